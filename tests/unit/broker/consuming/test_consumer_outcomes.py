"""Idle, cancelled, closed, retriable and fatal are five outcomes; none of them loses a message."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import BackendError, Closed, ConfigurationError
from broker.messages import Outcome, SettleState
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming, until


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
            message = await consumer.next_message(timeout=60)
            assert message is not None
            assert message.id == "1"
        else:
            assert results[0] is not None


async def test_a_fatal_error_is_raised_once_and_releases_the_buffer() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2")
    async with consuming(source) as consumer:
        assert await consumer.next_message(timeout=60) is not None
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
