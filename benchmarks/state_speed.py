"""What an application pays that keeps state beside a log: followed logs, positions of its own, tables, batches.

Each figure stands beside the call of the library, or of the raw client, that does the same without it; the two run in
turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import count as counting

import broker
from benchmarks import raw_kafka
from benchmarks.kafka_stage import BODY, KafkaStage, open_kafka
from benchmarks.latency import RATE, Arrived, Pipe, latency_of, median_of
from benchmarks.measure import (
    COLLECTED_AFTER,
    USUAL,
    Series,
    Spread,
    Variant,
    alternate,
    in_pairs,
    seldom_collected,
)
from benchmarks.report import Finding, Section, Table
from benchmarks.stages import FILLED, open_stage
from benchmarks.steadiness import idle_shares

__all__ = ["measure_state"]

_BATCH = 5000
_AT_ONCE = (5000, 500)
"""Batch sizes of the raw loop; the faster of the two counts."""
_ROW = ("key", "data", "offset")
_AT_MOST = 100
_PATIENCE = 60.0
_IDLE_SECONDS = 6.0
_COMMITTED = 20
"""Records between commits."""
_ROWS = 500
"""Rows of a write to a table."""
_KEYS = 5000
_SETTLE = 0.3
"""Seconds in which librdkafka fills its queue before the clock starts, for ours and the raw client alike."""
_numbers = counting()


async def measure_state(scale: float, rounds: int) -> Section:
    """Follow, commit own positions and write tables on Kafka and JetStream; read Kafka by batches of the default."""
    section = Section(
        "State beside a log",
        "Ratios of records, commits or rows per second; times from publish to a reader of a log, and percent of a core "
        "of a process whose follower waits. Followers and reads of the log hand over batches of "
        f"{_BATCH:,}, and are measured from the first of them on. A commit follows {_COMMITTED} records, a write of a "
        f"table has {_ROWS} rows and a checkpoint. Reads run after "
        f"`gc.set_threshold({COLLECTED_AFTER})`, but where it says otherwise.",
    )
    async with open_kafka() as stage:
        count = max(20_000, int(1_000_000 * scale))
        topic = stage.filled(count)
        await _batches(section, stage, topic, count, rounds)
        await _state(section, "kafka", stage.bus, topic, count, scale, rounds)
    count = max(2000, int(100_000 * scale))
    async with open_stage("jetstream", count) as stage:
        await _state(section, "jetstream", stage.bus, FILLED, count, scale, rounds)
    return section


async def _state(
    section: Section, name: str, bus: broker.Bus, topic: str, count: int, scale: float, rounds: int
) -> None:
    await _following(section, name, bus, topic, count, rounds)
    await _tail(section, name, bus, scale, rounds)
    await _committing(section, name, bus, topic, min(count // _COMMITTED, max(20, int(1000 * scale))), rounds)
    await _tables(section, name, bus, max(4, int(100 * scale)), rounds)


def _new_name() -> str:
    return f"state-{next(_numbers)}"


@asynccontextmanager
async def _topic(bus: broker.Bus, *, compacted: bool = False) -> AsyncGenerator[str]:
    """A new topic of one partition, deleted at the end of the block."""
    name = _new_name()
    await bus.admin.ensure_topic(name, partitions=1, compacted=compacted)
    try:
        yield name
    finally:
        await bus.admin.delete_topic(name)


def _add(section: Section, what: str, series: Mapping[str, Series]) -> None:
    section.runs.update({f"{what}: {name}": runs for name, runs in series.items()})


def _many(rounds: int) -> int:
    """Rounds of short runs."""
    return 2 * rounds if rounds > 1 else 1


def _in_thousands(rate: Spread) -> Spread:
    return Spread(rate.median / 1e3, rate.least / 1e3, rate.most / 1e3)


# -- followed logs -------------------------------------------------------------------------------------------


async def _following(section: Section, name: str, bus: broker.Bus, topic: str, count: int, rounds: int) -> None:
    """Both are measured from their first batch to the last, so that the time to open does not count as speed."""
    opened: dict[str, list[float]] = {"follow": [], "log.read": []}
    base = _reading(bus, topic, count, opened["log.read"])
    follow = _followed(bus, topic, count, opened["follow"])
    pairs = await in_pairs(
        seldom_collected(base), {"follow": seldom_collected(follow)}, count=count, rounds=_many(rounds)
    )
    own, beside = pairs["follow"]
    _add(section, name, {"follow": own, "log.read, beside it": beside})
    section.findings.append(Finding(f"follow / log.read, {name}", own.times_rate_of(beside), "x", at_least=0.9))
    for what, seconds in opened.items():
        first = Spread.of([1e3 * each for each in seconds])
        section.findings.append(Finding(f"from {what} to its first batch, {name}", first, "ms"))


def _reading(bus: broker.Bus, topic: str, count: int, opened: list[float]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        started = time.perf_counter()
        batches = bus.log.read(topic, 0, max_records=_BATCH)
        left = count - len(await anext(batches))
        opened.append(time.perf_counter() - started)

        async def read() -> None:
            if left != sum([_use(batch) async for batch in batches]):
                raise RuntimeError("Records did not come")

        yield read

    return variant


def _followed(bus: broker.Bus, topic: str, count: int, opened: list[float]) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        started = time.perf_counter()
        async with bus.log.follow(topic) as log:
            rest = count - len(await log.next_batch(_BATCH))
            opened.append(time.perf_counter() - started)

            async def follow() -> None:
                left = rest
                while left > 0:
                    left -= _use(await log.next_batch(_BATCH))

            yield follow

    return variant


def _use(batch: broker.RecordBatch) -> int:
    """Read the columns of each record. Returns the number of records."""
    for _key, _data, _offset in batch.rows(*_ROW):
        pass
    return len(batch)


async def _tail(section: Section, name: str, bus: broker.Bus, scale: float, rounds: int) -> None:
    ways: dict[str, Callable[[], AbstractAsyncContextManager[Pipe]]] = {
        "follow": partial(_follower, bus),
        "a group": partial(_group, bus),
    }
    late: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, opened in ways.items():
            late[way].append(await latency_of(opened, scale))
    median = Spread.of([1e3 * p50 for p50, _ in late["follow"]])
    section.findings.append(Finding(f"from publish to a follower, p50, {name}", median, "ms", at_most=5.0))
    section.tables.append(
        Table(
            (f"From publish to a reader of a log, {RATE} records a second, {name}", "p50", "p99"),
            [(way, *(median_of(numbers) for numbers in zip(*runs, strict=True))) for way, runs in late.items()],
        )
    )
    async with _topic(bus) as topic, bus.log.follow(topic) as log:
        while log.behind:
            await log.next_batch(timeout=1.0)
        shares = await idle_shares(log.next_batch(), max(0.5, _IDLE_SECONDS * scale), min(rounds, 3))
    section.findings.append(Finding(f"a follower that waits, {name}", Spread.of(shares), "%", at_most=1.0))


@asynccontextmanager
async def _follower(bus: broker.Bus) -> AsyncGenerator[Pipe]:
    async with _topic(bus) as topic, bus.log.follow(topic) as log:

        async def receive(arrived: Arrived) -> None:
            for record in await log.next_batch(_AT_MOST, timeout=_PATIENCE):
                arrived(record.data)

        yield Pipe(bus.topic(topic).publish, receive)


@asynccontextmanager
async def _group(bus: broker.Bus) -> AsyncGenerator[Pipe]:
    async with _topic(bus) as topic, bus.records(topic, group=_new_name()) as log:

        async def receive(arrived: Arrived) -> None:
            for record in await log.next_batch(_AT_MOST, timeout=_PATIENCE):
                arrived(record.data)

        yield Pipe(bus.topic(topic).publish, receive)


# -- positions -----------------------------------------------------------------------------------------------


async def _committing(section: Section, name: str, bus: broker.Bus, topic: str, count: int, rounds: int) -> None:
    async def everything(log: broker.RecordConsumer, batch: broker.RecordBatch) -> None:
        await log.commit()

    async def own(log: broker.RecordConsumer, batch: broker.RecordBatch) -> None:
        await log.commit_positions({(topic, 0): batch[-1].offset + 1})

    ours, beside = (
        await in_pairs(
            _commits(bus, topic, count, everything),
            {"commit_positions": _commits(bus, topic, count, own)},
            count=count,
            rounds=_many(rounds),
        )
    )["commit_positions"]
    _add(section, name, {"commit_positions": ours, "commit, beside it": beside})
    section.findings.append(
        Finding(f"commit_positions / commit, {name}", ours.times_rate_of(beside), "x", at_least=0.9)
    )


def _commits(
    bus: broker.Bus,
    topic: str,
    count: int,
    commit: Callable[[broker.RecordConsumer, broker.RecordBatch], Awaitable[None]],
) -> Variant:
    """Commits, each after some records."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with bus.records(topic, group=_new_name()) as log:
            await commit(log, await log.next_batch(1))

            async def run() -> None:
                for _ in range(count):
                    await commit(log, await log.next_batch(_COMMITTED))

            yield run

    return variant


