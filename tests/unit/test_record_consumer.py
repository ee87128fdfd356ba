"""The record consumer over a scripted source: outcomes, hand-over, commits, rebalances, positions, close."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.capabilities import RecordCapabilities
from broker.codecs import Json
from broker.errors import (
    BackendError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    DecodeError,
    LeaseLost,
    NotAuthorized,
    OffsetOutOfRange,
    SettleError,
    TopicNotFound,
    Unsupported,
)
from broker.hooks import (
    DeadLettered,
    DeadLetterFailed,
    Event,
    FetchFailed,
    Hooks,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    Warned,
)
from broker.protocols import BatchedRecordIterator, BatchedRecordStream, RecordIterator, RecordStream
from broker.reading.record_consumer import RecordConsumer
from broker.spi import RecordSubscription, TopicPartition
from tests.unit.record_fakes import FakeBackend, FakeSource

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)


class Bench:
    """An open consumer over a scripted source, and what it told the hooks."""

    def __init__(self, consumer: RecordConsumer[Any], source: FakeSource, backend: FakeBackend) -> None:
        self.consumer = consumer
        self.source = source
        self.backend = backend
        self.events: list[Event] = []
        self.seen = asyncio.Event()

    def note(self, event: Event) -> None:
        self.events.append(event)
        self.seen.set()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if type(event) is kind]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop run until the condition holds; each step is an event, not a pause."""
        async with asyncio.timeout(5):
            while not holds():
                await asyncio.sleep(0)

    async def buffered(self, count: int) -> None:
        await self.until(lambda: len(self.consumer._pump) == count)


@asynccontextmanager
async def bench(*partitions: int, records: RecordCapabilities | None = None, **options: Any) -> AsyncGenerator[Bench]:
    source = FakeSource(partitions or (0,))
    backend = FakeBackend(source, records=records)
    hooks = Hooks()
    consumer: RecordConsumer[Any] = RecordConsumer(
        backend,  # pyright: ignore[reportArgumentType]
        RecordSubscription(topics=["orders"], group="audit"),
        hooks=hooks,
        **options,
    )
    made = Bench(consumer, source, backend)
    hooks.listen(made.note)
    async with consumer:
        yield made


# -- outcomes ------------------------------------------------------------------------------------------------


async def test_idle_is_none_or_an_empty_batch() -> None:
    async with bench() as b:
        assert await b.consumer.next_record(timeout=0.01) is None
        assert len(await b.consumer.next_batch(timeout=0)) == 0
        b.source.append(4)
        record = await b.consumer.next_record(timeout=5)
        assert record is not None
        assert record.offset == 4


async def test_a_batch_has_what_is_there_and_never_more_than_asked() -> None:
    async with bench() as b:
        b.source.append(*range(10))
        await b.buffered(10)
        assert [r.offset for r in await b.consumer.next_batch(4)] == [0, 1, 2, 3]
        assert [r.offset for r in await b.consumer.next_batch(100)] == [4, 5, 6, 7, 8, 9]
        with pytest.raises(ConfigurationError):
            await b.consumer.next_batch(0)


async def test_cancelled_waiters_lose_no_record() -> None:
    async with bench() as b:
        got: list[int] = []

        async def one() -> None:
            record = await b.consumer.next_record()
            assert record is not None
            got.append(record.offset)

        for offset in range(50):
            waiting = [asyncio.create_task(one()) for _ in range(3)]
            await asyncio.sleep(0)
            b.source.append(offset)
            waiting[offset % 3].cancel()
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        while (record := await b.consumer.next_record(timeout=0.01)) is not None:
            got.append(record.offset)
        assert sorted(got) == list(range(50))


async def test_a_retriable_error_is_an_event_and_the_fetch_goes_on() -> None:
    async with bench() as b:
        b.source.fail(ConnectionFailed("cut"))
        b.source.append(1)
        record = await b.consumer.next_record(timeout=5)
        assert record is not None
        (event,) = b.of(FetchFailed)
        assert isinstance(event, FetchFailed)
        assert event.topic == "orders"
        assert 0 < event.pause <= 0.1
        assert b.consumer.healthy


