"""Portable names as streams, consumers and subjects of NATS, one to one. Pure functions, safe from any thread.

Topic `orders.eu` is stream `orders=eu`. Its messages are published to `orders=eu.<partition>`; scheduled messages wait
under `orders=eu.schedule.<id>`. A message of a compacted topic goes to `orders=eu.<partition>.<key>`, since the server
keeps the last message of each subject. No portable name contains `=` or `+`. A topic's name is one token of the
subject, so no two topics overlap.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Final

from broker import InvalidName
from broker.driver import NativeName, check_name

__all__ = [
    "PARTITIONS_KEY",
    "RELEASE_COUNTS_STREAM",
    "TOMBSTONE_KEY",
    "consumer_name",
    "group_consumer",
    "group_of",
    "partition_subject",
    "release_counts_subject",
    "row_subject",
    "rows_filter",
    "schedule_subject",
    "stream_name",
    "subject_filter",
    "subscription_of",
    "topic_of",
]

PARTITIONS_KEY: Final = "anybroker-partitions"
"""Metadata of a topic's stream: its number of partitions."""
TOMBSTONE_KEY: Final = "anybroker-tombstone-seconds"
"""Metadata of a compacted topic's stream: the seconds after which the server removes a tombstone."""
RELEASE_COUNTS_STREAM: Final = "anybroker+release-counts"
"""The stream of release counts; it is not a topic."""

_LONGEST_KEY: Final = 256
"""Bytes of a key that its subject spells out."""
_FORBIDDEN: Final = frozenset(" \t\r\n\f\v.*>/\\\0")


def stream_name(topic: str) -> str:
    """The stream of a topic.

    :raises InvalidName: the name is neither portable nor valid for a stream.
    """
    return _encode(topic, "topic", "stream")


def consumer_name(subscription: str) -> str:
    """The durable consumer of a message subscription.

    :raises InvalidName: the name is neither portable nor valid for a consumer.
    """
    return _encode(subscription, "subscription", "consumer")


def group_consumer(group: str, partition: int) -> str:
    """The durable consumer of a record group for one partition."""
    return f"{_encode(group, 'group', 'consumer')}+{partition}"


def topic_of(stream: str) -> str:
    """The topic of a stream; a NativeName if no portable name maps to it."""
    return _decode(stream)


def subscription_of(consumer: str) -> str:
    """The subscription or group that a consumer belongs to."""
    return _decode(group_of(consumer) or consumer)


def group_of(consumer: str) -> str | None:
    """The encoded group of a consumer that serves one of its partitions; None for any other consumer."""
    group, plus, partition = consumer.rpartition("+")
    return group if plus and group and partition.isdecimal() else None


def partition_subject(stream: str, partition: int) -> str:
    """The subject of one partition."""
    return f"{stream}.{partition}"


def row_subject(stream: str, partition: int, key: bytes) -> str:
    """The subject of a key in a compacted topic. A long key is hashed, because the server limits subjects."""
    if len(key) > _LONGEST_KEY:
        return f"{stream}.{partition}.h{sha256(key).hexdigest()}"
    return f"{stream}.{partition}.k{urlsafe_b64encode(key).rstrip(b'=').decode()}"


def rows_filter(stream: str, partition: int | None = None) -> str:
    """All keys of a partition of a compacted topic, or of all partitions."""
    return f"{stream}.{'*' if partition is None else partition}.*"


def schedule_subject(stream: str, token: str) -> str:
    """The subject of one scheduled message; `*` as token matches all."""
    return f"{stream}.schedule.{token}"


def release_counts_subject(stream: str, consumer: str) -> str:
    """The subject of a subscription's release counts."""
    return f"anybroker.release-counts.{stream}.{consumer}"


def subject_filter(stream: str) -> str:
    """All partitions of a topic, without scheduled messages."""
    return f"{stream}.*"


def _encode(name: str, what: str, native: str) -> str:
    if isinstance(name, NativeName):
        if len(name) > 255 or not _FORBIDDEN.isdisjoint(name):
            raise InvalidName(
                f"{what} name {str(name)!r} is not valid for a {native}",
                advice="NATS takes up to 255 characters without spaces, '.', '*', '>', '/' and '\\'",
            )
        return str(name)
    return check_name(name, what).replace(".", "=")


def _decode(name: str) -> str:
    decoded = name.replace("=", ".")
    try:
        return check_name(decoded, "topic")
    except InvalidName:
        return NativeName(name)
