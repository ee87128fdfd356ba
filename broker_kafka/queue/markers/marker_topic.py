"""The marker topic of a subscription: its name, its creation, and the check that it is fit for markers.

*Concurrency.* Any number of processes may ensure a topic at once. *Cancellation.* The topic may exist afterwards.
*Failure.* A topic that would lose or delay markers is refused, with every wrong setting and the call that corrects
them; an existing topic is never changed here. A name that could be mistaken for another queue's is refused before
anything is created or joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from broker import ConfigurationError, InvalidName, LeaseLost, NotFound, TopicNotFound, TopicPartition
from broker.driver import Ephemeral, MessageSubscription, logger
from broker_kafka.admin.topics import KafkaTopics, TopicOptions
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.cluster.requests import describe_topic
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset, positions_in

__all__ = [
    "MARKERS",
    "MARKER_HEADROOM",
    "TRACKER",
    "check_names",
    "check_subscription",
    "ensure_marker_topic",
    "marker_topic_exists",
    "marker_topic_name",
    "require_markers",
    "tracker_group",
]


MARKERS: Final = ".markers"
"""The suffix of marker topics."""
TRACKER: Final = ".tracker"
"""The suffix of trackers' groups."""
MARKER_HEADROOM: Final = 65_536
"""Bytes by which a START may be larger than its message: origin, queue, dead-letter topic."""
_DEFAULT_SIZE: Final = 1_048_588
"""Bytes; the brokers' default of max.message.bytes."""
_LEAST_RETENTION: Final = timedelta(days=1)
"""Trackers renew the START of a long lease every hour; without a tracker it is lost after the rest of this."""
_RETENTION: Final = timedelta(days=7)
_MILLISECOND: Final = timedelta(milliseconds=1)
_SIZE: Final = "max.message.bytes"


def marker_topic_name(subscription: str, shared: str | None = None) -> str:
    """The marker topic of a subscription.

    :param shared: the setting `marker_topic`.
    """
    return shared or f"{subscription}{MARKERS}"


def tracker_group(subscription: str, shared: str | None = None) -> str:
    """The group of the trackers of a marker topic.

    :param shared: the setting `marker_topic`.
    """
    # One topic has one group of trackers, whether its name comes from the subscription or the setting.
    return f"{subscription if shared is None else shared.removesuffix(MARKERS)}{TRACKER}"


async def ensure_marker_topic(
    connection: Connection,
    subscription: str,
    *,
    topics: Sequence[str] = (),
    partitions: int | None = None,
    create: bool = True,
) -> int:
    """Create the marker topic of a subscription, or check it; returns its number of partitions.

    :param topics: the message topics, which set its message size and partitions.
    :param partitions: of a new topic; None for as many as the largest message topic has.
    :param create: whether to create a missing topic, which raises TopicNotFound otherwise.
    :raises ConfigurationError: a setting of the topic would lose markers or falsify their time, or is too small for
        the START of a message that the message topics take.
    :raises TopicNotFound: a message topic does not exist.
    """
    name = marker_topic_name(subscription, connection.settings.marker_topic)
    admin = KafkaTopics(connection)
    sources = [await admin.describe_topic(topic) for topic in topics]
    default = 0 if sources else _DEFAULT_SIZE
    sizes = [_number(each.native["config"], _SIZE) for each in sources]
    largest = max(connection.settings.message_max_bytes, default, *sizes)
    needed = largest + MARKER_HEADROOM
    try:
        found = await admin.describe_topic(name)
    except TopicNotFound:
        if not create:
            raise
        wanted = partitions or max((each.partitions or 1 for each in sources), default=connection.settings.partitions)
        await admin.create(name, wanted, TopicOptions(_config(needed)))
        # Another process may have created it first, with other settings.
        found = await admin.describe_topic(name, known=True)
        await _mark_as_markers(connection, subscription, name, found.partitions or 1)
    _check(name, found.native["config"], needed)
    return found.partitions or 1


async def _mark_as_markers(connection: Connection, subscription: str, name: str, partitions: int) -> None:
    """Commit the first positions of the trackers' group, which mark the topic as one of markers."""
    group = tracker_group(subscription, connection.settings.marker_topic)
    firsts = {TopicPartition(name, partition): StoredOffset(0) for partition in range(partitions)}
    for error in set((await GroupOffsetStore(connection).reset(group, firsts)).values()):
        # A tracker that has joined meanwhile commits its own.
        if error is not None and not isinstance(error, LeaseLost):
            logger.info("The positions of %r are committed by its trackers: %s", name, error)