async def test_health_follows_the_fetches() -> None:
    async with bench() as b:
        assert b.consumer.healthy
        b.source.fail(ConnectionFailed("cut"))
        await b.until(lambda: bool(b.of(FetchFailed)))
        assert not b.consumer.healthy
        b.source.append(1)
        assert await b.consumer.next_record(timeout=5) is not None
        assert b.consumer.healthy
        await b.consumer.close()
        assert not b.consumer.healthy


async def test_pauses_grow_and_are_jittered() -> None:
    async with bench() as b:
        for _ in range(3):
            b.source.fail(ConnectionFailed("cut"))
        b.source.append(1)
        assert await b.consumer.next_record(timeout=5) is not None
        pauses = [event.pause for event in b.of(FetchFailed) if isinstance(event, FetchFailed)]
        assert 0.05 <= pauses[0] <= 0.1 <= pauses[1] <= 0.2 <= pauses[2] <= 0.4


async def test_a_fatal_error_is_raised_once_after_what_came_before_it() -> None:
    async with bench() as b:
        b.source.append(1, 2)
        await b.buffered(2)
        b.source.fail(NotAuthorized("no"))
        await b.until(lambda: b.consumer._pump.error is not None)
        assert len(await b.consumer.next_batch()) == 2
        with pytest.raises(NotAuthorized):
            await b.consumer.next_batch()
        with pytest.raises(Closed, match="no"):
            await b.consumer.next_batch()
        assert [r async for r in b.consumer] == []


async def test_a_waiting_call_hears_of_a_fatal_error_at_once() -> None:
    async with bench() as b:
        waiting = asyncio.create_task(b.consumer.next_record())
        await asyncio.sleep(0)
        b.source.fail(NotAuthorized("no"))
        with pytest.raises(NotAuthorized):
            await asyncio.wait_for(waiting, 5)


async def test_a_mistake_of_the_backend_is_told_as_such() -> None:
    async with bench() as b:
        b.source.fail(ZeroDivisionError("oops"))
        with pytest.raises(BackendError, match="oops") as caught:
            await b.consumer.next_record(timeout=5)
        assert isinstance(caught.value.native, ZeroDivisionError)


async def test_calls_after_close_raise_closed_and_iterations_end() -> None:
    async with bench() as b:
        waiting = asyncio.create_task(b.consumer.next_record())
        iterating = asyncio.create_task(_drain(b.consumer))
        await asyncio.sleep(0)
        await b.consumer.close()
        with pytest.raises(Closed):
            await waiting
        assert await iterating == []
        for call in (b.consumer.next_record, b.consumer.next_batch, b.consumer.commit, b.consumer.committed):
            with pytest.raises(Closed):
                await call()
        with pytest.raises(Closed):
            b.consumer.pause()
        assert [batch async for batch in b.consumer.batches()] == []
        assert b.source.closed


async def test_calls_before_open_say_how_to_open() -> None:
    backend: Any = FakeBackend()
    consumer = RecordConsumer(backend, RecordSubscription(topics=["orders"], group="g"), hooks=Hooks())
    with pytest.raises(Closed, match="async with"):
        await consumer.next_record()
    with pytest.raises(Closed, match="async with"):
        _ = [r async for r in consumer]
    await consumer.close()
    with pytest.raises(Closed):
        await consumer.__aenter__()


async def test_a_close_while_it_joins_leaves_the_group_again() -> None:
    backend: Any = FakeBackend()
    consumer = RecordConsumer(backend, RecordSubscription(topics=["orders"], group="g"), hooks=Hooks())

    async def join_and_be_closed() -> None:
        with pytest.raises(Closed, match="async with"):
            await consumer.next_record()
        await consumer.close()

    backend.joining = join_and_be_closed
    with pytest.raises(Closed):
        await consumer.__aenter__()
    assert backend.source.closed
    assert consumer.closed


