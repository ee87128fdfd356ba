"""Views on the in-memory broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from broker import (
    CHECKPOINT_KEY,
    BrokerError,
    Bus,
    Closed,
    ConfigurationError,
    DecodeError,
    Json,
    OutboundMessage,
    Receipt,
    StorageFailed,
    TopicNotFound,
    connect,
)
from broker_inmem import Broker, InmemSettings
from broker_streams import keys
from broker_streams.recovery import CopyState
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.store import Store, StoreCorrupt
from broker_streams.view import Change, View

TABLE = "counts-table"


@pytest.fixture
def server() -> Broker:
    return Broker()


@pytest.fixture
async def bus(server: Broker) -> AsyncIterator[Bus]:
    async with connect(InmemSettings(broker=server)) as bus:
        await bus.admin.ensure_topic(TABLE, partitions=3, compacted=True)
        yield bus


async def write(bus: Bus, **rows: int | None) -> None:
    messages = [OutboundMessage(None if value is None else b"%d" % value, key) for key, value in rows.items()]
    await bus.topic(TABLE).publish_batch(messages)


async def wait_for(view: View[int], state: CopyState) -> None:
    async with asyncio.timeout(60):
        async for each in view.states():
            if each is state:
                return


async def test_a_missing_table_is_named(bus: Bus) -> None:
    with pytest.raises(TopicNotFound, match="nothing"):
        async with View(bus, "nothing", Json(int)):
            raise AssertionError


async def test_a_view_opens_once(bus: Bus) -> None:
    view = View(bus, TABLE, Json(int))
    async with view:
        pass
    with pytest.raises(Closed, match="opens once"):
        await view.__aenter__()
    with pytest.raises(Closed):
        view.get("a")
    await view.close()


async def test_it_follows_its_table(bus: Bus) -> None:
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        receipt = await bus.topic(TABLE).publish(b"5", key="a")
        assert await view.get("a", at_least=receipt) == 5
        receipt = await bus.topic(TABLE).publish(OutboundMessage(None, "a"))
        assert await view.get("a", at_least=receipt) is None


async def test_what_waits_for_a_receipt_ends_with_the_view(bus: Bus) -> None:
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        waiting = asyncio.ensure_future(view.get("a", at_least=Receipt("beyond", partition=0, offset=1000)))
        await asyncio.sleep(0)
        assert not waiting.done()
    with pytest.raises(Closed, match="is closed"):
        await asyncio.wait_for(waiting, 60)


async def test_reserved_rows_are_not_rows(bus: Bus) -> None:
    await write(bus, a=1)
    own = [OutboundMessage(b"x", key, partition=0) for key in (CHECKPOINT_KEY, keys.agenda_key(b"a"))]
    last = (await bus.topic(TABLE).publish_batch(own))[-1]
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        await view.get("a", at_least=last)
        assert list(view.items()) == [("a", 1)]


async def test_a_view_of_some_partitions_has_only_their_rows(bus: Bus) -> None:
    await write(bus, **{f"key-{n}": n for n in range(30)})
    async with View(bus, TABLE, Json(int), partitions=[1]) as view:
        await view.ready()
        found = dict(view.items())
        assert 0 < len(found) < 30
        for n in range(30):
            assert (f"key-{n}" in found) == (await bus.partition_of(TABLE, f"key-{n}") == 1)
        assert view.position(0) is None
        assert view.position(1) == len(found)


def test_w5_a_view_without_partitions_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="partitions is empty"):
        View(None, TABLE, Json(int), partitions=[])  # pyright: ignore[reportArgumentType]


async def test_a_partition_that_the_table_does_not_have_is_named(bus: Bus) -> None:
    async with View(bus, TABLE, Json(int), partitions=[7]) as view:
        with pytest.raises(Exception, match="has no partition 7"):
            await view.ready()


async def test_a_change_is_told_when_the_view_has_the_row(bus: Bus) -> None:
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        store: Any = vars(view)["_store"]
        write_now = store.write

        def write_slowly(*args: Any, **options: Any) -> None:
            time.sleep(0.05)
            write_now(*args, **options)

        store.write = write_slowly
        changes = view.changes()
        for value in range(5):
            await write(bus, a=value)
            async with asyncio.timeout(60):
                change = await anext(changes)
            assert view.get("a") == change.new == value


async def test_changes_have_old_and_new_values(bus: Bus) -> None:
    await write(bus, a=1)
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        changes = view.changes()
        for value in (2, None):
            await write(bus, a=value)
            async with asyncio.timeout(60):
                change = await anext(changes)
            assert change == Change("a", 1 if value else 2, value)
    with pytest.raises(StopAsyncIteration):
        await anext(changes)


async def test_changes_of_a_key_that_nobody_read_yet_become_one(bus: Bus) -> None:
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        changes = view.changes()
        await write(bus, a=1, b=1)
        await write(bus, a=2)
        receipt = await bus.topic(TABLE).publish(b"3", key="a")
        await view.get("a", at_least=receipt)
        receipt = await bus.topic(TABLE).publish(b"1", key="b")
        await view.get("b", at_least=receipt)
        assert {await anext(changes), await anext(changes)} == {Change("a", None, 3), Change("b", None, 1)}


async def test_changes_go_on_after_a_row_that_cannot_be_decoded(bus: Bus) -> None:
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        changes = view.changes()
        await bus.topic(TABLE).publish_batch(
            [OutboundMessage(b"1", "a"), OutboundMessage(b"text", "b"), OutboundMessage(b"3", "c")]
        )
        found: list[Change[int]] = []
        failures: list[str] = []
        async with asyncio.timeout(60):
            while len(found) < 2:
                try:
                    async for change in changes:
                        found.append(change)
                        if len(found) == 2:
                            break
                except DecodeError as error:
                    failures.append(error.message)
        assert {change.key: change.new for change in found} == {"a": 1, "c": 3}
        (message,) = failures
        assert message.startswith("The change of row 'b' cannot be decoded: ")


async def test_partitions_that_are_added_are_followed(bus: Bus) -> None:
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        await bus.admin.ensure_topic(TABLE, partitions=4, compacted=True)
        receipt = await bus.topic(TABLE).publish(OutboundMessage(b"7", "new", partition=3))
        async with asyncio.timeout(60):
            assert await view.get("new", at_least=receipt) == 7


async def test_a_recreated_table_is_read_again(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    await write(bus, a=1, b=2)
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        changes = view.changes()
        await bus.admin.delete_topic(TABLE)
        await bus.admin.ensure_topic(TABLE, partitions=3, compacted=True)
        await write(bus, a=3)
        seen: set[Change[int]] = set()
        async with asyncio.timeout(60):
            while view.get("a") != 3 or "b" in view:
                seen.add(await anext(changes))
        assert "emptied and read again" in caplog.text


def on_disk(bus: Bus, directory: Path, **options: Any) -> View[int]:
    return View(bus, TABLE, Json(int), store=Lmdb(), state_dir=directory, **options)


async def test_a_view_on_disk_goes_on_where_it_was(bus: Bus, tmp_path: Path) -> None:
    await write(bus, a=1, b=2)
    async with on_disk(bus, tmp_path) as view, on_disk(bus, tmp_path) as other:
        # Each has a directory of its own.
        for each in (view, other):
            await each.ready()
            assert dict(each.items()) == {"a": 1, "b": 2}
    await write(bus, c=3)
    async with on_disk(bus, tmp_path) as view:
        await view.ready()
        assert (view.stats().read, dict(view.items())) == (1, {"a": 1, "b": 2, "c": 3})


async def test_a_view_of_some_partitions_has_no_rows_of_others(bus: Bus, tmp_path: Path) -> None:
    rows = [OutboundMessage(b"%d" % number, f"key-{number}", partition=number) for number in range(3)]
    await bus.topic(TABLE).publish_batch(rows)
    for numbers, keys_of in (([0, 1, 2], [0, 1, 2]), ([2, 0], [0, 2]), ([0, 2], [0, 2])):
        async with on_disk(bus, tmp_path, partitions=numbers) as view:
            await view.ready()
            assert [value for _, value in view.items()] == keys_of


async def test_a_store_that_a_view_cannot_read_is_set_aside(
    bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await write(bus, a=1)
    async with on_disk(bus, tmp_path) as view:
        await view.ready()
    (tmp_path / f"view~{TABLE}/0/{TABLE}.lmdb/data.mdb").write_bytes(b"rubbish" * 5000)
    async with on_disk(bus, tmp_path) as view:
        await view.ready()
        assert view.get("a") == 1
    assert f"{TABLE}.lmdb.corrupt-1" in caplog.text


async def test_a_store_that_turns_out_to_be_corrupt_is_set_aside_at_the_end(bus: Bus, tmp_path: Path) -> None:
    await write(bus, a=1)
    async with on_disk(bus, tmp_path) as view:
        await view.ready()
        break_writes(view, StoreCorrupt("A page cannot be read", path=tmp_path / f"view~{TABLE}/0/{TABLE}.lmdb"))
    assert found_below(tmp_path, "*.corrupt-1") == [f"{TABLE}.lmdb.corrupt-1"]
    async with on_disk(bus, tmp_path) as view:
        await view.ready()
        assert view.stats().read == 1


def break_writes(view: View[int], error: BrokerError) -> Store:
    """Have all writes of a view to its store fail; return the store."""
    store: Any = view._opened().store

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    store.write = fail
    return store


def found_below(directory: Path, pattern: str) -> list[str]:
    return [path.name for path in directory.rglob(pattern)]


async def test_a_disk_that_fails_at_the_end_leaves_nothing_open(bus: Bus, tmp_path: Path) -> None:
    view = await on_disk(bus, tmp_path).__aenter__()
    await view.ready()
    changes, store = view.changes(), break_writes(view, StorageFailed("The store failed: no space left"))
    with pytest.raises(StorageFailed):
        await view.close()
    assert store.closed
    with pytest.raises(StopAsyncIteration):
        await anext(changes)
    async with on_disk(bus, tmp_path) as again:
        await again.ready()
    assert found_below(tmp_path, "lock") == ["lock"]


async def test_figures(bus: Bus) -> None:
    await write(bus, a=1, b=2, c=3)
    async with View(bus, TABLE, Json(int)) as view:
        await view.ready()
        stats = view.stats()
        assert (stats.rows, stats.read, sum(stats.positions.values())) == (3, 3, 3)
        assert stats.bytes > 0
        assert stats.recovery_seconds is not None
