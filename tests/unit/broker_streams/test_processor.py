"""Processors on the in-memory broker: checkpoints, restarts, crashes, rebalances, visits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import broker
from broker import (
    CHECKPOINT_KEY,
    BackendError,
    Bus,
    ConfigurationError,
    ConnectionFailed,
    Json,
    NotFound,
    OutboundMessage,
    TableWriter,
    TopicPartition,
    TransactionAborted,
    Unsupported,
    connect,
)
from broker_inmem import Broker, InmemSettings
from broker_streams import commits
from broker_streams import processor as processors
from broker_streams.checkpoint import Checkpoint
from broker_streams.context import Context, Window
from broker_streams.graph import Edge, Group, Input, Join, Lookup, Loop, Output, Persist, Timer, Tumbling
from broker_streams.partition import PartitionState, PartitionTables
from broker_streams.processor import Processor
from broker_streams.recovery import CopyState
from broker_streams.stats import ProcessorState
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.memory import Memory
from broker_streams.topics import TopicPolicy
from broker_streams.view import View
from tests.unit.broker_streams.brokers import Limited

SECONDS = 60.0
PARTITIONS = 4


RECIPES = {
    "transactions": Limited(),
    "atomic": Limited(transactions=False),
    "atomic-10-rows": Limited(transactions=False, rows=10),
    "fenced": Limited(transactions=False, atomic=False),
    "plain": Limited(transactions=False, tables=False),
}


@pytest.fixture
def server() -> Broker:
    return Broker(Limited())


@pytest.fixture
async def bus(server: Broker) -> AsyncIterator[Bus]:
    async with connect(InmemSettings(broker=server)) as bus:
        await prepare(bus)
        yield bus


async def prepare(bus: Bus, partitions: int = PARTITIONS) -> None:
    for topic in ("clicks", "alerts"):
        await bus.admin.ensure_topic(topic, partitions=partitions)


counts = Persist(Json(int))
alerts = Output("alerts", Json(int))


def count(ctx: Context, value: int) -> None:
    """Sums the values of a key."""
    total = ctx[counts] = (ctx[counts] or 0) + value
    ctx.emit(alerts, key=ctx.key, value=total)


def counting(callback: Callable[..., Any] = count, *edges: Edge, name: str = "counts") -> Group:
    return Group(name, Input("clicks", Json(int), callback), counts, alerts, *edges)


def processing(bus: Bus, group: Group | None = None, **options: Any) -> Processor:
    options = {"store": Memory(), "checkpoint_interval": 0.01, **options}
    return Processor(bus, counting() if group is None else group, **options)


async def publish(bus: Bus, values: Sequence[tuple[str, int]], topic: str = "clicks") -> None:
    await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % value, key) for key, value in values])


def ones(number: int, keys: int = 10) -> list[tuple[str, int]]:
    return [(f"key-{n % keys}", 1) for n in range(number)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def viewing(bus: Bus, table: str = "counts-table") -> AsyncGenerator[View[int]]:
    """A view that is ready; creates the table if no processor has yet."""
    await bus.admin.ensure_topic(table, compacted=True)
    async with View(bus, table, Json(int)) as view:
        await view.ready()
        yield view


def total(view: View[int]) -> int:
    return sum(value for _, value in view.items())


async def outputs(bus: Bus) -> list[tuple[str, int]]:
    """What was published to `alerts`: ids and values."""
    found: list[tuple[str, int]] = []
    for partition in await bus.log.partitions("alerts"):
        async for batch in bus.log.read("alerts", partition):
            found += [(record.id, int(record.data or b"")) for record in batch]
    return found


# -- the life of a processor -------------------------------------------------------------------------------


async def test_it_is_a_service(server: Broker) -> None:
    bus = connect(InmemSettings(broker=server))
    await bus.open()
    await prepare(bus)
    processor = processing(bus)

    async def stop_later() -> None:
        await until(lambda: processor.state is ProcessorState.RUNNING)
        processor.stop()

    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(stop_later())
        await broker.serve(processor)
    assert processor.state is ProcessorState.STOPPED
    await bus.close()


async def test_a_cancelled_run_stops_the_processor(bus: Bus) -> None:
    await publish(bus, ones(10))
    processor = processing(bus)
    running = asyncio.create_task(processor.run())
    await until(lambda: processor.state is ProcessorState.RUNNING)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processor.state is ProcessorState.STOPPED


def test_options_are_checked() -> None:
    for options in (
        {"guarantee": "twice"},
        {"checkpoint_interval": 0},
        {"checkpoint_interval": float("nan")},
        {"checkpoint_interval": "1s"},
        {"checkpoint_messages": 0},
        {"checkpoint_messages": 0.5},
        {"standby": "some"},
        {"standby": 1},
        {"standby": ["1"]},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            processing(None, **options)  # pyright: ignore[reportArgumentType]


async def test_a_standby_of_partitions_that_are_not_there_is_refused(bus: Bus) -> None:
    with pytest.raises(ConfigurationError, match=r"standby is \[0, 4\], and group 'counts' has 4 partitions"):
        await processing(bus, standby={4, 0}).run()


async def test_topics_that_do_not_fit_are_refused(bus: Bus) -> None:
    processor = processing(bus, counting(count, Output("nothing", Json(int))))
    with pytest.raises(ConfigurationError, match="Output 'nothing' does not exist"):
        await processor.run()
    assert processor.state is ProcessorState.STOPPED
    with pytest.raises(ConfigurationError, match="create=False"):
        await processing(bus, topics=TopicPolicy(create=False)).run()


async def test_exactly_once_is_refused_where_it_does_not_hold() -> None:
    async with connect(InmemSettings(broker=Broker(RECIPES["plain"]))) as bus:
        await prepare(bus)
        with pytest.raises(Unsupported, match="may count twice"):
            await processing(bus, guarantee="exactly_once").run()


@pytest.mark.parametrize(
    ("recipe", "asked", "guarantee", "how"),
    [
        ("transactions", None, "exactly_once", "transactions"),
        ("transactions", "at_least_once", "at_least_once", "single messages"),
        ("atomic", None, "exactly_once", "atomic writes to the table"),
        ("atomic", "at_least_once", "at_least_once", "fenced writes to the table"),
        ("fenced", None, "exactly_once", "redo records before the rows"),
        ("fenced", "at_least_once", "at_least_once", "fenced writes to the table"),
        ("plain", None, "at_least_once", "single messages"),
    ],
)
async def test_the_best_guarantee_is_taken(recipe: str, asked: Any, guarantee: str, how: str) -> None:
    async with connect(InmemSettings(broker=Broker(RECIPES[recipe]))) as bus:
        await prepare(bus)
        async with processing(bus, guarantee=asked) as processor:
            stats = processor.stats()
            assert (stats.guarantee, stats.how) == (guarantee, how)


# -- messages and checkpoints ------------------------------------------------------------------------------


async def test_the_last_checkpoint_is_written_at_the_end(bus: Bus) -> None:
    await publish(bus, ones(100))
    async with processing(bus, checkpoint_interval=1000) as processor:
        await processor.ready()
        await until(lambda: sum(each.engine.dirty for each in processor.runners) == 10)
        assert await processor.get("key-1") is None
    async with viewing(bus) as view:
        assert total(view) == 100


async def test_a_number_of_messages_makes_a_checkpoint(bus: Bus) -> None:
    await publish(bus, ones(100))
    async with processing(bus, checkpoint_interval=1000, checkpoint_messages=100), viewing(bus) as view:
        await until(lambda: total(view) == 100)


async def test_a_deferred_message_holds_its_checkpoint_back(bus: Bus) -> None:
    held: list[Any] = []

    def defer(ctx: Context, value: int) -> None:
        held.append(ctx.defer())
        count(ctx, value)

    await publish(bus, [("a", 1)])
    async with viewing(bus) as view, processing(bus, counting(defer)) as processor:
        await processor.ready()
        await until(lambda: len(held) == 1)
        await publish(bus, [("a", 1)])
        assert view.get("a") is None
        while len(held) < 2:
            await asyncio.sleep(0.005)
            for done in held:
                done()
        for done in held:
            done()
        await until(lambda: view.get("a") == 2)


async def test_many_messages_pass_a_processor_that_pauses_its_partitions(bus: Bus) -> None:
    await publish(bus, ones(60_000, keys=50))
    async with processing(bus, checkpoint_interval=0.2) as processor, viewing(bus) as view:
        await until(lambda: total(view) == 60_000)
        assert await processor.get("key-7") == 1200


@pytest.mark.parametrize("tells", [True, False])
async def test_get_reads_the_partitions_of_this_member(tells: bool) -> None:
    async with connect(InmemSettings(broker=Broker(Limited(tells_partitions=tells)))) as bus:
        await prepare(bus)
        await publish(bus, [("a", 5)])
        async with processing(bus) as processor, viewing(bus) as view:
            await processor.ready()
            await until(lambda: view.get("a") == 5)
            await until(lambda: any(each.checkpoints for each in processor.runners))
            assert await processor.get("a") == 5
            assert await processor.get("none") is None
        with pytest.raises(NotFound, match="does not run here"):
            await processor.get("a")


async def test_get_needs_rows(bus: Bus) -> None:
    with pytest.raises(ConfigurationError, match="has no Persist"):
        await Processor(bus, Group("bare", Input("clicks", Json(int), lambda ctx, value: None))).get("a")


async def test_a_callback_runs_in_a_task_that_names_group_and_partition(bus: Bus) -> None:
    """By this name a callback that blocks the event loop is reported."""
    found: set[tuple[int, str]] = set()

    def callback(ctx: Context, value: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        found.add((ctx.partition, task.get_name()))

    await publish(bus, ones(40, keys=40))
    async with processing(bus, counting(callback)):
        await until(lambda: len(found) == PARTITIONS)
    assert found == {(number, f"group counts, partition {number} of clicks") for number in range(PARTITIONS)}


async def test_pause_and_resume(bus: Bus) -> None:
    async with processing(bus) as processor, viewing(bus) as view:
        await processor.ready()
        await publish(bus, [("a", 1)])
        await until(lambda: view.get("a") == 1)
        processor.pause()
        receipt = await bus.topic("clicks").publish(b"1", key="a")
        other = await bus.topic("counts-table").publish(b"7", key="other")
        assert await view.get("other", at_least=other) == 7
        assert view.get("a") == 1
        assert receipt.offset is not None
        processor.resume()
        await until(lambda: view.get("a") == 2)


async def test_timers_of_the_wall_clock_fire_without_messages(bus: Bus) -> None:
    def on_timer(ctx: Context) -> None:
        ctx[counts] = (ctx[counts] or 0) + 100

    timer = Timer("soon", on_timer, clock="wall")

    def set_timer(ctx: Context, value: int) -> None:
        ctx[counts] = value
        ctx.set_timer(timer, after=0.05)

    await publish(bus, [("a", 1)])
    async with processing(bus, counting(set_timer, timer)) as processor, viewing(bus) as view:
        await processor.ready()
        await until(lambda: view.get("a") == 101)


async def test_joins_and_lookups(bus: Bus) -> None:
    for table in ("users", "prices"):
        await bus.admin.ensure_topic(table, partitions=PARTITIONS if table == "users" else 1, compacted=True)
    users, prices = Join("users", Json(int)), Lookup("prices", Json(int))

    def priced(ctx: Context, value: int) -> None:
        ctx[counts] = value + (ctx[users] or 0) + (ctx.lookup(prices, "hat") or 0)

    await publish(bus, [("a", 10)], "users")
    await publish(bus, [("hat", 100)], "prices")
    await publish(bus, [("a", 1)])
    async with processing(bus, counting(priced, users, prices)) as processor, viewing(bus) as view:
        await processor.ready()
        await until(lambda: view.get("a") == 111)
        await publish(bus, [("a", 20)], "users")
        await until(lambda: processor.stats().partitions != {} and joined_rows(processor) == 2)
        await publish(bus, [("a", 2)])
        await until(lambda: view.get("a") == 122)
        assert processor.stats().lookups["prices"].rows == 1


def joined_rows(processor: Processor) -> int:
    return sum(each.joins["users"].rows for each in processor.stats().partitions.values())


async def test_an_input_may_begin_at_the_end(bus: Bus) -> None:
    await publish(bus, [("a", 1)])
    group = Group("late", Input("clicks", Json(int), count, start="latest"), counts, alerts)
    async with processing(bus, group) as processor:
        await processor.ready()
    # What comes before a restart is not lost, although no checkpoint was written.
    await publish(bus, [("a", 10)])
    async with processing(bus, group), viewing(bus, "late-table") as view:
        await until(lambda: view.get("a") == 10)


async def test_figures(bus: Bus) -> None:
    await publish(bus, ones(20))
    async with processing(bus) as processor, viewing(bus) as view:
        await processor.ready()
        await until(lambda: total(view) == 20)
        await until(lambda: sum(each.inputs["clicks"].count for each in processor.stats().partitions.values()) == 20)
        stats = processor.stats()
        assert stats.checkpoint_seconds is not None
        assert sum(each.rows for each in stats.partitions.values()) >= 10
        assert sum(each.published for each in stats.partitions.values()) == 20
        assert stats.recovering == {}
        assert all(each.state is PartitionState.RUNNING for each in stats.partitions.values())
        assert stats.failed_checkpoints == 0


# -- failures ----------------------------------------------------------------------------------------------


async def test_an_aborted_checkpoint_is_done_again(bus: Bus, server: Broker) -> None:
    await publish(bus, ones(50))
    async with processing(bus, checkpoint_interval=0.05) as processor, viewing(bus) as view:
        await processor.ready()
        await until(lambda: total(view) == 50)
        # More often than it is written again.
        server.faults.fail("transaction", TransactionAborted("a fault"), times=5)
        await publish(bus, ones(50))
        await until(lambda: total(view) == 100)
        await until(lambda: processor.stats().failed_checkpoints > 0)
    assert sorted(Counter(await outputs(bus)).values()) == [1] * 100


async def test_a_publisher_of_the_same_name_fences_only_for_a_moment(bus: Bus) -> None:
    async with processing(bus, name="one") as processor, viewing(bus) as view:
        await processor.ready()
        await publish(bus, ones(50))
        await until(lambda: total(view) == 50)
        async with bus.transactional_publisher("counts.one"):
            await publish(bus, ones(50))
            await until(lambda: total(view) == 100)


async def test_p12_it_survives_a_broker_that_goes_away(bus: Bus, server: Broker) -> None:
    async with processing(bus) as processor, viewing(bus) as view:
        await processor.ready()
        await publish(bus, ones(50))
        await until(lambda: total(view) == 50)
        assert processor.healthy
        server.faults.stop()
        await until(lambda: view.state is CopyState.CONNECTING and not processor.healthy)
        server.faults.start()
        await until_published(bus, ones(50))
        await until(lambda: total(view) == 100 and processor.healthy)
    assert not processor.healthy
    assert len(set(await outputs(bus))) == 100


async def until_published(bus: Bus, values: Sequence[tuple[str, int]]) -> None:
    """Publish as soon as the broker is back."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await publish(bus, values)
                return
            except broker.BrokerError:
                await asyncio.sleep(0.01)