async def test_a_missing_topic_and_a_missing_family_show_at_open() -> None:
    backend: Any = FakeBackend()

    async def refuse() -> None:
        raise TopicNotFound("no orders")

    backend.joining = refuse
    subscription = RecordSubscription(topics=["orders"], group="g")
    with pytest.raises(TopicNotFound):
        await RecordConsumer(backend, subscription, hooks=Hooks()).__aenter__()
    from dataclasses import replace

    backend.capabilities = replace(backend.capabilities, records=None)
    with pytest.raises(Unsupported, match="no records"):
        await RecordConsumer(backend, subscription, hooks=Hooks()).__aenter__()


async def _drain(consumer: RecordConsumer[Any]) -> list[Any]:
    return [record async for record in consumer]


# -- iteration and flow --------------------------------------------------------------------------------------


async def test_leaving_a_loop_needs_no_clean_up_and_loses_nothing() -> None:
    async with bench() as b:
        b.source.append(*range(6))
        seen: list[int] = []
        async for record in b.consumer:
            seen.append(record.offset)
            if record.offset == 2:
                break
        async for batch in b.consumer.batches(2):
            seen += [r.offset for r in batch]
            break
        async for record in b.consumer:
            seen.append(record.offset)
            if record.offset == 5:
                break
        assert seen == [0, 1, 2, 3, 4, 5]


async def test_stop_when_idle_ends_iterations_and_calls_without_a_timeout() -> None:
    async with bench(stop_when_idle=0.02) as b:
        b.source.append(1, 2)
        assert [r.offset async for r in b.consumer] == [1, 2]
        b.source.append(3)
        assert [[r.offset for r in batch] async for batch in b.consumer.batches()] == [[3]]
        assert await b.consumer.next_record() is None


async def test_joining_is_not_idleness_and_its_end_is_heard() -> None:
    async with bench(stop_when_idle=0.02) as b:
        b.consumer._pump._idle_since = asyncio.get_running_loop().time() + 10
        iterating = asyncio.create_task(_drain(b.consumer))
        await _turns()
        b.source.listener.assigned([])
        assert await asyncio.wait_for(iterating, 5) == []


async def test_a_broken_connection_is_not_idleness() -> None:
    async with bench(stop_when_idle=0.02) as b:
        b.source.fail(ConnectionFailed("cut"))
        await b.until(lambda: bool(b.of(FetchFailed)))
        b.source.append(1)
        assert [r.offset async for r in b.consumer] == [1], "the pause of 50 ms and more did not end the iteration"


async def test_the_buffer_is_bounded_in_records_and_refilled_at_half() -> None:
    async with bench(max_buffered=10) as b:
        b.source.append(*range(100))
        await b.buffered(10)
        assert b.source.fetches == [(10, 64 * 1024 * 1024)]
        await b.consumer.next_batch(4)
        await _turns()
        assert len(b.source.fetches) == 1, "six of ten are still there"
        await b.consumer.next_batch(1)
        await b.until(lambda: len(b.source.fetches) > 1)
        assert b.source.fetches[1][0] == 5
        total = 5
        while batch := await b.consumer.next_batch(3, timeout=0.05):
            assert len(b.consumer._pump) <= 10
            total += len(batch)
        assert total == 100


async def test_the_buffer_is_bounded_in_bytes() -> None:
    async with bench(max_buffered_bytes=50) as b:
        for offset in range(10):
            b.source.append(offset, data=b"x" * 19)
        await b.buffered(3)
        await _turns()
        assert b.consumer._pump._bytes == 60, "exceeded by one record at most"
        assert [r.offset for r in await b.consumer.next_batch(2)] == [0, 1]
        await b.buffered(3)
        offsets = [2]
        while batch := await b.consumer.next_batch(1, timeout=0.05):
            offsets += [r.offset for r in batch]
        assert offsets[1:] == list(range(2, 10))
        assert b.consumer._pump._bytes == 0


async def test_a_consumer_that_never_waits_lets_others_run() -> None:
    async with bench() as b:
        b.source.append(*range(5000))
        await b.buffered(5000)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(5000):
            await b.consumer.next_record()
        task.cancel()
        assert turns >= 10


