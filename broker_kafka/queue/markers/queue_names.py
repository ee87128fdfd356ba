"""Which names a queue with markers can have, beside those of its marker topic and its trackers' group.

*Failure.* A name that would be taken for another's is refused before anything is made or joined.
"""

from __future__ import annotations

from broker import BrokerError, InvalidName, NotFound, TopicNotFound
from broker.driver import Ephemeral, MessageSubscription
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.cluster.requests import describe_topic
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.queue.markers.topic import MARKERS, TRACKER, marker_topic_name, tracker_group

__all__ = ["check_names", "check_subscription", "has_markers", "require_markers"]


async def check_names(connection: Connection, subscription: MessageSubscription) -> None:
    """:raises InvalidName: the subscription is named as the trackers of another are, or cannot have a marker topic; or
        its topic, or that of its dead letters, is one of markers.
    :raises BrokerError: the brokers do not tell.
    """
    name = subscription.subscription
    if isinstance(name, Ephemeral):
        return
    markers = check_subscription(name, connection.settings.marker_topic)
    for field, topic in (("topic", subscription.topic), ("dead_letter", subscription.dead_letter)):
        if topic == markers:
            raise InvalidName(
                f"{field} is {topic!r}, where the markers of subscription {name!r} lie",
                topic=topic,
                advice=f"Take another topic as {field}, or other markers with marker_topic",
            )
        if topic is not None and topic.endswith(MARKERS) and await _is_of_markers(connection, topic):
            queue = topic.removesuffix(MARKERS)
            raise InvalidName(
                f"{field} is {topic!r}, where the markers of subscription {queue!r} lie",
                topic=topic,
                advice=f"Take another topic as {field}; broker queue inspect {queue} shows what these tell",
            )


def check_subscription(name: str, shared: str | None) -> str:
    """The marker topic of a subscription, or of a `queue_group`, by its name alone.

    :param shared: the setting `marker_topic`.
    :raises InvalidName: it is named as the trackers of another are, or cannot have a marker topic; or `shared` is none.
    """
    if not name:
        raise InvalidName("subscription is ''", advice="Give the name that its consumers have")
    if name.endswith(TRACKER):
        raise InvalidName(
            f"subscription is {name!r}, which is the group of the trackers of {name.removesuffix(TRACKER)!r}",
            advice=f"Name a queue with markers so that it does not end with {TRACKER!r}",
        )
    markers = marker_topic_name(name, shared)
    if shared is not None and not is_topic_name(shared):
        raise InvalidName(
            f"marker_topic is {shared!r}, and no topic on Kafka can be named so",
            advice="Name a topic by at most 249 of ASCII letters, digits, '.', '_' and '-'; '.' and '..' are none",
        )
    if not is_topic_name(markers):
        raise InvalidName(
            f"subscription is {name!r}, and no topic on Kafka can be named {markers!r} for its markers",
            advice="Name a topic for them with marker_topic, or the subscription with at most 241 of "
            "ASCII letters, digits, '.', '_' and '-'",
        )
    return markers


async def require_markers(connection: Connection, queue: str) -> str:
    """The marker topic of a subscription, or of a `queue_group`, that is there.

    :raises InvalidName: as `check_subscription`.
    :raises NotFound: there is none.
    """
    shared = connection.settings.marker_topic
    markers = check_subscription(queue, shared)
    if not await has_markers(connection, markers):
        raise NotFound(
            f"Subscription {queue!r} is no queue with markers: there is no topic {markers!r}",
            advice="Check its name, and give queue_group and marker_topic as its consumers do; a new queue has its "
            "marker topic once its first consumer with queue=markers was opened",
        )
    return markers


async def has_markers(connection: Connection, topic: str) -> bool:
    """Whether the topic is there. :raises BrokerError: the brokers do not tell."""
    try:
        await describe_topic(connection, topic)
    except TopicNotFound:
        return False
    return True


async def _is_of_markers(connection: Connection, topic: str) -> bool:
    """Whether trackers have committed positions of it; by its name alone it may be anything."""
    try:
        places = await partitions_of(connection, topic)
    except NotFound:
        return False
    found = await GroupOffsetStore(connection).fetch(tracker_group(topic.removesuffix(MARKERS)), places)
    for position in found.values():
        if isinstance(position, BrokerError):
            raise position
    return any(position is not None for position in found.values())
