"""Settling: states, cancellation, refused acks, leases and flow control."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from broker.capabilities import ConfirmedAck, LeaseMode
from broker.consuming.retry.policy import Retry
from broker.errors import BrokerError, LeaseLost, OperationTimeout, Unsupported
from broker.hooks import Event, LeasesNotRenewed, SettleFailed
from broker.messages import Message, Outcome, SettleState
from tests.unit.broker.consuming.scripted_source import Letters, ScriptedSource, consuming, received, until


async def test_cancelling_an_ack_does_not_cancel_the_settlement() -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source) as consumer:
        message = await received(consumer)
        source.settle_gate.clear()
        ack = asyncio.create_task(message.ack())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ack.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ack
        source.settle_gate.set()
    assert source.outcomes(Outcome.ACK) == ["1"]
    assert message.state is SettleState.SETTLED


async def test_a_refused_ack_raises_and_an_unawaited_one_is_an_event() -> None:
    source = ScriptedSource()
    events: list[Event] = []
    source.add("1")
    source.refuse["1"] = LeaseLost("too late")
    async with consuming(source, events=events) as consumer:
        message = await received(consumer)
        with pytest.raises(LeaseLost, match="too late"):
            await message.ack()
        assert message.lease_lost
        source.add("1")

        async def handle(message: Message) -> None:
            consumer.stop()

        await consumer.receive(handle)
    assert len([event for event in events if isinstance(event, SettleFailed)]) == 2


async def test_a_refused_ack_of_a_block_is_an_event_and_the_loop_goes_on() -> None:
    source = ScriptedSource()
    events: list[Event] = []
    source.add("1", "2")
    source.refuse["1"] = LeaseLost("too late")
    async with consuming(source, events=events) as consumer:
        async for message in consumer:
            async with message:
                pass
            if message.id == "2":
                break
    assert [event.message.id for event in events if isinstance(event, SettleFailed)] == ["1"]
    assert source.outcomes(Outcome.ACK) == ["2"]


async def test_an_unanswered_ack_leaves_the_state_unknown() -> None:
    source = ScriptedSource()
    source.add("1")
    source.refuse["1"] = OperationTimeout("no answer")
    async with consuming(source) as consumer:
        message = await received(consumer)
        with pytest.raises(OperationTimeout):
            await message.ack()
        assert message.state is SettleState.UNKNOWN


async def test_a_batch_acks_in_one_settle() -> None:
    source = ScriptedSource()
    source.add(*map(str, range(100)))
    async with consuming(source) as consumer:
        count = 0
        async for batch in consumer.batches(100):
            await batch.ack()
            count += len(batch)
            if count == 100:
                break
    assert len(source.outcomes(Outcome.ACK)) == 100
    assert source.settle_calls == 1


async def test_never_more_than_max_outstanding() -> None:
    source = ScriptedSource()
    source.add(*map(str, range(500)))
    async with consuming(source, max_outstanding=7) as consumer:
        held: list[Message] = []
        handled = 0
        while handled < 500:
            message = await consumer.next_message(timeout=0.01) if len(held) < 7 else None
            if message is not None:
                held.append(message)
            assert source.fetched - len(source.settled) <= 7
            if message is None or len(held) == 7:
                await held.pop(0).ack()
                handled += 1


class NotRenewing(ScriptedSource):
    """Renews no lease, or all but that of "1"."""

    def __init__(self, failure: BaseException | None) -> None:
        super().__init__()
        self.failure = failure

    async def extend(self, messages: Sequence[Message]) -> Sequence[BrokerError | None]:
        if self.failure is not None:
            raise self.failure
        return [OperationTimeout("too slow") if message.id == "1" else None for message in messages]


@pytest.mark.parametrize(
    ("failure", "which", "text"),
    [
        (None, {"1"}, "too slow"),
        (OperationTimeout("no answer"), {"1", "2"}, "no answer"),
        (KeyError("x"), {"1", "2"}, "The backend failed to extend: 'x'"),
    ],
    ids=["one", "all", "bug"],
)
async def test_leases_that_are_not_renewed_are_told_and_tried_again(
    failure: BaseException | None, which: set[str], text: str
) -> None:
    source, events = NotRenewing(failure), list[Event]()
    source.add("1", "2")
    async with consuming(source, lease_seconds=0.03, events=events) as consumer:
        held = await consumer.next_batch(2, timeout=5)
        events.clear()
        await until(lambda: len(events) >= 2)
        for event in events:
            assert isinstance(event, LeasesNotRenewed)
            assert {message.id for message in event.messages} == which
            assert text in str(event.error)
        assert not any(message.lease_lost for message in held)


async def test_a_lease_that_the_broker_ended_is_lost() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1")
    async with consuming(source) as consumer:
        message = await received(consumer)
        assert source.listener is not None
        source.listener.lost([message])
        assert message.lease_lost
        with pytest.raises(LeaseLost):
            await message.ack()


async def test_an_unconfirmed_ack_does_not_wait() -> None:
    source = ScriptedSource()
    source.add("1")
    source.settle_gate.clear()
    async with consuming(source, confirmed=ConfirmedAck.NEVER) as consumer:
        message = await received(consumer)
        async with asyncio.timeout(60):
            await message.ack()
        assert message.state is SettleState.SETTLING
        source.settle_gate.set()
    assert message.state is SettleState.SETTLED


async def test_a_delay_beyond_broker_and_lease_is_refused() -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source, native_delay=1.0, max_lease=5.0, retry=Retry(initial=0, maximum=1)) as consumer:
        message = await received(consumer)
        with pytest.raises(Unsupported, match="600 s"):
            await message.nack(delay=600)
        assert message.state is SettleState.OPEN
        await message.ack()


async def test_without_leases_any_delay_is_kept_in_memory() -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source, native_delay=0.0, lease=LeaseMode.NONE) as consumer:
        message = await received(consumer)
        await message.nack(delay=0.01)
        again = await received(consumer)
        assert again.id == "1"
        assert again.delivery_attempt == 2
        await again.ack()
    assert source.outcomes(Outcome.NACK) == []


@pytest.mark.parametrize("confirmed", ConfirmedAck)
async def test_a_reject_whose_settlement_fails_after_its_letter_raises(confirmed: ConfirmedAck) -> None:
    source, letters = ScriptedSource(), Letters()
    events: list[Event] = []
    source.add("1")
    source.refuse["1"] = LeaseLost("too late")
    async with consuming(source, letters=letters, confirmed=confirmed, events=events) as consumer:
        message = await received(consumer)
        with pytest.raises(LeaseLost, match="too late"):
            await message.reject("no")
        assert message.lease_lost
    assert len(letters.written) == 1
    assert len([event for event in events if isinstance(event, SettleFailed)]) == 1


async def test_a_lease_lost_while_a_letter_is_written_is_reported() -> None:
    source, letters = ScriptedSource(redelivers=False), Letters()
    events: list[Event] = []
    source.add("1")
    letters.gate.clear()
    async with consuming(source, letters=letters, events=events) as consumer:
        message = await received(consumer)
        rejecting = asyncio.create_task(message.reject("no"))
        await until(lambda: letters.tried)
        assert source.listener is not None
        source.listener.lost([message])
        letters.gate.set()
        with pytest.raises(LeaseLost, match="after its lease was lost"):
            await rejecting
    assert len(letters.written) == 1
    assert not source.settled
    assert [event.message for event in events if isinstance(event, SettleFailed)] == [message]


async def test_a_message_lost_during_its_backoff_is_dropped() -> None:
    source = ScriptedSource()
    source.add("1", "2")
    async with consuming(source, native_delay=0.0) as consumer:
        message, other = await received(consumer), await received(consumer)
        await message.nack(delay=0.01)
        await other.nack(delay=0.02)
        assert source.listener is not None
        source.listener.lost([message])
        assert (await received(consumer)).id == "2"
        assert consumer._engine is not None
        assert not len(consumer._engine.policies[0]._holder)
