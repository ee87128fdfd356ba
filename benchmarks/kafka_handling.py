"""Kafka's records handled as messages: what the facade adds, key order over many partitions, and other frameworks.

One process, one broker, the same records. FastStream runs over confluent-kafka and over aiokafka; both frameworks and
aiokafka itself run as their documentation shows, with batches where they have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer  # pyright: ignore[reportMissingTypeStubs]
from faststream.confluent import KafkaBroker as ConfluentBroker
from faststream.kafka import KafkaBroker as AioBroker

import broker
from benchmarks.kafka_stage import BODY, KEYS, KafkaStage, open_kafka
from benchmarks.measure import Spread, Variant, alternate
from benchmarks.receiving import over_the_spi, receive
from benchmarks.report import Finding, Section

__all__ = ["measure_kafka_handling"]

_PARTITIONS = 16
_HANDLER_SECONDS = 0.005
_AT_ONCE: Mapping[int, float | None] = {16: 1.2, 64: None}
"""Numbers of concurrent handlers, and the target of each: how many times as long they may take as the same handlers
without messages. asyncio waits in whole milliseconds, so a sleep of 5 ms takes up to 6."""


async def measure_kafka_handling(scale: float, rounds: int) -> Section:
    """A handler per record, and the same work by other frameworks."""
    section = Section(
        "Kafka, a handler per record",
        "CPU per message that `receive` adds to the SPI; the time that a handler of 5 ms takes, "
        f"in the order of their keys over {_PARTITIONS} partitions, against the same handlers without any message; "
        "and messages per second beside FastStream and aiokafka.",
    )
    async with open_kafka() as stage:
        await _receiving(section, stage, max(1000, int(40_000 * scale)), rounds)
        await _key_order(section, stage, max(640, int(12_800 * scale)), rounds)
        await _peers_consuming(section, stage, max(1000, int(40_000 * scale)), rounds)
        await _peers_publishing(section, stage, max(500, int(20_000 * scale)), rounds)
    return section


# -- what receive adds ---------------------------------------------------------------------------------------


async def _receiving(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    topic = stage.filled(count)
    variants: dict[str, Variant] = {
        "SPI": _subscribed(stage, topic, count, over_the_spi),
        "receive(handler)": _subscribed(stage, topic, count, receive),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"handle: {name}": runs for name, runs in series.items()})
    added = series["receive(handler)"].cost_above(series["SPI"])
    section.findings.append(Finding("receive(handler) on top of the SPI", added, "µs", at_most=8.0))


def _subscribed(
    stage: KafkaStage, topic: str, count: int, work: Callable[[broker.Bus, str, str, int], Awaitable[None]]
) -> Variant:
    """Run with a new subscription."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        yield partial(work, stage.bus, topic, stage.name("handled"), count)

    return variant


