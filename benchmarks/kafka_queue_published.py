"""Kafka as a queue, measured like the published tables of kmq and parallel-consumer.

Their figures, from machines of their own, are in docs/performance-kafka-queue.md; ours are of one process on this
machine. The work of a message is a sleep, whose length varies by message and is the same in all runs. The clock starts
when a consumer has joined.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import broker
from benchmarks.kafka_stage import KafkaStage, open_kafka
from benchmarks.report import Section, Table

__all__ = ["measure_published"]

_ENGINES: Final = ("offsets", "markers")
_COUNT: Final = 10_000
_LONGEST_WORK: Final = 0.005
_CONCURRENCY: Final = 100
_KEYS: Final = (1, 2, 5, 10, 20, 100, 10_000)
_SENT: Final = 100_000
_BATCH: Final = 500
_PATIENCE: Final = 120.0
_TIME: Final = struct.Struct(">d")
_PADDING: Final = bytes(92)

Take = Callable[[], Awaitable[Sequence[bytes | None]]]
"""The bodies of some messages, which are done with by then."""


async def measure_published(scale: float, rounds: int) -> Section:
    """Seconds by order, and rates with p95. Each runs once: `rounds` is ignored."""
    section = Section(
        "Kafka as a queue, in the shape of others' tables",
        f"First that of parallel-consumer: seconds for {_COUNT:,} messages of one partition, with 0 to "
        f"{1e3 * _LONGEST_WORK:g} ms of random work each, {_CONCURRENCY} at once; `max_outstanding` is four times as "
        "many, so that a key may have all of them here. Then that of kmq: messages of 100 B that one process sends as "
        "fast as they are confirmed and receives meanwhile, and the time from sending to ack. One run each; what they "
        "have published stands in [the page on queues](kafka-queue.md#what-it-costs).",
    )
    async with open_kafka() as stage:
        count = max(200, int(_COUNT * scale))
        rows = [
            ["of the partition", *[await _in_order(stage, engine, count, keys=1, at_once=1) for engine in _ENGINES]]
        ]
        for keys in _KEYS:
            name = f"of the key; {keys:,} {'key' if keys == 1 else 'keys'}"
            rows.append([name, *[await _in_order(stage, engine, count, keys=keys) for engine in _ENGINES]])
        rows.append(["none", *[await _in_order(stage, engine, count, keys=None) for engine in _ENGINES]])
        section.tables.append(Table(["Order", *[f"queue={engine}, seconds" for engine in _ENGINES]], rows))
        sent = max(2 * _BATCH, int(_SENT * scale))
        section.tables.append(
            Table(
                ["One process sends and receives", "messages a second", "p95 of processing"],
                [
                    ["records, a commit for each batch", *await _records(stage, sent)],
                    *[[f"queue={engine}", *await _queue(stage, engine, sent)] for engine in _ENGINES],
                ],
            )
        )
    return section


async def _in_order(
    stage: KafkaStage, engine: str, count: int, *, keys: int | None, at_once: int = _CONCURRENCY
) -> str:
    """Seconds to handle all messages.

    :param keys: number of keys, whose order is kept; None is no order.
    """
    topic = stage.topic()
    lengths = random.Random(count)
    work = [lengths.uniform(0.0, _LONGEST_WORK) for _ in range(count)]
    left = count
    async with broker.connect(f"{stage.url}?queue={engine}") as bus:
        messages = [
            broker.OutboundMessage(b"%d" % number, None if keys is None else b"key-%d" % (number % keys))
            for number in range(count)
        ]
        inbox = bus.messages(
            topic, subscription=stage.name("published"), ordered_by_key=keys is not None, max_outstanding=4 * count
        )

        async def handle(message: broker.Message) -> None:
            nonlocal left
            await asyncio.sleep(work[int(message.data or b"0")])
            left -= 1
            if left <= 0:
                inbox.stop()

        async with inbox:
            await _started(bus, inbox, topic)
            await bus.topic(topic).publish_batch(messages)
            began = time.perf_counter()
            async with asyncio.timeout(10 * _PATIENCE):
                await inbox.receive(handle, concurrency=at_once)
            return f"{time.perf_counter() - began:.2f}"


async def _started(bus: broker.Bus, inbox: broker.MessageConsumer, topic: str) -> None:
    """Wait for the first message."""
    await bus.topic(topic).publish(b"0")
    first = await inbox.next_message(timeout=_PATIENCE)
    if first is None:
        raise RuntimeError("Nothing came")
    await first.ack()


async def _queue(stage: KafkaStage, engine: str, count: int) -> tuple[str, str]:
    topic = stage.topic()
    async with (
        broker.connect(f"{stage.url}?queue={engine}") as bus,
        bus.messages(topic, subscription=stage.name("published"), max_outstanding=2 * _BATCH) as inbox,
    ):
        await _started(bus, inbox, topic)

        async def take() -> Sequence[bytes | None]:
            batch = await inbox.next_batch(_BATCH, timeout=_PATIENCE)
            await batch.ack()
            return [message.data for message in batch]

        return await _through(bus.topic(topic), take, count)


async def _records(stage: KafkaStage, count: int) -> tuple[str, str]:
    topic = stage.topic()
    async with (
        broker.connect(stage.url) as bus,
        bus.records(topic, group=stage.name("published"), start="earliest") as log,
    ):
        await bus.topic(topic).publish(b"0")
        await log.next_batch(1, timeout=_PATIENCE)

        async def take() -> Sequence[bytes | None]:
            batch = await log.next_batch(_BATCH, timeout=_PATIENCE)
            await log.commit()
            return [record.data for record in batch]

        return await _through(bus.topic(topic), take, count)


async def _through(target: broker.Topic, take: Take, count: int) -> tuple[str, str]:
    """Send and receive `count` messages; return messages per second, and the p95 of the latency."""
    took: list[float] = []

    async def send() -> None:
        for _ in range(count // _BATCH):
            body = _TIME.pack(time.perf_counter()) + _PADDING
            await target.publish_batch([body] * _BATCH)

    began = time.perf_counter()
    sending = asyncio.create_task(send())
    while len(took) < count - count % _BATCH:
        bodies = await take()
        now = time.perf_counter()
        took += [now - _TIME.unpack_from(body)[0] for body in bodies if body is not None]
        if not bodies:
            raise RuntimeError(f"Only {len(took)} of {count} messages came")
    await sending
    seconds = time.perf_counter() - began
    took.sort()
    return f"{len(took) / seconds:,.0f}", f"{1e3 * took[len(took) * 95 // 100]:.0f} ms"