async def test_a_fenced_partition_starts_anew() -> None:
    async with connect(InmemSettings(broker=Broker(RECIPES["atomic"]))) as bus:
        await prepare(bus)
        async with processing(bus) as processor, viewing(bus) as view:
            await processor.ready()
            await publish(bus, ones(50))
            await until(lambda: total(view) == 50)
            partition = await bus.partition_of("counts-table", "key-0")
            async with bus.table_writer("counts-table", partition):
                pass
            await publish(bus, ones(50))
            await until(lambda: total(view) == 100)
            assert processor.stats().failed_checkpoints > 0
        assert len(set(await outputs(bus))) == 100


class Dying:
    """Commits that die before or after the first or the second write."""

    def __init__(self, commits: Any, chance: random.Random, die: Callable[[], object]) -> None:
        self._commits = commits
        self._lives = chance.choice((1, 1, 2))
        self._after = chance.choice((False, True))
        self._die = die

    def __getattr__(self, name: str) -> Any:
        return getattr(self._commits, name)

    async def write(self, parts: Any) -> Any:
        self._lives -= 1
        if self._lives == 0 and not self._after:
            self._die()
            raise ConnectionFailed("died before a write", retriable=False)
        written = await self._commits.write(parts)
        if self._lives == 0:
            self._die()
            raise ConnectionFailed("died after a write", retriable=False)
        return written


