"""Kafka beside raw confluent-kafka in its best form, on the same broker.

One process, one broker, the same records, in turn. The raw loops block the thread they run in, which is the one of the
event loop: nothing else has to run meanwhile. A consumer has joined, and its first records have come, before the clock
starts.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from confluent_kafka import Consumer

import broker
from benchmarks import raw_kafka
from benchmarks.kafka_stage import BODY, KEYS, KafkaStage, open_kafka
from benchmarks.measure import Series, Spread, Variant, alternate
from benchmarks.report import Finding, Section
from broker.records import RecordsOfRuns
from broker_kafka.runs import runs_of

__all__ = ["measure_kafka"]

_BATCH = 5000
_AT_ONCE = (5000, 500)
"""What loops in the consuming thread take at once, raw and ours: of either the quicker form counts. A small batch stays
in the cache, and a large one has less to do for each batch."""
_PUBLISHED = 10_000
_IN_TRANSACTION = 1000
_COLUMNS = ["topic", "partition", "offset", "key", "data"]
_ROW = ("key", "data", "offset")
_LONG_ROW = (*_ROW, "attributes", "publish_time")
_USUAL = "collector as Python has it"
_COLLECTED_AFTER = 50_000
"""New objects, after which the collector looks at them in a program that reads by the million: the best form of either
side. Python's 700 has it look at whatever lives longer than that, as what is handed over does."""
_SETTLE = 0.3
"""Seconds in which librdkafka fills its queue before the clock starts, for ours and the raw client alike."""


async def measure_kafka(scale: float, rounds: int) -> Section:
    """Publish, consume, copy in transactions, and handle with key order."""
    section = Section(
        "Kafka beside confluent-kafka",
        "Ratios of messages per second. The raw loops are single threads with a counting callback, whole batches and "
        "`fetch.queue.backoff.ms=10`; records have a key, and every second one a header. Both sides consume after "
        f"`gc.set_threshold({_COLLECTED_AFTER})`, which is the best form of either, but where it says otherwise.",
        "times as fast",
    )
    async with open_kafka() as stage:
        await _publishing(section, stage, max(1000, int(200_000 * scale)), rounds)
        await _consuming(section, stage, max(20_000, int(400_000 * scale)), rounds)
        await _transactions(section, stage, max(2000, int(100_000 * scale)), rounds)
    return section


# -- publishing ----------------------------------------------------------------------------------------------


