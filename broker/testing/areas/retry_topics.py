"""Conformance tests of retry topics: durable waits, unchanged messages, dead letters at the end."""

from __future__ import annotations

import asyncio

import pytest

from broker.bus import Bus
from broker.consuming.retry.topics import RetryTopics
from broker.errors import ConnectionFailed, TopicNotFound
from broker.hooks import Event, RetryWriteFailed
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.areas.retry import handling
from broker.testing.case import ConformanceCase
from broker.testing.faults import Faults
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, take, until_seen

__all__ = ["RetryingOnTopics"]

GROUP = "workers"
TOPICS = RetryTopics((0.3, 0.9))


async def _prepared(harness: Harness, *, partitions: int = 2) -> str:
    topic = await harness.topic(partitions=partitions)
    for name in TOPICS.names(topic, GROUP):
        await harness.create_topic(name, partitions=partitions)
    return topic


class RetryingOnTopics(ConformanceCase):
    """Retry topics of record consumers that serve messages."""

    @requires("records")
    @promise(
        "retry-topics.delay-in-turn",
        "A failed message is redelivered after the delay of each retry topic in turn; others pass it.",
    )
    async def test_delay_in_turn(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await _prepared(harness)
        loop = asyncio.get_running_loop()
        times: list[float] = []
        calls: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.data)
            if message.data == b"bad":
                times.append(loop.time())
                if len(times) < 3:
                    raise ValueError("raised by the test")

        async with bus.records(topic, group=GROUP).as_messages(retry_topics=TOPICS) as inbox:
            await bus.topic(topic).publish(b"bad")
            work = asyncio.ensure_future(handling(inbox.receive(handle), lambda: len(times) == 3, inbox, 30.0))
            await eventually(lambda: times, harness.patience, "the first try")
            await bus.topic(topic).publish_batch(numbered(100))
            await eventually(lambda: len(calls) >= 101, harness.patience, "the handling of those behind it")
            await work
        waits = [times[1] - times[0], times[2] - times[1]]
        for waited, due in zip(waits, TOPICS.delays, strict=True):
            assert due - 0.02 <= waited <= due + 0.5 * harness.patience, f"Waited {waited:.3f} s instead of {due} s"
        assert {body: calls.count(body) for body in calls} == {**once(numbered(100)), b"bad": 3}

    @requires("records")
    @promise(
        "retry-topics.restore-the-original",
        "After its wait a message has its original topic, id, key, body, attributes and time; its attempts go on.",
    )
    async def test_restore_the_original(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await _prepared(harness)
        sent = OutboundMessage(b"body", key=b"key", attributes={"colour": "red"}, id="the-id")
        await bus.topic(topic).publish(sent)
        shown: list[object] = []
        async with bus.records(topic, group=GROUP).as_messages(retry_topics=TOPICS) as inbox:
            for attempt in (1, 2, 3):
                (message,) = await take(inbox, 1, harness.patience)
                assert message.delivery_attempt == attempt
                body = message.key, message.data, dict(message.attributes)
                shown.append((message.topic, message.id, message.given_id, *body, message.publish_time))
                await (message.nack() if attempt < 3 else message.ack())
            await nothing_more(inbox, harness.quiet)
        assert shown[0] == shown[1] == shown[2]
        assert shown[0] == (topic, "the-id", "the-id", b"key", b"body", {"colour": "red"}, message.publish_time)

    @requires("records")
    @promise(
        "retry-topics.last-is-dead-lettered",
        "After the last retry topic a message is dead-lettered with its original topic.",
    )
    async def test_last_is_dead_lettered(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await _prepared(harness), await harness.topic()
        calls: list[int | None] = []

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.delivery_attempt)
            raise ValueError("raised by the test")

        async with (
            bus.records(topic, group=GROUP).as_messages(retry_topics=TOPICS, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers", start="earliest") as letters,
        ):
            work = asyncio.ensure_future(inbox.receive(handle))
            await bus.topic(topic).publish(OutboundMessage(b"x", key=b"k", attributes={"colour": "red"}, id="the-id"))
            (letter,) = await take(letters, 1, harness.patience)
            await inbox.close()
            await work
        assert calls == [1, 2, 3]
        attributes = letter.attributes
        assert (letter.key, letter.data, attributes["colour"]) == (b"k", b"x", "red")
        assert (attributes["dead-letter-topic"], attributes["dead-letter-id"]) == (topic, "the-id")
        assert (attributes["dead-letter-reason"], attributes["dead-letter-attempts"]) == ("failed 3 times", "3")
        assert not [name for name in attributes if name.startswith("retry-letter-")]

    @requires("records")
    @promise(
        "retry-topics.original-waits-for-its-copy",
        "A message is unsettled until its copy is on the retry topic; a failed write is repeated without the handler.",
    )
    async def test_original_waits_for_its_copy(self, harness: Harness) -> None:
        faults = Faults()
        topic = await _prepared(harness, partitions=1)
        bus = await harness.connect(wrap=faults)
        first = TOPICS.names(topic, GROUP)[0]
        faults.publish[first] += [ConnectionFailed("no way to the broker, made by the test")] * 2
        events: list[Event] = []
        bus.hooks.listen(lambda event: events.append(event) if isinstance(event, RetryWriteFailed) else None)
        calls: list[int | None] = []

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.delivery_attempt)
            if len(calls) == 1:
                raise ValueError("raised by the test")

        async def waiting() -> int:
            return (await bus.admin.lag(topic, GROUP)).waiting

        await bus.topic(topic).publish(b"x")
        async with bus.records(topic, group=GROUP).as_messages(retry_topics=TOPICS, commit_every=1) as inbox:
            work = asyncio.ensure_future(inbox.receive(handle))
            await eventually(lambda: events, harness.patience, "the failure of a write")
            assert await waiting() == 1, "The original was settled before its copy was written"
            await eventually(lambda: len(calls) == 2, harness.patience, "the second try")
            await inbox.close()
            await work
        assert (calls, len(events), await waiting()) == ([1, 2], 2, 0)

    @requires("records", "harness.crash")
    @promise(
        "retry-topics.waits-survive-a-crash",
        "Messages that wait on a retry topic outlive their consumer, and are not delivered before they are due.",
    )
    async def test_waits_survive_a_crash(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await _prepared(harness)
        loop = asyncio.get_running_loop()
        other = await harness.connect(short_lease=True)
        await bus.topic(topic).publish_batch(numbered(20))
        inbox = other.records(topic, group=GROUP).as_messages(retry_topics=TOPICS, commit_every=1)
        await inbox.open()
        for message in await take(inbox, 20, harness.patience):
            await message.nack(delay=0.9)
        nacked = loop.time()
        await eventually(lambda: _nothing_waits(bus, topic), harness.patience, "the commit of the originals")
        await harness.crash(other)
        async with bus.records(topic, group=GROUP).as_messages(retry_topics=TOPICS) as inbox:
            seen = await until_seen(inbox, numbered(20), 3 * harness.patience)
            assert loop.time() - nacked >= 0.6
            assert bodies(seen) == once(numbered(20))
            assert {message.delivery_attempt for message in seen} == {2}

    @requires("records")
    @promise(
        "retry-topics.must-exist",
        "A consumer whose retry topics are missing raises when it opens, and creates none.",
    )
    async def test_must_exist(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        with pytest.raises(TopicNotFound) as caught:
            await bus.records(topic, group=GROUP).as_messages(retry_topics=TOPICS).open()
        name = TOPICS.names(topic, GROUP)[0]
        assert name in str(caught.value)
        assert name not in await bus.admin.topics()


async def _nothing_waits(bus: Bus, topic: str) -> bool:
    return (await bus.admin.lag(topic, GROUP)).waiting == 0
