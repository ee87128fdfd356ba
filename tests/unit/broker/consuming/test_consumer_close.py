"""Closing a consumer: what it releases, what it waits for, and which errors waiting calls raise."""

from __future__ import annotations

import asyncio

import pytest

from broker.consuming.settle_loop import SettleLoop
from broker.driver.contract import Settlement
from broker.errors import LeaseLost, SettleError
from broker.hooks import Event, SettleFailed
from broker.messages import Message, Outcome, SettleState
from tests.unit.broker.consuming.scripted_source import Letters, ScriptedSource, consuming, received, until


async def test_close_releases_unhandled_messages_at_once() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2", "3")
    async with consuming(source, close_timeout=60) as consumer:
        message = await received(consumer)
        started = asyncio.get_running_loop().time()
        await consumer.close()
        assert asyncio.get_running_loop().time() - started < 30
        with pytest.raises(LeaseLost, match="was given back before it was settled: its consumer closed") as caught:
            await message.ack()
        assert "max_lease" not in caught.value.advice
        with pytest.raises(LeaseLost, match="was given back before it was extended"):
            await message.extend(5)
    assert source.fetched == len(source.outcomes(Outcome.RELEASE))


async def test_close_waits_for_a_running_block() -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source) as consumer:
        message = await received(consumer)
        entered = asyncio.Event()
        closing = asyncio.Event()

        async def work() -> None:
            async with message:
                entered.set()
                await asyncio.sleep(0)
                await closing.wait()

        working = asyncio.create_task(work())
        await entered.wait()
        close = asyncio.create_task(consumer.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not close.done()
        closing.set()
        await close
        await working
    assert source.outcomes(Outcome.ACK) == ["1"]


async def test_a_handler_may_close_its_own_consumer() -> None:
    source = ScriptedSource()
    source.add("1", "2")
    async with consuming(source) as consumer:

        async def handle(message: Message) -> None:
            await consumer.close()

        async with asyncio.timeout(60):
            await consumer.receive(handle)
    assert source.outcomes(Outcome.ACK) == ["1"]


class DeafSource(ScriptedSource):
    """Ignores `interrupt`."""

    def interrupt(self) -> None:
        return


async def test_close_does_not_wait_for_a_source_that_ignores_interrupts() -> None:
    async with consuming(DeafSource(), close_timeout=0.1) as consumer:
        assert await consumer.next_message(timeout=0.01) is None
        async with asyncio.timeout(60):
            await consumer.close()


async def test_close_answers_acks_that_the_source_did_not_answer() -> None:
    source = ScriptedSource()
    source.add("1", "2")
    events: list[Event] = []
    async with consuming(source, events=events, close_timeout=0.05) as consumer:
        first, second = await received(consumer), await received(consumer)
        source.settle_gate.clear()
        acks = [asyncio.create_task(first.ack())]
        await until(lambda: source.settle_calls == 1)
        # The settle loop waits for the answer to the first.
        acks.append(asyncio.create_task(second.ack()))
        await asyncio.sleep(0)
    for ack in acks:
        with pytest.raises(SettleError, match="was closed before"):
            await asyncio.wait_for(ack, 60)
    assert {message.state for message in (first, second)} == {SettleState.UNKNOWN}
    assert [event.message for event in events if isinstance(event, SettleFailed)] == [first, second]


async def test_an_ack_after_the_last_settlement_is_answered() -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source) as consumer:
        message = await received(consumer)
        pump = SettleLoop(source, lambda settlements, results, seconds: None)
        await pump.close(asyncio.get_running_loop().time() + 5)
        with pytest.raises(SettleError, match="was closed before"):
            await asyncio.wait_for(pump.put_and_wait([Settlement(message, Outcome.ACK)]), 60)


@pytest.mark.parametrize("written", [False, True])
async def test_a_reject_interrupted_by_close_raises(written: bool) -> None:
    source, letters = ScriptedSource(), Letters()
    source.add("1")
    async with consuming(source, letters=letters, close_timeout=0.05) as consumer:
        message = await received(consumer)
        (source.settle_gate if written else letters.gate).clear()
        reject = asyncio.create_task(message.reject("no use"))
        await until(lambda: source.settle_calls if written else letters.tried)
    with pytest.raises(SettleError, match="was closed before"):
        await asyncio.wait_for(reject, 60)
    assert len(letters.written) == written
