"""Conformance tests of administration: idempotent provisioning, lag, purge and health."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from broker.bus import Bus
from broker.errors import NotFound, SubscriptionNotFound, TopicNotFound
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, read, take, until_seen

__all__ = ["Administration", "listed"]


class Administration(ConformanceCase):
    """Topics, subscriptions, lag and health."""

    @promise(
        "admin.ensure-is-idempotent",
        "`ensure_topic` and `ensure_subscription` change and lose nothing if the topic or subscription exists.",
    )
    async def test_ensure_is_idempotent(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(numbered(5))
        assert (await bus.admin.ensure_topic(topic)).name == topic
        start = "latest" if bus.capabilities.messages and bus.capabilities.messages.start_latest else "earliest"
        again = await bus.admin.ensure_subscription(topic, "readers", start=start)
        assert (again.topic, again.name) == (topic, "readers")
        async with bus.messages(topic, subscription="readers") as inbox:
            assert bodies(await until_seen(inbox, numbered(5), harness.patience)) == once(numbered(5))

    @promise("admin.ensure-concurrently", "Ten concurrent calls that ensure the same topic all succeed.")
    async def test_ensure_concurrently(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), unique("at-once")
        await asyncio.gather(*(harness.create_topic(topic) for _ in range(10)))
        assert (await bus.admin.describe_topic(topic)).name == topic

    @promise(
        "admin.delete-is-idempotent",
        "Deleting a missing topic or subscription is no error; a deleted one no longer exists.",
    )
    async def test_delete_is_idempotent(self, harness: Harness) -> None:
        # A unique name: some brokers delete a subscription from all topics at once.
        bus, topic, readers = await harness.bus(), await harness.topic(), unique("readers")
        await bus.admin.ensure_subscription(topic, readers)
        for _ in range(2):
            await bus.admin.delete_subscription(topic, readers)
        assert not await listed(bus, topic)
        for _ in range(2):
            await bus.admin.delete_topic(topic)
        assert topic not in await bus.admin.topics()
        with pytest.raises(TopicNotFound):
            await bus.topic(topic).publish(b"x")

    @promise(
        "admin.recreated-topic-is-empty",
        "A topic that was deleted and created again is empty and has no subscriptions.",
    )
    async def test_recreated_topic_is_empty(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(numbered(5, "old"))
        await bus.admin.delete_topic(topic)
        await bus.admin.ensure_topic(topic)
        assert not await listed(bus, topic)
        async with bus.messages(topic, subscription="readers", start="earliest") as inbox:
            await bus.topic(topic).publish(b"new")
            assert bodies(await until_seen(inbox, [b"new"], harness.patience)) == once([b"new"])
            await nothing_more(inbox, harness.quiet)

    @requires("messages.start_latest")
    @promise(
        "admin.recreated-subscription-starts-fresh",
        "A subscription that was deleted and created again starts from its `start`.",
    )
    async def test_recreated_subscription_starts_fresh(self, harness: Harness) -> None:
        bus, topic, readers = await harness.bus(), await harness.topic(), unique("readers")
        await bus.admin.ensure_subscription(topic, readers)
        await bus.topic(topic).publish_batch(numbered(5))
        await bus.admin.delete_subscription(topic, readers)
        async with bus.messages(topic, subscription=readers, start="latest") as inbox:
            await nothing_more(inbox, harness.quiet)
            await bus.topic(topic).publish(b"new")
            assert bodies(await until_seen(inbox, [b"new"], harness.patience)) == once([b"new"])

    @requires("messages.subscription_admin")
    @promise(
        "admin.lists-are-complete",
        "Topics, and the subscriptions of each topic, are listed under their portable names.",
    )
    async def test_lists_are_complete(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.create_topic(unique("listed.with_all-signs"))
        for name in ("first", "second.x", "third_y"):
            await bus.admin.ensure_subscription(topic, name)
        assert topic in await bus.admin.topics()
        assert await bus.admin.subscriptions(topic) == ["first", "second.x", "third_y"]
        described = await bus.admin.describe_subscription(topic, "second.x")
        assert (described.topic, described.name) == (topic, "second.x")

    @promise(
        "admin.missing-raises",
        "Describing, listing or measuring something missing raises TopicNotFound or SubscriptionNotFound.",
    )
    async def test_missing_raises(self, harness: Harness) -> None:
        bus, topic, missing = await harness.bus(), await harness.topic(), unique("missing")
        with pytest.raises(TopicNotFound):
            await bus.admin.describe_topic(missing)
        with pytest.raises(TopicNotFound):
            await bus.admin.subscriptions(missing)
        with pytest.raises(TopicNotFound):
            await bus.admin.ensure_subscription(missing, "readers")
        with pytest.raises(SubscriptionNotFound):
            await bus.admin.describe_subscription(topic, "missing")
        with pytest.raises(NotFound):
            await bus.admin.lag(topic, "missing")

    @promise(
        "admin.partitions-as-requested",
        "A topic has the number of partitions that it was created with.",
    )
    async def test_partitions_as_requested(self, harness: Harness) -> None:
        bus = await harness.bus()
        topic = await harness.topic(partitions=3)
        expected = 3 if bus.capabilities.publish.partitions else None
        assert (await bus.admin.describe_topic(topic)).partitions in (expected, 1 if expected is None else 3)

    @requires("messages.subscription_admin")
    @promise("admin.lag-counts-messages", "Lag counts waiting and unsettled messages; it is zero when all are acked.")
    async def test_lag_counts_messages(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(numbered(10))
        lag = await bus.admin.lag(topic, "readers")
        assert (lag.waiting, lag.unsettled) in ((10, 0), (10, None))
        async with bus.messages(topic, subscription="readers") as inbox:
            messages = await take(inbox, 10, harness.patience)
            lag = await bus.admin.lag(topic, "readers")
            assert (lag.waiting, lag.unsettled) in ((0, 10), (10, None))
            for message in messages:
                await message.ack()

            async def settled() -> bool:
                lag = await bus.admin.lag(topic, "readers")
                return lag.waiting == 0 and not lag.unsettled

            await eventually(settled, harness.patience, "a lag of zero")

    @requires("records")
    @promise(
        "admin.lag-counts-records",
        "The lag of a record group is the number of records after its committed position, per partition.",
    )
    async def test_lag_counts_records(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(10))
        async with bus.records(topic, group="readers") as log:
            records = await read(log, 4, harness.patience)
            await records[-1].commit()

            async def behind() -> bool:
                lag = await bus.admin.lag(topic, "readers")
                return lag.waiting == 6 and dict(lag.partitions) == {0: 6}

            await eventually(behind, harness.patience, "a lag of six records")

    @promise("admin.purge-empties", "`purge` removes all messages; later messages arrive.")
    async def test_purge_empties(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(10))
        assert await bus.admin.purge(topic) in (10, None)
        async with bus.messages(topic, subscription="readers", start="earliest") as inbox:
            await bus.topic(topic).publish(b"new")
            assert bodies(await until_seen(inbox, [b"new"], harness.patience)) == once([b"new"])
            await nothing_more(inbox, harness.quiet)

    @requires("messages.start_latest")
    @promise("admin.purge-keeps-subscriptions", "`purge` keeps the subscriptions; they receive later messages.")
    async def test_purge_keeps_subscriptions(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(numbered(5))
        await bus.admin.purge(topic)
        assert await listed(bus, topic) in (["readers"], None)
        await bus.topic(topic).publish(b"new")
        async with bus.messages(topic, subscription="readers", start="latest") as inbox:
            assert bodies(await until_seen(inbox, [b"new"], harness.patience)) == once([b"new"])
            await nothing_more(inbox, harness.quiet)

    @requires("messages.start_latest", "messages.history")
    @promise(
        "admin.subscription-starts-as-requested",
        "A subscription created with `start` begins there, whichever consumer opens it later.",
    )
    async def test_subscription_starts_as_requested(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(5, "old"))
        await bus.admin.ensure_subscription(topic, "late", start="latest")
        await bus.admin.ensure_subscription(topic, "early", start="earliest")
        new = numbered(5, "new")
        await bus.topic(topic).publish_batch(new)
        for name, wanted in (("late", new), ("early", [*numbered(5, "old"), *new])):
            async with bus.messages(topic, subscription=name) as inbox:
                assert bodies(await until_seen(inbox, wanted, harness.patience)) == once(wanted)
                await nothing_more(inbox, harness.quiet)

    @promise(
        "admin.topic-counts-its-messages",
        "If the broker reports the number of messages of a topic, the number is correct.",
    )
    async def test_topic_counts_its_messages(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()

        async def has(number: int) -> bool:
            return (await bus.admin.describe_topic(topic)).messages in (number, None)

        assert await has(0)
        await bus.topic(topic).publish_batch(numbered(7))
        await eventually(lambda: has(7), harness.patience, "a count of seven messages")
        await bus.admin.purge(topic)
        await eventually(lambda: has(0), harness.patience, "a count of no message")

    @requires("harness.age")
    @promise(
        "admin.retention-is-kept",
        "The broker removes messages older than the topic's `retention`, and keeps newer ones.",
    )
    async def test_retention_is_kept(self, harness: Harness) -> None:
        bus = await harness.bus()
        short = await harness.topic(retention=timedelta(seconds=1))
        long = await harness.topic(retention=timedelta(hours=1))
        for topic in (short, long):
            if bus.capabilities.records is None:
                # A broker without a log keeps messages for existing subscriptions only.
                await bus.admin.ensure_subscription(topic, "readers")
            await bus.topic(topic).publish_batch(numbered(3, "old"))
        await harness.age(2.0)

        async def is_removed() -> bool:
            return (await bus.admin.describe_topic(short)).messages in (0, None)

        await eventually(is_removed, harness.patience, "the end of what is old")
        # Of `short`, whatever is read within a second of its publish depends on the speed of the machine.
        await bus.topic(long).publish(b"new")
        for topic, wanted in ((short, []), (long, [*numbered(3, "old"), b"new"])):
            async with bus.messages(topic, subscription="readers", start="earliest") as inbox:
                assert bodies(await until_seen(inbox, wanted, harness.patience)) == once(wanted)
                await nothing_more(inbox, harness.quiet)

    @requires("harness.isolate")
    @promise(
        "admin.health-reports-unreachable-server",
        "`health()` reports an unreachable server, and recovers with the connection.",
        seconds=60,
    )
    async def test_health_reports_unreachable_server(self, harness: Harness) -> None:
        bus = await harness.connect(short_lease=True)
        assert (await bus.health()).ok
        await harness.isolate(bus)
        assert not (await bus.health()).ok
        await harness.heal(bus)

        async def is_well() -> bool:
            return (await bus.health()).ok

        await eventually(is_well, 3 * harness.patience, "the connection's return")

    @promise(
        "admin.health-is-a-round-trip",
        "`health()` measures a round trip, and reports a closed bus.",
    )
    async def test_health_is_a_round_trip(self, harness: Harness) -> None:
        bus = await harness.connect()
        health = await bus.health()
        assert health.ok
        assert health.seconds is not None
        assert 0 <= health.seconds < harness.patience
        await bus.close()
        assert not (await bus.health()).ok


async def listed(bus: Bus, topic: str) -> list[str] | None:
    """The subscriptions of a topic, or None where the broker lists none."""
    messages = bus.capabilities.messages
    return await bus.admin.subscriptions(topic) if messages and messages.subscription_admin else None
