"""Opening a consumer concurrently with another open, a close, a stop, or a cancellation at any step."""

from __future__ import annotations

import asyncio

import pytest

from broker.bus import Bus
from broker.consuming.consumer import MessageConsumer
from broker.consuming.engine import Engine
from broker.errors import BrokerError, Closed
from broker.messages import Message, MessageBatch

STEPS = range(12)


@pytest.fixture
async def bus(broker_bus: Bus) -> Bus:
    await broker_bus.admin.ensure_topic("orders", partitions=1)
    await broker_bus.admin.ensure_subscription("orders", "billing")
    await broker_bus.topic("orders").publish_batch([b"%d" % n for n in range(10)])
    return broker_bus


def billing(bus: Bus, *, idle: float | None = 0.05) -> MessageConsumer:
    """A consumer whose server takes some loop steps to answer."""
    consumer = bus.messages("orders", subscription="billing", stop_when_idle=idle)
    at_once = consumer._make_engine

    async def make_engine() -> Engine:
        await step(6)
        return await at_once()

    consumer._make_engine = make_engine
    return consumer


async def drain(consumer: MessageConsumer) -> int:
    count = 0
    async for message in consumer:
        await message.ack()
        count += 1
    return count


async def step(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def begun(bus: Bus, steps: int, *, idle: float | None = 0.05) -> tuple[MessageConsumer, asyncio.Task[None]]:
    """A consumer whose open has made `steps` loop steps."""
    consumer = billing(bus, idle=idle)
    opening = asyncio.create_task(consumer.open())
    await step(steps)
    return consumer, opening


async def outcome(opening: asyncio.Task[None]) -> BaseException | None:
    """The error that it ended with."""
    return (await asyncio.gather(opening, return_exceptions=True))[0]


async def everything_is_there_for_another(bus: Bus) -> None:
    assert (await bus.admin.lag("orders", "billing")).unsettled == 0
    async with billing(bus) as other:
        assert await drain(other) == 10


async def test_concurrent_opens_open_once(bus: Bus) -> None:
    async with billing(bus) as consumer:
        await asyncio.gather(consumer.open(), consumer.open())
        assert await drain(consumer) == 10
    consumer = billing(bus)
    await bus.topic("orders").publish_batch([b"x"] * 10)
    await asyncio.gather(consumer.open(), consumer.open())
    await consumer.close()
    await everything_is_there_for_another(bus)


@pytest.mark.parametrize("steps", STEPS)
async def test_a_close_during_the_opening_is_final(bus: Bus, steps: int) -> None:
    consumer, opening = await begun(bus, steps)
    await consumer.close()
    # If the close came too late for that, it closed an open consumer.
    ended = await outcome(opening)
    assert ended is None or isinstance(ended, Closed)
    assert consumer.closed
    with pytest.raises(Closed):
        await consumer.open()
    with pytest.raises(Closed):
        await consumer.next_message()
    await everything_is_there_for_another(bus)


@pytest.mark.parametrize("steps", STEPS)
async def test_a_cancelled_opening_leaves_nothing_open(bus: Bus, steps: int) -> None:
    consumer, opening = await begun(bus, steps)
    opening.cancel()
    ended = await outcome(opening)
    if isinstance(ended, asyncio.CancelledError):
        await everything_is_there_for_another(bus)
        await consumer.open()
    await consumer.close()
    assert (await bus.admin.lag("orders", "billing")).unsettled == 0


@pytest.mark.parametrize("steps", STEPS)
async def test_a_cancellation_during_a_close_is_raised(bus: Bus, steps: int) -> None:
    consumer, opening = await begun(bus, steps)
    opened = opening.done()
    opening.cancel()
    await consumer.close()
    ended = await outcome(opening)
    assert opened or isinstance(ended, asyncio.CancelledError)
    await everything_is_there_for_another(bus)


@pytest.mark.parametrize("steps", STEPS)
async def test_a_stop_during_the_opening_takes_effect(bus: Bus, steps: int) -> None:
    consumer, opening = await begun(bus, steps, idle=None)
    consumer.stop()
    await opening
    async with asyncio.timeout(60):
        assert [message async for message in consumer] == []
    await consumer.close()
    await everything_is_there_for_another(bus)


async def test_a_receive_that_begins_after_the_stop_returns(bus: Bus) -> None:
    async def handle(message: Message[bytes]) -> None:
        raise AssertionError("a stopped consumer delivers nothing")

    async def handle_all(batch: MessageBatch[bytes]) -> None:
        raise AssertionError("a stopped consumer delivers nothing")

    async with billing(bus, idle=None) as consumer:
        working = [
            asyncio.create_task(consumer.receive(handle)),
            asyncio.create_task(consumer.receive_batches(handle_all)),
        ]
        consumer.stop()
        async with asyncio.timeout(60):
            await asyncio.gather(*working)
    with pytest.raises(Closed):
        await consumer.receive(handle)
    await everything_is_there_for_another(bus)


async def test_a_consumer_that_was_never_opened_raises_closed(bus: Bus) -> None:
    consumer = billing(bus)
    for call in (
        consumer.next_message(),
        consumer.next_batch(),
        anext(aiter(consumer)),
        anext(aiter(consumer.batches())),
    ):
        with pytest.raises(Closed, match="is not open"):
            await call


async def test_a_failed_opening_may_be_repeated(bus: Bus) -> None:
    consumer = bus.messages("orders", subscription="later", create=False, stop_when_idle=0.05)
    with pytest.raises(BrokerError):
        await consumer.open()
    await bus.admin.ensure_subscription("orders", "later")
    async with consumer:
        assert await drain(consumer) == 10
