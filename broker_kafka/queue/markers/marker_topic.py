"""The marker topic of a subscription: created as a tracker needs it, or found to be so before anybody writes to it.

*Concurrency.* Any number of processes may ask at once; one creates it. *Cancellation.* The topic may be there after it.
*Failure.* A topic that would lose or delay markers is refused, with every setting that is wrong and the call that mends
them; nothing of a topic that is there is changed here.

MERGED broker_kafka.queue.markers.marker_topic: Which names a queue with markers can have, beside those of its marker topic and its trackers' group.

*Failure.* A name that would be taken for another's is refused before anything is made or joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from broker import BrokerError, ConfigurationError, InvalidName, LeaseLost, NotFound, TopicNotFound, TopicPartition
from broker.driver import Ephemeral, MessageSubscription, logger
from broker_kafka.admin.topics import KafkaTopics, TopicOptions
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.cluster.requests import describe_topic
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset

__all__ = [
    "LARGEST",
    "LEAST_RETENTION",
    "MARKERS",
    "MARKER_HEADROOM",
    "TRACKER",
    "check_names",
    "check_subscription",
    "ensure_marker_topic",
    "has_markers",
    "marker_topic_name",
    "require_markers",
    "tracker_group",
]


MARKERS: Final = ".markers"
"""With this end the marker topic of a subscription is named."""
TRACKER: Final = ".tracker"
"""With this end the group of its trackers."""
MARKER_HEADROOM: Final = 65_536
"""Bytes by which a START may be larger than its message: whence it came, whose it is, where its dead letter goes."""
_BROKERS_SIZE: Final = 1_048_588
"""Bytes; what brokers let a topic take unless they are told otherwise."""
LARGEST: Final = 1_000_000_000
"""Bytes; the most that librdkafka takes. Markers and what is sent again carry what a message topic took, whoever wrote
it: `message_max_bytes` is of what this process publishes, and the brokers say what is too large."""
LEAST_RETENTION: Final = timedelta(days=1)
"""Trackers repeat the START of a long lease each hour; what nobody repeats is lost with the log, so they may be away
for the rest of this."""
_RETENTION: Final = timedelta(days=7)
_MILLISECOND: Final = timedelta(milliseconds=1)
_SIZE: Final = "max.message.bytes"


def marker_topic_name(subscription: str, shared: str | None = None) -> str:
    """Where the markers of a subscription lie.

    :param shared: the setting `marker_topic`.
    """
    return shared or f"{subscription}{MARKERS}"


def tracker_group(subscription: str, shared: str | None = None) -> str:
    """The group whose members share the tracking of a subscription, or of all that have one marker topic.

    :param shared: the setting `marker_topic`.
    """
    # One topic has one group of trackers, however it is named to them.
    return f"{subscription if shared is None else shared.removesuffix(MARKERS)}{TRACKER}"


async def ensure_marker_topic(
    connection: Connection,
    subscription: str,
    *,
    topics: Sequence[str] = (),
    partitions: int | None = None,
    create: bool = True,
) -> int:
    """Create the marker topic of a subscription if there is none, else check it; how many partitions it has.

    :param topics: the message topics, which its messages and partitions are measured by.
    :param partitions: of a new topic; as many as the largest message topic has if None.
    :param create: else a missing topic raises TopicNotFound.
    :raises ConfigurationError: a setting of the topic would lose markers or falsify their time, or does not take the
        START of a message that the message topics take.
    :raises TopicNotFound: a message topic is not there.
    """
    name = marker_topic_name(subscription, connection.settings.marker_topic)
    admin = KafkaTopics(connection)
    sources = [await admin.describe(topic) for topic in topics]
    unknown = 0 if sources else _BROKERS_SIZE
    taken = [_number(each.native["config"], _SIZE) for each in sources]
    largest = max(connection.settings.message_max_bytes, unknown, *taken)
    needed = largest + MARKER_HEADROOM
    try:
        found = await admin.describe(name)
    except TopicNotFound:
        if not create:
            raise
        wanted = partitions or max((each.partitions or 1 for each in sources), default=connection.settings.partitions)
        await admin.create(name, wanted, TopicOptions(_config(needed)))
        # Somebody else may have been quicker, and have made it otherwise.
        found = await admin.describe(name, known=True)
        await _note_as_new(connection, subscription, name, found.partitions or 1)
    _check(name, found.native["config"], needed)
    return found.partitions or 1


async def _note_as_new(connection: Connection, subscription: str, name: str, partitions: int) -> None:
    """Give the trackers' group its first positions, by which the topic is known as one of markers from now on."""
    group = tracker_group(subscription, connection.settings.marker_topic)
    firsts = {TopicPartition(name, partition): StoredOffset(0) for partition in range(partitions)}
    for error in set((await GroupOffsetStore(connection).reset(group, firsts)).values()):
        # A tracker that has joined meanwhile commits its own.
        if error is not None and not isinstance(error, LeaseLost):
            logger.info("Trackers will give %r their group's positions: %s", name, error)


def _config(needed: int) -> dict[str, str | None]:
    return {
        "message.timestamp.type": "LogAppendTime",
        "cleanup.policy": "delete",
        "retention.ms": str(_RETENTION // _MILLISECOND),
        "retention.bytes": "-1",
        _SIZE: str(needed),
    }


def _check(name: str, config: Mapping[str, str | None], needed: int) -> None:
    """:raises ConfigurationError: it is not fit for markers."""
    wrong: dict[str, tuple[str, Any]] = {}
    if config.get("message.timestamp.type") != "LogAppendTime":
        wrong["message.timestamp.type"] = "leases end by the broker's clock, not by the writers'", "LogAppendTime"
    if config.get("cleanup.policy") != "delete":
        wrong["cleanup.policy"] = "compaction removes markers of messages that are open", "delete"
    if 0 <= _number(config, "retention.ms") < LEAST_RETENTION // _MILLISECOND:
        least = LEAST_RETENTION // _MILLISECOND
        wrong["retention.ms"] = f"open messages are lost with it; it must be {least} or more, or -1", str(least)
    if _number(config, "retention.bytes") >= 0:
        wrong["retention.bytes"] = "open messages are lost when the log is so long", "-1"
    if _number(config, _SIZE) < needed:
        wrong[_SIZE] = "the START of the largest message does not fit", str(needed)
    if wrong:
        told = "; ".join(f"{option} is {config.get(option)!r}, and {reason}" for option, (reason, _) in wrong.items())
        mend = {option: value for option, (_, value) in wrong.items()}
        raise ConfigurationError(
            f"Topic {name!r} is not fit for markers: {told}",
            advice=f"Call bus.admin.ensure_topic({name!r}, **{mend!r}), or set these with kafka-configs",
        )


def _number(config: Mapping[str, str | None], name: str) -> int:
    return int(config.get(name) or -1)


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
    """The marker topic of a subscription, by its name alone.

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
    """The marker topic of a subscription, that is there.

    :raises InvalidName: as `check_subscription`.
    :raises NotFound: there is none.
    """
    shared = connection.settings.marker_topic
    markers = check_subscription(queue, shared)
    if not await has_markers(connection, markers):
        raise NotFound(
            f"Subscription {queue!r} is no queue with markers: there is no topic {markers!r}",
            advice="Check its name, and give marker_topic as its consumers do; a new queue has its "
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
