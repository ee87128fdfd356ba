"""W1 to W5 of goka's list: views."""

from __future__ import annotations

import pytest

from broker import Closed, Json
from broker_streams.recovery import CopyState
from broker_streams.view import View
from tests.streams.brokers import CUT, StreamBroker, on
from tests.streams.support import Stream, until


@pytest.fixture
async def stream(stream: Stream) -> Stream:
    await stream.publish([("a", 1), ("b", 2), ("gone", 3)], stream.table)
    await stream.publish([("a", 10), ("gone", None)], stream.table)
    return stream


async def test_w1_rows_are_there_when_it_is_ready_and_not_before(stream: Stream) -> None:
    view = View(stream.bus, stream.table, Json(int))
    with pytest.raises(Closed, match="is not open"):
        view.get("a")
    assert (view.state, view.staleness) == (CopyState.IDLE, None)
    async with view:
        await view.ready()
        assert [view.get(key) for key in ("a", "b", "gone", "none")] == [10, 2, None, None]
        assert ("a" in view, "gone" in view, len(view)) == (True, False, 2)
    with pytest.raises(Closed):
        view.get("a")


@on(*CUT)
async def test_w2_it_serves_what_it_has_while_the_broker_is_away(server: StreamBroker, stream: Stream) -> None:
    lone = await server.connect_alone()
    async with stream.viewing(lone) as view:
        await until(lambda: view.state is CopyState.RUNNING)
        server.cut(lone)
        await until(lambda: view.state is CopyState.CONNECTING)
        assert view.get("a") == 10
        receipt = await stream.bus.topic(stream.table).publish(b"11", key="a")
        server.heal(lone)
        assert await view.get("a", at_least=receipt) == 11
        await until(lambda: view.state is CopyState.RUNNING)


async def test_w3_evict_is_local_until_the_row_is_written_again(stream: Stream) -> None:
    async with stream.viewing() as view, stream.viewing() as other:
        view.evict("a")
        assert (view.get("a"), other.get("a")) == (None, 10)
        receipt = await stream.bus.topic(stream.table).publish(b"12", key="a")
        assert await view.get("a", at_least=receipt) == 12


async def test_w4_items_are_ordered_over_all_partitions(stream: Stream) -> None:
    await stream.publish([(f"key-{n:02}", n) for n in range(30)], stream.table)
    async with stream.viewing() as view:
        assert list(view.items(prefix="key-")) == [(f"key-{n:02}", n) for n in range(30)]
        assert [value for _, value in view.items(start="key-07", stop="key-10")] == [7, 8, 9]
        assert [value for _, value in view.items(prefix="key-2", reverse=True)] == list(range(29, 19, -1))
        assert list(view.items(start="x")) == []
        rows = view.items(start="key-00")
        assert [next(rows), next(rows)] == [("key-00", 0), ("key-01", 1)]
        receipt = await stream.bus.topic(stream.table).publish(b"99", key="key-99")
        await view.get("key-99", at_least=receipt)
        assert [value for _, value in rows if value < 30] == list(range(2, 30))
        with pytest.raises(StopIteration):
            next(rows)