def _run(work: Callable[[], Awaitable[object]]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        yield work

    return variant


# -- key order -----------------------------------------------------------------------------------------------


async def _key_order(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    topic = stage.filled(count, partitions=_PARTITIONS)
    for at_once, bar in _AT_ONCE.items():
        # Long enough that start and end hardly count.
        number = count * min(2 * at_once, max(_AT_ONCE)) // max(_AT_ONCE)
        variants: dict[str, Variant] = {
            f"{at_once} at once, no broker": _run(partial(_ideal, number, at_once)),
            f"{at_once} at once, by key": _joined(stage, topic, number, at_once),
        }
        series = await alternate(variants, count=number, rounds=rounds)
        section.runs.update({f"5 ms handler: {name}": runs for name, runs in series.items()})
        alone, joined = series.values()
        what = f"5 ms handler, {at_once} at once, by key: time"
        section.findings.append(Finding(f"{what} / the handlers alone", alone.times_rate_of(joined), "x", at_most=bar))
        least = number * _HANDLER_SECONDS / at_once
        for name, runs in (("the handlers alone", alone), ("by key", joined)):
            times = Spread.of([sample.seconds / least for sample in runs.samples])
            section.findings.append(Finding(f"5 ms handler, {at_once} at once, {name}: time / 5 ms each", times, "x"))


async def _ideal(count: int, at_once: int) -> None:
    """The same sleeps without messages."""

    async def work() -> None:
        for _ in range(count // at_once):
            await asyncio.sleep(_HANDLER_SECONDS)

    await asyncio.gather(*(work() for _ in range(at_once)))


def _joined(stage: KafkaStage, topic: str, count: int, at_once: int) -> Variant:
    """The clock starts when the consumer has joined and has its first messages."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        left = count

        async def handle(message: broker.Message) -> None:
            nonlocal left
            await asyncio.sleep(_HANDLER_SECONDS)
            left -= 1
            if not left:
                inbox.stop()

        inbox = stage.bus.messages(topic, subscription=stage.name("ours"), ordered_by_key=True, max_outstanding=4000)
        async with inbox:
            first = await inbox.next_message()
            if first is None:
                raise RuntimeError("Nothing came")
            await first.ack()
            left -= 1
            yield partial(inbox.receive, handle, concurrency=at_once)

    return variant


# -- peers ---------------------------------------------------------------------------------------------------


async def _peers_consuming(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    topic = stage.filled(count)
    variants: dict[str, Variant] = {
        "ours, receive(handler)": _subscribed(stage, topic, count, receive),
        "FastStream on confluent": _faststream(ConfluentBroker, stage, topic, count),
        "FastStream on aiokafka": _faststream(AioBroker, stage, topic, count),
        "ours, batches, committed": _batches(stage, topic, count),
        "aiokafka, getmany, committed": _getmany(stage, topic, count),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"consume: {name}": runs for name, runs in series.items()})
    for ours, theirs in (
        ("ours, receive(handler)", "FastStream on confluent"),
        ("ours, receive(handler)", "FastStream on aiokafka"),
        ("ours, batches, committed", "aiokafka, getmany, committed"),
    ):
        what = f"consume: {ours.removeprefix('ours, ')} / {theirs}"
        section.findings.append(Finding(what, series[ours].times_rate_of(series[theirs]), "x"))


def _faststream(make: Callable[..., Any], stage: KafkaStage, topic: str, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        theirs = make(stage.bootstrap, logger=None)
        left, done = count, asyncio.Event()

        async def handle(body: bytes) -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set()

        theirs.subscriber(topic, group_id=stage.name("faststream"), auto_offset_reset="earliest")(handle)

        async def consume() -> None:
            await theirs.start()
            await done.wait()

        try:
            yield consume
        finally:
            await theirs.stop()

    return variant


def _batches(stage: KafkaStage, topic: str, count: int) -> Variant:
    """The clock starts when the consumer has joined and has its first batch, for ours and the others."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.bus.records(topic, group=stage.name("ours")) as log:
            left = count - len(await log.next_batch(500))

            async def consume() -> None:
                nonlocal left
                while left > 0:
                    batch = await log.next_batch(500)
                    left -= len(batch)
                    await batch.commit()

            yield consume

    return variant


def _getmany(stage: KafkaStage, topic: str, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        consumer: Any = AIOKafkaConsumer(
            topic,
            bootstrap_servers=stage.bootstrap,
            group_id=stage.name("aiokafka"),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        await consumer.start()

        async def fetch() -> int:
            found = await consumer.getmany(timeout_ms=1000, max_records=500)
            return sum(map(len, found.values()))

        left = count
        while left == count:
            left -= await fetch()

        async def consume() -> None:
            nonlocal left
            while left > 0:
                left -= await fetch()
                await consumer.commit()

        try:
            yield consume
        finally:
            await consumer.stop()

    return variant


async def _peers_publishing(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    variants: dict[str, Variant] = {
        "ours, enqueue": _publishing(stage, count, _enqueue),
        "aiokafka, send": _publishing(stage, count, _send),
        "FastStream on confluent, publish, 1000 at a time": _publishing(
            stage, count, partial(_publish_with_faststream, ConfluentBroker)
        ),
        "FastStream on aiokafka, publish, 1000 at a time": _publishing(
            stage, count, partial(_publish_with_faststream, AioBroker)
        ),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"publish: {name}": runs for name, runs in series.items()})
    ours = series["ours, enqueue"]
    for name in list(variants)[1:]:
        section.findings.append(Finding(f"publish: enqueue / {name}", ours.times_rate_of(series[name]), "x"))


def _publishing(stage: KafkaStage, count: int, work: Callable[[KafkaStage, str, int], Awaitable[None]]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.target() as topic:
            yield partial(work, stage, topic, count)

    return variant


async def _enqueue(stage: KafkaStage, name: str, count: int) -> None:
    topic = stage.bus.topic(name)
    for index in range(count):
        await topic.enqueue(broker.OutboundMessage(BODY, KEYS[index % 1000]))
    await topic.flush()


async def _send(stage: KafkaStage, name: str, count: int) -> None:
    producer: Any = AIOKafkaProducer(bootstrap_servers=stage.bootstrap, enable_idempotence=True, linger_ms=5)
    await producer.start()
    receipts: list[Any] = [await producer.send(name, BODY, KEYS[index % 1000]) for index in range(count)]
    await asyncio.gather(*receipts)
    await producer.stop()


async def _publish_with_faststream(make: Callable[..., Any], stage: KafkaStage, name: str, count: int) -> None:
    async with make(stage.bootstrap, logger=None) as theirs:
        for start in range(0, count, 1000):
            await asyncio.gather(
                *(
                    theirs.publish(BODY, name, key=KEYS[index % 1000])
                    for index in range(start, min(start + 1000, count))
                )
            )
