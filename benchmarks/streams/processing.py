"""A processor on a real broker, beside the same records and publishes made by hand.

Each message changes a row of its own and publishes a message, and a checkpoint covers 10,000 messages or fewer. By hand
means: the same records, and the same number of messages with the same ids and rows, written as the processor writes
them, but without decoding, state or a graph. The difference is what the engine adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from benchmarks.measure import Series, Spread, Variant, alternate, seldom_collected
from benchmarks.report import Finding, Section
from benchmarks.streams.stage import PARTITIONS, Stage, open_stage, state_directory
from benchmarks.streams.works import counting
from broker import CHECKPOINT_KEY, OutboundMessage, RecordBatch, RecordConsumer, TopicPartition
from broker_streams import Lmdb, Processor

__all__ = ["measure_processing", "per_cpu_second", "until_handled"]

_BARS: Final[Mapping[str, float]] = {"kafka": 70_000, "jetstream": 35_000}
_ADDED: Final = 5.0
_CHECKPOINT: Final = 10_000


async def measure_processing(scale: float, rounds: int) -> list[Section]:
    """Measure on Kafka and on JetStream, exactly once on both."""
    rates = Section(
        "A processor",
        "Messages per second of CPU of this process, client threads included: exactly once, LMDB, one output and one "
        f"row of the table per message, {PARTITIONS} partitions, from joining the group to the last checkpoint. Beside "
        "it, the same records and publishes made by hand, without decoding, state and graph.",
        "messages per second of CPU",
    )
    added = Section(
        "What the engine adds",
        "CPU microseconds per message of a processor above the same records and publishes made by hand: all of its "
        "decoding, encoding and storing.",
        "CPU µs per message",
    )
    for name, bar in _BARS.items():
        async with open_stage(name) as stage:
            count = max(2000, int((200_000 if name == "kafka" else 60_000) * scale))
            source = await stage.filled(count, keys=count)
            variants: dict[str, Variant] = {
                f"{name}, processor": seldom_collected(_processor(stage, source, count)),
                f"{name}, by hand": seldom_collected(_by_hand(stage, source, count)),
            }
            series = await alternate(variants, count=count, rounds=rounds)
            rates.runs.update(series)
            ours, hand = series.values()
            rates.findings += [
                Finding(f"{name}, processor", per_cpu_second(ours), "/s", at_least=bar),
                Finding(f"{name}, by hand", per_cpu_second(hand), "/s"),
            ]
            added.findings.append(Finding(f"the engine, {name}", ours.cost_above(hand), "µs", at_most=_ADDED))
    return [rates, added]


def per_cpu_second(series: Series) -> Spread:
    """Messages per second of CPU."""
    return Spread.of([sample.count / sample.cpu for sample in series.samples])


async def until_handled(processor: Processor, count: int) -> None:
    """Wait until checkpoints cover so many messages."""
    while sum(number for each in processor.runners for number, _ in each.handled.values()) < count:
        if processor.state == "stopped":
            raise RuntimeError("The processor has stopped")
        await asyncio.sleep(0.02)


def _processor(stage: Stage, source: str, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.target() as target:
            group = counting(name=stage.unique("group"), source=source, target=target)
            with state_directory() as directory:

                async def run() -> None:
                    async with Processor(
                        stage.bus, group, state_dir=directory, store=Lmdb(), checkpoint_messages=_CHECKPOINT
                    ) as processor:
                        await until_handled(processor, count)

                yield run
            await stage.bus.admin.delete_topic(group.table)

    return variant


def _by_hand(stage: Stage, source: str, count: int) -> Variant:
    write = _in_transactions if stage.bus.capabilities.publish.transactions else _by_table_writers

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        table = await stage.topic(compacted=True)
        async with stage.target() as target:
            yield partial(write, stage, source, target, table, count)
        await stage.bus.admin.delete_topic(table)

    return variant


async def _in_transactions(stage: Stage, source: str, target: str, table: str, count: int) -> None:
    group = stage.unique("hand")
    async with (
        stage.bus.transactional_publisher(group) as publisher,
        stage.bus.records(source, group=group) as log,
    ):
        while count:
            batches = await _next(log, min(count, _CHECKPOINT))
            outputs, rows, ends = _work(batches, group)
            async with publisher.transaction(log) as transaction:
                await transaction.publish_batch(target, outputs, receipts=False)
                await transaction.publish_batch(table, [row for part in rows.values() for row in part], receipts=False)
                await transaction.publish_batch(
                    table,
                    [OutboundMessage(b"%d" % end, CHECKPOINT_KEY, partition=number) for number, end in ends.items()],
                    receipts=False,
                )
            count -= len(outputs)


async def _by_table_writers(stage: Stage, source: str, target: str, table: str, count: int) -> None:
    group, most = stage.unique("hand"), stage.bus.capabilities.publish.table_rows or _CHECKPOINT
    async with AsyncExitStack() as stack:
        writers = [
            await stack.enter_async_context(stage.bus.table_writer(table, number)) for number in range(PARTITIONS)
        ]
        log = await stack.enter_async_context(stage.bus.records(source, group=group))
        while count:
            # As many as fit if they are spread evenly.
            batches = await _next(log, min(count, most * PARTITIONS))
            outputs, rows, ends = _work(batches, group)
            await stage.bus.topic(target).publish_batch(outputs, receipts=False)
            for number, part in rows.items():
                for start in range(0, len(part), most):
                    await writers[number].write(part[start : start + most], checkpoint=b"%d" % ends[number])
            await log.commit_positions({TopicPartition(source, number): end for number, end in ends.items()})
            count -= len(outputs)


async def _next(log: RecordConsumer[Any], count: int) -> Sequence[RecordBatch[Any]]:
    """The next records, exactly so many."""
    batches: list[RecordBatch[Any]] = []
    while count:
        batch = await log.next_batch(min(count, 5000), timeout=10.0)
        if not batch:
            raise RuntimeError("The topic has too few records")
        batches.append(batch)
        count -= len(batch)
    return batches


def _work(
    batches: Sequence[RecordBatch[Any]], group: str
) -> tuple[list[OutboundMessage], dict[int, list[OutboundMessage]], dict[int, int]]:
    """An output and a row for each record, and the ends of the partitions."""
    outputs: list[OutboundMessage] = []
    rows: dict[int, list[OutboundMessage]] = {}
    ends: dict[int, int] = {}
    for batch in batches:
        for place, part in batch.by_partition().items():
            number = place.partition
            into = rows.setdefault(number, [])
            for key, offset, time in part.rows("key", "offset", "publish_time_ms"):
                outputs.append(
                    OutboundMessage(
                        b'{"user":"user-123456","clicks":1}',
                        key,
                        None,
                        f"{group}/{number}/{offset}/0",
                        publish_time=datetime.fromtimestamp(time / 1000, UTC),
                    )
                )
                into.append(OutboundMessage(b'{"clicks":1,"spent":12}', key, partition=number))
                ends[number] = offset + 1
    return outputs, rows, ends
