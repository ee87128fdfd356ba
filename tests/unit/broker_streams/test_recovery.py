"""Copies of a table in a store: what is read, and when a store is emptied."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from broker import CHECKPOINT_KEY, Bus, ConnectionFailed, OutboundMessage, StorageFailed, connect
from broker_inmem import Broker, InmemSettings
from broker_streams import keys, recovery
from broker_streams.agenda import EVENT, Agenda
from broker_streams.recovery import CHECKPOINT, CopyState, RecoveryStats, TableCopy, position_name, stored_checkpoint
from broker_streams.stores.memory import Memory
from broker_streams.stores.store import Store

TABLE = "counts-table"


@pytest.fixture
def server() -> Broker:
    return Broker()


@pytest.fixture
async def bus(server: Broker) -> AsyncIterator[Bus]:
    async with connect(InmemSettings(broker=server)) as bus:
        await bus.admin.ensure_topic(TABLE, partitions=1, compacted=True)
        yield bus


@pytest.fixture
def store() -> Iterator[Store]:
    store = Memory().open(None, "test")
    yield store
    store.close()


async def write(bus: Bus, *rows: tuple[bytes, bytes | None]) -> None:
    await bus.topic(TABLE).publish_batch([OutboundMessage(data, key) for key, data in rows])


def rows_of(store: Store) -> dict[bytes, bytes]:
    return dict(store.items(keys.ROWS))


def copied(bus: Bus, store: Store) -> TableCopy:
    return TableCopy(bus, TABLE, store, [0], own=True)


async def test_a_log_whose_end_lags_a_moment_behind_the_store_is_waited_for(bus: Bus, store: Store) -> None:
    await write(bus, (b"a", b"1"))
    await copied(bus, store).recover()
    store.write({}, {position_name(0): b"2"})
    recovering = asyncio.create_task(copied(bus, store).recover())
    await asyncio.sleep(0.01)
    await write(bus, (b"skipped", b"1"))
    async with asyncio.timeout(60):
        await recovering
    assert rows_of(store) == {b"a": b"1"}


async def test_a_copy_that_was_cut_off_is_not_of_now(bus: Bus, store: Store, server: Broker) -> None:
    copy = copied(bus, store)
    running = asyncio.create_task(copy.run())
    await copy.ready()
    server.faults.stop()
    async with asyncio.timeout(60):
        while copy.state is not CopyState.CONNECTING:
            await asyncio.sleep(0.01)
    vars(copy)["_known_at"] -= 3600
    running.cancel()
    await asyncio.wait([running])
    copy.sync()
    assert int(store.meta("time") or b"0") < time.time() - 3500
    server.faults.start()


async def test_a_copy_that_was_cut_off_for_too_long_is_read_again(
    bus: Bus, store: Store, server: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await write(bus, (b"a", b"1"))
    copy = copied(bus, store)
    running = asyncio.create_task(copy.run())
    await copy.ready()
    store.write({keys.ROWS: {b"stale": b"1"}})
    server.faults.stop()
    async with asyncio.timeout(60):
        while copy.state is not CopyState.CONNECTING:
            await asyncio.sleep(0.01)
        vars(copy)["_known_at"] -= 48 * 3600
        while "48 hours old" not in caplog.text:
            await asyncio.sleep(0.01)
        server.faults.start()
        while rows_of(store) != {b"a": b"1"}:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])


async def test_a_store_of_a_recreated_topic_is_emptied(
    bus: Bus, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await write(bus, (b"a", b"1"))
    await copied(bus, store).recover()
    await bus.admin.delete_topic(TABLE)
    await bus.admin.ensure_topic(TABLE, partitions=1, compacted=True)
    await write(bus, (b"b", b"1"))
    await copied(bus, store).recover()
    assert rows_of(store) == {b"b": b"1"}
    assert "deleted and recreated" in caplog.text


async def test_a_store_of_another_table_is_emptied(bus: Bus, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.write({keys.ROWS: {b"other": b"1"}}, {"topic": b"others-table"})
    await copied(bus, store).recover()
    assert rows_of(store) == {}
    assert "the store is of table 'others-table'" in caplog.text


async def test_a_store_that_may_have_missed_tombstones_is_emptied(
    bus: Bus, store: Store, server: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await write(bus, (b"a", b"1"), (b"b", b"1"))
    await copied(bus, store).recover()
    store.write({}, {"time": b"%d" % (time.time() - 48 * 3600)})
    await copied(bus, store).recover()
    assert rows_of(store) == {b"a": b"1", b"b": b"1"}
    assert "48 hours old" in caplog.text


async def test_it_reads_a_compacted_topic_on_from_a_removed_position(bus: Bus, store: Store, server: Broker) -> None:
    await write(bus, (b"a", b"1"), (b"b", b"1"))
    await copied(bus, store).recover()
    await write(bus, (b"a", b"2"), (b"a", b"3"), (b"b", b"2"))
    server.compact(TABLE)
    await copied(bus, store).recover()
    assert rows_of(store) == {b"a": b"3", b"b": b"2"}


async def test_the_own_copy_has_checkpoint_and_index(bus: Bus, store: Store) -> None:
    row = keys.agenda_key(b"a")
    await write(
        bus, (b"a", b"1"), (row, Agenda(expiry=5000).pack()), (CHECKPOINT_KEY, b"one"), (CHECKPOINT_KEY, b"two")
    )
    await copied(bus, store).recover()
    assert store.meta(CHECKPOINT) == b"two"
    assert set(rows_of(store)) == {b"a", row}
    assert dict(store.items(keys.DUE)) == {keys.due_key(EVENT, 5000, b"a"): b""}
    await write(bus, (row, Agenda(expiry=6000).pack()))
    await copied(bus, store).recover()
    assert dict(store.items(keys.DUE)) == {keys.due_key(EVENT, 6000, b"a"): b""}
    await write(bus, (row, None))
    await copied(bus, store).recover()
    assert dict(store.items(keys.DUE)) == {}


async def test_a_tombstone_deletes_a_checkpoint(bus: Bus, store: Store) -> None:
    await write(bus, (CHECKPOINT_KEY, b"one"))
    await copied(bus, store).recover()
    assert stored_checkpoint(store) == b"one"
    await write(bus, (CHECKPOINT_KEY, b"two"), (CHECKPOINT_KEY, None))
    asked: list[bytes | None] = []

    async def enough(checkpoint: bytes | None) -> bool:
        asked.append(checkpoint)
        return True

    await copied(bus, store).recover(enough)
    assert [*asked, stored_checkpoint(store)] == [None, None]


async def test_a_copy_of_another_table_has_only_its_rows(bus: Bus, store: Store) -> None:
    await write(bus, (b"a", b"1"), (keys.agenda_key(b"a"), b"x"), (CHECKPOINT_KEY, b"one"))
    await TableCopy(bus, TABLE, store).recover()
    assert rows_of(store) == {b"a": b"1"}
    assert store.meta(CHECKPOINT) is None


async def test_it_waits_for_a_checkpoint_that_the_broker_shows_late(bus: Bus, store: Store) -> None:
    await write(bus, (CHECKPOINT_KEY, b"one"))
    asked = asyncio.Event()

    async def enough(checkpoint: bytes | None) -> bool:
        asked.set()
        return checkpoint == b"two"

    recovering = asyncio.create_task(copied(bus, store).recover(enough, patience=60))
    async with asyncio.timeout(60):
        await asked.wait()
        await write(bus, (b"a", b"1"), (CHECKPOINT_KEY, b"two"))
        assert await recovering
    assert rows_of(store) == {b"a": b"1"}


async def test_it_says_when_that_checkpoint_does_not_come(bus: Bus, store: Store) -> None:
    async def never(checkpoint: bytes | None) -> bool:
        return False

    assert not await copied(bus, store).recover(never, patience=0.01)


async def test_t5_a_store_that_cannot_be_synced_is_not_ready(bus: Bus, store: Store) -> None:
    class Full:
        """A store whose disk is full when the recovery is to become durable."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def write(self, changes: Mapping[str, Any], meta: Mapping[str, bytes] | None = None, **options: Any) -> None:
            if not changes and not meta:
                raise StorageFailed("The store failed: no space left")
            store.write(changes, meta or {}, **options)

    await write(bus, (b"a", b"1"))
    full: Any = Full()
    with pytest.raises(StorageFailed, match="no space left"):
        await TableCopy(bus, TABLE, full).recover()
    copy = TableCopy(bus, TABLE, full)
    running = asyncio.create_task(copy.run())
    async with asyncio.timeout(60):
        while copy.state is not CopyState.CONNECTING and not running.done():
            await asyncio.sleep(0.01)
    assert not copy.is_ready
    assert copy.seconds is None
    running.cancel()
    await asyncio.wait([running])
    assert await copied(bus, store).recover()
    assert rows_of(store) == {b"a": b"1"}


