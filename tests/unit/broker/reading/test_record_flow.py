"""How records flow through the consumer: iterations, idleness, the bounds of its buffer, the cost of a batch."""

from __future__ import annotations

import asyncio

from broker.driver.contract import TopicPartition
from broker.errors import ConnectionFailed
from broker.hooks import FetchFailed
from tests.unit.broker.consuming.warp import in_jumping_time
from tests.unit.broker.reading.record_bench import bench, drain, turns


async def test_stop_when_idle_ends_iterations_and_calls_without_a_timeout() -> None:
    async with bench(stop_when_idle=0.02) as b:
        b.source.append(1, 2)
        assert [r.offset async for r in b.consumer] == [1, 2]
        b.source.append(3)
        assert [[r.offset for r in batch] async for batch in b.consumer.batches()] == [[3]]
        assert await b.consumer.next_record() is None


async def test_joining_is_not_idleness() -> None:
    async with bench(stop_when_idle=0.02) as b:
        b.consumer._fetcher._idle_since = asyncio.get_running_loop().time() + 10
        iterating = asyncio.create_task(drain(b.consumer))
        await turns()
        b.source.listener.assigned([])
        assert await asyncio.wait_for(iterating, 60) == []


async def test_idle_time_restarts_with_partitions_that_come_later() -> None:
    async with bench(stop_when_idle=60) as b:
        fetcher, now = b.consumer._fetcher, asyncio.get_running_loop().time
        b.source.listener.assigned([TopicPartition("orders", 0)])
        fetcher._idle_since = now() - 50
        b.source.listener.assigned([TopicPartition("orders", 1)])
        assert fetcher.idle_since is not None
        assert now() - fetcher.idle_since < 50


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
        await turns()
        assert len(b.source.fetches) == 1, "six of ten are still there"
        await b.consumer.next_batch(1)
        await b.until(lambda: len(b.source.fetches) > 1)
        assert b.source.fetches[1][0] == 5
        total = 5
        while total < 100:
            total += len(await b.consumer.next_batch(3))
            assert len(b.consumer._fetcher.buffer) <= 10
        assert total == 100


async def test_the_buffer_is_bounded_in_bytes() -> None:
    async with bench(max_buffered_bytes=50) as b:
        for offset in range(10):
            b.source.append(offset, data=b"x" * 19)
        await b.buffered(3)
        await turns()
        assert b.consumer._fetcher.buffer.size == 60, "exceeded by one record at most"
        assert [r.offset for r in await b.consumer.next_batch(2)] == [0, 1]
        await b.buffered(3)
        offsets = [2]
        while len(offsets) < 9:
            offsets += [r.offset for r in await b.consumer.next_batch(1)]
        assert offsets[1:] == list(range(2, 10))
        assert b.consumer._fetcher.buffer.size == 0


async def test_a_consumer_that_never_waits_lets_other_tasks_run() -> None:
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


@in_jumping_time
async def test_a_batch_waits_until_it_is_full_or_old() -> None:
    async with bench() as b:
        time = asyncio.get_running_loop().time
        began = time()
        waiting = asyncio.create_task(b.consumer.next_batch(3, max_wait=10))
        await asyncio.sleep(5)
        b.source.append(0)
        await asyncio.sleep(5)
        b.source.append(1, 2, 3)
        assert [record.offset for record in await waiting] == [0, 1, 2]
        assert time() - began == 10
        assert [record.offset for record in await b.consumer.next_batch(3, max_wait=10)] == [3]
        assert time() - began == 20
        assert len(await b.consumer.next_batch(3, timeout=5, max_wait=10)) == 0
        b.source.append(4)
        assert [record.offset for record in await b.consumer.next_batch(3, timeout=5, max_wait=10)] == [4]
        assert time() - began == 30
        b.source.append(5, 6)
        async for batch in b.consumer.batches(2, max_wait=10):
            assert [record.offset for record in batch] == [5, 6]
            break
        assert time() - began == 30


@in_jumping_time
async def test_a_batch_that_cannot_grow_is_handed_over() -> None:
    async with bench(max_buffered=4) as b:
        b.source.append(0, 1, 2)
        began = asyncio.get_running_loop().time()
        assert [record.offset for record in await b.consumer.next_batch(4, max_wait=3600)] == [0, 1, 2]
        assert asyncio.get_running_loop().time() == began


@in_jumping_time
async def test_records_are_handed_over_at_the_rate() -> None:
    async with bench(max_rate=2.0) as b:
        time = asyncio.get_running_loop().time
        began = time()
        b.source.append(*range(20))
        for number in range(4):
            record = await b.consumer.next_record()
            assert record is not None
            assert record.offset == number
            assert time() - began == number / 2
        assert await b.consumer.next_record(timeout=0.25) is None
        assert time() - began == 1.75
        assert [r.offset for r in await b.consumer.next_batch(10)] == list(range(4, 14))
        assert time() - began == 2
        assert [r.offset for r in await b.consumer.next_batch(10)] == list(range(14, 20))
        assert time() - began == 7
