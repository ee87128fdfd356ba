"""Conformance tests of hooks: events for publishes, deliveries and settlements, and interceptors."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from broker.hooks import Connected, Event, PublishCall, Published, Received, Settled
from broker.messages import Message, MessageBatch
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.testing.areas.retry import handling
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise
from broker.testing.waiting import eventually, numbered, take

__all__ = ["Observing"]

TRACE = "traceparent"


class Observing(ConformanceCase):
    """Events and interceptors."""

    @promise(
        "observing.trace-is-propagated",
        "An attribute that a publish interceptor adds arrives with the message, for every way to publish, and the "
        "interceptor is left with the outcome of each message.",
    )
    async def test_trace_is_propagated(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[str] = []

        calls: list[PublishCall] = []

        @contextmanager
        def add_trace(call: PublishCall) -> Generator[None]:
            call.messages = [
                message.replace(attributes={**message.attributes, TRACE: "00-abc-def-01"}) for message in call.messages
            ]
            yield
            calls.append(call)

        @contextmanager
        def around(message: Message[Any]) -> Generator[None]:
            seen.append(message.attributes[TRACE])
            yield

        bus.hooks.around_publishing(add_trace)
        bus.hooks.around_handling(around)

        async def handle(message: Message[bytes]) -> None:
            assert message.attributes["own"] == "kept"

        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"1", attributes={"own": "kept"})
            await bus.topic(topic).publish_batch([OutboundMessage(b"2", attributes={"own": "kept"})])
            await bus.topic(topic).enqueue(b"3", attributes={"own": "kept"})
            await handling(inbox.receive(handle), lambda: len(seen) >= 3, inbox, harness.patience)
        assert seen == ["00-abc-def-01"] * 3
        assert [(call.topic, call.origin) for call in calls] == [(topic, "application")] * 3
        assert all(isinstance(outcome, Receipt) for call in calls for outcome in call.outcomes)

    @promise(
        "observing.block-is-wrapped",
        "`async with message` runs inside the handling interceptors, which see its error.",
    )
    async def test_block_is_wrapped(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[str] = []

        @contextmanager
        def around(message: Message[Any]) -> Generator[None]:
            seen.append("begin")
            try:
                yield
            except ValueError as error:
                seen.append(str(error))
                raise
            else:
                seen.append("end")

        bus.hooks.around_handling(around)
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch([b"good", b"bad"])
            for message in await take(inbox, 2, harness.patience):
                async with message:
                    if message.data == b"bad":
                        raise ValueError("raised by the test")
        assert sorted(seen) == sorted(["begin", "end", "begin", "raised by the test"])

    @promise(
        "observing.publishes-are-reported",
        "Every call that publishes emits an event with the outcome of each message and its duration.",
    )
    async def test_publishes_are_reported(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        await bus.topic(topic).publish(b"x")
        await bus.topic(topic).publish_batch(numbered(10))
        for body in numbered(10):
            await bus.topic(topic).enqueue(body)
        await bus.topic(topic).flush()
        seen = [event for event in events if isinstance(event, Published)]
        assert sum(len(event.outcomes) for event in seen) == 21
        assert all(isinstance(outcome, Receipt) for event in seen for outcome in event.outcomes)
        assert all(event.topic == topic and event.seconds >= 0 for event in seen)

    @promise(
        "observing.batch-is-wrapped",
        "A batch handler runs inside the interceptors of batches, which see its messages and its error.",
    )
    async def test_batch_is_wrapped(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[object] = []

        @contextmanager
        def around(messages: Sequence[Message[Any]]) -> Generator[None]:
            seen.append(sorted(message.data or b"" for message in messages))
            try:
                yield
            except ValueError as error:
                seen.append(str(error))
                raise

        async def handle(batch: MessageBatch[bytes]) -> None:
            inbox.stop()
            raise ValueError("raised by the test")

        bus.hooks.around_batch(around)
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch([b"1", b"2"])
            await inbox.receive_batches(handle, max_messages=2, max_wait=harness.patience)
        assert seen == [[b"1", b"2"], "raised by the test"]

    @promise(
        "observing.deliveries-are-reported",
        "Messages and events of their delivery and settlement name topic and subscription.",
    )
    async def test_deliveries_are_reported(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            [message] = await take(inbox, 1, harness.patience)
            assert (message.topic, message.subscription, message.group) == (topic, "readers", None)
            await message.ack()
            await eventually(lambda: any(isinstance(event, Settled) for event in events), harness.patience, "the ack")
        seen = [event for event in events if isinstance(event, Received | Settled)]
        assert {(event.topic, event.subscription, event.group) for event in seen} == {(topic, "readers", None)}

    @promise(
        "observing.origin-of-publishes",
        "A publish interceptor sees whether the application, a dead letter or a redrive publishes.",
    )
    async def test_origin_of_publishes(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        origins: list[tuple[str, str]] = []

        @contextmanager
        def around(call: PublishCall) -> Generator[None]:
            origins.append((call.topic, call.origin))
            yield

        bus.hooks.around_publishing(around)
        async with bus.messages(topic, subscription="readers", dead_letter=dead) as inbox:
            await bus.topic(topic).publish(b"x")
            [message] = await take(inbox, 1, harness.patience)
            await message.reject("bad")
            assert (await bus.admin.redrive(dead, to=[topic])).moved == 1
        assert origins == [(topic, "application"), (dead, "dead_letter"), (topic, "redrive")]

    @promise("observing.settlements-are-reported", "Every settlement is counted in an event: acked, nacked, released.")
    async def test_settlements_are_reported(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)

        def counts() -> tuple[int, int, int]:
            seen = [event for event in events if isinstance(event, Settled)]
            return sum(e.acked for e in seen), sum(e.nacked for e in seen), sum(e.released for e in seen)

        async with bus.messages(topic, subscription="readers", max_outstanding=10) as inbox:
            await bus.topic(topic).publish_batch(numbered(10))
            messages = await take(inbox, 10, harness.patience)
            for message in messages[:5]:
                await message.ack()
            for message in messages[5:8]:
                await message.nack(delay=min(60.0, _native_delay(bus)))
            await eventually(lambda: counts()[0] == 5, harness.patience, "the news of five acks")
        await eventually(lambda: sum(counts()) >= 10, harness.patience, "the news of ten settlements")
        assert counts()[0] == 5

    @promise("observing.removed-listener-gets-no-events", "A removed listener receives no more events.")
    async def test_removed_listener_gets_no_events(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        events: list[Event] = []
        remove = bus.hooks.listen(events.append)
        await bus.topic(topic).publish(b"x")
        heard = len(events)
        assert heard
        remove()
        await bus.topic(topic).publish(b"x")
        assert len(events) == heard

    @promise(
        "observing.connecting-is-reported",
        "The first connection emits an event that names the server, without its credentials.",
    )
    async def test_connecting_is_reported(self, harness: Harness) -> None:
        events: list[Event] = []
        bus = harness.open_bus(harness.url(), None)
        bus.hooks.listen(events.append)
        async with bus:
            await asyncio.sleep(0)
        seen = [event for event in events if isinstance(event, Connected)]
        assert [event.again for event in seen] == [False]
        assert seen[0].server
        assert "@" not in seen[0].server


def _native_delay(bus: Any) -> float:
    return bus.capabilities.messages.native_delay
