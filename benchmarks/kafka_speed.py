"""Kafka next to raw confluent-kafka in its best form, on the same broker.

One process, one broker, the same records, in turn. The raw loops block the thread of the event loop, because nothing
else runs meanwhile. `kafka_reading` measures reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import broker
from benchmarks import raw_kafka
from benchmarks.kafka_reading import consuming
from benchmarks.kafka_stage import BODY, KEYS, KafkaStage, open_kafka
from benchmarks.measure import COLLECTED_AFTER, USUAL, Spread, Variant, alternate, in_pairs, seldom_collected
from benchmarks.report import Finding, Section

__all__ = ["measure_kafka"]

_PUBLISHED = 10_000
_IN_TRANSACTION = 1000


async def measure_kafka(scale: float, rounds: int) -> Section:
    """Publish, consume, copy in transactions, and handle in order by key."""
    section = Section(
        "Kafka beside confluent-kafka",
        "Ratios of messages per second. The raw loops are single threads with a counting callback, whole batches and "
        "`fetch.queue.backoff.ms=10`; records have a key, and every second one a header. Both sides run after "
        f"`gc.set_threshold({COLLECTED_AFTER})`, which is the best form of either, but where it says otherwise, and "
        "soon after each other.",
        "times as fast",
    )
    async with open_kafka() as stage:
        await _publishing(section, stage, max(1000, int(200_000 * scale)), rounds)
        await consuming(section, stage, max(20_000, int(1_000_000 * scale)), rounds)
        await _transactions(section, stage, max(2000, int(100_000 * scale)), rounds)
    return section


# -- publishing ----------------------------------------------------------------------------------------------


async def _publishing(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    base = _raw_publish(stage, count, raw_kafka.produce_one_by_one)
    enqueue = _publish(stage, count, _enqueue)
    variants: dict[str, Variant] = {
        "raw, produce, callback keeps the place": _raw_publish(stage, count, raw_kafka.produce_with_places),
        "raw, produce_batch, counting callback": _raw_publish(stage, count, raw_kafka.produce_batches),
        "ours, publish_batch without receipts": _publish(stage, count, _publish_without_receipts),
        "ours, publish_batch": _publish(stage, count, _publish_batch),
        "ours, enqueue": enqueue,
    }
    # Many short runs.
    number = 2 * rounds if rounds > 1 else 1
    seldom = {name: seldom_collected(variant) for name, variant in variants.items()}
    series = await in_pairs(seldom_collected(base), seldom, count=count, rounds=number)
    usual = {f"ours, enqueue, {USUAL}": enqueue}
    series |= await in_pairs(base, usual, count=count, rounds=number)
    for name, (own, beside) in series.items():
        section.runs[f"publish: {name}"] = own
        section.runs[f"publish: raw, produce, counting callback, beside {name}"] = beside
    for name, bar in (
        ("publish_batch without receipts", 0.9),
        ("publish_batch", 0.6),
        ("enqueue", 0.45),
        (f"enqueue, {USUAL}", None),
    ):
        own, beside = series[f"ours, {name}"]
        what = f"{name} / raw produce, counting callback"
        section.findings.append(Finding(what, own.times_rate_of(beside), "x", at_least=bar))
    best, _ = series["raw, produce_batch, counting callback"]
    all_of_ours, _ = series["ours, publish_batch without receipts"]
    section.findings.append(
        Finding("publish_batch without receipts / raw produce_batch", all_of_ours.times_rate_of(best), "x")
    )


def _outbound(count: int) -> list[broker.OutboundMessage]:
    return [broker.OutboundMessage(BODY, KEYS[index % 1000]) for index in range(count)]


def _raw_publish(stage: KafkaStage, count: int, work: Callable[..., None]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        messages = _outbound(count)
        async with stage.target() as topic:
            producer = stage.producer()
            work(producer, topic, messages[:1])

            async def run() -> None:
                work(producer, topic, messages)

            yield run

    return variant


def _publish(
    stage: KafkaStage, count: int, work: Callable[[broker.Topic, list[broker.OutboundMessage]], Any]
) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        messages = _outbound(count)
        async with stage.target() as name:
            topic = stage.bus.topic(name)
            await topic.publish(messages[0])
            yield partial(work, topic, messages)

    return variant


async def _publish_without_receipts(topic: broker.Topic, messages: list[broker.OutboundMessage]) -> None:
    await asyncio.gather(
        *(
            topic.publish_batch(messages[start : start + _PUBLISHED], receipts=False)
            for start in range(0, len(messages), _PUBLISHED)
        )
    )


async def _publish_batch(topic: broker.Topic, messages: list[broker.OutboundMessage]) -> None:
    await asyncio.gather(
        *(topic.publish_batch(messages[start : start + _PUBLISHED]) for start in range(0, len(messages), _PUBLISHED))
    )


async def _enqueue(topic: broker.Topic, messages: list[broker.OutboundMessage]) -> None:
    for message in messages:
        await topic.enqueue(message)
    await topic.flush()


# -- transactions --------------------------------------------------------------------------------------------


async def _transactions(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    source = stage.filled(count, headers=False)
    count -= count % _IN_TRANSACTION
    variants: dict[str, Variant] = {
        "raw": _raw_transactions(stage, source, count),
        "ours": _transactional(stage, source, count),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"copy in transactions: {name}": runs for name, runs in series.items()})
    rate = series["ours"].rate
    thousands = Spread(rate.median / 1e3, rate.least / 1e3, rate.most / 1e3)
    what = f"copied in transactions of {_IN_TRANSACTION}"
    section.findings += [
        Finding(what, thousands, "k/s", at_least=80),
        Finding(f"{what} / raw", series["ours"].times_rate_of(series["raw"]), "x"),
    ]


def _raw_transactions(stage: KafkaStage, source: str, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.target() as sink:
            consumer = stage.consumer(**{"isolation.level": "read_committed"})
            consumer.subscribe([source])
            producer = stage.producer(**{"transactional.id": stage.name("tx")})
            producer.init_transactions(30)
            # A first transaction of one record, so that the group has positions and the client knows the sink.
            raw_kafka.transactions(consumer, producer, sink, 1, 1)

            async def run() -> None:
                raw_kafka.transactions(consumer, producer, sink, count - _IN_TRANSACTION, _IN_TRANSACTION)

            yield run
            consumer.close()

    return variant


def _transactional(stage: KafkaStage, source: str, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with (
            stage.target() as sink,
            stage.bus.records(source, group=stage.name("ours")) as log,
            stage.bus.transactional_publisher(stage.name("tx")) as publisher,
        ):
            await _copy(log, publisher, sink, 1, 1)
            yield partial(_copy, log, publisher, sink, count - _IN_TRANSACTION, _IN_TRANSACTION)

    return variant


async def _copy(
    log: broker.RecordConsumer, publisher: broker.TransactionalPublisher, sink: str, count: int, size: int
) -> None:
    while count > 0:
        batch = list(await log.next_batch(size))
        while len(batch) < size:
            batch += await log.next_batch(size - len(batch))
        async with publisher.transaction(log) as transaction:
            await transaction.publish_batch(
                sink, [broker.OutboundMessage(r.data or b"", r.key) for r in batch], receipts=False
            )
        count -= len(batch)
