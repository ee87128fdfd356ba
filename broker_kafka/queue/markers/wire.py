"""Markers as bytes: V1, the format of kafka-mq-go; V2, with fields that a V1 tracker skips; and V3, a START of several
messages. Pure functions.

`markers.proto` defines the format. A record has one marker, or carries many. A marker that this version does not know
is read as None and never raises: a newer tracker, or another program, may share the topic. `FORMATS` are the formats
in which consumers write markers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from sys import intern
from typing import Final, NamedTuple

import msgspec
from google.protobuf.message import DecodeError

from broker_kafka.cluster.names import is_id, is_topic_name
from broker_kafka.queue.markers_pb2 import END, KEEPALIVE, START, V1, V2, V3
from broker_kafka.queue.markers_pb2 import Marker as _Marker
from broker_kafka.queue.markers_pb2 import MessageID as _MessageID

__all__ = [
    "FORMATS",
    "TIME_MARKER",
    "Content",
    "Headers",
    "Kind",
    "Marker",
    "MarkerFormat",
    "MessageId",
    "Origin",
    "pack_markers",
    "read_content",
    "read_markers",
    "write_marker",
]


Headers = tuple[tuple[str, bytes | None], ...]

_LONGEST: Final = 100 * 366 * 24 * 3600 * 1000
"""Milliseconds, a hundred years: a longer delay is a mistake, and would overflow a time."""


_MOST_SHARED_BYTES: Final = 8 << 20
"""What the messages of one START share, once each has a START of its own; 200 of ours take a fraction of it."""


class Kind(IntEnum):
    """The kind of a marker; the numbers are those of the wire."""

    START = 0
    END = 1
    KEEPALIVE = 2


class MessageId(NamedTuple):
    """A message of a queue, by its place in the log.

    :ivar topic: empty in V1, whose marker topic belongs to one message topic.
    :ivar queue: the subscription, since several may read one topic; empty in V1, whose queues share no message.
    """

    topic: str
    partition: int
    offset: int
    queue: str = ""

    @property
    def is_v1(self) -> bool:
        """Whether V1 can name the message: its END is then V1, for trackers of kafka-mq-go."""
        return not self.topic and not self.queue


class Origin(NamedTuple):
    """Where a message was published, and its producer's time in milliseconds since 1970; 0 is unknown."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a START, from which the message can be redelivered.

    :ivar key: of the record; in V1 it is the queue's name.
    :ivar max_attempts: after so many deliveries the message becomes a dead letter; 0 is never.
    :ivar dead_letter: the topic of dead letters; empty without one.
    :ivar holder: the name of the consumer that leased the message, to be shown.
    """

    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()
    origin: Origin | None = None
    max_attempts: int = 0
    dead_letter: str = ""
    holder: str = ""


class Marker(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A marker, without the content of a START.

    :ivar after_ms: START and KEEPALIVE: milliseconds from the marker's time until the message is redelivered.
    :ivar attempt: START: which delivery this is, from 1. KEEPALIVE: how many deliveries count, since the holder may
        have tried again; a release may count one fewer. None if the marker does not carry it.
    :ivar released: the message has no holder; a KEEPALIVE with this is a release, and may carry a delay.
    :ivar renews: of a START that renews another one, the offset of that.
    :ivar as_of: of a renewal, the offset below which it includes all markers.
    :ivar more: the offsets of further messages, of the same partition and queue. `read_each` splits a START with more.
    :ivar reason: of a release.
    """

    kind: Kind
    id: MessageId
    after_ms: int = 0
    attempt: int | None = None
    released: bool = False
    renews: int | None = None
    as_of: int = 0
    more: tuple[int, ...] = ()
    reason: str = ""

    def ids(self) -> list[MessageId]:
        """All messages that the marker names."""
        topic, partition, offset, queue = self.id
        return [MessageId(topic, partition, each, queue) for each in (offset, *self.more)]


TIME_MARKER: Final = Marker(kind=Kind.END, id=MessageId("", 0, -1))
"""Names no message: it is written for the timestamp that the broker gives it. A V1 tracker skips it too."""