class Torn:
    """A writer of a table that dies once in the middle of a write, as on a broker that stores rows one by one."""

    def __init__(self, writer: TableWriter, bus: Bus, partition: int, chance: random.Random, die: Callable[[], object]):
        self._writer = writer
        self._bus = bus
        self._partition = partition
        self._chance = chance
        self._die = die

    async def write(self, rows: Sequence[OutboundMessage], *, checkpoint: bytes) -> None:
        if rows and self._chance.random() < 0.1:
            last = None
            async for batch in self._bus.log.read("counts-table", self._partition):
                last = next((row.data for row in reversed(list(batch)) if row.key == CHECKPOINT_KEY), last)
            # Nothing is written without a checkpoint: the one that is there.
            await self._writer.write(rows[: self._chance.randrange(len(rows))], checkpoint=last or Checkpoint().pack())
            self._die()
            raise ConnectionFailed("died in the middle of a write", retriable=False)
        await self._writer.write(rows, checkpoint=checkpoint)


def tear(commits: Any, bus: Bus, chance: random.Random, die: Callable[[], object]) -> None:
    """Let writers of these commits die."""
    whole = commits._writer
    commits._writer = lambda part: Torn(whole(part), bus, part.partition, chance, die)


@pytest.mark.parametrize("recipe", ["transactions", "atomic", "atomic-10-rows", "fenced"])
@pytest.mark.parametrize("store", ["memory", "lmdb"])
async def test_kills_around_checkpoints_count_nothing_twice(recipe: str, store: str, tmp_path: Path) -> None:
    server = Broker(RECIPES[recipe])
    chance = random.Random(recipe + store)

    def loop_back(ctx: Context, value: int) -> None:
        count(ctx, value)
        ctx.loop(loop, key=f"looped-{value}", value=1)

    def looped(ctx: Context, value: int) -> None:
        ctx[counts] = (ctx[counts] or 0) + value

    loop = Loop(Json(int), looped)
    async with connect(InmemSettings(broker=server)) as own:
        await prepare(own)
        deaths = 0
        for turn in range(12):
            await publish(own, ones(40, keys=7))
            async with AsyncExitStack() as stack:
                bus = await stack.enter_async_context(connect(InmemSettings(broker=server)))
                processor = processing(
                    bus,
                    counting(loop_back, loop),
                    store=Memory() if store == "memory" else Lmdb(),
                    state_dir=tmp_path / "state",
                    name="one",
                )
                died = asyncio.Event()

                def die(bus: Bus = bus, died: asyncio.Event = died) -> None:
                    died.set()
                    server.faults.kill(bus, drop_leases=True)

                last = turn == 11
                try:
                    async with processor, viewing(own) as view:
                        if not last:
                            raw: Any = vars(processor)["_checkpoints"]
                            if recipe == "fenced":
                                tear(raw.commits, bus, chance, die)
                            raw.commits = Dying(raw.commits, chance, die)
                        await until(
                            lambda: (
                                died.is_set()  # noqa: B023
                                or (total(view) == 2 * 40 * (turn + 1))  # noqa: B023
                                or processor.state is ProcessorState.STOPPED  # noqa: B023
                            )
                        )
                except broker.BrokerError:
                    assert died.is_set()
                deaths += died.is_set()
        assert deaths > 3
        async with viewing(own) as view:
            assert total(view) == 2 * 40 * 12
        assert len(set(await outputs(own))) == 40 * 12
        if recipe == "transactions":
            assert len(await outputs(own)) == 40 * 12


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
async def test_rows_that_a_crash_left_out_are_written_by_the_next_member(guarantee: Any) -> None:
    async with connect(InmemSettings(broker=Broker(RECIPES["fenced"]))) as bus:
        await prepare(bus, 1)
        writes = 0

        class Half:
            """A writer that dies after the redo records of the first checkpoint."""

            def __init__(self, writer: TableWriter) -> None:
                self._writer = writer

            async def write(self, rows: Sequence[OutboundMessage], *, checkpoint: bytes) -> None:
                nonlocal writes
                writes += bool(rows)
                if writes > 1:
                    raise ConnectionFailed("died before the rows", retriable=False)
                await self._writer.write(rows, checkpoint=checkpoint)

        with pytest.raises(ConnectionFailed):
            async with processing(bus, checkpoint_interval=1000, checkpoint_messages=10) as processor:
                raw: Any = vars(processor)["_checkpoints"].commits
                whole = raw._writer
                raw._writer = lambda part: Half(whole(part))
                await publish(bus, ones(10))
                await until(lambda: processor.state is ProcessorState.STOPPED)
        async with viewing(bus) as view:
            await view.ready()
            assert total(view) == 0
            async with processing(bus, guarantee=guarantee) as processor:
                await until(lambda: total(view) == 10)
                await publish(bus, ones(10))
                await until(lambda: total(view) == 20)