# -- tables --------------------------------------------------------------------------------------------------


async def _tables(section: Section, name: str, bus: broker.Bus, writes: int, rounds: int) -> None:
    count = writes * _ROWS
    async with _topic(bus, compacted=True) as topic:
        table = _table(bus, topic, writes)
        if bus.capabilities.publish.transactions:
            ours, beside = (
                await in_pairs(_by_hand(bus, topic, writes), {"table_writer": table}, count=count, rounds=_many(rounds))
            )["table_writer"]
            _add(section, name, {"table_writer": ours, "the transaction by hand, beside it": beside})
            ratio = ours.times_rate_of(beside)
            what = f"table_writer / the transaction by hand, {name}"
            section.findings.append(Finding(what, ratio, "x", at_least=0.9))
            least = None
        else:
            ours = (await alternate({"table_writer": table}, count=count, rounds=_many(rounds)))["table_writer"]
            _add(section, name, {"table_writer": ours})
            least = 10.0
    what = f"rows that table_writer writes by {_ROWS}, {name}"
    section.findings.append(Finding(what, _in_thousands(ours.rate), "k/s", at_least=least))


def _rows(write: int, partition: int | None = None) -> list[broker.OutboundMessage]:
    return [
        broker.OutboundMessage(BODY, b"key-%d" % ((write * _ROWS + number) % _KEYS), partition=partition)
        for number in range(_ROWS)
    ]


