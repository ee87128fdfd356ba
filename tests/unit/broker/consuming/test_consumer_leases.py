"""Expired messages are not handed over, and no delay outlasts a lease that is not renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

import pytest

import broker
from broker.capabilities import LeaseMode
from broker.consuming.retry.policy import Retry
from broker.errors import LeaseLost, Unsupported
from broker.hooks import Event, HandlerFailed, LeaseExpired
from broker.messages import Message, Outcome, SettleState
from broker_inmem import ManualClock
from tests.unit.broker.consuming.scripted_source import Letters, ScriptedSource, consuming, received, until
from tests.unit.broker.consuming.warp import in_jumping_time

LEASE = 10.0


class Leasing(ScriptedSource):
    """Reports the leases in `over` as expired, and `left` seconds for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.over: set[str] = set()
        self.left = LEASE

    def expire_leases(self, messages: Sequence[Message[Any]]) -> None:
        assert self.listener is not None
        if over := [message for message in messages if message.id in self.over]:
            self.listener.lost(over)


class Fixed(Leasing):
    def lease_left(self, message: Message[Any]) -> float:
        return 0.0 if message.id in self.over else self.left


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("batches", [False, True])
async def test_a_buffered_message_with_an_expired_lease_is_not_delivered(batches: bool, ordered: bool) -> None:
    source = Leasing()
    for number in range(4):
        source.add(str(number), key=b"%d" % (number % 2))
    events: list[Event] = []
    async with consuming(source, events=events, ordered_by_key=ordered) as consumer:
        first = await received(consumer)
        assert first.id == "0"
        # As after a frozen process.
        source.over = {"1"}
        await first.ack()
        second = (await consumer.next_batch(4, timeout=5))[0] if batches else await received(consumer)
        assert second.id == "2"
        lost = [event.message for event in events if isinstance(event, LeaseExpired)]
        assert [(message.id, message.state) for message in lost] == [("1", SettleState.LOST)]
        if ordered:
            # It must be redelivered before the next message of its key.
            await until(lambda: source.outcomes(Outcome.RELEASE) == ["3"])


async def test_deliveries_that_no_handler_saw_do_not_count_towards_max_deliveries() -> None:
    source, letters = Leasing(), Letters()
    retry = Retry(max_attempts=2, max_deliveries=2)
    async with consuming(source, retry=retry, letters=letters) as consumer:
        # As behind a handler that blocks the event loop: the lease ends in the buffer, again and again.
        source.over = {"1"}
        for attempt in (1, 2, 3):
            source.add("1", attempt=attempt)
            assert await consumer.next_message(timeout=0.05) is None
            assert source.fetched == attempt
        source.over = set()
        for attempt in (4, 5):
            source.add("1", attempt=attempt)
            message = await received(consumer)
            assert source.listener is not None
            source.listener.lost([message])
        source.add("1", attempt=6)
        await until(lambda: source.fetched == 6)
        assert await consumer.next_message(timeout=0.05) is None
    (letter,) = letters.written
    assert letter.attributes["dead-letter-reason"] == "delivered 5 times without being settled"


async def test_an_explicit_delay_is_limited_by_the_rest_of_the_lease() -> None:
    source = Fixed()
    source.add("1")
    async with consuming(source, lease=LeaseMode.FIXED, lease_seconds=LEASE, native_delay=0.0) as consumer:
        message = await received(consumer)
        source.left = 0.5
        with pytest.raises(Unsupported, match=r"8 s exceeds the rest of the message's lease \(0\.50 s\)"):
            await message.nack(8)
        assert message.state is SettleState.OPEN
        await message.nack(0.1)
        again = await received(consumer)
        assert (again.id, again.delivery_attempt) == ("1", 2)
        source.over = {"1"}
        with pytest.raises(LeaseLost):
            await again.nack(8)
        assert again.lease_lost


async def test_a_retry_delay_is_limited_by_the_rest_of_the_lease() -> None:
    source = Fixed()
    source.add("1")
    source.left = 0.2
    events: list[Event] = []
    began: list[float] = []
    retry = Retry(initial=60.0, maximum=60.0, jitter=0)
    async with consuming(
        source, retry=retry, events=events, lease=LeaseMode.FIXED, lease_seconds=LEASE, native_delay=0.0
    ) as consumer:

        async def handle(_: Message[Any]) -> None:
            began.append(monotonic())
            if len(began) == 1:
                raise ValueError("not now")

        working = asyncio.ensure_future(consumer.receive(handle))
        await until(lambda: source.outcomes(Outcome.ACK))
        await consumer.close()
        await working
    assert [event.retry_in for event in events if isinstance(event, HandlerFailed)] == [0.2]
    assert 0.19 <= began[1] - began[0] < 30


async def test_lease_lost_tells_by_the_clock_until_the_message_is_settled() -> None:
    source = Fixed()
    source.add("1")
    async with consuming(source) as consumer:
        message = await received(consumer)
        assert not message.lease_lost
        # As in a handler that blocks the event loop: nothing has told the consumer.
        source.over = {"1"}
        assert message.lease_lost
        assert message.state is SettleState.OPEN
        source.over = set()
        assert not message.lease_lost
        source.over = {"1"}
        await message.ack()
        assert not message.lease_lost


async def test_a_lease_that_is_over_by_the_clock_cannot_be_extended() -> None:
    source = Fixed()
    source.add("1")
    async with consuming(source) as consumer:
        message = await received(consumer)
        source.over = {"1"}
        with pytest.raises(LeaseLost, match="lost before it was extended"):
            await message.extend(60)
        source.over = set()
        await message.extend(60)
        await message.ack()


@in_jumping_time
async def test_the_rest_of_a_renewed_lease_limits_no_delay() -> None:
    source = Fixed()
    source.left = 0.5
    source.add("1")
    async with consuming(source, native_delay=0.0) as consumer:
        message = await received(consumer)
        await message.nack(8)
        again = await received(consumer)
        assert (again.id, again.delivery_attempt) == ("1", 2)
        assert asyncio.get_running_loop().time() == pytest.approx(8)


async def test_a_lease_of_the_broker_in_memory_ends_by_its_clock(broker_bus: broker.Bus, manual_clock: ManualClock):
    await broker_bus.admin.ensure_topic("orders")
    await broker_bus.topic("orders").publish(b"1")
    async with broker_bus.messages("orders", subscription="billing") as inbox:
        message = await received(inbox)
        manual_clock.advance(29)
        assert not message.lease_lost
        manual_clock.advance(2)
        assert message.lease_lost
