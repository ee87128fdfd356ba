"""Portable names as streams, consumers and subjects of NATS, one to one. Pure functions, safe from any thread.

A topic `orders.eu` is the stream `orders=eu` with the subjects `orders=eu.<partition>`, where messages go, and
`orders=eu.schedule.<id>`, where messages wait for their time. `=` and `+` are free because no portable name has
them; a topic's name is one token of the subject, so no two topics overlap.
"""

from __future__ import annotations

from typing import Final

from broker import InvalidName
from broker.driver import NativeName, check_name

__all__ = [
    "GIVEN_BACK",
    "PARTITIONS_KEY",
    "consumer_name",
    "given_back_subject",
    "group_consumer",
    "group_of",
    "partition_subject",
    "schedule_subject",
    "stream_name",
    "subject_filter",
    "subscription_of",
    "topic_of",
]

PARTITIONS_KEY: Final = "anybroker-partitions"
"""Metadata of a stream that is a topic: how many partitions it has."""
GIVEN_BACK: Final = "anybroker+given-back"
"""The stream that says what was given back unhandled; it is no topic."""

_FORBIDDEN: Final = frozenset(" \t\r\n\f\v.*>/\\\0")


def stream_name(topic: str) -> str:
    """The stream of a topic.

    :raises InvalidName: the name is neither portable nor a stream's.
    """
    return _encode(topic, "topic", "stream")


def consumer_name(subscription: str) -> str:
    """The durable consumer of a message subscription.

    :raises InvalidName: the name is neither portable nor a consumer's.
    """
    return _encode(subscription, "subscription", "consumer")


def group_consumer(group: str, partition: int) -> str:
    """The durable consumer that a record group has for one partition."""
    return f"{_encode(group, 'group', 'consumer')}+{partition}"


def topic_of(stream: str) -> str:
    """The topic that a stream is; a stream that no portable name stands for comes back as a native name."""
    return _decode(stream)


def subscription_of(consumer: str) -> str:
    """The subscription or group that a consumer belongs to."""
    return _decode(group_of(consumer) or consumer)


def group_of(consumer: str) -> str | None:
    """The encoded group of a consumer that serves one partition of it; None for any other consumer."""
    group, plus, partition = consumer.rpartition("+")
    return group if plus and group and partition.isdecimal() else None


def partition_subject(stream: str, partition: int) -> str:
    """Where the messages of one partition are."""
    return f"{stream}.{partition}"


def schedule_subject(stream: str, token: str) -> str:
    """Where one message waits for its time; `*` as token stands for all."""
    return f"{stream}.schedule.{token}"


def given_back_subject(stream: str, consumer: str) -> str:
    """Where it is kept what the consumers of a subscription gave back."""
    return f"anybroker.given-back.{stream}.{consumer}"


def subject_filter(stream: str) -> str:
    """All partitions of a topic, without what is scheduled."""
    return f"{stream}.*"


def _encode(name: str, what: str, native: str) -> str:
    if isinstance(name, NativeName):
        if len(name) > 255 or not _FORBIDDEN.isdisjoint(name):
            raise InvalidName(
                f"{what} name {str(name)!r} cannot be a {native}'s",
                advice="NATS takes up to 255 characters, without spaces, '.', '*', '>', '/' and '\\'",
            )
        return str(name)
    return check_name(name, what).replace(".", "=")


def _decode(name: str) -> str:
    decoded = name.replace("=", ".")
    try:
        return check_name(decoded, "topic")
    except InvalidName:
        return NativeName(name)
