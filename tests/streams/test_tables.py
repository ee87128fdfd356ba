"""T1 to T8 of goka's list: copies of a table, which partitions and views follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import pytest

from broker import Bus, NotFound, OutboundMessage
from broker_streams import keys, recovery
from broker_streams.recovery import CopyState, TableCopy, position_name
from broker_streams.stores.memory import Memory
from broker_streams.stores.store import Store
from tests.streams.brokers import CUT, StreamBroker, on
from tests.streams.support import SECONDS, Stream, until


@pytest.fixture
async def stream(server: StreamBroker, bus: Bus) -> Stream:
    """Only its table, of one partition."""
    stream = Stream(server, bus)
    await stream.topic("table", partitions=1, compacted=True)
    return stream


@pytest.fixture
def store() -> Iterator[Store]:
    store = Memory().open(None, "test")
    yield store
    store.close()


async def write(stream: Stream, *rows: tuple[bytes, bytes | None]) -> None:
    await stream.bus.topic(stream.table).publish_batch([OutboundMessage(data, key) for key, data in rows])


def rows_of(store: Store) -> dict[bytes, bytes]:
    return dict(store.items(keys.ROWS))


async def copied(stream: Stream, store: Store) -> TableCopy:
    """A copy that has been recovered."""
    copy = TableCopy(stream.bus, stream.table, store, [0], own=True)
    async with asyncio.timeout(SECONDS):
        await copy.recover()
    return copy


@asynccontextmanager
async def followed(stream: Stream, store: Store, bus: Bus | None = None) -> AsyncGenerator[TableCopy]:
    """A copy that follows."""
    copy = TableCopy(bus or stream.bus, stream.table, store)
    running = asyncio.create_task(copy.run())
    try:
        async with asyncio.timeout(SECONDS):
            await copy.ready()
        yield copy
    finally:
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()


async def test_t1_a_new_store_begins_at_the_oldest_row_and_goes_on_where_it_is(stream: Stream, store: Store) -> None:
    await write(stream, (b"a", b"1"))
    copy = await copied(stream, store)
    assert rows_of(store) == {b"a": b"1"}
    assert store.meta(position_name(0)) == b"%d" % copy.positions[0]
    store.write({keys.ROWS: {b"a": b"kept"}})
    await write(stream, (b"b", b"2"))
    assert (await copied(stream, store)).rows == 1
    assert rows_of(store) == {b"a": b"kept", b"b": b"2"}


async def test_t1_errors_at_the_start_are_raised(stream: Stream, store: Store) -> None:
    with pytest.raises(NotFound, match="has no partition 5"):
        await TableCopy(stream.bus, stream.table, store, [5]).recover()
    with pytest.raises(NotFound):
        await TableCopy(stream.bus, f"{stream.name}-nothing", store).run()


async def test_t2_a_store_that_is_up_to_date_reads_nothing(stream: Stream, store: Store) -> None:
    await write(stream, (b"a", b"1"))
    await copied(stream, store)
    assert (await copied(stream, store)).rows == 0


async def test_t2_a_store_that_is_newer_than_the_topic_is_emptied(
    stream: Stream, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery, "_LAG_SECONDS", 0.0)
    await write(stream, (b"a", b"1"))
    await copied(stream, store)
    beyond = (await stream.bus.log.bounds(stream.table))[0].next + 100_000
    store.write({keys.ROWS: {b"stale": b"x"}}, {position_name(0): b"%d" % beyond})
    await copied(stream, store)
    assert rows_of(store) == {b"a": b"1"}
    assert "newer than the topic" in caplog.text


async def test_t3_it_reads_to_the_end_and_stops(stream: Stream, store: Store) -> None:
    assert (await copied(stream, store)).rows == 0
    await write(stream, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None))
    copy = await copied(stream, store)
    assert rows_of(store) == {b"a": b"2"}
    assert copy.state is CopyState.IDLE


async def test_t3_a_copy_that_follows_reads_on(stream: Stream, store: Store) -> None:
    async with followed(stream, store) as copy:
        await write(stream, (b"a", b"1"))
        await until(lambda: rows_of(store) == {b"a": b"1"})
        assert copy.state is CopyState.RUNNING


@on(*CUT)
async def test_t6_a_copy_that_is_cut_off_says_since_when(server: StreamBroker, stream: Stream, store: Store) -> None:
    lone = await server.connect_alone()
    async with followed(stream, store, lone) as copy:
        await until(lambda: copy.staleness == 0.0)
        server.cut(lone)
        await until(lambda: copy.state is CopyState.CONNECTING)
        await until(lambda: (copy.staleness or 0.0) > 0.1)
        server.heal(lone)
        await until(lambda: copy.staleness == 0.0)


async def test_t7_a_cancelled_copy_leaves_a_store_that_goes_on(stream: Stream, store: Store) -> None:
    await write(stream, (b"a", b"1"))
    async with followed(stream, store) as copy:
        pass
    assert copy.state is CopyState.IDLE
    await write(stream, (b"b", b"2"))
    assert (await copied(stream, store)).rows == 1
    assert rows_of(store) == {b"a": b"1", b"b": b"2"}


@on(*CUT)
async def test_t8_a_copy_that_was_cut_off_tries_again(server: StreamBroker, stream: Stream, store: Store) -> None:
    await write(stream, (b"a", b"1"))
    lone = await server.connect_alone()
    async with followed(stream, store, lone) as copy:
        for data in (b"2", b"3"):
            server.cut(lone)
            await until(lambda: copy.state is CopyState.CONNECTING)
            await write(stream, (b"a", data))
            server.heal(lone)
            await until(lambda: rows_of(store) == {b"a": data})  # noqa: B023
            await until(lambda: copy.state is CopyState.RUNNING)
    assert store.meta(position_name(0)) == b"%d" % copy.positions[0]