async def _turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# -- commits -------------------------------------------------------------------------------------------------


async def test_a_commit_settles_all_lower_offsets_of_its_partition_only() -> None:
    async with bench(0, 1) as b:
        b.source.append(1, 5, 9)
        b.source.append(7, 8, partition=1)
        await b.buffered(5)
        batch = await b.consumer.next_batch()
        assert b.source.commits == [], "reading commits nothing"
        await batch[1].commit()
        assert b.source.stored == {P0: 6}
        await batch.commit()
        assert b.source.stored == {P0: 10, P1: 9}


async def test_commit_without_records_is_everything_handed_over() -> None:
    async with bench(0, 1) as b:
        await b.consumer.commit()
        assert b.source.commits == []
        b.source.append(1, 2, 3)
        await b.buffered(3)
        await b.consumer.next_batch(2)
        await b.consumer.commit()
        assert b.source.stored == {P0: 3}
        await b.consumer.commit()
        assert len(b.source.commits) == 1, "nothing new to commit"


async def test_a_position_never_falls() -> None:
    async with bench() as b:
        b.source.append(1, 2, 3)
        await b.buffered(3)
        batch = await b.consumer.next_batch()
        await batch[2].commit()
        await batch[0].commit()
        await b.consumer.commit_records([batch[1], batch[0]])
        assert b.source.commits == [{P0: 4}]
        assert (await b.consumer.committed())[P0] == 4


async def test_records_given_in_any_order_commit_the_highest() -> None:
    async with bench() as b:
        b.source.append(1, 2, 3)
        await b.buffered(3)
        batch = await b.consumer.next_batch()
        await b.consumer.commit_records([batch[2], batch[0], batch[1]])
        assert b.source.stored == {P0: 4}


async def test_overlapping_commits_are_joined_and_reach_the_broker_in_rising_order() -> None:
    async with bench() as b:
        b.source.append(*range(10))
        await b.buffered(10)
        batch = await b.consumer.next_batch()
        b.source.commit_gate = asyncio.Event()
        calls = [asyncio.create_task(batch[i].commit()) for i in (0, 5, 3, 9, 2)]
        await asyncio.wait_for(b.source.commit_begun.wait(), 5)
        await _turns()
        b.source.commit_gate.set()
        await asyncio.gather(*calls)
        sent = [commit[P0] for commit in b.source.commits]
        assert sent == sorted(set(sent))
        assert sent[-1] == 10
        assert len(sent) <= 2


