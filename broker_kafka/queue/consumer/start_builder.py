"""`StartBuilder`: turns fetched records into messages of a queue, and into the STARTs that lease them. Pure.

All markers of a message lie in one partition of the marker topic. It is chosen when the START is built and kept with
the message, so that a marker topic which grows in between moves nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import Any, Final, NamedTuple, cast
from zlib import crc32

import msgspec
from confluent_kafka import TIMESTAMP_CREATE_TIME

from broker import Message, TopicPartition
from broker.driver import Place
from broker_kafka.client.partitioner import partition_of
from broker_kafka.codec.headers import NativeRecord, RecordView, due_of, headers_of, headers_of_each
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.queue.consumer.lease_manager import HeldMessage
from broker_kafka.queue.markers.marker_producer import PACKED_BYTES, PlacedMarker
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.redelivery import attempts_of, origin_of
from broker_kafka.queue.markers.start_writer import StartWriter
from broker_kafka.queue.markers.wire import (
    Content,
    Headers,
    Kind,
    Marker,
    MarkerFormat,
    MessageId,
    Origin,
    write_marker,
)
from broker_kafka.queue.markers_pb2 import Header, HeaderList

__all__ = ["QUEUE_VIEW", "FetchedRecord", "StartBuilder", "StartRecord", "marker_partition"]


def marker_partition(id: MessageId, partitions: int) -> int:
    """The partition of a START: one for each queue and message partition, which spreads the load of a queue."""
    return (crc32(f"{id.queue}\0{id.topic}".encode()) + id.partition) % partitions


class _UncountedView(RecordView):
    """As `RecordView`, with the place at which a redelivered message was published."""

    __slots__ = ()

    def place(self, raw: Any, /) -> Place | None:
        headers = headers_of(raw)
        origin = origin_of(headers, raw.topic()) if headers else None
        return super().place(raw) if origin is None else Place(origin.partition, origin.offset)


class _QueueView(_UncountedView):
    """With the delivery attempt, too."""

    __slots__ = ()

    def delivery_attempt(self, raw: Any, /) -> int | None:
        headers = headers_of(raw)
        return attempts_of(headers) + 1 if headers else 1


QUEUE_VIEW: Final = _QueueView()
"""The view of messages of queues."""
_UNCOUNTED_VIEW: Final = _UncountedView()
"""The view of messages with V1 markers, which carry no attempt count."""


_offset: Final = cast("Callable[[Any], int]", NativeRecord.offset)

_MAX_COUNT: Final = 2**31 - 1
"""The largest attempt count: what foreign headers claim is cut to this, too."""
_FRAME: Final = 40
"""The most bytes that a message adds to a START of several, besides its key, value and headers."""


class FetchedRecord(msgspec.Struct, eq=False, gc=False):
    """A record that was fetched and whose position is not committed.

    :ivar assignment: the number of the assignment in which it was fetched.
    :ivar held: the message; None for a record of another queue, which is skipped.
    :ivar due: when it may be handed over, in milliseconds since 1970; 0 is at once.
    :ivar is_first: whether it lies where it was published, and was never delivered.
    :ivar deferred: whether its START leases it to no one, so that a tracker sends it again when it is due.
    """

    place: TopicPartition
    assignment: int
    raw: NativeRecord
    offset: int
    headers: Headers
    held: HeldMessage | None
    due: int = 0
    is_first: bool = True
    deferred: bool = False


class StartRecord(NamedTuple):
    """A record with one or more STARTs, and the fetched records that it starts."""

    marker: PlacedMarker
    records: Sequence[FetchedRecord]


class StartBuilder:
    """:param queue_filter: which records are the queue's.
    :param partitions: of the marker topic.
    :param holder: the name of this consumer, shown by `broker queue inspect`.
    :param max_deliveries: after so many a tracker writes a message to `dead_letter`; V1 STARTs do not carry it.
    :param dead_letter: a topic; without one, trackers redeliver every message.
    """

    def __init__(
        self,
        queue_filter: QueueFilter,
        partitions: int,
        *,
        lease_ms: int,
        holder: str,
        format: MarkerFormat,
        max_deliveries: int | None,
        dead_letter: str | None,
    ) -> None:
        self._filter: Final = queue_filter
        self.key_mark: Final = queue_filter.key_mark
        self.topic_mark: Final = queue_filter.topic_mark
        self._queue: Final = queue_filter.queue
        self._v1: Final = format.v1
        self._by_key: Final = format.place_by_key
        self._max_markers: Final = format.markers_per_record
        self._partitions: Final = partitions
        self._lease_ms: Final = lease_ms
        self._holder: Final = holder
        self._dead_letter: Final = dead_letter or ""
        self._max_attempts: Final = min(max_deliveries or 0, _MAX_COUNT) if dead_letter else 0

    def fetched(self, run: NativeRun, assignment: int) -> list[FetchedRecord]:
        """The records of a run."""
        topic, number, queue, queue_filter, by_key = run.topic, run.partition, self._queue, self._filter, self._by_key
        place = TopicPartition(topic, number)
        partition = default = marker_partition(MessageId(topic, number, 0, queue), self._partitions)
        found: list[FetchedRecord] = []
        messages = run.messages
        for raw, offset, known in zip(messages, map(_offset, messages), headers_of_each(messages), strict=True):
            held, due, is_first = None, 0, True
            headers = tuple(known) if known else ()
            if by_key:
                key = _bytes(raw.key())
                partition = default if key is None else partition_of(key, self._partitions)
            if not headers and queue_filter.key is None:
                held = HeldMessage(MessageId(topic, number, offset, queue), partition, 1)
            elif queue_filter.matches(raw.key(), headers):
                held = HeldMessage(MessageId(topic, number, offset, queue), partition, attempts_of(headers) + 1)
                due = due_of(headers)
                is_first = held.attempt == 1 and origin_of(headers, topic) is None
            found.append(FetchedRecord(place, assignment, raw, offset, headers, held, due, is_first))
        return found

    def starts(self, records: Iterable[FetchedRecord], now: int) -> list[StartRecord]:
        """The STARTs of these; records of other queues get none.

        :param now: milliseconds since 1970; what is due later is deferred.
        """
        parts: dict[tuple[TopicPartition, int], tuple[list[FetchedRecord], list[FetchedRecord]]] = {}
        place: TopicPartition | None = None
        partition = -1
        joined: list[FetchedRecord] = []
        single: list[FetchedRecord] = []
        joins = self._max_markers > 1
        for each in records:
            held = each.held
            if held is None:
                continue
            if each.place is not place or held.partition != partition:
                place, partition = each.place, held.partition
                joined, single = parts.setdefault((place, partition), ([], []))
            each.deferred = each.due > now
            (joined if joins and each.is_first and not each.deferred else single).append(each)
        found: list[StartRecord] = []
        for (place, partition), (joined, single) in parts.items():
            writer = StartWriter(
                *place,
                self._queue,
                lease_ms=self._lease_ms,
                holder=self._holder,
                max_attempts=self._max_attempts,
                dead_letter=self._dead_letter,
            )
            found += [self._single(writer, partition, each, max(0, each.due - now)) for each in single]
            found += self._joined(writer, partition, joined)
        return found

    def _single(self, writer: StartWriter, partition: int, record: FetchedRecord, wait_ms: int) -> StartRecord:
        held = record.held
        assert held is not None
        data = self._v1_start(record, held, wait_ms) if self._v1 else _start(writer, record, held, wait_ms)
        return StartRecord(PlacedMarker(partition, data), (record,))

    def _joined(self, writer: StartWriter, partition: int, records: Sequence[FetchedRecord]) -> Iterator[StartRecord]:
        """STARTs of messages on their first delivery: one for several of them where the columns allow it."""
        raws: list[Any] = [each.raw for each in records]
        keys: list[bytes] = [key for raw in raws if (key := raw.key()) is not None]
        values: list[bytes] = [value for raw in raws if (value := raw.value()) is not None]
        if len(values) < len(raws) or 0 < len(keys) < len(raws):
            # A column cannot say which message has no key or value.
            for each in records:
                yield self._single(writer, partition, each, 0)
            return
        times = [_time(*raw.timestamp()) for raw in raws]
        headers = [_header_list(each.headers) for each in records] if any(each.headers for each in records) else []
        sizes = [_FRAME + len(value) for value in values]
        if keys:
            sizes = list(map(add, sizes, map(len, keys)))
        if headers:
            sizes = list(map(add, sizes, map(HeaderList.ByteSize, headers)))
        for begin, end in _parts(sizes, self._max_markers):
            part = slice(begin, end)
            if end - begin == 1:
                yield self._single(writer, partition, records[begin], 0)
                continue
            offsets = [each.offset for each in records[part]]
            data = writer.together(offsets, keys[part], values[part], times[part], headers[part])
            yield StartRecord(PlacedMarker(partition, data, whole=True), records[part])

    def _v1_start(self, record: FetchedRecord, held: HeldMessage, wait_ms: int) -> bytes:
        marker = Marker(kind=Kind.START, id=held.id, after_ms=wait_ms or self._lease_ms)
        return write_marker(marker, Content(key=_bytes(record.raw.key()), value=_bytes(record.raw.value())), v1=True)

    def message(self, record: FetchedRecord) -> Message[Any]:
        """The message as the consumer gets it."""
        raw = record.raw
        view = _UNCOUNTED_VIEW if self._v1 else QUEUE_VIEW
        return Message(record.place.topic, raw.value(), raw, view, record.held, len(raw))


def _start(writer: StartWriter, record: FetchedRecord, held: HeldMessage, wait_ms: int) -> bytes:
    raw = record.raw
    key, value, headers = raw.key(), raw.value(), record.headers
    time = _time(*raw.timestamp())
    if not headers and not wait_ms and type(key) is bytes and type(value) is bytes:
        return writer.plain(record.offset, held.attempt, key, value, time)
    place = record.place
    origin = origin_of(headers, place.topic) or Origin(place.topic, place.partition, record.offset, time)
    # Deferring is no delivery.
    attempt = held.attempt - 1 if wait_ms else held.attempt
    return writer.write(record.offset, attempt, _bytes(key), _bytes(value), headers, origin, wait_ms=wait_ms)


def _time(kind: int, time: int) -> int:
    """When a record was published, in milliseconds since 1970; 0 is unknown."""
    return time if kind == TIMESTAMP_CREATE_TIME and time > 0 else 0


def _bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def _header_list(headers: Headers) -> HeaderList:
    return HeaderList(headers=[Header(name=name, value=value) for name, value in headers])


def _parts(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Bounds of the parts: at most `most` messages, and the bytes of one record unless a message alone is larger."""
    totals = list(accumulate(sizes))
    begin = size = 0
    while begin < len(sizes):
        end = min(begin + most, max(begin + 1, bisect_right(totals, size + PACKED_BYTES)))
        yield begin, end
        begin, size = end, totals[end - 1]
