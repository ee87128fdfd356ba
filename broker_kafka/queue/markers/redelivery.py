"""What a tracker publishes in place of a due message: the message again, or a dead letter. Pure functions.

A redelivered message is a new record with a new place in its log, so that markers of the old one do not touch it. Its
headers carry the deliveries that count, its origin, its queue, and the message id that users see.

*Trust.* Any producer of the topic can write such headers. An origin of another topic counts as none, since a redrive
publishes to the topic of the origin.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from broker.driver import DEAD_LETTER_PREFIX
from broker_kafka.codec.headers import DUE, record_id
from broker_kafka.codec.headers import Headers as RecordHeaders
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.wire import Content, Headers, Origin

__all__ = [
    "ATTEMPTS",
    "ORIGIN",
    "QUEUE",
    "Replacement",
    "attempts_of",
    "dead_letter",
    "is_exhausted",
    "origin_of",
    "redelivery",
]

ATTEMPTS: Final = "anybroker-attempts"
"""How many deliveries of the message count, in decimal."""
ORIGIN: Final = "anybroker-origin"
"""Where and when it was published: `topic:partition:offset:milliseconds`."""
QUEUE: Final = "anybroker-queue"
"""The queue that it was redelivered for: other queues of the topic skip it."""
_ID: Final = "anybroker-id"
_TIME: Final = "anybroker-time"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PLACE: Final = re.compile(rb"(.+):([0-9]{1,19}):([0-9]{1,19}):([0-9]{1,19})")
"""Python refuses to read a number of thousands of digits."""
_LARGEST: Final = 2**31
_MOST_ATTEMPTS: Final = 2**31 - 2
"""One more still fits where counts have 32 bits, as in a START and in Spark."""


class Replacement(NamedTuple):
    """A record published in place of a due message."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


def is_exhausted(lease: Lease, content: Content) -> bool:
    """Whether the message was delivered as often as it may be."""
    return 0 < content.max_attempts <= lease.attempt


def redelivery(lease: Lease, content: Content) -> Replacement:
    """The message again, for the queue that held it."""
    origin = _origin(lease, content)
    # Before the first delivery the consumer checks the due time by its own clock; afterwards the time is past.
    dropped = {ATTEMPTS, ORIGIN, QUEUE, DUE} if lease.attempt else {ATTEMPTS, ORIGIN, QUEUE}
    headers = _without(content.headers, dropped)
    names = {name for name, _ in headers}
    if _ID not in names:
        headers += ((_ID, record_id(origin.topic, origin.partition, origin.offset).encode()),)
    headers = _timed(headers, origin)
    headers += (
        (ATTEMPTS, b"%d" % lease.attempt),
        (ORIGIN, f"{origin.topic}:{origin.partition}:{origin.offset}:{origin.timestamp_ms}".encode()),
    )
    if lease.id.queue:
        headers += ((QUEUE, lease.id.queue.encode()),)
    return Replacement(lease.id.topic, content.key, content.value, headers)


def dead_letter(lease: Lease, content: Content, reason: str) -> Replacement:
    """The whole record with the headers of a dead letter, and no attempt count: a redrive starts from 0."""
    origin = _origin(lease, content)
    # By the brokers' clock, as all times of a tracker.
    given_up = _EPOCH + timedelta(milliseconds=lease.deadline)
    known = {
        "reason": reason,
        "error": lease.reason,
        "attempts": str(lease.attempt),
        "topic": origin.topic,
        "subscription": lease.id.queue,
        "id": record_id(origin.topic, origin.partition, origin.offset),
        "time": given_up.isoformat(),
        "partition": str(origin.partition),
        "offset": str(origin.offset),
    }
    for name, value in content.headers:
        if name == _ID and value is not None:
            known["id"] = value.decode("utf-8", "replace")
    added = {DEAD_LETTER_PREFIX + name: text.encode() for name, text in known.items() if text}
    # The record may come from a dead-letter topic, or from a forger.
    own = tuple([header for header in content.headers if not header[0].startswith(DEAD_LETTER_PREFIX)])
    headers = _timed(_without(own, {ATTEMPTS, ORIGIN, QUEUE, DUE, _ID}), origin)
    headers += tuple(added.items())
    return Replacement(content.dead_letter, content.key, content.value, headers)


def attempts_of(headers: RecordHeaders) -> int:
    """How many deliveries of the record's message count; 0 without the header."""
    for name, value in headers:
        if name == ATTEMPTS and value is not None and value.isdigit() and len(value) <= 10:
            return min(int(value), _MOST_ATTEMPTS)
    return 0


def origin_of(headers: RecordHeaders, topic: str) -> Origin | None:
    """Where the record's message was published first; None if here.

    :param topic: of the record.
    """
    for name, value in headers:
        if name == ORIGIN and value is not None:
            found = _PLACE.fullmatch(value)
            if found is not None and found[1] == topic.encode():
                partition, offset, timestamp = map(int, found.groups()[1:])
                if partition < _LARGEST and max(offset, timestamp) < _LARGEST**2:
                    return Origin(topic, partition, offset, timestamp)
    return None


def _origin(lease: Lease, content: Content) -> Origin:
    # Another program may have written the START.
    if content.origin is not None and content.origin.topic == lease.id.topic:
        return content.origin
    return Origin(lease.id.topic, lease.id.partition, lease.id.offset, 0)


def _timed(headers: Headers, origin: Origin) -> Headers:
    """With the producer's time, which differs from the new record's timestamp."""
    if not origin.timestamp_ms or any(name == _TIME for name, _ in headers):
        return headers
    return (*headers, (_TIME, b"%d" % (1000 * origin.timestamp_ms)))


def _without(headers: Headers, names: set[str]) -> Headers:
    return tuple([header for header in headers if header[0] not in names])
