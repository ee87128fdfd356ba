"""Reading Kafka in batches, next to loops on confluent-kafka.

The clock starts when a consumer has joined and has its first records. The raw loops, and ours that are labelled "in the
consuming thread", run in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from confluent_kafka import Consumer

import broker
from benchmarks import raw_kafka
from benchmarks.kafka_stage import KafkaStage
from benchmarks.measure import USUAL, Series, Variant, alternate, seldom_collected
from benchmarks.report import Finding, Section
from broker.records import RecordsOfRuns
from broker_kafka.codec.record_run import runs_of

__all__ = ["consuming"]

_BATCH = 5000
_AT_ONCE = (5000, 500)
"""Batch sizes of the loops in the consuming thread, raw and ours; the faster of the two counts. A small batch stays in
the cache, a large one has less overhead."""
_COLUMNS = ["topic", "partition", "offset", "key", "data"]
_ROW = ("key", "data", "offset")
_LONG_ROW = (*_ROW, "attributes", "publish_time")
_Compared = tuple[str, dict[str, Variant], float | None]
"""Name, variants, and the target."""
_SETTLE = 0.3
"""Seconds in which librdkafka fills its queue before the clock starts, for ours and the raw client alike."""


async def consuming(section: Section, stage: KafkaStage, count: int, rounds: int) -> None:
    """Rows, records and columns, handed over and in the consuming thread."""
    topic = stage.filled(count)

    def in_thread(work: Callable[..., None]) -> dict[str, Variant]:
        return {f", by {most}": _raw_consume(stage, topic, count, partial(work, most=most)) for most in _AT_ONCE}

    def handed_over(work: Callable[[Any, int], Awaitable[None]]) -> dict[str, Variant]:
        return {"": _consume(stage, topic, count, work)}

    rows = handed_over(_rows)
    # Each raw loop next to its counterpart, so that they run shortly after each other.
    groups: dict[str, tuple[dict[str, Variant], list[_Compared]]] = {
        "key, data, offset": (
            in_thread(raw_kafka.read),
            [
                ("rows of key, data, offset, in the consuming thread", in_thread(partial(_rows_of, topic)), 0.9),
                ("rows of key, data, offset", rows, 0.85),
                ("records: key, data, offset, in the consuming thread", in_thread(partial(_records_of, topic)), None),
                ("records: key, data, offset", handed_over(_read), None),
            ],
        ),
        f"key, data, offset, {USUAL}": (
            in_thread(raw_kafka.read),
            [(f"rows of key, data, offset, {USUAL}", rows, None)],
        ),
        "attributes and times too": (
            in_thread(raw_kafka.read_with_attributes),
            [
                (
                    "rows with attributes and times too, in the consuming thread",
                    in_thread(partial(_long_rows_of, topic)),
                    0.9,
                ),
                ("rows with attributes and times too", handed_over(_long_rows), 0.85),
                ("records: attributes and times too", handed_over(_read_with_attributes), None),
            ],
        ),
        "the five getters": (
            in_thread(raw_kafka.read_five),
            [
                ("columns, in the consuming thread", in_thread(partial(_columns_of, topic)), 0.875),
                ("columns", handed_over(_read_some_columns), None),
            ],
        ),
        "columns": (
            in_thread(partial(raw_kafka.read_columns, headers=False)),
            [("columns of topic, partition, offset, key and data", handed_over(_read_some_columns), None)],
        ),
        "columns, headers and times too": (
            in_thread(partial(raw_kafka.read_columns, headers=True)),
            [("columns, headers and times too", handed_over(_read_columns), None)],
        ),
    }
    for base, (raw, compared) in groups.items():
        variants = {f"raw, {base}{form}": variant for form, variant in raw.items()}
        for name, forms, _ in compared:
            variants |= {f"ours, {name}{form}": variant for form, variant in forms.items()}
        if USUAL not in base:
            variants = {name: seldom_collected(variant) for name, variant in variants.items()}
        series = await alternate(variants, count=count, rounds=rounds)
        section.runs.update({f"consume: {name}": runs for name, runs in series.items()})
        beside = _quickest(series[f"raw, {base}{form}"] for form in raw)
        for name, forms, bar in compared:
            ratio = _quickest(series[f"ours, {name}{form}"] for form in forms).times_rate_of(beside)
            section.findings.append(Finding(f"consume by batch: {name} / raw, {base}", ratio, "x", at_least=bar))


def _quickest(forms: Iterable[Series]) -> Series:
    return max(forms, key=lambda runs: runs.rate.median)


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


def _batch_of(consumer: Consumer, topic: str, most: int) -> broker.RecordBatch:
    """Our batch without delivery to another thread."""
    runs = runs_of(consumer.consume(most, 1.0), topic, (topic, 0))
    return broker.RecordBatch(RecordsOfRuns([(run, 0) for run in runs], None))


def _rows_of(topic: str, consumer: Consumer, count: int, most: int) -> None:
    while count > 0:
        batch = _batch_of(consumer, topic, most)
        for _key, _data, _offset in batch.rows(*_ROW):
            pass
        count -= len(batch)
        batch = None  # released objects are reused, as in the raw loop


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
