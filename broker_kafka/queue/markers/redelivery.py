"""What a tracker sends for a message that is due: the message again, or a dead letter. Pure functions.

A message that is sent again is a new record with a new place in its log, and who held the old one has no say over it.
Its headers tell how many deliveries count, whence it came first, whose it is, and which id it has for users.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from broker.driver import DEAD_LETTER_PREFIX
from broker_kafka.codec.headers import DUE, record_id
from broker_kafka.codec.headers import Headers as RecordHeaders
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.wire import Content, Headers, MessageId, Origin

__all__ = [
    "ATTEMPTS",
    "ORIGIN",
    "QUEUE",
    "Sending",
    "again",
    "attempts_of",
    "dead_letter",
    "is_exhausted",
    "origin_of",
]

ATTEMPTS: Final = "anybroker-attempts"
"""How many deliveries of the message count already, in decimal."""
ORIGIN: Final = "anybroker-origin"
"""Where and when it was sent first: `topic:partition:offset:milliseconds`."""
QUEUE: Final = "anybroker-queue"
"""The queue that it was sent again for: others that read the same topic pass over it."""
_ID: Final = "anybroker-id"
_TIME: Final = "anybroker-time"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LARGEST: Final = 2**31
_MOST_ATTEMPTS: Final = 2**32 - 2
"""The START of the next delivery has no room for more."""


class Sending(NamedTuple):
    """A record to be written in place of a message."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


def is_exhausted(lease: Lease, content: Content) -> bool:
    """Whether the message was delivered as often as it may be."""
    return 0 < content.max_attempts <= lease.attempt


def again(lease: Lease, content: Content) -> Sending:
    """The message once more, for the queue that held it."""
    origin = content.origin or _place(lease.id)
    # Who gets it before any delivery looks at the time again, by a clock of its own; afterwards that is past.
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
    return Sending(lease.id.topic, content.key, content.value, headers)


def dead_letter(lease: Lease, content: Content, reason: str) -> Sending:
    """The whole record, and what a consumer's letter tells: why, whence, when and after how many deliveries it is given
    up; the count itself is left out, so that who sends it back begins anew."""
    origin = content.origin or _place(lease.id)
    # By the brokers' clock, as all of the tracker's times.
    given_up = _EPOCH + timedelta(milliseconds=lease.deadline)
    told = {
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
            told["id"] = value.decode("utf-8", "replace")
    added = {DEAD_LETTER_PREFIX + name: text.encode() for name, text in told.items() if text}
    headers = _timed(_without(content.headers, {ATTEMPTS, ORIGIN, QUEUE, DUE, _ID, *added}), origin)
    headers += tuple(added.items())
    return Sending(content.dead_letter, content.key, content.value, headers)


def attempts_of(headers: RecordHeaders) -> int:
    """How many deliveries of a record's message count already; 0 if it does not tell."""
    for name, value in headers:
        if name == ATTEMPTS and value is not None and value.isdigit() and len(value) <= 10:
            return min(int(value), _MOST_ATTEMPTS)
    return 0


def origin_of(headers: RecordHeaders) -> Origin | None:
    """Where a record's message was sent first; None if this is the place."""
    for name, value in headers:
        if name == ORIGIN and value is not None:
            topic, *numbers = value.decode("utf-8", "replace").rsplit(":", 3)
            if len(numbers) == 3 and all(number.isascii() and number.isdigit() for number in numbers):
                partition, offset, timestamp = map(int, numbers)
                if partition < _LARGEST and max(offset, timestamp) < _LARGEST**2:
                    return Origin(topic, partition, offset, timestamp)
    return None


def _place(id: MessageId) -> Origin:
    return Origin(id.topic, id.partition, id.offset, 0)


def _timed(headers: Headers, origin: Origin) -> Headers:
    """With the producer's time, which the new record's timestamp does not tell."""
    if not origin.timestamp_ms or any(name == _TIME for name, _ in headers):
        return headers
    return (*headers, (_TIME, b"%d" % (1000 * origin.timestamp_ms)))


def _without(headers: Headers, names: set[str]) -> Headers:
    return tuple([header for header in headers if header[0] not in names])