async def test_a_commit_goes_on_when_its_caller_is_cancelled_and_close_waits_for_it() -> None:
    async with bench() as b:
        b.source.append(1)
        record = await b.consumer.next_record()
        assert record is not None
        b.source.commit_gate = asyncio.Event()
        call = asyncio.create_task(record.commit())
        await asyncio.wait_for(b.source.commit_begun.wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        closing = asyncio.create_task(b.consumer.close())
        await _turns()
        assert not closing.done()
        assert not b.source.closed
        b.source.commit_gate.set()
        await closing
        assert b.source.stored == {P0: 2}


async def test_a_refused_commit_raises_and_can_be_repeated() -> None:
    async with bench(0, 1) as b:
        b.source.append(1)
        b.source.append(1, partition=1)
        await b.buffered(2)
        batch = await b.consumer.next_batch()
        b.source.commit_errors.append({P1: SettleError("later")})
        with pytest.raises(SettleError, match="later"):
            await batch.commit()
        assert b.source.stored == {P0: 2}
        await batch.commit()
        assert b.source.stored == {P0: 2, P1: 2}
        assert b.source.commits[1] == {P1: 2}, "what was stored is not sent again"


async def test_a_failed_commit_that_nobody_awaits_is_a_warning() -> None:
    async with bench() as b:
        b.source.append(1)
        record = await b.consumer.next_record()
        assert record is not None
        b.source.commit_gate = asyncio.Event()
        b.source.commit_errors.append(ConnectionFailed("cut"))
        call = asyncio.create_task(record.commit())
        await asyncio.wait_for(b.source.commit_begun.wait(), 5)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        b.source.commit_gate.set()
        await b.until(lambda: bool(b.of(Warned)))


async def test_close_commits_nothing() -> None:
    async with bench() as b:
        b.source.append(1, 2)
        await b.consumer.next_record()
    assert b.source.commits == []


# -- rebalances ----------------------------------------------------------------------------------------------


async def test_revoked_partitions_leave_the_buffer_and_stay_committable_until_released() -> None:
    committed_while_revoking: list[dict[TopicPartition, int]] = []
    holder: list[Bench] = []

    async def on_revoking(partitions: Any) -> None:
        b = holder[0]
        assert partitions == [P0]
        (event,) = b.of(PartitionsRevoked)
        assert isinstance(event, PartitionsRevoked)
        assert event.current == (P1,), "told before the release"
        await b.consumer.commit()
        committed_while_revoking.append(dict(b.source.stored))

    async with bench(0, 1, on_revoking=on_revoking) as b:
        holder.append(b)
        b.source.append(1, 2, 3)
        b.source.append(8, 9, partition=1)
        await b.buffered(5)
        handed = await b.consumer.next_batch(2)
        await b.source.revoke(0)
        assert committed_while_revoking == [{P0: 3}]
        assert b.consumer.assignment() == [P1]
        rest = await b.consumer.next_batch()
        assert [(r.partition, r.offset) for r in rest] == [(1, 8), (1, 9)], "3 belongs to the next owner"
        with pytest.raises(LeaseLost):
            await handed[1].commit()
        assert [type(e) for e in b.events][:2] == [PartitionsAssigned, PartitionsAssigned]


async def test_a_revocation_waits_for_a_commit_on_its_way() -> None:
    async with bench() as b:
        b.source.append(1)
        record = await b.consumer.next_record()
        assert record is not None
        b.source.commit_gate = asyncio.Event()
        call = asyncio.create_task(record.commit())
        await asyncio.wait_for(b.source.commit_begun.wait(), 5)
        revoking = asyncio.create_task(b.source.revoke(0))
        await _turns()
        assert not revoking.done()
        b.source.commit_gate.set()
        await revoking
        await call
        assert b.source.stored == {P0: 2}


async def test_work_on_revocation_is_cut_off_at_the_deadline() -> None:
    async def never(partitions: Any) -> None:
        await asyncio.Event().wait()

    async with bench(on_revoking=never) as b:
        await b.source.revoke(0, within=0.02)
        assert b.consumer.assignment() == []
        assert len(b.of(Warned)) == 1


async def test_lost_partitions_refuse_commits_and_are_told() -> None:
    async with bench(0, 1) as b:
        b.source.append(1, 2)
        b.source.append(1, partition=1)
        await b.buffered(3)
        batch = await b.consumer.next_batch(1)
        b.source.lose(0)
        assert isinstance(b.of(PartitionsLost)[0], PartitionsLost)
        with pytest.raises(LeaseLost, match="taken away"):
            await batch.commit()
        rest = await b.consumer.next_batch()
        assert [(r.partition, r.offset) for r in rest] == [(1, 1)]
        with pytest.raises(LeaseLost):
            await b.consumer.commit_records([*batch, *rest])
        assert b.source.stored == {P1: 2}, "the others of the same commit were carried out"


async def test_commit_of_everything_tells_once_that_a_part_was_lost() -> None:
    async with bench(0, 1) as b:
        b.source.append(1)
        b.source.append(1, partition=1)
        await b.buffered(2)
        await b.consumer.next_batch()
        b.source.lose(0)
        with pytest.raises(LeaseLost):
            await b.consumer.commit()
        assert b.source.stored == {P1: 2}
        await b.consumer.commit()


async def test_a_record_of_an_earlier_assignment_cannot_be_committed_in_a_later_one() -> None:
    async with bench() as b:
        b.source.append(1, 2, 3)
        await b.buffered(3)
        old = await b.consumer.next_batch(3)
        b.source.lose(0)
        b.source.stored[P0] = 2  # the owner in between
        b.source.assign(0)
        new = await b.consumer.next_record(timeout=5)
        assert new is not None
        assert new.offset == 2
        with pytest.raises(LeaseLost):
            await old.commit()
        assert b.source.stored == {P0: 2}
        await new.commit()
        assert b.source.stored == {P0: 3}


async def test_records_of_a_lost_partition_that_a_fetch_still_brings_are_dropped() -> None:
    async with bench(0, 1) as b:
        b.consumer._assignments.give_up(b.consumer._assignments.begin_revoke([P0]))
        b.source.append(1)
        b.source.append(1, partition=1)
        record = await b.consumer.next_record(timeout=5)
        assert record is not None
        assert record.partition == 1
        assert await b.consumer.next_record(timeout=0.01) is None


# -- positions -----------------------------------------------------------------------------------------------


async def test_seek_drops_the_buffer_and_reads_on_from_there() -> None:
    async with bench(0, 1) as b:
        b.source.append(*range(10))
        b.source.append(5, partition=1)
        await b.buffered(11)
        await b.consumer.next_batch(4)
        await b.consumer.seek({("orders", 0): 2})
        batch: list[Any] = []
        while len(batch) < 9:
            batch += await b.consumer.next_batch(timeout=5)
        assert sorted((r.partition, r.offset) for r in batch) == [*((0, n) for n in range(2, 10)), (1, 5)]


async def test_seek_to_none_is_the_committed_position() -> None:
    async with bench() as b:
        b.source.append(*range(4))
        await b.buffered(4)
        batch = await b.consumer.next_batch()
        await batch[1].commit()
        await b.consumer.seek({P0: None})
        record = await b.consumer.next_record(timeout=5)
        assert record is not None
        assert record.offset == 2


async def test_going_back_to_the_committed_position_keeps_it() -> None:
    async with bench() as b:
        b.source.append(*range(4))
        await b.buffered(4)
        batch = await b.consumer.next_batch()
        await batch[2].commit()
        await b.consumer.seek({P0: None})
        await batch[0].commit()
        assert b.source.stored == {P0: 3}


async def test_a_seek_is_the_one_way_to_take_a_position_back() -> None:
    async with bench() as b:
        b.source.append(*range(4))
        await b.buffered(4)
        await (await b.consumer.next_batch()).commit()
        await b.consumer.seek({P0: 1})
        record = await b.consumer.next_record(timeout=5)
        assert record is not None
        await record.commit()
        assert b.source.stored == {P0: 2}


async def test_what_was_handed_over_below_a_sought_position_can_still_be_committed() -> None:
    async with bench() as b:
        b.source.append(*range(6))
        await b.buffered(6)
        await b.consumer.next_batch(4)
        await b.consumer.seek({P0: 2})
        await b.consumer.commit()
        assert b.source.stored == {P0: 2}, "2 and 3 are to be read again"
        await b.consumer.seek({P0: 1})
        await b.consumer.commit()
        assert b.source.stored == {P0: 2}, "nothing was handed over since the commit"
        await b.consumer.next_batch(1, timeout=5)
        await b.consumer.seek({P0: 5})
        await b.consumer.commit()
        assert b.source.stored == {P0: 2}, "what a seek jumped over was not handed over"


async def test_a_seek_that_cannot_be_is_refused() -> None:
    async with bench() as b:
        with pytest.raises(LeaseLost, match="not assigned"):
            await b.consumer.seek({("orders", 7): 1})
        with pytest.raises(OffsetOutOfRange):
            await b.consumer.seek({P0: -1})
    async with bench(records=RecordCapabilities(seek=False)) as b:
        with pytest.raises(Unsupported):
            await b.consumer.seek({P0: 1})


async def test_paused_partitions_keep_their_records_for_later() -> None:
    async with bench(0, 1) as b:
        b.source.append(1, 2)
        b.source.append(8, partition=1)
        await b.buffered(3)
        b.consumer.pause([("orders", 0)])
        assert b.source.paused == {P0}
        assert [r.offset for r in await b.consumer.next_batch(timeout=0.05)] == [8]
        b.source.append(3)
        assert await b.consumer.next_record(timeout=0.01) is None
        b.consumer.resume([("orders", 0)])
        got: list[int] = []
        while len(got) < 3:
            got += [r.offset for r in await b.consumer.next_batch(timeout=5)]
        assert got == [1, 2, 3]


async def test_a_waiter_gets_what_resume_lets_go() -> None:
    async with bench() as b:
        b.source.append(1)
        await b.buffered(1)
        b.consumer.pause()
        waiting = asyncio.create_task(b.consumer.next_record())
        await _turns()
        assert not waiting.done()
        b.consumer.resume()
        record = await asyncio.wait_for(waiting, 5)
        assert record is not None


# -- decoding ------------------------------------------------------------------------------------------------


async def test_payloads_are_decoded() -> None:
    async with bench(codec=Json(int)) as b:
        b.source.append(1, 2)
        await b.buffered(2)
        assert [r.payload for r in await b.consumer.next_batch()] == [1, 2]
        assert b.consumer._codec is not None


async def test_an_undecodable_record_raises_in_its_place_and_the_next_call_goes_on() -> None:
    async with bench(codec=Json(int)) as b:
        b.source.append(1)
        b.source.append(2, data=b"{")
        b.source.append(3)
        await b.buffered(3)
        assert [r.offset for r in await b.consumer.next_batch()] == [1]
        with pytest.raises(DecodeError, match=r"\[0\]@2"):
            await b.consumer.next_batch()
        assert [r.offset for r in await b.consumer.next_batch()] == [3]


async def test_an_undecodable_record_goes_to_the_dead_letters_and_counts_as_done() -> None:
    async with bench(codec=Json(int), on_decode_error="orders.dead") as b:
        b.source.append(1)
        b.source.append(2, data=b"{")
        b.source.append(3, data=b"")
        await b.buffered(3)
        first = await b.consumer.next_record()
        assert first is not None
        assert await b.consumer.next_record(timeout=0.05) is None
        letters = b.backend.targets["orders.dead"].messages
        assert [letter.data for letter in letters] == [b"{", b""]
        letter = letters[0]
        assert letter.key == b"k"
        assert letter.attributes["n"] == "2"
        assert letter.attributes["dead-letter-topic"] == "orders"
        assert letter.attributes["dead-letter-subscription"] == "audit"
        assert letter.attributes["dead-letter-reason"].startswith("cannot be decoded: ")
        assert "@2 cannot be decoded" in letter.attributes["dead-letter-error"]
        assert letter.attributes["dead-letter-id"] == "id-2"
        assert letter.publish_time is not None
        assert len(b.of(DeadLettered)) == 2
        await first.commit()
        assert b.source.stored == {P0: 4}, "what was skipped behind it is done as well"


async def test_a_dead_letter_topic_that_cannot_be_is_told_before_the_first_record() -> None:
    backend: Any = FakeBackend()
    backend.missing.add("orders.dead")
    subscription = RecordSubscription(topics=["orders"], group="g")
    consumer = RecordConsumer(backend, subscription, hooks=Hooks(), codec=Json(int), on_decode_error="orders.dead")
    with pytest.raises(TopicNotFound):
        await consumer.__aenter__()
    with pytest.raises(ConfigurationError, match="one of the consumed"):
        RecordConsumer(backend, subscription, hooks=Hooks(), on_decode_error="orders")


async def test_skipped_records_alone_are_committed_with_the_next_commit() -> None:
    async with bench(0, 1, codec=Json(int), on_decode_error="orders.dead") as b:
        b.source.append(1, data=b"{")
        b.source.append(1, partition=1)
        await b.buffered(2)
        batch = await b.consumer.next_batch(timeout=5)
        assert [r.partition for r in batch] == [1]
        await batch.commit()
        assert b.source.stored == {P0: 2, P1: 2}


async def test_a_failed_dead_letter_is_written_again_and_nothing_overtakes_it() -> None:
    async with bench(codec=Json(int), on_decode_error="orders.dead") as b:
        target = b.backend.publish_target("orders.dead")
        target.errors.append(ConnectionFailed("cut"))
        b.source.append(1, data=b"{")
        b.source.append(2)
        await b.buffered(2)
        call = asyncio.create_task(b.consumer.next_record())
        await asyncio.wait_for(target.tried.wait(), 5)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await b.consumer.next_record(timeout=0) is None, "the letter is not written yet"
        record = await b.consumer.next_record(timeout=5)
        assert record is not None
        assert record.offset == 2
        assert len(target.messages) == 1
        assert len(b.of(DeadLetterFailed)) == 1


async def test_losing_the_partition_ends_the_writing_of_its_dead_letter() -> None:
    async with bench(codec=Json(int), on_decode_error="orders.dead") as b:
        target = b.backend.publish_target("orders.dead")
        target.errors += [ConnectionFailed("cut")] * 100
        b.source.append(1, data=b"{")
        call = asyncio.create_task(b.consumer.next_record())
        await asyncio.wait_for(target.tried.wait(), 5)
        await b.source.revoke(0)
        b.source.stored[P0] = 2
        b.source.append(2)
        b.source.assign(0)
        record = await asyncio.wait_for(call, 5)
        assert record is not None
        assert record.offset == 2
        assert target.messages == []


async def test_close_does_not_wait_for_a_dead_letter_that_cannot_be_written() -> None:
    async with bench(codec=Json(int), on_decode_error="orders.dead", close_timeout=5) as b:
        target = b.backend.publish_target("orders.dead")
        target.errors += [ConnectionFailed("cut")] * 100
        b.source.append(1, data=b"{")
        call = asyncio.create_task(b.consumer.next_record())
        await asyncio.wait_for(target.tried.wait(), 5)
        began = time.monotonic()
        await b.consumer.close()
        assert time.monotonic() - began < 1
        with pytest.raises(Closed):
            await call
        assert b.source.commits == []


# -- close ---------------------------------------------------------------------------------------------------


async def test_the_fetch_is_interrupted_and_never_cancelled() -> None:
    async with bench() as b:
        await _turns()
    assert b.source.closed
    assert not b.source.fetch_cancelled


async def test_close_returns_within_its_time_when_the_source_does_not_heed() -> None:
    async with bench(close_timeout=0.05) as b:
        b.source.deaf = True
        await _turns()
        began = time.monotonic()
        await b.consumer.close()
        assert time.monotonic() - began < 1.5
        await b.consumer.close()


async def test_a_cancelled_close_goes_on() -> None:
    async with bench() as b:
        b.source.append(1)
        record = await b.consumer.next_record()
        assert record is not None
        b.source.commit_gate = asyncio.Event()
        call = asyncio.create_task(record.commit())
        await asyncio.wait_for(b.source.commit_begun.wait(), 5)
        closing = asyncio.create_task(b.consumer.close())
        await _turns()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        b.source.commit_gate.set()
        await call
        await b.until(lambda: b.source.closed)


async def test_the_consumer_satisfies_the_protocols() -> None:
    backend: Any = FakeBackend()
    consumer = RecordConsumer(backend, RecordSubscription(topics=["orders"], group="g"), hooks=Hooks())
    _one: RecordIterator[bytes] = consumer
    _many: BatchedRecordIterator[bytes] = consumer
    _stream: RecordStream[bytes] = consumer
    _batches: BatchedRecordStream[bytes] = consumer


async def test_batches_cost_next_to_nothing_per_record() -> None:
    async with bench(max_buffered=100_000) as b:
        b.source.append(*range(100_000))
        await b.buffered(100_000)
        began = time.process_time()
        total = 0
        while total < 100_000:
            batch = await b.consumer.next_batch(1000)
            await batch.commit()
            total += len(batch)
        spent = (time.process_time() - began) / 100_000 * 1e6
        assert spent < 3, f"{spent:.2f} µs a record; a bound that a busy machine still keeps"