def _config(needed: int) -> dict[str, str | None]:
    return {
        "message.timestamp.type": "LogAppendTime",
        "cleanup.policy": "delete",
        "retention.ms": str(_RETENTION // _MILLISECOND),
        "retention.bytes": "-1",
        _SIZE: str(needed),
    }


def _check(name: str, config: Mapping[str, str | None], needed: int) -> None:
    """:raises ConfigurationError: the topic is not fit for markers."""
    wrong: dict[str, tuple[str, Any]] = {}
    if config.get("message.timestamp.type") != "LogAppendTime":
        wrong["message.timestamp.type"] = "leases are timed by the broker's clock", "LogAppendTime"
    if config.get("cleanup.policy") != "delete":
        wrong["cleanup.policy"] = "compaction removes markers of open messages", "delete"
    if 0 <= _number(config, "retention.ms") < _LEAST_RETENTION // _MILLISECOND:
        least = _LEAST_RETENTION // _MILLISECOND
        wrong["retention.ms"] = f"open messages are lost with old markers; set {least} or more, or -1", str(least)
    if _number(config, "retention.bytes") >= 0:
        wrong["retention.bytes"] = "open messages are lost when the log grows longer", "-1"
    if _number(config, _SIZE) < needed:
        wrong[_SIZE] = "the START of the largest message does not fit", str(needed)
    if wrong:
        reasons = "; ".join(
            f"{option} is {config.get(option)!r}, and {reason}" for option, (reason, _) in wrong.items()
        )
        settings = {option: value for option, (_, value) in wrong.items()}
        raise ConfigurationError(
            f"Topic {name!r} is not fit for markers: {reasons}",
            advice=f"Call bus.admin.ensure_topic({name!r}, **{settings!r}), or set these options with kafka-configs",
        )


def _number(config: Mapping[str, str | None], name: str) -> int:
    return int(config.get(name) or -1)


async def check_names(connection: Connection, subscription: MessageSubscription) -> None:
    """:raises InvalidName: the subscription has the name of a trackers' group, or cannot have a marker topic; or its
        topic or dead-letter topic is a marker topic.
    :raises BrokerError: the brokers do not answer.
    """
    name = subscription.subscription
    if isinstance(name, Ephemeral):
        return
    markers = check_subscription(name, connection.settings.marker_topic)
    for field, topic in (("topic", subscription.topic), ("dead_letter", subscription.dead_letter)):
        if topic == markers:
            raise InvalidName(
                f"{field} is {topic!r}, the marker topic of subscription {name!r}",
                topic=topic,
                advice=f"Use another topic as {field}, or another marker_topic",
            )
        if topic is not None and topic.endswith(MARKERS) and await _holds_markers(connection, topic):
            queue = topic.removesuffix(MARKERS)
            raise InvalidName(
                f"{field} is {topic!r}, the marker topic of subscription {queue!r}",
                topic=topic,
                advice=f"Use another topic as {field}; broker queue inspect {queue} shows what the markers hold",
            )


def check_subscription(name: str, shared: str | None) -> str:
    """The marker topic of a subscription, whose names are checked without I/O.

    :param shared: the setting `marker_topic`.
    :raises InvalidName: the subscription is empty or has the name of a trackers' group, or one name is no topic name.
    """
    if not name:
        raise InvalidName("subscription is ''", advice="Give the subscription of its consumers")
    if name.endswith(TRACKER):
        raise InvalidName(
            f"subscription is {name!r}, the trackers' group of {name.removesuffix(TRACKER)!r}",
            advice=f"Choose a name that does not end with {TRACKER!r}",
        )
    markers = marker_topic_name(name, shared)
    if shared is not None and not is_topic_name(shared):
        raise InvalidName(
            f"marker_topic is {shared!r}, which is no valid topic name on Kafka",
            advice="Use at most 249 of ASCII letters, digits, '.', '_' and '-', and neither '.' nor '..'",
        )
    if not is_topic_name(markers):
        raise InvalidName(
            f"subscription is {name!r}, whose marker topic {markers!r} is no valid topic name on Kafka",
            advice="Set marker_topic, or name the subscription with at most 241 of "
            "ASCII letters, digits, '.', '_' and '-'",
        )
    return markers


async def require_markers(connection: Connection, queue: str) -> str:
    """The existing marker topic of a subscription.

    :raises InvalidName: as `check_subscription`.
    :raises NotFound: it does not exist.
    """
    shared = connection.settings.marker_topic
    markers = check_subscription(queue, shared)
    if not await marker_topic_exists(connection, markers):
        raise NotFound(
            f"Subscription {queue!r} is no queue with markers: topic {markers!r} does not exist",
            advice="Check its name, and set marker_topic as its consumers do; a queue has its marker topic once a "
            "consumer with queue=markers was opened",
        )
    return markers


async def marker_topic_exists(connection: Connection, topic: str) -> bool:
    """Whether this marker topic exists. :raises BrokerError: the brokers do not answer."""
    try:
        await describe_topic(connection, topic)
    except TopicNotFound:
        return False
    return True


async def _holds_markers(connection: Connection, topic: str) -> bool:
    """Whether trackers have committed positions of the topic; its name alone proves nothing."""
    try:
        places = await partitions_of(connection, topic)
    except NotFound:
        return False
    found = await GroupOffsetStore(connection).fetch(tracker_group(topic.removesuffix(MARKERS)), places)
    return bool(positions_in(found))
