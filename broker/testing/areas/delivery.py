"""Conformance tests of delivery: each subscription receives every message."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from broker.messages import Message
from broker.names import ephemeral
from broker.outbound import OutboundMessage
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, log_time, nothing_more, numbered, once, take, until_seen
from broker.topic_patterns import TopicPattern

_FOUND_WITHIN: Final = 10.0
"""Seconds after which a new topic is found."""

__all__ = ["Delivery"]


class Delivery(ConformanceCase):
    """Which messages a subscription receives."""

    @promise("messages.arrive-unchanged", "Messages arrive with the body, key, attributes and id that were published.")
    async def test_arrive_unchanged(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        sent = [
            OutboundMessage(body, key=b"k-" + body, attributes={"n": body.decode(), "kind": "test"}, id=f"id-{n}")
            for n, body in enumerate(numbered(100))
        ]
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(sent)
            seen = await until_seen(inbox, numbered(100), harness.patience)
        got = {(m.id, m.topic, m.key, m.data, frozenset(m.attributes.items())) for m in seen}
        assert got == {(s.id, topic, s.key, s.data, frozenset(s.attributes.items())) for s in sent}
        assert len(seen) == 100

    @promise("messages.each-subscription-gets-all", "Each of two subscriptions of a topic receives every message.")
    async def test_each_subscription_gets_all(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with (
            bus.messages(topic, subscription="first") as first,
            bus.messages(topic, subscription="second") as second,
        ):
            await bus.topic(topic).publish_batch(numbered(50))
            for inbox in (first, second):
                assert bodies(await until_seen(inbox, numbered(50), harness.patience)) == once(numbered(50))

    @promise(
        "messages.consumers-share-a-subscription",
        "Twenty consumers of a subscription together receive each message once.",
    )
    async def test_consumers_share_a_subscription(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[Message[bytes]] = []
        complete = asyncio.Event()

        async def handle(message: Message[bytes]) -> None:
            seen.append(message)
            if len(seen) >= 1000:
                complete.set()

        inboxes = [bus.messages(topic, subscription="readers") for _ in range(20)]
        for inbox in inboxes:
            await inbox.__aenter__()
        work = [asyncio.ensure_future(inbox.receive(handle, concurrency=2)) for inbox in inboxes]
        await asyncio.gather(*(bus.topic(topic).publish_batch(numbered(50, f"p{n}")) for n in range(20)))
        async with asyncio.timeout(3 * harness.patience):
            await complete.wait()
        for inbox in inboxes:
            await inbox.close()
        await asyncio.gather(*work)
        assert bodies(seen) == once([body for n in range(20) for body in numbered(50, f"p{n}")])

    @promise(
        "messages.subscription-is-durable", "A subscription keeps messages that are published while it has no consumer."
    )
    async def test_subscription_is_durable(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers"):
            pass
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.messages(topic, subscription="readers") as inbox:
            assert bodies(await until_seen(inbox, numbered(20), harness.patience)) == once(numbered(20))

    @requires("messages.start_latest")
    @promise(
        "messages.subscription-created-by-admin",
        "A subscription created by `ensure_subscription` keeps messages from then on.",
    )
    async def test_subscription_created_by_admin(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers", start="latest")
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.messages(topic, subscription="readers", create=False) as inbox:
            assert bodies(await until_seen(inbox, numbered(20), harness.patience)) == once(numbered(20))

    @requires("messages.history")
    @promise(
        "messages.earliest-sees-history",
        'A new subscription with `start="earliest"` receives the messages that the topic holds.',
    )
    async def test_earliest_sees_history(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(20))
        for subscription in ("first", "second"):
            async with bus.messages(topic, subscription=subscription, start="earliest") as inbox:
                assert bodies(await until_seen(inbox, numbered(20), harness.patience)) == once(numbered(20))

    @requires("messages.start_latest")
    @promise(
        "messages.latest-skips-history",
        'A new subscription with `start="latest"` receives only later messages.',
    )
    async def test_latest_skips_history(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(20, "old"))
        async with bus.messages(topic, subscription="readers", start="latest") as inbox:
            await bus.topic(topic).publish_batch(numbered(5, "new"))
            assert bodies(await until_seen(inbox, numbered(5, "new"), harness.patience)) == once(numbered(5, "new"))
            await nothing_more(inbox, harness.quiet)

    @requires("messages.start_time")
    @promise(
        "messages.start-at-a-time",
        "A new subscription with a start time receives the messages that the broker stored from then on.",
    )
    async def test_start_at_a_time(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(5, "old"))
        async with bus.messages(topic, subscription="clock", start="earliest") as inbox:
            newest = max(map(log_time, await take(inbox, 5, harness.patience)))
        # Brokers round times to milliseconds: messages of the same millisecond are not later.
        following = newest + timedelta(milliseconds=1)
        await eventually(lambda: datetime.now(UTC) >= following, harness.patience, "the clock's next tick")
        boundary = datetime.now(UTC)
        await bus.topic(topic).publish_batch(numbered(5, "new"))
        async with bus.messages(topic, subscription="readers", start=boundary) as inbox:
            assert bodies(await until_seen(inbox, numbered(5, "new"), harness.patience)) == once(numbered(5, "new"))
            await nothing_more(inbox, harness.quiet)

    @requires("messages.ephemeral", "messages.subscription_admin")
    @promise(
        "messages.ephemeral-is-exclusive",
        'Every ephemeral consumer receives a copy, with `start="latest"` of later messages, and leaves nothing behind.',
    )
    async def test_ephemeral_is_exclusive(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="kept"):
            pass
        async with (
            bus.messages(topic, subscription=ephemeral(), start="latest") as first,
            bus.messages(topic, subscription=ephemeral(), start="latest") as second,
        ):
            await bus.topic(topic).publish_batch(numbered(5, "seen"))
            for inbox in (first, second):
                assert bodies(await until_seen(inbox, numbered(5, "seen"), harness.patience)) == once(
                    numbered(5, "seen")
                )
        await bus.topic(topic).publish_batch(numbered(5, "missed"))
        async with bus.messages(topic, subscription=ephemeral(), start="latest") as third:
            await nothing_more(third, harness.quiet)

        async def only_the_kept() -> bool:
            return await bus.admin.subscriptions(topic) == ["kept"]

        await eventually(only_the_kept, harness.patience, "the end of the ephemeral subscriptions")

    @requires("messages.ephemeral", "messages.history")
    @promise(
        "messages.ephemeral-begins-at-start",
        "An ephemeral consumer begins at `start`, by default with the earliest message.",
    )
    async def test_ephemeral_begins_at_start(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(5, "old"))
        async with bus.messages(topic, subscription=ephemeral()) as inbox:
            await bus.topic(topic).publish(b"new")
            wanted = [*numbered(5, "old"), b"new"]
            assert bodies(await until_seen(inbox, wanted, harness.patience)) == once(wanted)
            await nothing_more(inbox, harness.quiet)

    @promise("messages.several-topics", "One consumer reads several topics; each message names its topic.")
    async def test_several_topics(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic() for _ in range(3)]
        async with bus.messages(topics, subscription="readers") as inbox:
            for topic in topics:
                await bus.topic(topic).publish_batch(numbered(10, topic))
            wanted = [body for topic in topics for body in numbered(10, topic)]
            seen = await until_seen(inbox, wanted, harness.patience)
            assert bodies(seen) == once(wanted)
            assert all((message.data or b"").startswith(message.topic.encode()) for message in seen)

    @requires("messages.topic_patterns")
    @promise(
        "messages.pattern-follows-topics",
        "A consumer of a pattern reads the topics that match it, new ones from their first message on, and no other.",
    )
    async def test_pattern_follows_topics(self, harness: Harness) -> None:
        bus, prefix = await harness.bus(), unique("pattern")
        pattern = TopicPattern(re.escape(prefix) + r"\..*", exclude=r".*\.dead")
        for end in (".eu", ".us", ".dead", "-us"):
            name = await harness.create_topic(prefix + end)
            await bus.topic(name).publish(name.encode())
        async with bus.messages(pattern, subscription="readers", start="earliest") as inbox:
            wanted = [f"{prefix}{end}".encode() for end in (".eu", ".us")]
            seen = await until_seen(inbox, wanted, harness.patience)
            new = await harness.create_topic(f"{prefix}.new")
            await bus.topic(new).publish(new.encode())
            seen += await until_seen(inbox, [new.encode()], harness.patience + _FOUND_WITHIN)
            await nothing_more(inbox, harness.quiet)
        assert bodies(seen) == once([*wanted, new.encode()])
        assert all(message.data == message.topic.encode() for message in seen)
        async with bus.messages(pattern, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)

    @requires("messages.topic_patterns")
    @promise(
        "messages.pattern-survives-a-deletion",
        "A consumer of a pattern goes on when one of its topics is deleted, and reads a new topic of that name.",
    )
    async def test_pattern_survives_a_deletion(self, harness: Harness) -> None:
        bus, prefix = await harness.bus(), unique("pattern")
        stays, goes = [await harness.create_topic(f"{prefix}.{end}") for end in ("stays", "goes")]
        async with bus.messages(TopicPattern(re.escape(prefix) + ".*"), subscription="readers") as inbox:
            for name in (stays, goes):
                await bus.topic(name).publish(name.encode())
            await until_seen(inbox, [stays.encode(), goes.encode()], harness.patience)
            await bus.admin.delete_topic(goes)
            await bus.topic(stays).publish(b"at once")
            await until_seen(inbox, [b"at once"], harness.patience)
            await nothing_more(inbox, 1.2 * _FOUND_WITHIN)
            await harness.create_topic(goes)
            await bus.topic(goes).publish(b"again")
            await until_seen(inbox, [b"again"], harness.patience + _FOUND_WITHIN)

    @promise(
        "messages.closing-one-leaves-the-other", "When one of two consumers closes, the other continues to receive."
    )
    async def test_closing_one_leaves_the_other(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic(), await harness.topic()]
        async with (
            bus.messages(topics[0], subscription="readers") as first,
            bus.messages(topics[1], subscription="readers") as second,
        ):
            await first.close()
            for topic in topics:
                await bus.topic(topic).publish_batch(numbered(10, topic))
            wanted = numbered(10, topics[1])
            assert bodies(await until_seen(second, wanted, harness.patience)) == once(wanted)

    @promise(
        "messages.slow-subscription-does-not-block",
        "A subscription that settles nothing does not block other subscriptions.",
    )
    async def test_slow_subscription_does_not_block(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with (
            bus.messages(topic, subscription="stuck", max_outstanding=1) as stuck,
            bus.messages(topic, subscription="moving") as moving,
        ):
            await bus.topic(topic).publish_batch(numbered(100))
            await take(stuck, 1, harness.patience)
            assert bodies(await until_seen(moving, numbered(100), harness.patience)) == once(numbered(100))

    @promise("messages.unsettled-is-exclusive", "No other consumer receives a message while it is held unsettled.")
    async def test_unsettled_is_exclusive(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with (
            bus.messages(topic, subscription="readers") as first,
            bus.messages(topic, subscription="readers") as second,
        ):
            await bus.topic(topic).publish(b"only one")
            waits = {asyncio.ensure_future(inbox.next_message(harness.patience)) for inbox in (first, second)}
            done, waiting = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() is not None for task in done] == [True]
            _, still_waiting = await asyncio.wait(waiting, timeout=2 * harness.quiet)
            assert still_waiting == waiting, "The same message went to two consumers"
            for task in waiting:
                task.cancel()

    @promise("messages.native-object-is-exposed", "`native` is the client library's own object, not None.")
    async def test_native_object_is_exposed(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            assert message.native is not None
            assert message.id in repr(message)
