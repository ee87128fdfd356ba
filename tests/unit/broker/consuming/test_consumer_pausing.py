"""A paused consumer: nothing is handed over, and what was fetched stays its own."""

from __future__ import annotations

import asyncio

from broker.bus import connect
from broker.consuming.retry.policy import Retry
from broker.messages import Message, MessageBatch, Outcome
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming, until
from tests.unit.broker.consuming.warp import in_jumping_time


@in_jumping_time
async def test_a_paused_consumer_hands_nothing_over_and_renews_leases() -> None:
    source = ScriptedSource()
    async with consuming(source, lease_seconds=30.0, max_outstanding=5) as consumer:
        consumer.pause()
        waiting = asyncio.create_task(consumer.next_batch(5))
        source.add("1", "2", "3", "4", "5", "6", "7")
        await asyncio.sleep(3600)
        assert not waiting.done()
        assert source.fetched == 5
        assert set(source.extended) == {"1", "2", "3", "4", "5"}
        assert len(source.extended) >= 5 * 3600 // 30
        consumer.resume()
        assert [message.id for message in await waiting] == ["1", "2", "3", "4", "5"]


@in_jumping_time
async def test_calls_of_a_paused_consumer_time_out() -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source) as consumer:
        consumer.pause()
        assert await consumer.next_message(timeout=10) is None
        assert len(await consumer.next_batch(timeout=10)) == 0
        consumer.resume()
        message = await consumer.next_message(timeout=10)
        assert message is not None
        assert message.id == "1"


async def test_a_pause_before_the_opening_holds() -> None:
    async with connect("inmem:") as bus:
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"1")
        consumer = bus.messages("orders", subscription="billing")
        consumer.pause()
        async with consumer:
            assert await consumer.next_message(timeout=0.05) is None
            consumer.resume()
            assert await consumer.next_message(timeout=10) is not None


@in_jumping_time
async def test_a_running_handler_ends_and_its_failure_waits() -> None:
    source = ScriptedSource()
    source.add("1")
    tries: list[int] = []
    begun, finish = asyncio.Event(), asyncio.Event()
    async with consuming(source, retry=Retry(initial=1.0)) as consumer:

        async def handle(message: Message) -> None:
            tries.append(1)
            begun.set()
            await finish.wait()
            if len(tries) == 1:
                raise ValueError("not yet")

        work = asyncio.create_task(consumer.receive(handle))
        await begun.wait()
        consumer.pause()
        finish.set()
        await asyncio.sleep(600)
        assert len(tries) == 1
        consumer.resume()
        await until(lambda: source.outcomes(Outcome.ACK))
        assert len(tries) == 2
        consumer.stop()
        await work


@in_jumping_time
async def test_a_paused_consumer_is_not_idle_and_can_be_closed() -> None:
    source = ScriptedSource(redelivers=False)
    batches: list[int] = []
    async with consuming(source, stop_when_idle=1.0) as consumer:

        async def handle(batch: MessageBatch) -> None:
            batches.append(len(batch))

        work = asyncio.create_task(consumer.receive_batches(handle))
        consumer.pause()
        await asyncio.sleep(600)
        assert not work.done()
        source.add("1", "2")
        await asyncio.sleep(1)
        await consumer.close()
        await work
    assert batches == []
    assert sorted(source.outcomes(Outcome.RELEASE)) == ["1", "2"]


@in_jumping_time
async def test_a_resumed_consumer_ends_when_it_is_idle() -> None:
    async with consuming(ScriptedSource(), stop_when_idle=10.0) as consumer:
        consumer.pause()
        await asyncio.sleep(100)
        consumer.resume()
        resumed = asyncio.get_running_loop().time()
        assert await consumer.next_message() is None
        assert asyncio.get_running_loop().time() - resumed >= 10.0