_KINDS: Final = {START: Kind.START, END: Kind.END, KEEPALIVE: Kind.KEEPALIVE}
_TYPES: Final = {kind: number for number, kind in _KINDS.items()}
_START: Final = Kind.START
_END: Final = Kind.END
"""Attributes of an enum class cost a slow look-up each; this is read per message."""
_VERSIONS: Final = frozenset({V1, V2, V3})


def read_markers(data: bytes | None) -> Sequence[tuple[Marker | None, bytes]]:
    """The markers of a record, each with its bytes; None for one that is unknown, malformed, or without id."""
    raw = _Marker()
    marker = _read(raw, data or b"")
    if marker is None or not raw.packed:
        return ((marker, data or b""),)
    # One protobuf message for all of a record: creating one takes longer than reading one.
    each = _Marker()
    return [(_read(each, part), part) for part in raw.packed]


def pack_markers(markers: Sequence[bytes]) -> bytes:
    """One record that carries these for `read_markers`. A V1 tracker skips the record."""
    return _Marker(version=V2, type=END, message_id=_MessageID(offset=-1), packed=markers).SerializeToString()


def _read(raw: _Marker, data: bytes) -> Marker | None:
    """:param raw: which is read into."""
    try:
        raw.ParseFromString(data)
    except DecodeError:
        return None
    kind, version = _KINDS.get(raw.type), raw.version
    if kind is None or version not in _VERSIONS or not raw.HasField("message_id"):
        return None
    message = _read_id(raw.message_id)
    if not _are_names(message.topic, message.queue):
        return None  # requests for such a topic or group fail, or are never answered
    # The END at -1 is the time marker, and the head of a packed record.
    least = -1 if kind is _END else 0
    if message.partition < 0 or message.offset < least:
        return None  # no message has such a place
    after_ms = raw.redeliver_after_ms
    if after_ms > _LONGEST:
        after_ms = _LONGEST
    if version == V1:
        return Marker(kind=kind, id=message, after_ms=after_ms)
    if version == V3:
        return _read_starts(raw, kind, message, after_ms)
    starts = kind is _START
    more = () if starts else tuple(raw.more_offsets)
    if more and min(more) < 0:
        return None
    renewal = raw.renewal if starts and raw.HasField("renewal") else None
    return Marker(
        kind=kind,
        id=message,
        after_ms=after_ms,
        attempt=raw.attempt if raw.HasField("attempt") else None,
        released=raw.released,
        renews=None if renewal is None else renewal.of,
        as_of=0 if renewal is None else renewal.as_of,
        more=more,
        reason=raw.reason,
    )


@lru_cache(maxsize=100)
def _are_names(topic: str, queue: str) -> bool:
    """Whether these are valid names on Kafka, or empty. Cached: there are few names and many markers."""
    return (not topic or is_topic_name(topic)) and (not queue or ("\0" not in queue and is_id(queue)))


def _read_starts(raw: _Marker, kind: Kind, first: MessageId, after_ms: int) -> Marker | None:
    """A START of several messages; None if a column is incomplete, or what they share would fill the memory."""
    more = tuple(raw.more_offsets)
    count = 1 + len(more)
    complete = len(raw.values) == len(raw.times) == count and {len(raw.keys), len(raw.headers_of)} <= {0, count}
    shared = len(first.topic) + len(first.queue) + len(raw.dead_letter) + len(raw.holder)
    if kind is not _START or not more or not complete or min(more) < 0 or shared * count > _MOST_SHARED_BYTES:
        return None
    attempt = raw.attempt if raw.HasField("attempt") else None
    return Marker(kind=kind, id=first, after_ms=after_ms, attempt=attempt, more=more)


