"""A handler that raises after it settled or lost its message is reported like any other."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import pytest

from broker.bus import Bus
from broker.consuming.retry.policy import Retry
from broker.errors import LeaseLost
from broker.hooks import DeadLettered, Event, HandlerFailed
from broker.messages import Message, MessageBatch, Outcome
from broker.outbound import OutboundMessage
from tests.unit.broker.consuming.scripted_source import Letters, ScriptedSource, consuming

Settle = Callable[[Message], Awaitable[None]]


async def ack(message: Message) -> None:
    await message.ack()


async def nack(message: Message) -> None:
    await message.nack(1000)


async def reject(message: Message) -> None:
    await message.reject("bad")


def failures(events: list[Event]) -> list[tuple[str, str, int, float | None]]:
    return [
        (event.message.id, str(event.error), event.failures, event.retry_in)
        for event in events
        if isinstance(event, HandlerFailed)
    ]


@pytest.mark.parametrize("settle", [ack, nack, reject])
async def test_a_handler_error_after_settling_is_reported(settle: Settle, caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1")
    events: list[Event] = []
    async with consuming(source, events=events, letters=Letters(), stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            await settle(message)
            raise ValueError("too late")

        with caplog.at_level(logging.WARNING, "broker"):
            await consumer.receive(handle)
    assert failures(events) == [("1", "too late", 1, None)]
    assert f"after its {settle.__name__}" in caplog.text
    assert "too late" in caplog.text
    assert len(source.settled) == 1


async def test_a_block_error_after_settling_is_reported() -> None:
    source = ScriptedSource()
    source.add("1", "2")
    events: list[Event] = []
    async with consuming(source, events=events, stop_when_idle=0.05) as consumer:
        async for message in consumer:
            async with message:
                await message.ack()
                raise ValueError(f"too late for {message.id}")
    assert failures(events) == [("1", "too late for 1", 1, None), ("2", "too late for 2", 1, None)]
    assert source.outcomes(Outcome.ACK) == ["1", "2"]


async def test_a_batch_handler_error_after_settling_is_reported() -> None:
    source = ScriptedSource()
    source.add("1", "2")
    events: list[Event] = []
    async with consuming(source, events=events, stop_when_idle=0.05) as consumer:

        async def handle(batch: MessageBatch) -> None:
            await batch.ack()
            raise ValueError("too late")

        await consumer.receive_batches(handle)
    assert failures(events) == [("1", "too late", 1, None), ("2", "too late", 1, None)]


async def test_failures_after_a_lost_lease_are_reported_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource()
    events: list[Event] = []
    source.add("1")
    async with consuming(source, events=events, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            if message.delivery_attempt == 1:
                assert source.listener is not None
                source.listener.lost([message])
                source.add("1", attempt=2)
            await message.ack()

        with caplog.at_level(logging.WARNING, "broker"):
            await consumer.receive(handle)
    (failed,) = (event for event in events if isinstance(event, HandlerFailed))
    assert isinstance(failed.error, LeaseLost)
    assert (failed.failures, failed.retry_in) == (1, None)
    assert "after it was lost" in caplog.text
    assert source.outcomes(Outcome.ACK) == ["1"]


async def test_a_failure_after_a_lost_lease_uses_up_an_attempt() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1")
    tries: list[int | None] = []
    retry = Retry(max_attempts=2, initial=0.001, maximum=0.01)
    async with consuming(source, letters=letters, retry=retry, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            tries.append(message.delivery_attempt)
            if message.delivery_attempt == 1:
                assert source.listener is not None
                source.listener.lost([message])
                source.add("1", attempt=2)
            raise ValueError("bad")

        await consumer.receive(handle)
    assert tries == [1, 2]
    assert [letter.attributes["dead-letter-reason"] for letter in letters.written] == ["failed 2 times"]


async def test_equal_ids_of_two_topics_are_counted_separately(broker_bus: Bus) -> None:
    topics = ["billing", "orders", "letters"]
    for topic in topics:
        await broker_bus.admin.ensure_topic(topic)
    tries: list[str] = []
    events: list[Event] = []
    broker_bus.hooks.listen(events.append)
    retry = Retry(max_attempts=3, initial=0.001, maximum=0.01)
    async with broker_bus.messages(
        topics[:2], subscription="readers", retry=retry, dead_letter="letters", stop_when_idle=0.1
    ) as inbox:

        async def handle(message: Message) -> None:
            tries.append(message.topic)
            raise ValueError("bad")

        for topic in topics[:2]:
            await broker_bus.topic(topic).publish(OutboundMessage(b"x", id="1"))
        await inbox.receive(handle)
    assert sorted(tries) == ["billing"] * 3 + ["orders"] * 3
    assert [event.reason for event in events if isinstance(event, DeadLettered)] == ["failed 3 times"] * 2