@pytest.mark.parametrize("recipe", ["transactions", "atomic"])
async def test_a_zombie_writes_nothing(recipe: str) -> None:
    """A member that was cut off comes back, with messages of a partition that another member has handled."""
    server = Broker(replace(RECIPES[recipe], session_seconds=0.3))
    async with AsyncExitStack() as stack:
        cut, other = [await stack.enter_async_context(connect(InmemSettings(broker=server))) for _ in range(2)]
        await prepare(other, 1)
        first, second = processing(cut, checkpoint_interval=0.05), processing(other)
        await stack.enter_async_context(first)
        await first.ready()
        view = await stack.enter_async_context(viewing(other))
        await publish(other, ones(20))
        await until(lambda: total(view) == 20)
        server.faults.isolate(cut)
        await publish(other, ones(20))
        await stack.enter_async_context(second)
        await second.ready()
        await until(lambda: total(view) == 40)
        server.faults.heal(cut)
        await until(lambda: first.partitions == {})
        await publish(other, ones(20))
        await until(lambda: total(view) == 60)
        assert len(set(await outputs(other))) == 60


@pytest.mark.parametrize("recipe", ["atomic", "fenced", "plain"])
async def test_positions_of_the_group_need_not_be_committed(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint row says where to go on."""

    async def fail(consumer: object, parts: object) -> None: ...

    monkeypatch.setattr(commits, "_commit", fail)
    async with connect(InmemSettings(broker=Broker(RECIPES[recipe]))) as bus:
        await prepare(bus)
        for turn in range(1, 4):
            await publish(bus, ones(50))
            async with processing(bus), viewing(bus) as view:
                await until(lambda: total(view) >= 50 * turn)  # noqa: B023
        assert len(await outputs(bus)) == 150


async def move_group(bus: Bus, position: int) -> None:
    """Commit a position of the group for all partitions, as if somebody had reset it."""

    async def assigned(partitions: Sequence[TopicPartition]) -> None:
        await log.seek(dict.fromkeys(partitions, position))
        await log.commit_positions(dict.fromkeys(partitions, position))

    async with bus.records("clicks", group="counts", on_assigned=assigned) as log:
        async with asyncio.timeout(SECONDS):
            while set((await log.committed()).values()) != {position}:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("recipe", ["transactions", "atomic"])
async def test_positions_beyond_the_checkpoint(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    """A transaction writes both; so somebody has moved the group, or the last checkpoint cannot be seen."""
    async with connect(InmemSettings(broker=Broker(RECIPES[recipe]))) as bus:
        await prepare(bus)
        await publish(bus, ones(100))
        async with processing(bus), viewing(bus) as view:
            await until(lambda: total(view) == 100)
        await publish(bus, ones(100, keys=40))
        await move_group(bus, 31)
        processor = processing(bus)
        if recipe == "transactions":
            with pytest.raises(BackendError, match="lie beyond the checkpoint in table"):
                async with processor:
                    raw: Any = vars(processor)["_checkpoints"]
                    raw.commits.patience = 0.01
                    await processor.ready()
        else:
            async with processor, viewing(bus) as view:
                await until(lambda: total(view) == 200)
            assert "lie beyond the checkpoint, which counts" in caplog.text


async def test_a_group_that_has_positions_and_no_checkpoint_keeps_both(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that another library has left: its rows are taken as they are, and reading goes on."""
    await publish(bus, [("a", 1)])
    partition = await bus.partition_of("clicks", "a")
    for number in range(PARTITIONS):
        if number != partition:
            await bus.topic("clicks").publish(OutboundMessage(b"1", f"other-{number}", partition=number))
    await move_group(bus, 1)
    await bus.admin.ensure_topic("counts-table", partitions=PARTITIONS, compacted=True)
    await publish(bus, [("a", 41)], "counts-table")
    await publish(bus, [("a", 1)])
    processor = processing(bus)
    async with processor, viewing(bus) as view:
        raw: Any = vars(processor)["_checkpoints"]
        raw.commits.patience = 0.01
        await until(lambda: view.get("a") == 42)
    assert "without a checkpoint" in caplog.text


# -- rebalances --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", ["transactions", "atomic-10-rows"])
async def test_p6_members_come_go_and_are_killed(recipe: str, seed: int) -> None:
    server = Broker(replace(RECIPES[recipe], session_seconds=0.5, transaction_seconds=5.0))
    chance = random.Random(f"{recipe}{seed}")

    def loop_back(ctx: Context, value: int) -> None:
        count(ctx, value)
        ctx.loop(loop, key=f"looped-{ctx.key[-1]}", value=1)

    def looped(ctx: Context, value: int) -> None:
        ctx[counts] = (ctx[counts] or 0) + value

    loop = Loop(Json(int), looped)
    members: list[tuple[Bus, AsyncExitStack]] = []

    async def start() -> None:
        stack = AsyncExitStack()
        bus = await stack.enter_async_context(connect(InmemSettings(broker=server)))
        await stack.enter_async_context(processing(bus, counting(loop_back, loop)))
        members.append((bus, stack))

    async with connect(InmemSettings(broker=server)) as own:
        await prepare(own)
        async with viewing(own) as view:
            for _ in range(12):
                drawn = chance.random()
                if len(members) < 2 or (len(members) < 4 and drawn < 0.5):
                    await start()
                elif drawn < 0.75:
                    await members.pop(chance.randrange(len(members)))[1].aclose()
                else:
                    bus, stack = members.pop(chance.randrange(len(members)))
                    server.faults.kill(bus, drop_leases=chance.random() < 0.5)
                    with suppress(broker.BrokerError):
                        await stack.aclose()
                await publish(own, ones(60, keys=20))
            if not members:
                await start()
            await until(lambda: total(view) == 2 * 12 * 60)
            for _, stack in members:
                await stack.aclose()
            assert total(view) == 2 * 12 * 60
        found = await outputs(own)
        assert len(set(found)) == 12 * 60
        assert recipe != "transactions" or len(found) == 12 * 60


async def test_a_killed_member_is_replaced(server: Broker, bus: Bus) -> None:
    async with viewing(bus) as view:
        doomed = connect(InmemSettings(broker=server))
        await doomed.open()
        first = processing(doomed)
        with pytest.raises(broker.BrokerError):
            async with first:
                await first.ready()
                await publish(bus, ones(100))
                await until(lambda: total(view) == 100)
                server.faults.kill(doomed, drop_leases=True)
                async with processing(bus) as second:
                    await second.ready()
                    await publish(bus, ones(100))
                    await until(lambda: total(view) == 200)
                await until(lambda: first.state is ProcessorState.STOPPED)
        assert len(await outputs(bus)) == 200


async def test_a_recovering_partition_can_be_revoked(server: Broker, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second member takes partitions while the first still waits for its tables."""
    await bus.admin.ensure_topic("users", partitions=PARTITIONS, compacted=True)
    group = counting(count, Join("users", Json(int)))
    gate, waiting = asyncio.Event(), set[int]()
    recover = PartitionTables.recover

    async def slowly(tables: PartitionTables, *arguments: Any) -> bool:
        own: Any = tables.own
        if own._bus is bus:
            await own._begin()
            waiting.add(tables.partition)
            await gate.wait()
        return await recover(tables, *arguments)

    monkeypatch.setattr(PartitionTables, "recover", slowly)
    async with viewing(bus) as view, connect(InmemSettings(broker=server)) as other:
        await publish(bus, ones(100))
        async with processing(bus, group) as first:
            await until(lambda: len(waiting) == PARTITIONS)
            assert {
                number: (each.rows, each.left) for number, each in first.stats().recovering.items()
            } == dict.fromkeys(range(PARTITIONS), (0, 0))
            async with processing(other, group) as second:
                await second.ready()
                assert len(first.partitions) == len(second.partitions) == PARTITIONS // 2
                assert set(first.partitions.values()) == {PartitionState.RECOVERING}
                gate.set()
                await first.ready()
                await until(lambda: total(view) == 100)
    assert len(await outputs(bus)) == 100


async def test_p10_a_callback_that_hangs_stops_neither_a_rebalance_nor_the_end(server: Broker, bus: Bus) -> None:
    """What it was at is undone, and handled by the next owner; what was handled before is kept."""
    hanging = asyncio.Event()

    async def hang(ctx: Context, value: int) -> None:
        if value == 100:
            hanging.set()
            await asyncio.Event().wait()
        count(ctx, value)

    async with viewing(bus) as view, connect(InmemSettings(broker=server)) as other:
        messages = [OutboundMessage(b"1", f"key-{n}", partition=n) for n in range(PARTITIONS)]
        await bus.topic("clicks").publish_batch([*messages, *(each.replace(data=b"100") for each in messages)])
        async with processing(bus, counting(hang), checkpoint_interval=1000) as first:
            await asyncio.wait_for(hanging.wait(), SECONDS)
            async with processing(other) as second:
                await until(lambda: len(second.partitions) == 2)
                await second.ready()
                await until(lambda: total(view) == 2 * 101)
            await until(lambda: len(first.partitions) == PARTITIONS)
        assert total(view) == 2 * 101 + 2 * 1
        async with processing(bus):
            await until(lambda: total(view) == 4 * 101)


async def test_a_spare_member_is_ready_and_takes_over(
    server: Broker, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "_SPARE_SECONDS", 0.5)
    monkeypatch.setattr(processors, "_SPARE_LOOK_SECONDS", 0.05)
    members = [connect(InmemSettings(broker=server)) for _ in range(PARTITIONS)]
    async with AsyncExitStack() as stack, viewing(bus) as view:
        running: list[Processor] = []
        for each in members:
            await stack.enter_async_context(each)
            running.append(await stack.enter_async_context(processing(each)))
        await until(lambda: all(len(each.partitions) == 1 for each in running))
        async with processing(bus) as spare:
            async with asyncio.timeout(SECONDS):
                await spare.ready()
            assert (spare.state, spare.partitions) == (ProcessorState.RUNNING, {})
            running[0].stop()
            await until(lambda: len(spare.partitions) == 1)
            async with asyncio.timeout(SECONDS):
                await spare.ready()
            assert list(spare.partitions.values()) == [PartitionState.RUNNING]
            await publish(bus, ones(100))
            await until(lambda: total(view) == 100)


async def test_a_member_is_not_ready_before_it_has_its_share(
    server: Broker, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "_SPARE_LOOK_SECONDS", 0.05)
    hanging, going = asyncio.Event(), asyncio.Event()

    async def hang(ctx: Context, value: int) -> None:
        hanging.set()
        await going.wait()
        count(ctx, value)

    await publish(bus, ones(PARTITIONS * 10))
    async with connect(InmemSettings(broker=server)) as other, processing(bus, counting(hang)):
        await asyncio.wait_for(hanging.wait(), SECONDS)
        async with processing(other) as second:
            ready = asyncio.create_task(second.ready())
            # The first gives nothing away before it gives up waiting for its callbacks.
            await until(lambda: second.state is ProcessorState.RUNNING)
            assert second.partitions or not ready.done()
            going.set()
            await asyncio.wait_for(ready, SECONDS)
            assert len(second.partitions) == PARTITIONS // 2


async def test_a_store_on_disk_is_not_read_again(bus: Bus, tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": Lmdb(), "state_dir": tmp_path / "state"}
    await publish(bus, ones(100))
    async with processing(bus, **options), viewing(bus) as view:
        await until(lambda: total(view) == 100)
    async with processing(bus, **options) as processor:
        await processor.ready()
        assert sum(each.table.rows for each in processor.stats().partitions.values()) == 0
        assert await processor.get("key-1") == 10


async def test_get_waits_for_a_checkpoint_that_the_broker_has_and_the_member_does_not_know(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = asyncio.Event()
    async with processing(bus) as processor, viewing(bus) as view:
        await processor.ready()
        checkpoints = processor._checkpoints
        assert checkpoints is not None
        write = checkpoints.commits.write

        async def slow(parts: Any) -> Any:
            outcomes = await write(parts)
            await answer.wait()
            return outcomes

        monkeypatch.setattr(checkpoints.commits, "write", slow)
        await publish(bus, [("a", 5)])
        await until(lambda: view.get("a") == 5)
        getting = asyncio.create_task(processor.get("a"))
        await asyncio.sleep(0.05)
        assert not getting.done()
        answer.set()
        assert await getting == 5


async def test_a_partition_with_unread_messages_is_not_idle(bus: Bus) -> None:
    closed: list[int | None] = []

    def on_close(_: Context, window: Window[int]) -> None:
        closed.append(window.value)

    hour = Tumbling("hour", Json(int), size=3600, on_close=on_close, close_after_idle=0.2)

    def add(ctx: Context, value: int) -> None:
        for window in ctx.windows(hour):
            window.value = (window.value or 0) + value

    time = datetime(2026, 1, 1, 10, 30, tzinfo=UTC)
    clicks = [OutboundMessage(b"%d" % value, "a", publish_time=time) for value in (1, 2)]
    async with processing(bus, Group("windows", Input("clicks", Json(int), add), hour)) as processor:
        await processor.ready()
        await bus.topic("clicks").publish_batch(clicks[:1])
        await until(lambda: any(each.engine.positions for each in processor.runners))
        processor.pause()
        await bus.topic("clicks").publish_batch(clicks[1:])
        await asyncio.sleep(0.5)
        processor.resume()
        await until(lambda: bool(closed))
    assert closed == [3]
    assert sum(each.counts["late"] for each in processor.runners) == 0


# -- more of the graph -------------------------------------------------------------------------------------


async def test_topics_of_a_partition_are_merged_by_time(bus: Bus) -> None:
    """What was published later to another topic, with an earlier time, is handled first."""
    await bus.admin.ensure_topic("views", partitions=PARTITIONS)
    seen: list[int] = []

    def note(ctx: Context, value: int) -> None:
        seen.append(value)

    group = Group("merged", Input(["clicks", "views"], Json(int), note))
    for topic, first in (("clicks", 1), ("views", 0)):
        for value in range(first, 40, 2):
            moment = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=value)
            await bus.topic(topic).publish(OutboundMessage(b"%d" % value, "a", publish_time=moment))
    async with processing(bus, group):
        await until(lambda: len(seen) == 40)
    assert seen == list(range(40))


async def test_a_topic_that_ends_with_a_transaction_is_not_waited_for(bus: Bus) -> None:
    """The last offset of its log has no message."""
    await bus.admin.ensure_topic("views", partitions=PARTITIONS)
    async with bus.transactional_publisher("other") as publisher, publisher.transaction() as transaction:
        await transaction.publish("views", b"1", key="a")
    group = Group("sums", Input(["clicks", "views"], Json(int), count), counts, alerts)
    async with processing(bus, group), viewing(bus, "sums-table") as view:
        await publish(bus, [("a", 1)])
        await until(lambda: view.get("a") == 2)


async def test_a_group_without_rows(bus: Bus) -> None:
    def double(ctx: Context, value: int) -> None:
        ctx.emit(alerts, key=ctx.key, value=2 * value)

    group = Group("doubles", Input("clicks", Json(int), double), alerts)
    await publish(bus, ones(30))
    for _ in range(2):
        async with processing(bus, group) as processor:
            await processor.ready()
            await until(lambda: processor.state is ProcessorState.RUNNING)
    assert sorted(value for _, value in await outputs(bus)) == [2] * 30


async def test_rows_of_an_older_version_are_upgraded(bus: Bus) -> None:
    await publish(bus, ones(30))
    async with processing(bus), viewing(bus) as view:
        await until(lambda: total(view) == 30)
    newer = Persist(Json(int), version=2, upgrade=lambda version, data: b"%d" % (int(data) * 1000))
    group = Group("counts", Input("clicks", Json(int), lambda ctx, value: None), newer, alerts)
    for _ in range(2):
        async with processing(bus, group) as processor, viewing(bus) as view:
            await processor.ready()
            await until(lambda: total(view) == 30_000)


async def test_a_changed_graph_is_told(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    await publish(bus, ones(3))
    async with processing(bus), viewing(bus) as view:
        await until(lambda: total(view) == 3)
    timer = Timer("new", lambda ctx: None)
    async with processing(bus, counting(count, timer)) as processor:
        await processor.ready()
    assert caplog.text.count("timer 'new' is new") == 1


@pytest.mark.parametrize("recipe", RECIPES)
async def test_the_table_of_another_group_is_refused(recipe: str) -> None:
    async with connect(InmemSettings(broker=Broker(RECIPES[recipe]))) as bus:
        await prepare(bus)
        async with viewing(bus) as view, processing(bus) as owner:
            await publish(bus, ones(20))
            await until(lambda: len(view) == 10)
            await owner.ready()
            other = Group("other", Input("clicks", Json(int), count), counts, alerts, table="counts-table")
            message = "Table 'counts-table' of group 'other' belongs to group 'counts': .* table of its own"
            with pytest.raises(ConfigurationError, match=message):
                async with processing(bus, other) as thief:
                    await thief.ready()
            # The table goes on, although its partitions may have been fenced for a moment.
            await publish(bus, ones(20))
            await until(lambda: all(value == 4 for _, value in view.items()))


async def test_a_partitioner_of_its_own(bus: Bus) -> None:
    group = Group("counts", Input("clicks", Json(int), count), counts, alerts, partitioner="fnv1a")
    for n in range(40):
        await bus.topic("clicks", partitioner="fnv1a").publish(b"1", key=f"key-{n}")
    async with processing(bus, group) as processor, viewing(bus) as view:
        await until(lambda: total(view) == 40)
        await until(lambda: sum(each.checkpoints for each in processor.runners) >= PARTITIONS)
        assert await processor.get("key-7") == 1
    for partition in range(PARTITIONS):
        async for batch in bus.log.read("alerts", partition):
            for record in batch:
                assert await bus.partition_of("alerts", record.key or b"", partitioner="fnv1a") == partition


async def test_a_partition_that_comes_back_is_not_read_again(server: Broker, bus: Bus) -> None:
    await publish(bus, ones(100, keys=40))
    async with viewing(bus) as view, connect(InmemSettings(broker=server)) as other, processing(bus) as first:
        await until(lambda: total(view) == 100)
        async with processing(other) as second:
            await second.ready()
        await until(lambda: len(first.partitions) == PARTITIONS)
        await first.ready()
        assert sum(each.table.rows for each in first.stats().partitions.values()) < 40


def test_broker_run(server: Broker) -> None:
    async def fill() -> None:
        async with connect(InmemSettings(broker=server)) as bus:
            await prepare(bus)
            await publish(bus, ones(20))

    asyncio.run(fill())
    handled: list[int] = []

    def stop_at_the_last(ctx: Context, value: int) -> None:
        handled.append(value)
        count(ctx, value)
        if len(handled) == 20:
            processor.stop()

    processor = processing(connect(InmemSettings(broker=server)), counting(stop_at_the_last))
    broker.run(processor)

    async def check() -> None:
        async with connect(InmemSettings(broker=server)) as bus, viewing(bus) as view:
            assert total(view) == 20

    asyncio.run(check())


async def test_a_failed_assertion_in_a_callback_is_raised(bus: Bus) -> None:
    def wrong(ctx: Context, value: int) -> None:
        assert value == 2, "it is not"

    bus.hooks.raises = lambda error: isinstance(error, AssertionError)
    await publish(bus, [("a", 1)])
    with pytest.raises(AssertionError, match="it is not"):
        await processing(bus, counting(wrong)).run()
