"""`on_assigned`, `on_revoking` and `on_lost` of the record consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from broker.driver.contract import TopicPartition
from broker.errors import Closed, ConfigurationError, LeaseLost, OperationTimeout
from tests.unit.broker.reading.record_bench import P0, P1, Bench, bench, turns


class Callbacks:
    """Notes each call; `gate` lets `on_assigned` return."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.gate = asyncio.Event()
        self.cancelled = 0

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("assigned", partitions)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def on_revoking(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("revoking", partitions)

    async def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("lost", partitions)

    @property
    def options(self) -> dict[str, Any]:
        return {"on_assigned": self.on_assigned, "on_revoking": self.on_revoking, "on_lost": self.on_lost}

    def _note(self, what: str, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append((what, [partition.partition for partition in partitions]))


async def offsets(b: Bench, count: int) -> list[int]:
    return [record.offset for _ in range(count) if (record := await b.consumer.next_record(timeout=60)) is not None]


async def test_no_record_is_handed_over_before_on_assigned_has_returned() -> None:
    callbacks = Callbacks()
    async with bench(**callbacks.options) as b:
        b.source.append(1, 2)
        assert b.consumer.assignment() == [P0]
        assert await b.consumer.next_record(timeout=0.01) is None
        assert b.source.paused == {P0}
        assert len(b.consumer._fetcher.buffer) == 0
        callbacks.gate.set()
        assert await offsets(b, 2) == [1, 2]
        assert callbacks.calls == [("assigned", [0])]


async def test_other_partitions_are_read_meanwhile() -> None:
    callbacks = Callbacks()
    callbacks.gate.set()
    async with bench(0, **callbacks.options) as b:
        b.source.append(1)
        assert await offsets(b, 1) == [1]
        callbacks.gate.clear()
        b.source.append(7, partition=1)
        b.source.assign(1)
        b.source.append(2)
        assert await offsets(b, 1) == [2]
        assert await b.consumer.next_record(timeout=0.01) is None
        callbacks.gate.set()
        assert await offsets(b, 1) == [7]


async def test_on_assigned_seeks_to_positions_of_its_own() -> None:
    async def seek(partitions: Sequence[TopicPartition]) -> None:
        await b.consumer.seek(dict.fromkeys(partitions, 3))

    async with bench(0, 1, on_assigned=seek) as b:
        b.source.append(*range(5))
        b.source.append(*range(5), partition=1)
        assert await offsets(b, 4) in ([3, 4, 3, 4], [3, 3, 4, 4])


async def test_a_pause_within_on_assigned_outlasts_it() -> None:
    async def pause(partitions: Sequence[TopicPartition]) -> None:
        b.consumer.pause(partitions)

    async with bench(on_assigned=pause) as b:
        b.source.append(1)
        assert await b.consumer.next_record(timeout=0.01) is None
        b.consumer.resume()
        assert await offsets(b, 1) == [1]


async def test_a_resume_does_not_overtake_on_assigned() -> None:
    callbacks = Callbacks()
    async with bench(**callbacks.options) as b:
        b.source.append(1)
        b.consumer.pause()
        b.consumer.resume()
        assert await b.consumer.next_record(timeout=0.01) is None
        callbacks.gate.set()
        assert await offsets(b, 1) == [1]


async def test_waiting_for_on_assigned_is_not_idle() -> None:
    callbacks = Callbacks()
    async with bench(stop_when_idle=0.01, **callbacks.options) as b:
        reading = asyncio.create_task(b.consumer.next_record())
        await asyncio.sleep(0.05)
        assert not reading.done()
        b.source.append(1)
        callbacks.gate.set()
        record = await asyncio.wait_for(reading, 60)
        assert record is not None


async def test_an_error_of_on_assigned_ends_the_consumer_and_is_raised_once() -> None:
    async def fail(_: Sequence[TopicPartition]) -> None:
        raise ZeroDivisionError("state")

    async with bench(on_assigned=fail) as b:
        b.source.append(1)
        with pytest.raises(ZeroDivisionError, match="state"):
            await b.consumer.next_record(timeout=60)
        with pytest.raises(Closed, match="ZeroDivisionError"):
            await b.consumer.next_record()
        assert b.source.stored == {}


async def test_a_cancelled_error_of_on_assigned_ends_the_consumer() -> None:
    async def fail(_: Sequence[TopicPartition]) -> None:
        raise asyncio.CancelledError

    async with bench(on_assigned=fail) as b:
        b.source.append(1)
        with pytest.raises(RuntimeError, match="on_assigned of group 'audit' raised CancelledError by itself"):
            await b.consumer.next_record(timeout=60)


async def test_a_call_that_never_returns_is_named_with_its_deadline() -> None:
    async def never(_: Sequence[TopicPartition]) -> None:
        await asyncio.Event().wait()

    async with bench(0, 1, on_assigned=never, assign_timeout=0.05) as b:
        b.source.append(1)
        with pytest.raises(OperationTimeout, match=r"assign_timeout, 0.05 s.*'orders'\[0\], 'orders'\[1\]") as raised:
            await b.consumer.next_record()
        assert not raised.value.retriable
        assert raised.value.advice


async def test_on_assigned_is_cancelled_and_begins_again_with_the_partitions_that_stay() -> None:
    callbacks = Callbacks()
    async with bench(0, 1, **callbacks.options) as b:
        await turns()
        await b.source.revoke(0)
        await turns()
        assert callbacks.cancelled == 1
        assert sorted(callbacks.calls[1:]) == [("assigned", [1]), ("revoking", [0])]
        b.source.lose(1)
        await turns()
        assert callbacks.cancelled == 2
        assert callbacks.calls[3:] == [("lost", [1])]
        callbacks.gate.set()
        b.source.assign(0, 1)
        b.source.append(1)
        assert await offsets(b, 1) == [1]


async def test_a_lost_partition_begins_on_assigned_again_for_the_others() -> None:
    calls: list[list[int]] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def seek(partitions: Sequence[TopicPartition]) -> None:
        calls.append([partition.partition for partition in partitions])
        begun.set()
        await go_on.wait()
        await b.consumer.seek(dict.fromkeys(partitions, 3))

    async with bench(0, 1, on_assigned=seek) as b:
        await begun.wait()
        b.source.lose(0)
        go_on.set()
        b.source.append(*range(5), partition=1)
        assert await offsets(b, 2) == [3, 4]
        assert calls == [[0, 1], [1]]


async def test_on_assigned_does_not_name_partitions_that_are_gone_before_it_begins() -> None:
    callbacks = Callbacks()
    callbacks.gate.set()
    async with bench(**callbacks.options) as b:
        await turns()
        callbacks.calls.clear()
        b.source.lose(0)
        b.source.assign(0, 1)
        b.source.lose(0)
        await turns()
        assert callbacks.calls == [("lost", [0]), ("lost", [0]), ("assigned", [1])]


async def test_on_assigned_of_a_partition_waits_for_its_on_lost() -> None:
    order: list[str] = []
    cleaned = asyncio.Event()

    async def on_assigned(_: Sequence[TopicPartition]) -> None:
        order.append("assigned")

    async def on_lost(_: Sequence[TopicPartition]) -> None:
        await cleaned.wait()
        order.append("cleaned")

    async with bench(on_assigned=on_assigned, on_lost=on_lost) as b:
        await turns()
        b.source.lose(0)
        b.source.assign(0)
        await turns()
        assert order == ["assigned"]
        cleaned.set()
        b.source.append(1)
        assert await offsets(b, 1) == [1]
        assert order == ["assigned", "cleaned", "assigned"]


async def test_on_assigned_of_a_partition_waits_for_its_earlier_call() -> None:
    order: list[str] = []
    loaded = asyncio.Event()

    async def on_assigned(partitions: Sequence[TopicPartition]) -> None:
        numbers = [partition.partition for partition in partitions]
        order.append(f"begin {numbers}")
        await loaded.wait()
        await b.consumer.seek(dict.fromkeys(partitions, len(order)))
        order.append(f"end {numbers}")

    async with bench(0, 1, on_assigned=on_assigned) as b:
        await turns()
        await b.source.revoke(1)
        b.source.assign(1)
        await turns()
        assert order == ["begin [0, 1]", "begin [0]"], "a late seek of the call would take the partition back"
        loaded.set()
        b.source.append(*range(6), partition=1)
        assert await offsets(b, 2) == [4, 5]
        assert order == ["begin [0, 1]", "begin [0]", "end [0]", "begin [1]", "end [1]"]


async def test_nothing_is_loaded_for_a_partition_after_its_on_revoking() -> None:
    state: set[TopicPartition] = set()
    slow = asyncio.Event()

    async def load(partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            await slow.wait()
            state.add(partition)

    async def drop(partitions: Sequence[TopicPartition]) -> None:
        state.difference_update(partitions)

    async with bench(0, 1, on_assigned=load, on_revoking=drop) as b:
        await turns()
        await b.source.revoke(1)
        slow.set()
        b.source.append(1)
        assert await offsets(b, 1) == [1]
        assert state == {P0}


async def test_a_callback_that_cannot_be_awaited_is_named() -> None:
    plain: Any = print
    async with bench(on_assigned=plain) as b:
        with pytest.raises(ConfigurationError, match="on_assigned is <built-in function print>") as raised:
            await b.consumer.next_record()
        assert "async def" in raised.value.advice


async def test_a_hanging_on_lost_is_named() -> None:
    async def loaded(_: Sequence[TopicPartition]) -> None: ...

    async def never(_: Sequence[TopicPartition]) -> None:
        await asyncio.Event().wait()

    async with bench(on_assigned=loaded, on_lost=never, assign_timeout=0.05, close_timeout=0.01) as b:
        await turns()
        b.source.lose(0)
        b.source.assign(0)
        with pytest.raises(OperationTimeout, match=r"on_lost of group .* on_assigned waits for it, with 'orders'\[0\]"):
            await b.consumer.next_record()


async def test_lost_is_told_apart_from_revoking() -> None:
    callbacks = Callbacks()
    callbacks.gate.set()
    async with bench(0, 1, **callbacks.options) as b:
        await turns()
        await b.source.revoke(0)
        b.source.lose(1)
        await turns()
        assert callbacks.calls[1:] == [("revoking", [0]), ("lost", [1])]


async def test_an_error_of_on_lost_is_a_warning() -> None:
    async def fail(_: Sequence[TopicPartition]) -> None:
        raise ZeroDivisionError

    async with bench(0, 1, on_lost=fail) as b:
        b.source.lose(0)
        await turns()
        assert any("on_lost failed: ZeroDivisionError()" in str(event) for event in b.events)
        b.source.append(7, partition=1)
        assert await offsets(b, 1) == [7]


@pytest.mark.parametrize("name", ["on_assigned", "on_lost"])
async def test_a_callback_may_close_the_consumer(name: str) -> None:
    closed = asyncio.Event()

    async def close(_: Sequence[TopicPartition]) -> None:
        await b.consumer.close()
        closed.set()

    options: dict[str, Any] = {name: close}
    async with bench(0, 1, **options) as b:
        if name == "on_lost":
            b.source.lose(0)
        await asyncio.wait_for(closed.wait(), 60)
        with pytest.raises(Closed):
            await b.consumer.next_record()
    assert b.source.closed


async def test_the_close_cancels_on_assigned_and_waits_for_on_lost() -> None:
    callbacks = Callbacks()
    cleaned: list[TopicPartition] = []

    async def on_lost(partitions: Sequence[TopicPartition]) -> None:
        await asyncio.sleep(0.01)
        cleaned.extend(partitions)

    async with bench(0, 1, on_assigned=callbacks.on_assigned, on_lost=on_lost) as b:
        await turns()
        b.source.lose(1)
        await turns()
    assert callbacks.cancelled == 2
    assert cleaned == [P1]


async def test_a_pause_ends_with_its_assignment() -> None:
    async with bench() as b:
        b.consumer.pause()
        b.source.lose(0)
        b.source.paused.add(P0)
        b.source.assign(0)
        b.source.append(1)
        assert await offsets(b, 1) == [1]


async def test_seeking_a_lost_partition_in_on_assigned_of_none_else_raises() -> None:
    async def seek(_: Sequence[TopicPartition]) -> None:
        await b.consumer.seek({("orders", 7): 1})

    async with bench(on_assigned=seek) as b:
        with pytest.raises(LeaseLost, match=r"Partition 7"):
            await b.consumer.next_record(timeout=60)


@pytest.mark.parametrize("name", ["on_assigned", "on_revoking", "on_lost"])
async def test_as_messages_refuses_callbacks(name: str) -> None:
    callbacks = Callbacks()
    async with bench() as b:
        consumer = type(b.consumer)(
            b.backend,  # pyright: ignore[reportArgumentType]
            b.consumer._subscription,
            hooks=b.consumer._hooks,
            **{name: callbacks.options[name]},
        )
        with pytest.raises(ConfigurationError, match=f"as_messages.. has no {name}"):
            consumer.as_messages()
