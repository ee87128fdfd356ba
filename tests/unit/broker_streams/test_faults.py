"""Faults of the table in docs/streams-operations.md that no other module's tests have: each has one outcome."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest

from broker import (
    BrokerError,
    Bus,
    ConfigurationError,
    DecodeError,
    InvalidMessage,
    Json,
    NotFound,
    OffsetOutOfRange,
    OutboundMessage,
    StorageFailed,
    Text,
    TopicRecreated,
    connect,
)
from broker_inmem import Broker, BrokerOptions, InmemSettings
from broker_streams import (
    SKIP,
    Context,
    Group,
    Input,
    Join,
    Lmdb,
    Output,
    Persist,
    ProcessorState,
    Store,
    StoreCorrupt,
    StoreLocked,
    StreamFailed,
    Tester,
    Tumbling,
    View,
    checkpointer,
)
from broker_streams.operations import Reset, find_group
from broker_streams.stores.store import disk_failed
from tests.unit.broker_streams.test_processor import (
    PARTITIONS,
    RECIPES,
    SECONDS,
    alerts,
    counting,
    counts,
    ones,
    outputs,
    prepare,
    processing,
    publish,
    total,
    until,
    viewing,
)


@pytest.fixture
async def bus() -> Any:
    async with connect(InmemSettings(broker=Broker())) as bus:
        await prepare(bus)
        yield bus


async def reset(bus: Bus, state_dir: Path, *, rows: bool) -> None:
    stored = await find_group(bus, "counts")
    async with Reset(bus, stored, to="earliest", rows=rows, state_dir=state_dir) as work:
        await work.run()


def reading(ctx: Context, value: int) -> None:
    ctx[counts] = (ctx[counts] or 0) + value


# -- callbacks ---------------------------------------------------------------------------------------------


def test_a_callback_may_not_emit_to_what_is_not_declared() -> None:
    other = Output("other", Json(int))

    def callback(ctx: Context, value: int) -> None:
        ctx[counts] = value
        ctx.emit(other, key=ctx.key, value=value)

    with Tester(Group("counts", Input("clicks", Json(int), callback), counts)) as test:
        with pytest.raises(StreamFailed, match="Output\\('other'\\) is not an edge of group 'counts'"):
            test.publish("clicks", key="a", value=1)
        assert test["counts-table"] == {}


def test_a_row_of_another_type_fails_the_message() -> None:
    def callback(ctx: Context, value: int) -> None:
        ctx[counts] = "text"  # pyright: ignore[reportArgumentType]

    group = Group("counts", Input("clicks", Json(int), callback, on_error=SKIP), counts)
    with Tester(group) as test:
        test.publish("clicks", key="a", value=1)
        assert test["counts-table"] == {}
    with Tester(counting(callback)) as test, pytest.raises(StreamFailed) as failed:
        test.publish("clicks", key="a", value=1)
    assert isinstance(failed.value.native, InvalidMessage)


# -- rows that cannot be read ------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["counts-table", "names"])
def test_an_undecodable_row_fails_the_message_that_reads_it(table: str) -> None:
    names = Join("names", Json(int))
    unread: list[str] = []

    def callback(ctx: Context, value: int) -> None:
        try:
            before = (ctx[counts] or 0) + (ctx[names] or 0)
        except DecodeError:
            unread.append(ctx.key)
            raise
        ctx[counts] = before + value

    written = Persist(Text())
    writer = Group("other", Input("texts", Text(), lambda ctx, text: None), written)
    group = Group("counts", Input("clicks", Json(int), callback, on_error=SKIP), counts, names)
    with Tester(group, writer) as test:
        test.publish("clicks", key="b", value=1)
        test.publish("names", key="a", data=b"no number") if table == "names" else _break_row(test, table, "a")
        test.publish("clicks", key="a", value=1)
        test.publish("clicks", key="b", value=1)
        assert test.view("counts-table", Json(int)).get("b") == 2
    assert unread == ["a"]


def _break_row(test: Tester, table: str, key: str) -> None:
    raw: Any = test
    raw._topics.tables[table] = Text()
    test.set_row(table, key, "no number")


async def test_a_view_raises_for_an_undecodable_row_only(bus: Bus) -> None:
    await bus.admin.ensure_topic("names", partitions=1, compacted=True)
    await bus.topic("names").publish(b"1", key="a")
    await bus.topic("names").publish(b"no number", key="b")
    async with View(bus, "names", Json(int)) as view:
        await view.ready()
        assert view.get("a") == 1
        assert "b" in view
        with pytest.raises(DecodeError, match="Json"):
            view.get("b")
        rows = view.items()
        assert next(rows) == ("a", 1)
        with pytest.raises(DecodeError):
            next(rows)


# -- stores ------------------------------------------------------------------------------------------------


async def test_a_named_member_that_runs_already_is_refused(bus: Bus, tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": Lmdb(), "state_dir": tmp_path, "name": "one"}
    async with processing(bus, **options) as processor:
        await processor.ready()
        with pytest.raises(StoreLocked, match=f"locked by process {os.getpid()} on {socket.gethostname()}"):
            await processing(bus, **options).run()


class Failing:
    """A store that fails when it is told to."""

    def __init__(self, store: Store, path: Path, factory: FailingFactory) -> None:
        self._store = store
        self._path = path
        self._factory = factory

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("write", "get_many"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if (error := self._factory.broken.get(name)) is not None:
                if isinstance(error, StoreCorrupt):
                    error.path = self._path
                raise error
            return found(*args, **kwargs)

        return call


class FailingFactory:
    """Opens such stores."""

    format: ClassVar[str] = "lmdb"

    def __init__(self) -> None:
        self.broken: dict[str, BrokerError] = {}

    def open(self, directory: Path | None, name: str) -> Store:
        assert directory is not None
        found: Any = Failing(Lmdb().open(directory, name), directory / f"{name}.lmdb", self)
        return found


def set_aside(state_dir: Path) -> list[Path]:
    """The stores that were set aside."""
    return list(state_dir.rglob("*.corrupt-1"))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("write", StorageFailed("The store failed: no space left")),
        ("get_many", StorageFailed("The store failed: input/output error")),
        ("get_many", StoreCorrupt("A page cannot be read", path=Path("set when it is raised"))),
    ],
)
async def test_a_store_that_fails_ends_the_processor_and_loses_nothing(
    bus: Bus, tmp_path: Path, call: str, error: BrokerError
) -> None:
    factory = FailingFactory()
    async with viewing(bus) as view:
        with pytest.raises(type(error)):
            async with processing(bus, store=factory, state_dir=tmp_path) as processor:
                await processor.ready()
                await publish(bus, ones(50))
                await until(lambda: total(view) == 50)
                factory.broken[call] = error
                await publish(bus, [(f"other-{n}", 1) for n in range(50)])
                await until(lambda: processor.state is ProcessorState.STOPPED)
        factory.broken.clear()
        assert len(set_aside(tmp_path)) == isinstance(error, StoreCorrupt)
        async with processing(bus, store=factory, state_dir=tmp_path) as processor:
            await processor.ready()
            await publish(bus, ones(10))
            await until(lambda: total(view) == 110)
    assert len({identity for identity, _ in await outputs(bus)}) == 110


async def test_a_store_that_cannot_be_opened_ends_the_processor_and_the_next_one_goes_on(
    bus: Bus, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"store": Lmdb(), "state_dir": tmp_path}
    await publish(bus, ones(50))
    blocked = tmp_path / "counts" / "0" / "counts-table-1.lmdb"
    blocked.parent.mkdir(parents=True, mode=0o700)
    blocked.write_bytes(b"")
    with pytest.raises(StorageFailed, match=re.escape(str(blocked))) as raised:
        async with asyncio.timeout(SECONDS):
            await processing(bus, **options).run()
    assert "permissions" in raised.value.advice
    blocked.unlink()
    async with processing(bus, **options), viewing(bus) as view:
        await until(lambda: total(view) == 50)


async def test_a_view_whose_store_fails_before_it_is_ready_says_so(bus: Bus, tmp_path: Path) -> None:
    await bus.admin.ensure_topic("counts-table", partitions=1, compacted=True)
    factory = FailingFactory()
    factory.broken["write"] = disk_failed(tmp_path / "counts-table.lmdb", OSError(28, "No space left on device"))
    async with View(bus, "counts-table", Json(int), store=factory, state_dir=tmp_path) as view:
        with pytest.raises(StorageFailed, match="No space left"):
            async with asyncio.timeout(SECONDS):
                await view.ready()
        factory.broken.clear()


async def test_a_store_of_another_cluster_is_emptied(
    bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"store": Lmdb(), "state_dir": tmp_path}
    await publish(bus, ones(100))
    async with processing(bus, **options), viewing(bus) as view:
        await until(lambda: total(view) == 100)
    async with connect(InmemSettings(broker=Broker())) as other:
        await prepare(other)
        await publish(other, [("key-1", 1)])
        async with processing(other, **options) as processor, viewing(other) as view:
            await until(lambda: view.get("key-1") == 1)
            await processor.ready()
            assert await processor.get("key-2") is None
    assert "is emptied and read again" in caplog.text


async def test_a_recreated_table_begins_empty_from_the_positions_of_the_group(
    bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"store": Lmdb(), "state_dir": tmp_path}
    await publish(bus, ones(10, keys=1))
    async with processing(bus, **options), viewing(bus) as view:
        await until(lambda: total(view) == 10)
    await bus.admin.delete_topic("counts-table")
    await publish(bus, ones(1, keys=1))
    processor = processing(bus, **options)
    async with processor:
        raw: Any = vars(processor)["_checkpoints"]
        raw.commits.patience = 0.01
        async with viewing(bus) as view:
            await until(lambda: total(view) == 1)
    assert "without a checkpoint" in caplog.text


async def recreate_table(bus: Bus, partitions: int = PARTITIONS) -> None:
    await bus.admin.delete_topic("counts-table")
    await bus.admin.ensure_topic("counts-table", partitions=partitions, compacted=True)


@pytest.mark.parametrize("recipe", RECIPES)
async def test_a_table_that_is_recreated_under_a_processor_ends_it(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(InmemSettings(broker=Broker(RECIPES[recipe]))) as bus:
        await prepare(bus, 1)
        processor = processing(bus, guarantee=None if recipe != "plain" else "at_least_once")
        with pytest.raises(TopicRecreated, match=r"Table 'counts-table' was .* while group 'counts' ran") as raised:
            async with processor:
                async with viewing(bus) as view:
                    await publish(bus, ones(10))
                    await until(lambda: total(view) == 10)
                await recreate_table(bus, 1)
                # A checkpoint that is written before it is looked again: the next owner finds it.
                async with viewing(bus) as view:
                    await publish(bus, ones(1))
                    await until(lambda: total(view) == 2)
                monkeypatch.setattr(checkpointer, "_LOOK_SECONDS", 0.0)
                await publish(bus, ones(1))
                await until(lambda: processor.state is ProcessorState.STOPPED)
        assert "broker streams reset counts --table" in raised.value.advice
        with pytest.raises(TopicRecreated, match="'counts-table'"):
            await processing(bus).run()
        await reset(bus, tmp_path, rows=True)
        async with processing(bus), viewing(bus) as view:
            await until(lambda: total(view) == 12)


async def test_a_partition_whose_table_was_recreated_is_not_recovered_from_it(bus: Bus) -> None:
    processor = processing(bus)
    with pytest.raises(TopicRecreated, match="'counts-table'"):
        async with processor:
            await processor.ready()
            await recreate_table(bus)
            # A second member takes partitions over, and gives them back when it ends.
            async with processing(bus) as other:
                await other.ready()
            await until(lambda: processor.state is ProcessorState.STOPPED)


async def test_a_joined_table_that_is_recreated_under_a_processor_is_read_again(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    await bus.admin.ensure_topic("names", partitions=PARTITIONS, compacted=True)
    await bus.topic("names").publish_batch([OutboundMessage(b"%d" % n, f"key-{n}") for n in (1, 2)])
    names = Join("names", Json(int))

    def callback(ctx: Context, value: int) -> None:
        ctx[counts] = ctx[names] or 0

    async with processing(bus, counting(callback, names)) as processor, viewing(bus) as view:
        await processor.ready()
        await bus.admin.delete_topic("names")
        await bus.admin.ensure_topic("names", partitions=PARTITIONS, compacted=True)
        await bus.topic("names").publish(b"3", key="key-1")
        async with asyncio.timeout(SECONDS):
            while (view.get("key-1"), view.get("key-2")) != (3, 0):
                await publish(bus, [("key-1", 1), ("key-2", 1)])
                await asyncio.sleep(0.01)
    assert "The copy of table names is emptied and read again" in caplog.text


async def test_rows_of_a_newer_version_are_refused(bus: Bus) -> None:
    newer = Persist(Json(int), version=2, upgrade=lambda version, data: data)
    await publish(bus, [("a", 1)])

    def callback(ctx: Context, value: int) -> None:
        ctx[newer] = value

    async with processing(bus, Group("counts", Input("clicks", Json(int), callback), newer)), viewing(bus) as view:
        await until(lambda: view.get("a") == 1)
    with pytest.raises(ConfigurationError, match="rows of version 2, and Persist has version 1"):
        await processing(bus).run()


async def test_an_input_that_grows_ends_the_processor(bus: Bus) -> None:
    with pytest.raises(NotFound, match="has no partition 4"):
        async with processing(bus) as processor:
            await processor.ready()
            await bus.admin.ensure_topic("clicks", partitions=PARTITIONS + 1)
            await until(lambda: processor.state is ProcessorState.STOPPED)
    with pytest.raises(ConfigurationError, match="'counts-table' has 4 partitions, and the inputs have 5"):
        await processing(bus).run()


# -- logs --------------------------------------------------------------------------------------------------


async def test_a_position_that_retention_has_overtaken(tmp_path: Path) -> None:
    async with connect(InmemSettings(broker=Broker())) as bus:
        await prepare(bus, 1)
        await bus.admin.ensure_topic("clicks", retention_messages=10)
        await publish(bus, ones(5))
        async with processing(bus), viewing(bus) as view:
            await until(lambda: total(view) == 5)
        await publish(bus, ones(100))
        with pytest.raises(OffsetOutOfRange):
            await processing(bus).run()
        await reset(bus, tmp_path, rows=False)
        async with processing(bus), viewing(bus) as view:
            await until(lambda: total(view) == 15)


async def test_retention_that_overtakes_a_paused_processor_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with connect(InmemSettings(broker=Broker())) as bus:
        await prepare(bus, 1)
        await bus.admin.ensure_topic("clicks", retention_messages=10)
        async with processing(bus) as processor, viewing(bus) as view:
            await processor.ready()
            await publish(bus, ones(5))
            await until(lambda: total(view) == 5)
            processor.pause()
            await publish(bus, ones(100))
            processor.resume()
            await until(lambda: total(view) == 15)
    assert "Group 'counts': retention removed 90 offsets of 'clicks'[0] that were not read; reading" in caplog.text


async def test_an_input_that_was_recreated_is_named(tmp_path: Path) -> None:
    async with connect(InmemSettings(broker=Broker())) as bus:
        await prepare(bus, 1)
        await publish(bus, ones(5))
        async with processing(bus), viewing(bus) as view:
            await until(lambda: total(view) == 5)
        await bus.admin.delete_topic("clicks")
        await bus.admin.ensure_topic("clicks", partitions=1)
        await publish(bus, ones(10))
        with pytest.raises(TopicRecreated, match=r"'clicks' was deleted .* in it, 5, means other") as raised:
            await processing(bus).run()
        assert "broker streams reset counts" in raised.value.advice
        await reset(bus, tmp_path, rows=False)
        for _ in range(2):
            async with processing(bus), viewing(bus) as view:
                await until(lambda: total(view) == 15)


def test_time_that_goes_backwards_does_not_turn_event_time_back() -> None:
    seen: list[datetime] = []

    def callback(ctx: Context, value: int) -> None:
        seen.append(ctx.now)
        count = (ctx[counts] or 0) + 1
        ctx[counts] = count

    group = Group("counts", Input("clicks", Json(int), callback), counts)
    with Tester(group) as test:
        for hour in (10, 2, 11):
            test.publish("clicks", key="a", value=1, timestamp=datetime(2026, 1, 1, hour, tzinfo=UTC))
        assert [now.hour for now in seen] == [10, 10, 11]
        assert test["counts-table"] == {"a": 3}


def test_a_time_far_ahead_closes_windows() -> None:
    def callback(ctx: Context, value: int) -> None:
        for window in ctx.windows(hours):
            window.value = (window.value or 0) + value

    closed: list[int | None] = []
    hours = Tumbling("hours", Json(int), size=3600, on_close=lambda ctx, window: closed.append(window.value))
    with Tester(Group("hours", Input("clicks", Json(int), callback), hours)) as test:
        test.publish("clicks", key="a", value=1, timestamp=datetime(2026, 1, 1, 10, tzinfo=UTC))
        test.publish("clicks", key="b", value=1, timestamp=datetime(2099, 1, 1, tzinfo=UTC))
        assert closed == [1]


async def test_a_key_of_a_hundred_kilobytes(tmp_path: Path) -> None:
    key = "k" * 100_000
    options: dict[str, Any] = {"store": Lmdb(), "state_dir": tmp_path}
    async with connect(InmemSettings(broker=Broker(BrokerOptions(max_key=1 << 20)))) as bus:
        await prepare(bus)
        await publish(bus, [(key, 1), (key, 2)])
        async with processing(bus, **options) as processor, viewing(bus) as view:
            await until(lambda: view.get(key) == 3)
            await until(lambda: sum(each.checkpoints for each in processor.runners) > 0)
            assert await processor.get(key) == 3
        async with processing(bus, **options) as processor:
            await processor.ready()
            assert await processor.get(key) == 3


async def test_a_key_that_is_too_long_for_the_broker_ends_the_processor(bus: Bus) -> None:
    def callback(ctx: Context, value: int) -> None:
        ctx[counts] = (ctx[counts] or 0) + value
        if value == 2:
            ctx.emit(alerts, key="k" * 100_000, value=1)

    await publish(bus, [("a", 1), ("a", 2)])
    async with viewing(bus) as view:
        with pytest.raises(BrokerError, match="Key has 100000 bytes"):
            await processing(bus, counting(callback)).run()
        assert view.get("a") is None