def _table(bus: broker.Bus, topic: str, writes: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        rows = [_rows(write) for write in range(writes)]
        async with bus.table_writer(topic, 0) as table:
            await table.write(rows[0], checkpoint=b"0")

            async def run() -> None:
                for number, each in enumerate(rows):
                    await table.write(each, checkpoint=b"%d" % number)

            yield run

    return variant


def _by_hand(bus: broker.Bus, topic: str, writes: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        rows = [_rows(write, 0) for write in range(writes)]
        async with bus.transactional_publisher(_new_name()) as publisher:

            async def write(number: int, rows: list[broker.OutboundMessage]) -> None:
                checkpoint = broker.OutboundMessage(b"%d" % number, broker.CHECKPOINT_KEY, partition=0)
                async with publisher.transaction() as transaction:
                    await transaction.publish_batch(topic, [*rows, checkpoint], receipts=False)

            await write(0, rows[0])

            async def run() -> None:
                for number, each in enumerate(rows):
                    await write(number, each)

            yield run

    return variant


# -- batches -------------------------------------------------------------------------------------------------


async def _batches(section: Section, stage: KafkaStage, topic: str, count: int, rounds: int) -> None:
    """A loop over batches of a group with all defaults."""
    ours = "rows of key, data, offset in batches of the default size"
    plain: dict[str, Variant] = {f"raw, by {most}": _raw_consume(stage, topic, count, most) for most in _AT_ONCE}
    plain[ours] = _consume(stage, topic, count)
    seldom = {name: seldom_collected(variant) for name, variant in plain.items()}
    for how, variants, bar in (("", seldom, 0.88), (f", {USUAL}", plain, None)):
        series = await alternate(variants, count=count, rounds=rounds)
        _add(section, "kafka", {f"{name}{how}": runs for name, runs in series.items()})
        raw = max((series[f"raw, by {most}"] for most in _AT_ONCE), key=lambda runs: runs.rate.median)
        section.findings += [
            Finding(f"{ours}{how}", _in_thousands(series[ours].rate), "k/s", at_least=1000.0),
            Finding(f"{ours} / raw{how}", series[ours].times_rate_of(raw), "x", at_least=bar),
        ]


def _raw_consume(stage: KafkaStage, topic: str, count: int, most: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        consumer = stage.consumer()
        consumer.subscribe([topic])
        left = count - raw_kafka.read_some(consumer)
        await asyncio.sleep(_SETTLE)

        async def run() -> None:
            raw_kafka.read(consumer, left, most)

        yield run
        consumer.close()

    return variant


def _consume(stage: KafkaStage, topic: str, count: int) -> Variant:
    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        async with stage.bus.records(topic, group=_new_name()) as log:
            left = count - len(await log.next_batch())
            await asyncio.sleep(_SETTLE)
            yield partial(_read_batches, log, left)

    return variant


async def _read_batches(log: broker.RecordConsumer, count: int) -> None:
    async for batch in log.batches():
        count -= _use(batch)
        if count <= 0:
            break
