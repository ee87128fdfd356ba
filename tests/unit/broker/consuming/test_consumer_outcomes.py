"""Idle, cancelled, closed, retriable and fatal are five outcomes; none of them loses a message."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import BackendError, Closed, ConfigurationError, ConnectionFailed
from broker.hooks import Event, FetchFailed
from broker.messages import Outcome, SettleState
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming, until


async def test_idle_returns_none() -> None:
    async with consuming(ScriptedSource()) as consumer:
        assert await consumer.next_message(timeout=0.01) is None
        assert len(await consumer.next_batch(timeout=0.01)) == 0


async def test_a_cancelled_waiter_loses_nothing() -> None:
    source = ScriptedSource()
    async with consuming(source) as consumer:
        first = asyncio.create_task(consumer.next_message())
        second = asyncio.create_task(consumer.next_message())
        await asyncio.sleep(0)
        source.add("1")
        await asyncio.sleep(0)
        first.cancel()
        message = await asyncio.wait_for(second, 60)
        assert message is not None
        assert message.id == "1"


@pytest.mark.parametrize("steps", range(8))
async def test_a_waiter_cancelled_at_any_step_leaves_its_message_to_the_next(steps: int) -> None:
    source = ScriptedSource()
    async with consuming(source) as consumer:
        waiter = asyncio.create_task(consumer.next_message())
        await asyncio.sleep(0)
        source.add("1")
        for _ in range(steps):
            await asyncio.sleep(0)
        waiter.cancel()
        results = await asyncio.gather(waiter, return_exceptions=True)
        if isinstance(results[0], asyncio.CancelledError):
            message = await consumer.next_message(timeout=5)
            assert message is not None
            assert message.id == "1"
        else:
            assert results[0] is not None


async def test_a_close_ends_iterations_and_wakes_waiters() -> None:
    async with consuming(ScriptedSource()) as consumer:

        async def iterate() -> list[str]:
            return [message.id async for message in consumer]

        iteration = asyncio.create_task(iterate())
        waiter = asyncio.create_task(consumer.next_message())
        await asyncio.sleep(0)
        await consumer.close()
        assert await iteration == []
        with pytest.raises(Closed):
            await waiter
        with pytest.raises(Closed):
            await consumer.next_batch()


async def test_a_retriable_error_is_an_event_and_fetching_continues() -> None:
    source = ScriptedSource()
    events: list[Event] = []
    async with consuming(source, events=events) as consumer:
        source.fail(ConnectionFailed("gone"))
        source.add("1")
        message = await consumer.next_message(timeout=5)
        assert message is not None
    assert [type(event) for event in events if isinstance(event, FetchFailed)] == [FetchFailed]


async def test_a_fatal_error_is_raised_once_and_releases_the_buffer() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2")
    async with consuming(source) as consumer:
        assert await consumer.next_message(timeout=5) is not None
        source.fail(BackendError("broken"))
        with pytest.raises(BackendError, match="broken"):
            _ = [message async for message in consumer]
        with pytest.raises(Closed) as closed:
            await consumer.next_message()
        assert isinstance(closed.value.__cause__, BackendError)
    assert len(source.outcomes(Outcome.RELEASE)) == source.fetched > 0


async def test_a_fatal_error_lets_handlers_finish_and_ends_receive() -> None:
    source = ScriptedSource()
    source.add("1")
    handled: list[str] = []
    async with consuming(source) as consumer:

        async def handle(message: object) -> None:
            source.fail(BackendError("broken"))
            await until(lambda: not source.errors)
            handled.append("finished")

        with pytest.raises(BackendError, match="broken"):
            await consumer.receive(handle, concurrency=3)
    assert handled == ["finished"]
    assert source.outcomes(Outcome.ACK) == ["1"]


async def test_break_needs_no_clean_up() -> None:
    source = ScriptedSource()
    source.add(*map(str, range(50)))
    seen: list[str] = []
    async with consuming(source) as consumer:
        for _ in range(50):
            async for message in consumer:
                seen.append(message.id)
                await message.ack()
                break
    assert sorted(seen, key=int) == [str(n) for n in range(50)]
    assert len(source.outcomes(Outcome.ACK)) == 50


async def test_stop_when_idle_ends_only_when_nothing_is_unsettled() -> None:
    source = ScriptedSource()
    source.add("1", "2")
    async with consuming(source, stop_when_idle=0.05) as consumer:
        first = await consumer.next_message()
        second = await consumer.next_message()
        assert first is not None
        assert second is not None
        assert await consumer.next_message(timeout=0.2) is None
        assert first.state is SettleState.OPEN
        await first.ack()
        await second.ack()
        assert [message async for message in consumer] == []
        assert await consumer.next_message() is None


async def test_a_batch_larger_than_the_bound_is_refused() -> None:
    async with consuming(ScriptedSource(), max_outstanding=10) as consumer:
        with pytest.raises(ConfigurationError, match="max_outstanding"):
            await consumer.next_batch(11)
        with pytest.raises(ConfigurationError, match="max_messages"):
            consumer.batches(0)


async def test_a_call_before_the_open_raises_with_advice() -> None:
    source = ScriptedSource()
    async with consuming(source) as consumer:
        pass
    with pytest.raises(Closed):
        await consumer.open()