async def _publishing(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    variants: dict[str, Variant] = {
        "raw, produce, counting callback": _raw_publish(stage, count, raw_kafka.produce_one_by_one),
        "raw, produce, callback keeps the place": _raw_publish(stage, count, raw_kafka.produce_with_places),
        "raw, produce_batch, counting callback": _raw_publish(stage, count, raw_kafka.produce_batches),
        "ours, publish_all": _publish(stage, count, _publish_all),
        "ours, publish_batch": _publish(stage, count, _publish_batch),
        "ours, enqueue": _publish(stage, count, _enqueue),
    }
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"publish: {name}": runs for name, runs in series.items()})
    base = series["raw, produce, counting callback"]
    for name, bar in (("publish_all", 0.9), ("publish_batch", 0.6), ("enqueue", 0.45)):
        what = f"{name} / raw produce, counting callback"
        section.findings.append(Finding(what, series[f"ours, {name}"].times_rate_of(base), "x", at_least=bar))
    best = series["raw, produce_batch, counting callback"]
    section.findings.append(
        Finding("publish_all / raw produce_batch", series["ours, publish_all"].times_rate_of(best), "x")
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


async def _publish_all(topic: broker.Topic, messages: list[broker.OutboundMessage]) -> None:
    await asyncio.gather(
        *(topic.publish_all(messages[start : start + _PUBLISHED]) for start in range(0, len(messages), _PUBLISHED))
    )


async def _publish_batch(topic: broker.Topic, messages: list[broker.OutboundMessage]) -> None:
    await asyncio.gather(
        *(topic.publish_batch(messages[start : start + _PUBLISHED]) for start in range(0, len(messages), _PUBLISHED))
    )


async def _enqueue(topic: broker.Topic, messages: list[broker.OutboundMessage]) -> None:
    for message in messages:
        await topic.enqueue(message)
    await topic.flush()


# -- consuming -----------------------------------------------------------------------------------------------


async def _consuming(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    topic = stage.filled(count)
    in_thread: dict[str, Callable[..., None]] = {
        "raw, key, data, offset": raw_kafka.read,
        f"raw, key, data, offset, {_USUAL}": raw_kafka.read,
        "raw, attributes and times too": raw_kafka.read_with_attributes,
        "raw, the five getters": raw_kafka.read_five,
        "raw, columns": partial(raw_kafka.read_columns, headers=False),
        "raw, columns, headers and times too": partial(raw_kafka.read_columns, headers=True),
        "ours, rows of key, data, offset, in the consuming thread": partial(_rows_of, topic),
        "ours, rows with attributes and times too, in the consuming thread": partial(_long_rows_of, topic),
        "ours, records: key, data, offset, in the consuming thread": partial(_records_of, topic),
        "ours, columns, in the consuming thread": partial(_columns_of, topic),
    }
    handed_over: dict[str, Variant] = {
        "ours, rows of key, data, offset": _consume(stage, topic, count, _rows),
        "ours, rows with attributes and times too": _consume(stage, topic, count, _long_rows),
        "ours, records: key, data, offset": _consume(stage, topic, count, _read),
        "ours, records: attributes and times too": _consume(stage, topic, count, _read_with_attributes),
        f"ours, rows of key, data, offset, {_USUAL}": _consume(stage, topic, count, _rows),
        "ours, columns, headers and times too": _consume(stage, topic, count, _read_columns),
        "ours, columns": _consume(stage, topic, count, _read_some_columns),
    }
    variants: dict[str, Variant] = {}
    forms: dict[str, list[str]] = {}
    for name, variant in handed_over.items():
        variants[name] = variant if _USUAL in name else _seldom_collected(variant)
        forms[name] = [name]
    for name, work in in_thread.items():
        forms[name] = [f"{name}, by {most}" for most in _AT_ONCE]
        for most, form in zip(_AT_ONCE, forms[name], strict=True):
            variant = _raw_consume(stage, topic, count, partial(work, most=most))
            variants[form] = variant if _USUAL in name else _seldom_collected(variant)
    series = await alternate(variants, count=count, rounds=rounds)
    section.runs.update({f"consume: {name}": runs for name, runs in series.items()})

    def quickest(name: str) -> Series:
        return max((series[form] for form in forms[name]), key=lambda runs: runs.rate.median)

    for name, base, bar in (
        ("rows of key, data, offset, in the consuming thread", "key, data, offset", 0.9),
        ("rows with attributes and times too, in the consuming thread", "attributes and times too", 0.9),
        ("rows of key, data, offset", "key, data, offset", 0.85),
        (f"rows of key, data, offset, {_USUAL}", f"key, data, offset, {_USUAL}", None),
        ("rows with attributes and times too", "attributes and times too", 0.85),
        ("records: key, data, offset, in the consuming thread", "key, data, offset", None),
        ("records: key, data, offset", "key, data, offset", None),
        ("records: attributes and times too", "attributes and times too", None),
        ("columns, in the consuming thread", "the five getters", 0.875),
        ("columns", "the five getters", None),
        ("columns", "columns", None),
        ("columns, headers and times too", "columns, headers and times too", None),
    ):
        ratio = quickest(f"ours, {name}").times_rate_of(quickest(f"raw, {base}"))
        section.findings.append(Finding(f"consume by batch: {name} / raw, {base}", ratio, "x", at_least=bar))


def _raw_consume(stage: KafkaStage, topic: str, count: int, work: Callable[..., None]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        consumer = stage.consumer()
        consumer.subscribe([topic])
        left = count - raw_kafka.read_some(consumer)
        await asyncio.sleep(_SETTLE)

        async def run() -> None:
            work(consumer, left)

        yield run
        consumer.close()

    return variant


def _consume(stage: KafkaStage, topic: str, count: int, work: Callable[[Any, int], Awaitable[None]]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.bus.records(topic, group=stage.name("ours")) as log:
            left = count - len(await log.next_batch(_BATCH))
            await asyncio.sleep(_SETTLE)
            yield partial(work, log, left)

    return variant


def _seldom_collected(variant: Variant) -> Variant:
    """It runs with a collector that looks seldom."""

    @asynccontextmanager
    async def seldom() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        usual = gc.get_threshold()
        gc.set_threshold(_COLLECTED_AFTER, *usual[1:])
        try:
            async with variant() as run:
                yield run
        finally:
            gc.set_threshold(*usual)

    return seldom


def _batch_of(consumer: Consumer, topic: str, most: int) -> broker.RecordBatch:
    """Our batch without any hand-over."""
    runs = runs_of(consumer.consume(most, 1.0), topic, (topic, 0))
    return broker.RecordBatch(RecordsOfRuns([(run, 0) for run in runs], None))


def _rows_of(topic: str, consumer: Consumer, count: int, most: int) -> None:
    while count > 0:
        batch = _batch_of(consumer, topic, most)
        for _key, _data, _offset in batch.rows(*_ROW):
            pass
        count -= len(batch)
        batch = None  # what is let go of is used again, as in the raw loop


def _long_rows_of(topic: str, consumer: Consumer, count: int, most: int) -> None:
    while count > 0:
        batch = _batch_of(consumer, topic, most)
        for _key, _data, _offset, _attributes, _time in batch.rows(*_LONG_ROW):
            pass
        count -= len(batch)
        batch = None


def _records_of(topic: str, consumer: Consumer, count: int, most: int) -> None:
    while count > 0:
        batch = _batch_of(consumer, topic, most)
        for record in batch:
            record.key  # noqa: B018  # read, as in the raw loop
            record.data  # noqa: B018
            record.offset  # noqa: B018
        count -= len(batch)
        batch = record = None


def _columns_of(topic: str, consumer: Consumer, count: int, most: int) -> None:
    while count > 0:
        batch = _batch_of(consumer, topic, most)
        batch.to_arrow(_COLUMNS)
        count -= len(batch)
        batch = None


async def _rows(log: broker.RecordConsumer, count: int) -> None:
    while count > 0:
        batch = await log.next_batch(_BATCH)
        for _key, _data, _offset in batch.rows(*_ROW):
            pass
        count -= len(batch)


async def _long_rows(log: broker.RecordConsumer, count: int) -> None:
    while count > 0:
        batch = await log.next_batch(_BATCH)
        for _key, _data, _offset, _attributes, _time in batch.rows(*_LONG_ROW):
            pass
        count -= len(batch)


async def _read(log: broker.RecordConsumer, count: int) -> None:
    while count > 0:
        for record in await log.next_batch(_BATCH):
            record.key  # noqa: B018  # read, as in the raw loop
            record.data  # noqa: B018
            record.offset  # noqa: B018
            count -= 1


async def _read_with_attributes(log: broker.RecordConsumer, count: int) -> None:
    while count > 0:
        for record in await log.next_batch(_BATCH):
            record.key  # noqa: B018
            record.data  # noqa: B018
            record.offset  # noqa: B018
            record.attributes  # noqa: B018
            record.publish_time  # noqa: B018
            count -= 1


async def _read_columns(log: broker.RecordConsumer, count: int) -> None:
    while count > 0:
        batch = await log.next_batch(_BATCH)
        batch.to_arrow()
        count -= len(batch)


async def _read_some_columns(log: broker.RecordConsumer, count: int) -> None:
    while count > 0:
        batch = await log.next_batch(_BATCH)
        batch.to_arrow(_COLUMNS)
        count -= len(batch)


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
            # One of a single record, so that the group has positions and the sink is known.
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
            await transaction.publish_all(sink, [broker.OutboundMessage(r.data or b"", r.key) for r in batch])
        count -= len(batch)
