"""Commits of the record consumer: what they settle, and what happens to them in a rebalance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.driver.contract import TopicPartition
from broker.errors import ConnectionFailed, LeaseLost, SettleError
from broker.hooks import PartitionsAssigned, PartitionsLost, PartitionsRevoked, Warned
from tests.unit.broker.reading.record_bench import P0, P1, Bench, bench, turns

# -- commits -------------------------------------------------------------------------------------------------


async def test_commit_without_records_covers_all_delivered_ones() -> None:
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


async def test_a_position_never_goes_back() -> None:
    async with bench() as b:
        b.source.append(1, 2, 3)
        await b.buffered(3)
        batch = await b.consumer.next_batch()
        await batch[2].commit()
        await batch[0].commit()
        await b.consumer.commit_records([batch[1], batch[0]])
        assert b.source.commits == [{P0: 4}]
        assert (await b.consumer.committed())[P0] == 4


async def test_records_in_any_order_commit_the_highest() -> None:
    async with bench() as b:
        b.source.append(1, 2, 3)
        await b.buffered(3)
        batch = await b.consumer.next_batch()
        await b.consumer.commit_records([batch[2], batch[0], batch[1]])
        assert b.source.stored == {P0: 4}


async def test_concurrent_commits_are_merged_and_sent_in_ascending_order() -> None:
    async with bench() as b:
        b.source.append(*range(10))
        await b.buffered(10)
        batch = await b.consumer.next_batch()
        b.source.commit_gate = asyncio.Event()
        calls = [asyncio.create_task(batch[i].commit()) for i in (0, 5, 3, 9, 2)]
        await asyncio.wait_for(b.source.commit_begun.wait(), 60)
        await turns()
        b.source.commit_gate.set()
        await asyncio.gather(*calls)
        sent = [commit[P0] for commit in b.source.commits]
        assert sent == sorted(set(sent))
        assert sent[-1] == 10
        assert len(sent) <= 2


async def test_a_commit_survives_the_cancellation_of_its_caller_and_close_waits_for_it() -> None:
    async with bench() as b:
        call, answer = await b.commit_under_way()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        closing = asyncio.create_task(b.consumer.close())
        await turns()
        assert not closing.done()
        assert not b.source.closed
        answer.set()
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


async def test_a_failed_commit_without_a_waiting_caller_is_a_warning() -> None:
    async with bench() as b:
        b.source.commit_errors.append(ConnectionFailed("cut"))
        call, answer = await b.commit_under_way()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        answer.set()
        await b.until(lambda: bool(b.of(Warned)))
        (warned,) = b.of(Warned)
        assert isinstance(warned, Warned)
        assert "cut" in warned.text


# -- rebalances ----------------------------------------------------------------------------------------------


async def test_revoked_partitions_leave_the_buffer_and_stay_committable_until_released() -> None:
    committed_while_revoking: list[dict[TopicPartition, int]] = []
    holder: list[Bench] = []

    async def on_revoking(partitions: Any) -> None:
        b = holder[0]
        assert partitions == [P0]
        (event,) = b.of(PartitionsRevoked)
        assert isinstance(event, PartitionsRevoked)
        assert event.current == (P1,), "reported before the release"
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


async def test_a_revocation_waits_for_a_running_commit() -> None:
    async with bench() as b:
        call, answer = await b.commit_under_way()
        revoking = asyncio.create_task(b.source.revoke(0))
        await turns()
        assert not revoking.done()
        answer.set()
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


async def test_lost_partitions_refuse_commits_and_are_reported() -> None:
    async with bench(0, 1) as b:
        b.source.append(1, 2)
        b.source.append(1, partition=1)
        await b.buffered(3)
        batch = await b.consumer.next_batch(1)
        b.source.lose(0)
        assert isinstance(b.of(PartitionsLost)[0], PartitionsLost)
        with pytest.raises(LeaseLost, match="was revoked"):
            await batch.commit()
        rest = await b.consumer.next_batch()
        assert [(r.partition, r.offset) for r in rest] == [(1, 1)]
        with pytest.raises(LeaseLost):
            await b.consumer.commit_records([*batch, *rest])
        assert b.source.stored == {P1: 2}, "the others of the same commit were carried out"


async def test_commit_raises_once_for_a_lost_partition() -> None:
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
        new = await b.consumer.next_record(timeout=60)
        assert new is not None
        assert new.offset == 2
        with pytest.raises(LeaseLost):
            await old.commit()
        assert b.source.stored == {P0: 2}
        await new.commit()
        assert b.source.stored == {P0: 3}


async def test_a_record_of_another_consumer_cannot_be_committed() -> None:
    async with bench(0, 1) as former, bench(0, 1) as b:
        for each in (former, b):
            each.source.append(1, 2, 3)
            each.source.append(7, partition=1)
            await each.buffered(4)
        late = await former.consumer.next_batch()
        ours = await b.consumer.next_batch()
        with pytest.raises(LeaseLost):
            await b.consumer.commit_records([ours[0], late[2], ours[3]])
        assert b.source.stored == {P0: 2, P1: 8}
        await late.commit()
        assert former.source.stored == {P0: 4, P1: 8}


async def test_records_of_a_lost_partition_from_a_running_fetch_are_dropped() -> None:
    async with bench(0, 1) as b:
        b.consumer._assignments.give_up(b.consumer._assignments.begin_revoke([P0]))
        b.source.append(1)
        b.source.append(1, partition=1)
        record = await b.consumer.next_record(timeout=60)
        assert record is not None
        assert record.partition == 1
        assert await b.consumer.next_record(timeout=0.01) is None