def read_content(data: bytes) -> Content:
    """The content of a START, from bytes that `read_markers` returned; of a START of several, what they share.

    :raises google.protobuf.message.DecodeError: the bytes are no marker.
    """
    raw = _Marker.FromString(data)
    origin = raw.origin if raw.HasField("origin") else None
    # V1 writes neither an empty key or value nor a missing one: keys are often missing, and values rarely.
    return Content(
        key=raw.key if raw.HasField("key") else None,
        value=raw.value if raw.HasField("value") else b"" if raw.version == V1 else None,
        headers=tuple([(header.name, header.value if header.HasField("value") else None) for header in raw.headers]),
        origin=None if origin is None else Origin(origin.topic, origin.partition, origin.offset, origin.timestamp_ms),
        max_attempts=raw.max_attempts,
        dead_letter=raw.dead_letter,
        holder=raw.holder,
    )


def write_marker(marker: Marker, content: Content | None = None, *, v1: bool = False) -> bytes:
    """A marker as bytes.

    :param content: of a START.
    :param v1: exactly as kafka-mq-go writes it, without what V1 has no field for.
    :raises ValueError: V1 has one id for each marker, and this names more.
    """
    if v1:
        if marker.more:
            raise ValueError(f"A V1 marker names one message, and this one {1 + len(marker.more)}: write one for each")
        raw = _Marker(type=_TYPES[marker.kind], message_id=_v1_id(marker.id), redeliver_after_ms=marker.after_ms)
        if content is not None:
            # V1 fields have no presence: empty ones are left out.
            raw.key, raw.value = content.key or b"", content.value or b""
            if not raw.key:
                raw.ClearField("key")
            if not raw.value:
                raw.ClearField("value")
        return raw.SerializeToString()
    raw = _Marker(
        version=V2,
        type=_TYPES[marker.kind],
        message_id=_write_id(marker.id),
        redeliver_after_ms=marker.after_ms,
        attempt=marker.attempt,
        released=marker.released,
        reason=marker.reason,
        more_offsets=marker.more,
    )
    if marker.renews is not None:
        raw.renewal.of, raw.renewal.as_of = marker.renews, marker.as_of
    if content is not None:
        _write_content(raw, content)
    return raw.SerializeToString()


def _write_content(raw: _Marker, content: Content) -> None:
    if content.key is not None:
        raw.key = content.key
    if content.value is not None:
        raw.value = content.value
    for name, value in content.headers:
        raw.headers.add(name=name, value=value)
    if content.origin is not None:
        origin = content.origin
        raw.origin.topic, raw.origin.partition = origin.topic, origin.partition
        raw.origin.offset, raw.origin.timestamp_ms = origin.offset, origin.timestamp_ms
    raw.max_attempts, raw.dead_letter, raw.holder = content.max_attempts, content.dead_letter, content.holder


def _read_id(raw: _MessageID) -> MessageId:
    # There are few names, and as many ids as open leases.
    return MessageId(intern(raw.topic), raw.partition, raw.offset, intern(raw.queue))


def _write_id(id: MessageId) -> _MessageID:
    return _MessageID(topic=id.topic, partition=id.partition, offset=id.offset, queue=id.queue)


def _v1_id(id: MessageId) -> _MessageID:
    return _MessageID(partition=id.partition, offset=id.offset)


class MarkerFormat(NamedTuple):
    """:ivar markers_per_record: how many messages one record, and one KEEPALIVE or END, may cover.
    :ivar place_by_key: whether markers lie in the partition of their message's key, where kafka-mq-go's tracker writes
        the END of what it redelivers.
    :ivar v1: whether markers are those of kafka-mq-go to the byte; what V1 has no field for is lost.
    """

    markers_per_record: int
    place_by_key: bool
    v1: bool


FORMATS: Final[Mapping[str, MarkerFormat]] = {
    "v2": MarkerFormat(markers_per_record=200, place_by_key=False, v1=False),
    "v2-single": MarkerFormat(markers_per_record=1, place_by_key=True, v1=False),
    "v1": MarkerFormat(markers_per_record=1, place_by_key=True, v1=True),
}
"""By the setting `marker_format`. A V1 tracker follows the last two: it skips fields that it does not know."""
