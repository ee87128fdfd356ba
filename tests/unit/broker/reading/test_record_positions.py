"""Positions of the record consumer: seek, pause and resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.capabilities import RecordCapabilities
from broker.errors import LeaseLost, OffsetOutOfRange, OperationTimeout, Unsupported
from tests.unit.broker.reading.record_bench import P0, P1, bench, turns


async def test_seek_drops_the_buffer_and_reads_on_from_there() -> None:
    async with bench(0, 1) as b:
        b.source.append(*range(10))
        b.source.append(5, partition=1)
        await b.buffered(11)
        await b.consumer.next_batch(4)
        await b.consumer.seek({("orders", 0): 2})
        batch: list[Any] = []
        while len(batch) < 9:
            batch += await b.consumer.next_batch(timeout=60)
        assert sorted((r.partition, r.offset) for r in batch) == [*((0, n) for n in range(2, 10)), (1, 5)]


async def test_a_seek_that_fails_half_way_names_what_has_moved() -> None:
    async with bench(0, 1) as b:
        for number in (0, 1):
            b.source.append(*range(4), partition=number)
        await b.buffered(8)
        b.source.seek_errors[P1] = OperationTimeout("No answer")
        with pytest.raises(OperationTimeout, match=r"^No answer. Only 'orders'\[0\] moved to the new position"):
            await b.consumer.seek({P0: 2, P1: 2})
        batch: list[Any] = []
        while len(batch) < 6:
            batch += await b.consumer.next_batch(timeout=60)
        assert sorted((r.partition, r.offset) for r in batch) == [(0, 2), (0, 3), *((1, n) for n in range(4))]


async def test_a_seek_that_moves_nothing_raises_its_error() -> None:
    async with bench(0, 1) as b:
        b.source.seek_errors = {P0: LeaseLost("Gone"), P1: OperationTimeout("No answer")}
        with pytest.raises(LeaseLost) as caught:
            await b.consumer.seek({P0: 2, P1: 2})
        assert caught.value.message == "Gone"


async def test_going_back_to_the_committed_position_keeps_it() -> None:
    async with bench() as b:
        b.source.append(*range(4))
        await b.buffered(4)
        batch = await b.consumer.next_batch()
        await batch[2].commit()
        await b.consumer.seek({P0: None})
        await batch[0].commit()
        assert b.source.stored == {P0: 3}


async def test_only_a_seek_moves_a_position_back() -> None:
    async with bench() as b:
        b.source.append(*range(4))
        await b.buffered(4)
        await (await b.consumer.next_batch()).commit()
        await b.consumer.seek({P0: 1})
        record = await b.consumer.next_record(timeout=60)
        assert record is not None
        await record.commit()
        assert b.source.stored == {P0: 2}


async def test_records_delivered_before_a_seek_can_still_be_committed() -> None:
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


async def test_an_invalid_seek_is_refused() -> None:
    async with bench() as b:
        with pytest.raises(LeaseLost, match="not assigned"):
            await b.consumer.seek({("orders", 7): 1})
        with pytest.raises(OffsetOutOfRange):
            await b.consumer.seek({P0: -1})
    async with bench(records=RecordCapabilities(seek=False)) as b:
        with pytest.raises(Unsupported):
            await b.consumer.seek({P0: 1})


async def test_calls_for_unassigned_partitions_are_refused_and_change_nothing() -> None:
    async with bench(0, 1) as b:
        b.source.append(1)
        text = "Partition 7 of topic 'orders' is not assigned to this member of group 'audit', which has 'orders'.0., "
        for call in (b.consumer.pause, b.consumer.resume):
            with pytest.raises(LeaseLost, match=text + "'orders'.1."):
                call([P0, ("orders", 7)])
        assert not b.source.paused
        assert await b.consumer.next_record(timeout=60) is not None
    async with bench(*range(30)) as b:
        with pytest.raises(LeaseLost, match=r"'orders'\[9\] and 20 more"):
            b.consumer.pause([("orders", 30)])


async def test_paused_partitions_keep_their_records_for_later() -> None:
    async with bench(0, 1) as b:
        b.source.append(1, 2)
        b.source.append(8, partition=1)
        await b.buffered(3)
        b.consumer.pause([("orders", 0)])
        assert b.source.paused == {P0}
        assert [r.offset for r in await b.consumer.next_batch()] == [8]
        b.source.append(3)
        assert await b.consumer.next_record(timeout=0.01) is None
        b.consumer.resume([("orders", 0)])
        got: list[int] = []
        while len(got) < 3:
            got += [r.offset for r in await b.consumer.next_batch(timeout=60)]
        assert got == [1, 2, 3]


async def test_resume_wakes_a_waiting_call() -> None:
    async with bench() as b:
        b.source.append(1)
        await b.buffered(1)
        b.consumer.pause()
        waiting = asyncio.create_task(b.consumer.next_record())
        await turns()
        assert not waiting.done()
        b.consumer.resume()
        record = await asyncio.wait_for(waiting, 60)
        assert record is not None
