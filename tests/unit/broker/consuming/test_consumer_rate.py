"""`max_rate`: how many messages a consumer hands over per second."""

from __future__ import annotations

import asyncio

from broker.consuming.retry.policy import Retry
from broker.messages import Message, MessageBatch, Outcome
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming, received, until
from tests.unit.broker.consuming.warp import in_jumping_time


def now() -> float:
    return round(asyncio.get_running_loop().time(), 3)


@in_jumping_time
async def test_messages_are_handed_over_at_the_rate() -> None:
    source = ScriptedSource()
    source.add(*(str(number) for number in range(10)))
    times: list[float] = []
    async with consuming(source, max_rate=2.0) as consumer:

        async def handle(message: Message) -> None:
            times.append(now())
            if len(times) == 10:
                consumer.stop()

        await consumer.receive(handle, concurrency=4)
    assert times == [number / 2 for number in range(10)]


@in_jumping_time
async def test_a_high_rate_is_reached() -> None:
    source = ScriptedSource()
    source.add(*(str(number) for number in range(5000)))
    async with consuming(source, max_rate=1000.0, max_outstanding=5000) as consumer:
        for _ in range(5000):
            await (await received(consumer)).ack()
        assert 4.8 <= now() <= 5.1


@in_jumping_time
async def test_retries_count_and_buffered_leases_are_renewed() -> None:
    source = ScriptedSource()
    source.add("1", "2", "3")
    times: list[float] = []
    async with consuming(source, max_rate=0.01, lease_seconds=30.0, prefetch=3, retry=Retry(initial=0)) as consumer:

        async def handle(message: Message) -> None:
            times.append(now())
            if len(times) == 1:
                raise ValueError("not yet")
            if len(times) == 4:
                consumer.stop()

        await consumer.receive(handle)
    assert times == [0, 100, 200, 300]
    assert set(source.extended) == {"1", "2", "3"}
    assert sorted(source.outcomes(Outcome.ACK)) == ["1", "2", "3"]


@in_jumping_time
async def test_batches_are_not_split_and_keep_the_average() -> None:
    source = ScriptedSource()
    source.add(*(str(number) for number in range(250)))
    batches: list[tuple[float, int]] = []
    async with consuming(source, max_rate=10.0) as consumer:

        async def handle(batch: MessageBatch) -> None:
            batches.append((now(), len(batch)))
            if sum(size for _, size in batches) == 250:
                consumer.stop()

        await consumer.receive_batches(handle, max_messages=100, max_wait=5.0)
    assert batches == [(0, 100), (10, 100), (20, 50)]


@in_jumping_time
async def test_a_timeout_passes_while_the_rate_waits_and_the_consumer_is_not_idle() -> None:
    source = ScriptedSource()
    source.add("1", "2")
    async with consuming(source, max_rate=0.01, stop_when_idle=1.0) as consumer:
        await (await received(consumer)).ack()
        assert await consumer.next_message(timeout=50) is None
        assert now() == 50
        await (await received(consumer)).ack()
        assert now() == 100
        assert await consumer.next_message() is None


@in_jumping_time
async def test_neither_pause_nor_resume_breaks_the_rate() -> None:
    source = ScriptedSource()
    source.add("1", "2", "3")
    async with consuming(source, max_rate=0.1) as consumer:
        await received(consumer)
        consumer.pause()
        consumer.resume()
        await received(consumer)
        assert now() == 10
        consumer.pause()
        await asyncio.sleep(100)
        waiting = asyncio.create_task(consumer.next_message())
        await asyncio.sleep(100)
        assert not waiting.done()
        consumer.resume()
        await waiting
        assert now() == 210


@in_jumping_time
async def test_a_close_does_not_wait_for_the_rate() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2")
    async with consuming(source, max_rate=0.001) as consumer:
        (await received(consumer)).in_use = False
        waiting = asyncio.create_task(consumer.next_message())
        await until(lambda: source.fetched == 2)
        await consumer.close()
        await asyncio.gather(waiting, return_exceptions=True)
        assert now() == 0
    assert sorted(source.outcomes(Outcome.RELEASE)) == ["1", "2"]
