"""Views and processors without `await`, on the broker in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from typing import Any, get_type_hints

import pytest

import broker.blocking
import broker_streams
from broker import Closed, ConfigurationError, DecodeError, Json, OutboundMessage, TopicNotFound
from broker.blocking import Bus
from broker_inmem import Broker
from broker_streams import Change, Context, Group, Input, Memory, PartitionState, Persist, ProcessorState, Visitor
from broker_streams.blocking import Processor, ProcessorOptions, View
from broker_streams.failures import StreamFailed

TABLE = "counts-table"
sums = Persist(Json(int))


@pytest.fixture
def bus() -> Iterator[Bus]:
    server = Broker()
    with broker.blocking.connect(server.url) as bus:
        bus.admin.ensure_topic("clicks", partitions=2)
        bus.admin.ensure_topic(TABLE, partitions=2, compacted=True)
        yield bus


def write(bus: Bus, **rows: int | None) -> list[Any]:
    messages = [OutboundMessage(None if value is None else b"%d" % value, key) for key, value in rows.items()]
    return list(bus.topic(TABLE).publish_batch(messages))


def add(ctx: Context, value: int) -> None:
    if value < 0:
        raise ValueError("below zero")
    ctx[sums] = (ctx[sums] or 0) + value


def scale(ctx: Context, factor: int) -> None:
    ctx[sums] = (ctx[sums] or 0) * factor


GROUP = Group("counts", Input("clicks", Json(int), add), sums, Visitor("scale", scale))


def processing(bus: Bus) -> Processor:
    return Processor(bus, GROUP, store=Memory(), checkpoint_interval=0.01)


def test_a_view_has_the_rows_of_the_table(bus: Bus) -> None:
    write(bus, a=1, b=2, c=3)
    with View(bus, TABLE, Json(int)) as view:
        view.ready()
        assert (view.get("a"), view.get("none"), "b" in view, "none" in view, len(view)) == (1, None, True, False, 3)
        assert list(view.items(start="b")) == [("b", 2), ("c", 3)]
        assert list(view.items(stop="c", reverse=True)) == [("b", 2), ("a", 1)]
        (receipt,) = write(bus, a=10)
        assert view.get("a", at_least=receipt) == 10
        assert view.position(receipt.partition) == receipt.offset + 1
        assert view.stats().rows == 3
        view.evict("a")
        assert "a" not in view
        assert view.table == TABLE
    with pytest.raises(Closed):
        view.get("a")
    view.close()


def test_rows_are_read_in_the_thread_of_the_caller(bus: Bus) -> None:
    """A read does not wait for the loop of the bus."""
    write(bus, a=1)
    entered, leave = threading.Event(), threading.Event()

    async def occupy() -> None:
        entered.set()
        assert leave.wait(60)

    with View(bus, TABLE, Json(int)) as view, ThreadPoolExecutor() as threads:
        view.ready()
        occupied = threads.submit(bus.call, occupy)
        try:
            assert entered.wait(60)
            assert view.get("a") == 1
            assert list(view.items()) == [("a", 1)]
        finally:
            leave.set()
        occupied.result(60)


def test_changes_come_to_another_thread_and_end_with_the_view(bus: Bus) -> None:
    write(bus, a=1)
    with ThreadPoolExecutor() as threads:
        with View(bus, TABLE, Json(int)) as view:
            view.ready()
            changes = view.changes()
            followed = threads.submit(list, changes)
            (receipt,) = write(bus, a=2)
            view.get("a", at_least=receipt)
        assert followed.result(60) == [Change("a", 1, 2)]


def test_changes_go_on_after_a_row_that_cannot_be_decoded(bus: Bus) -> None:
    with View(bus, TABLE, Json(int)) as view:
        view.ready()
        changes = view.changes()
        for data, key in ((b"text", "a"), (b"2", "b")):
            receipt = bus.topic(TABLE).publish(data, key=key)
        view.get("b", at_least=receipt)
        found: list[Change[int]] = []
        with pytest.raises(DecodeError, match="The change of row 'a' cannot be decoded"):
            found.extend(changes)
        if not found:
            found.append(next(changes))
        assert found == [Change("b", None, 2)]


def test_what_cannot_be_read(bus: Bus) -> None:
    with pytest.raises(TopicNotFound), View(bus, "missing-table", Json(int)):
        pass
    with pytest.raises(ConfigurationError, match="partitions is empty"):
        View(bus, TABLE, Json(int), partitions=[])


def test_a_view_outlives_its_bus_without_harm(bus: Bus) -> None:
    view = View(bus, TABLE, Json(int)).__enter__()
    bus.close()
    view.close()
    with pytest.raises(Closed):
        view.ready()


def test_a_processor_runs_beside_the_caller(bus: Bus) -> None:
    with processing(bus) as processor, View(bus, TABLE, Json(int)) as view:
        processor.ready()
        view.ready()
        changes = view.changes()
        bus.topic("clicks").publish(b"3", key="ann")
        assert next(changes) == Change("ann", None, 3)
        assert processor.get("ann") == 3
        assert processor.get("zoe") is None
        assert processor.visit("scale", 10) == 1
        assert processor.get("ann") == 30
        assert dict(processor.partitions) == {0: PartitionState.RUNNING, 1: PartitionState.RUNNING}
        assert processor.stats().state is processor.state is ProcessorState.RUNNING
        with pytest.raises(ConfigurationError, match="no Visitor 'none'"):
            processor.visit("none")
    assert processor.state is ProcessorState.STOPPED


def test_a_paused_processor_handles_nothing(bus: Bus) -> None:
    with processing(bus) as processor, View(bus, TABLE, Json(int)) as view:
        processor.ready()
        view.ready()
        processor.pause()
        bus.topic("clicks").publish(b"3", key="ann")
        # A visit writes a checkpoint of all that was handled.
        assert processor.visit("scale", 1) == 0
        changes = view.changes()
        processor.resume()
        assert next(changes).key == "ann"


def test_run_ends_by_stop(bus: Bus) -> None:
    processor = processing(bus)
    with ThreadPoolExecutor() as threads, View(bus, TABLE, Json(int)) as view:
        view.ready()
        changes = view.changes()
        running = threads.submit(processor.run)
        bus.topic("clicks").publish(b"3", key="ann")
        assert next(changes).new == 3
        processor.stop()
        running.result(60)
    assert processor.state is ProcessorState.STOPPED


def test_the_error_that_ends_a_processor_is_raised(bus: Bus) -> None:
    bus.topic("clicks").publish(b"-1", key="ann")
    with pytest.raises(StreamFailed, match="below zero"):
        processing(bus).run()
    lost = Group("lost", Input("missing", Json(int), add), sums)
    with pytest.raises(ConfigurationError, match="'missing' does not exist"), Processor(bus, lost, store=Memory()):
        pass


@pytest.mark.parametrize(
    ("asynchronous", "blocking", "left_out"),
    [
        (broker_streams.View, View, {"states"}),
        (broker_streams.Processor, Processor, {"states", "serve", "runners", "close", "bus", "consumer"}),
    ],
)
def test_the_surface_mirrors_the_asynchronous_one(asynchronous: type, blocking: type, left_out: set[str]) -> None:
    for name, member in vars(asynchronous).items():
        if name.startswith("_") or name in left_out:
            continue
        mirrored = vars(blocking)[name]
        if callable(member) and name != "get":
            assert list(signature(member).parameters) == list(signature(mirrored).parameters), name


def test_the_options_are_those_of_the_asynchronous_processor() -> None:
    parameters = signature(broker_streams.Processor.__init__).parameters
    assert set(get_type_hints(ProcessorOptions)) == set(parameters) - {"self", "bus", "group"}
