"""Names that a queue with markers would confuse with those of another queue: refused before anything is created."""

from __future__ import annotations

import asyncio

import pytest

from broker.bus import Bus, connect
from broker.errors import InvalidName
from broker.names import native_name
from broker.testing.waiting import take
from broker_kafka.queue.markers.marker_topic import tracker_group
from tests.kafka.queue_markers import Queue, connected, tracking
from tests.servers.kafka import KafkaServer

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers"


@pytest.mark.parametrize(
    ("subscription", "settings", "message"),
    [
        ("{group}.tracker", "", "subscription is '{group}.tracker', .* does not end with '.tracker'"),
        ("{group}/billing", "", "subscription is '{group}/billing', .* '{group}/billing.markers' .* marker_topic"),
        ("b" * 242, "", "subscription is 'bbb.* at most 241"),
        ("{group}", "&marker_topic={topic}", "topic is '{topic}', the marker topic of subscription '{group}'"),
        ("{group}", "&marker_topic=..", "marker_topic is '..', .* neither '.' nor '..'"),
        ("{group}", "&marker_topic={topic}.dead", "dead_letter is '{topic}.dead', the .* another marker_topic"),
    ],
    ids=["trackers", "slash", "long", "topic", "dots", "letters"],
)
async def test_an_invalid_name_is_refused_with_advice_and_creates_nothing(
    kafka: KafkaServer, topic: str, group: str, subscription: str, settings: str, message: str
) -> None:
    names = {"topic": topic, "group": group}

    async def own_topics(bus: Bus) -> list[str]:
        return [name for name in await bus.admin.topics() if name.startswith((topic, group))]

    async with connect(f"{kafka.url}?{QUICK}{settings.format(**names)}") as bus:
        await bus.admin.ensure_topic(f"{topic}.dead")
        name = native_name(subscription.format(**names))
        with pytest.raises(InvalidName, match=message.format(**names)):
            async with bus.messages(topic, subscription=name, dead_letter=f"{topic}.dead"):
                pass
        assert await bus.admin.subscriptions(topic) == []
        assert await own_topics(bus) == [topic, f"{topic}.dead"]


async def test_marker_topic_admits_any_subscription_name(kafka: KafkaServer, topic: str, group: str) -> None:
    name = native_name(f"{group}/billing")
    async with connect(f"{kafka.url}?{QUICK}&marker_topic={group}") as bus:
        async with bus.messages(topic, subscription=name) as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, PATIENCE)
            await message.ack()
        assert (await bus.admin.lag(topic, name)).waiting == 0
        await bus.admin.delete_subscription(topic, name)
        assert [each.name for each in await bus.admin.groups() if each.name == name] == []


async def test_a_group_whose_marker_topic_name_is_invalid_can_be_deleted(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    name = native_name(f"{group}/billing")
    async with connect(f"{kafka.url}?{QUICK}") as bus:
        await bus.admin.ensure_subscription(topic, name)
        assert (await bus.admin.lag(topic, name)).unsettled == 0
        await bus.admin.delete_subscription(topic, name)
        assert await bus.admin.subscriptions(topic) == []


async def test_the_marker_topic_of_another_queue_cannot_be_consumed(kafka: KafkaServer, topic: str, group: str) -> None:
    markers = f"{group}.markers"
    async with connect(f"{kafka.url}?{QUICK}") as bus:
        async with bus.messages(topic, subscription=group) as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, PATIENCE)
            await message.ack()
        error = f"is '{markers}', the marker topic of subscription '{group}'"
        with pytest.raises(InvalidName, match=f"topic {error}"):
            async with bus.messages(markers, subscription=f"{group}-2"):
                pass
        with pytest.raises(InvalidName, match=f"dead_letter {error}"):
            async with bus.messages(topic, subscription=f"{group}-2", dead_letter=markers):
                pass


async def test_a_topic_named_as_a_marker_topic_can_be_consumed(kafka: KafkaServer, group: str) -> None:
    async with connect(f"{kafka.url}?{QUICK}") as bus:
        topic = f"{group}.markers"
        await bus.admin.ensure_topic(topic)
        async with bus.messages(topic, subscription=f"{group}-2") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, PATIENCE)
            await message.ack()


def test_one_marker_topic_has_one_tracker_group() -> None:
    assert tracker_group("billing") == tracker_group("orders", "billing.markers") == "billing.tracker"
    assert tracker_group("billing", "open") == "open.tracker"


@pytest.mark.deep
async def test_trackers_of_two_marker_topics_in_one_group_do_not_interfere(kafka: KafkaServer) -> None:
    queue, other = await asyncio.to_thread(Queue, kafka), await asyncio.to_thread(Queue, kafka)
    other.markers = queue.subscription
    async with (
        connected(kafka) as connection,
        connected(kafka, queue="markers", marker_topic=other.markers) as named,
    ):
        await queue.prepare(connection)
        await other.prepare(named)
        async with tracking(connection, queue) as tracker, tracking(named, other) as second:
            assert tracker.group == second.group
            for each in (queue, other):
                await asyncio.to_thread(lambda of=each: of.take(of.send(3)))
                await asyncio.to_thread(each.wait_for_again, 3, 3)
            assert (tracker.counts.redelivered, tracker.counts.unknown_outcomes) == (3, 0)
            assert (second.counts.redelivered, second.counts.unknown_outcomes) == (3, 0)