async def test_t8_a_copy_that_was_ready_tries_again(
    bus: Bus, store: Store, server: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copied(bus, store)
    running = asyncio.create_task(copy.run())
    await copy.ready()
    await bus.admin.delete_topic(TABLE)
    async with asyncio.timeout(60):
        while "it tries again" not in caplog.text:
            await asyncio.sleep(0.01)
    await bus.admin.ensure_topic(TABLE, partitions=1, compacted=True)
    await write(bus, (b"a", b"1"))
    async with asyncio.timeout(60):
        await copy.reached(0, 0)
    assert rows_of(store) == {b"a": b"1"}
    running.cancel()
    await asyncio.wait([running])


async def test_retriable_errors_at_the_start_are_tried_again(bus: Bus, store: Store, server: Broker) -> None:
    server.faults.fail("admin", ConnectionFailed("away"), times=1)
    copy = copied(bus, store)
    running = asyncio.create_task(copy.run())
    async with asyncio.timeout(60):
        await copy.ready()
    running.cancel()
    await asyncio.wait([running])


async def test_progress_is_logged(
    bus: Bus, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(recovery, "_TELL_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "_MAX_ROWS", 10)
    await write(bus, *((b"%d" % n, b"1") for n in range(100)))
    await copied(bus, store).recover()
    lines = [line for line in caplog.text.splitlines() if "Recovering partition 0 of table counts-table" in line]
    assert len(lines) > 5
    assert all("rows/s, about" in line for line in lines)
    assert rows_of(store).keys() == {b"%d" % n for n in range(100)}


async def test_a_recovery_tells_how_far_it_is(bus: Bus, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_MAX_ROWS", 10)
    await write(bus, *((b"%d" % n, b"1") for n in range(100)))
    seen: list[RecoveryStats | None] = []
    copy = TableCopy(bus, TABLE, store, [0], own=True, before_write=lambda rows: seen.append(copy.recovery()))
    assert copy.recovery() is None
    await copy.recover()
    told = [each for each in seen if each is not None]
    assert len(told) == len(seen) > 5
    lefts = [each.left for each in told]
    assert lefts == sorted(lefts, reverse=True)
    assert lefts[0] > lefts[-1] >= 0
    assert told[-1].rate > 0
    assert told[-1].seconds_left is not None
    assert told[-1].rows > 50
    assert copy.recovery() is None


async def test_the_end_of_a_recovery_is_logged(bus: Bus, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await write(bus, (b"a", b"1"), (b"b", b"1"))
    await copied(bus, store).recover()
    assert "Recovered partition 0 of table counts-table: 2 rows" in caplog.text
