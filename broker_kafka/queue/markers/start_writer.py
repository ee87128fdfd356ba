"""STARTs of messages of one partition as bytes: `StartWriter`; and `read_each`, which splits a START of several. Pure.

A START of several messages holds what they share once and the rest in columns, so that it is cheap to write and read.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final

from broker_kafka.queue.markers.wire import Headers, Kind, Marker, MessageId, Origin, pack_markers
from broker_kafka.queue.markers_pb2 import START, V2, V3, HeaderList
from broker_kafka.queue.markers_pb2 import Marker as _Marker
from broker_kafka.queue.markers_pb2 import MessageID as _MessageID

__all__ = ["StartWriter", "read_each"]


class StartWriter:
    """Writes the STARTs of messages of one partition, as `write_marker` does and faster.

    One protobuf message holds what they share, and is serialised for each.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        queue: str,
        *,
        lease_ms: int,
        holder: str,
        max_attempts: int = 0,
        dead_letter: str = "",
    ) -> None:
        self._place: Final = (topic, partition)
        self._raw: Final = _Marker(
            version=V2,
            type=START,
            message_id=_MessageID(topic=topic, partition=partition, queue=queue),
            redeliver_after_ms=lease_ms,
            holder=holder,
            max_attempts=max_attempts,
            dead_letter=dead_letter,
        )
        self._id: Final = self._raw.message_id
        self._origin: Final = self._raw.origin
        self._origin.topic, self._origin.partition = self._place
        self._lease_ms: Final = lease_ms
        self._is_plain = True
        """Whether the last START had a key, a value, a holder, no headers, and its origin in this partition."""

    def plain(self, offset: int, attempt: int, key: bytes, value: bytes, timestamp_ms: int) -> bytes:
        """The START of a message without headers that lies where it was published."""
        raw, origin = self._raw, self._origin
        if not self._is_plain:
            self._is_plain = True
            raw.ClearField("headers")
            origin.topic, origin.partition = self._place
            self._wait(0)
        self._id.offset = origin.offset = offset
        origin.timestamp_ms = timestamp_ms
        raw.attempt, raw.key, raw.value = attempt, key, value
        return raw.SerializeToString()

    def write(
        self,
        offset: int,
        attempt: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        origin: Origin,
        *,
        wait_ms: int = 0,
    ) -> bytes:
        """The START of any message.

        :param wait_ms: above 0 the START leases the message to no one: it is redelivered after so long.
        """
        raw = self._raw
        self._is_plain = False
        self._id.offset, raw.attempt = offset, attempt
        if key is None:
            raw.ClearField("key")
        else:
            raw.key = key
        if value is None:
            raw.ClearField("value")
        else:
            raw.value = value
        raw.ClearField("headers")
        for name, data in headers:
            raw.headers.add(name=name, value=data)
        first = self._origin
        first.topic, first.partition, first.offset, first.timestamp_ms = origin
        self._wait(wait_ms)
        return raw.SerializeToString()

    def together(
        self,
        offsets: Sequence[int],
        keys: Sequence[bytes],
        values: Sequence[bytes],
        times: Sequence[int],
        headers: Sequence[HeaderList],
    ) -> bytes:
        """A record with the START of several messages, each on its first delivery and where it was published.

        :param keys: of each; empty if none has a key.
        :param times: of their producer, in milliseconds since 1970; 0 is unknown.
        :param headers: of each; empty if none has any.
        """
        raw, first = self._raw, self._id
        first.offset = offsets[0]
        start = _Marker(
            version=V3,
            type=START,
            message_id=first,
            redeliver_after_ms=self._lease_ms,
            attempt=1,
            holder=raw.holder,
            max_attempts=raw.max_attempts,
            dead_letter=raw.dead_letter,
            more_offsets=offsets[1:],
            keys=keys,
            values=values,
            times=times,
            headers_of=headers,
        )
        return pack_markers([start.SerializeToString()])

    def _wait(self, wait_ms: int) -> None:
        self._raw.released = wait_ms > 0
        self._raw.redeliver_after_ms = wait_ms or self._lease_ms


def read_each(marker: Marker, data: bytes, offsets: Container[int]) -> Iterator[tuple[Marker, bytes]]:
    """The START of each of these messages, split from the START of several.

    :param data: the bytes of the marker.
    """
    raw = _Marker.FromString(data)
    topic, partition, first, queue = marker.id
    writer = StartWriter(
        topic,
        partition,
        queue,
        lease_ms=marker.after_ms,
        holder=raw.holder,
        max_attempts=raw.max_attempts,
        dead_letter=raw.dead_letter,
    )
    attempt = 1 if marker.attempt is None else marker.attempt
    for at, offset in enumerate((first, *marker.more)):
        if offset not in offsets:
            continue
        key = raw.keys[at] if raw.keys else None
        headers: Headers = ()
        if raw.headers_of:
            column = raw.headers_of[at].headers
            headers = tuple([(each.name, each.value if each.HasField("value") else None) for each in column])
        origin = Origin(topic, partition, offset, raw.times[at])
        part = writer.write(offset, attempt, key, raw.values[at], headers, origin)
        message = MessageId(topic, partition, offset, queue)
        yield Marker(kind=Kind.START, id=message, after_ms=marker.after_ms, attempt=attempt), part
