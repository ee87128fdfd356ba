"""In which marker partition the markers of a message lie. Pure.

All markers of a message lie in one partition, which is chosen when its START is written and kept by who holds it: a
marker topic that grows in between moves nothing.

How a record that is handed over as a message of a queue is shown. Pure, safe from any thread.

Records on their way to be messages of a queue: what of them is to be started, and what their STARTs say. Pure.
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
from broker_kafka.queue.consumer.lease_manager import Hold
from broker_kafka.queue.markers.marker_producer import PACKED_BYTES, Placed
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

__all__ = ["QUEUE_VIEW", "UNCOUNTED_VIEW", "Started", "Starting", "Taken", "marker_partition"]


def marker_partition(id: MessageId, partitions: int) -> int:
    """The partition for a START: one for each queue and partition of messages, so that a queue's load is shared."""
    return (crc32(f"{id.queue}\0{id.topic}".encode()) + id.partition) % partitions


class _UncountedView(RecordView):
    """As any record, and it tells where the message lay before a tracker sent it again."""

    __slots__ = ()

    def place(self, raw: Any, /) -> Place | None:
        origin = origin_of(headers_of(raw) or ())
        return super().place(raw) if origin is None else Place(origin.partition, origin.offset)


class _QueueView(_UncountedView):
    """It also tells which delivery this is."""

    __slots__ = ()

    def delivery_attempt(self, raw: Any, /) -> int | None:
        headers = headers_of(raw)
        return attempts_of(headers) + 1 if headers else 1


QUEUE_VIEW: Final = _QueueView()
"""The one view of all messages of queues."""
UNCOUNTED_VIEW: Final = _UncountedView()
"""That of messages whose markers are V1: those keep no count."""


_offset: Final = cast("Callable[[Any], int]", NativeRecord.offset)

_MOST: Final = 2**32 - 1
"""The largest count that a START can tell."""
_FRAME: Final = 40
"""The most bytes that a message takes in a START of several, beside its key, value and headers."""


class Taken(msgspec.Struct, eq=False, gc=False):
    """A record that was taken from the group and is not committed.

    :ivar headers: of the record.
    :ivar assignment: the number of the assignment that it came in.
    :ivar hold: None for one that is another queue's, and is passed over.
    :ivar due: when it may be handed over, in milliseconds since 1970; 0 is at once.
    :ivar is_first: whether it lies where it was sent first, and was never delivered.
    :ivar waits: whether its START says that it is not due, so that a tracker sends it again when it is.
    """

    place: TopicPartition
    assignment: int
    raw: NativeRecord
    offset: int
    headers: Headers
    hold: Hold | None
    due: int = 0
    is_first: bool = True
    waits: bool = False


class Started(NamedTuple):
    """A START, and what it starts."""

    placed: Placed
    taken: Sequence[Taken]


class Starting:
    """:param own: which records are the queue's.
    :param partitions: of the marker topic.
    :param lease_ms: of each START.
    :param holder: who holds what is started here, for people.
    :param format: of the STARTs.
    :param max_deliveries: after so many a tracker writes a message to `dead_letter`; V1 cannot tell it.
    :param dead_letter: a topic; without one, trackers send every message again.
    """

    def __init__(
        self,
        own: QueueFilter,
        partitions: int,
        *,
        lease_ms: int,
        holder: str,
        format: MarkerFormat,
        max_deliveries: int | None,
        dead_letter: str | None,
    ) -> None:
        self._own: Final = own
        self.keys: Final = own.mark
        """What stands for the keys of its records."""
        self._queue: Final = own.queue
        self._v1: Final = format.v1
        self._by_key: Final = format.by_key
        self._together: Final = format.together
        self._partitions: Final = partitions
        self._lease_ms: Final = lease_ms
        self._holder: Final = holder
        self._dead_letter: Final = dead_letter or ""
        self._most: Final = min(max_deliveries or 0, _MOST) if dead_letter else 0

    def taken(self, run: NativeRun, assignment: int) -> list[Taken]:
        """The records of a run."""
        topic, number, queue, own, by_key = run.topic, run.partition, self._queue, self._own, self._by_key
        place = TopicPartition(topic, number)
        partition = usual = marker_partition(MessageId(topic, number, 0, queue), self._partitions)
        found: list[Taken] = []
        messages = run.messages
        for raw, offset, told in zip(messages, map(_offset, messages), headers_of_each(messages), strict=True):
            hold, due, is_first = None, 0, True
            headers = tuple(told) if told else ()
            if by_key:
                key = _bytes(raw.key())
                partition = usual if key is None else partition_of(key, self._partitions)
            if not headers and own.key is None:
                hold = Hold(MessageId(topic, number, offset, queue), partition, 1)
            elif own.has(raw.key(), headers):
                hold = Hold(MessageId(topic, number, offset, queue), partition, attempts_of(headers) + 1)
                due = due_of(headers)
                is_first = hold.attempt == 1 and origin_of(headers) is None
            found.append(Taken(place, assignment, raw, offset, headers, hold, due, is_first))
        return found

    def starts(self, taken: Iterable[Taken], now: int) -> list[Started]:
        """The STARTs of these, but for those that are another queue's.

        :param now: milliseconds since 1970; what is not due by then is told to wait.
        """
        parts: dict[tuple[TopicPartition, int], tuple[list[Taken], list[Taken]]] = {}
        place: TopicPartition | None = None
        partition = -1
        alike: list[Taken] = []
        others: list[Taken] = []
        joins = self._together > 1
        for each in taken:
            hold = each.hold
            if hold is None:
                continue
            if each.place is not place or hold.partition != partition:
                place, partition = each.place, hold.partition
                alike, others = parts.setdefault((place, partition), ([], []))
            each.waits = each.due > now
            (alike if joins and each.is_first and not each.waits else others).append(each)
        found: list[Started] = []
        for (place, partition), (alike, others) in parts.items():
            writer = StartWriter(
                *place,
                self._queue,
                lease_ms=self._lease_ms,
                holder=self._holder,
                max_attempts=self._most,
                dead_letter=self._dead_letter,
            )
            found += [self._alone(writer, partition, each, max(0, each.due - now)) for each in others]
            found += self._starts_together(writer, partition, alike)
        return found

    def _alone(self, writer: StartWriter, partition: int, taken: Taken, wait_ms: int) -> Started:
        hold = taken.hold
        assert hold is not None
        data = self._v1_start(taken, hold, wait_ms) if self._v1 else _start(writer, taken, hold, wait_ms)
        return Started(Placed(partition, data), (taken,))

    def _starts_together(self, writer: StartWriter, partition: int, taken: Sequence[Taken]) -> Iterator[Started]:
        """STARTs of messages on their first delivery, of several where that can be."""
        raws: list[Any] = [each.raw for each in taken]
        keys: list[bytes] = [key for raw in raws if (key := raw.key()) is not None]
        values: list[bytes] = [value for raw in raws if (value := raw.value()) is not None]
        if len(values) < len(raws) or 0 < len(keys) < len(raws):
            # Columns do not tell which message has none.
            for each in taken:
                yield self._alone(writer, partition, each, 0)
            return
        times = [_time(*raw.timestamp()) for raw in raws]
        headers = [_header_list(each.headers) for each in taken] if any(each.headers for each in taken) else []
        sizes = [_FRAME + len(value) for value in values]
        if keys:
            sizes = list(map(add, sizes, map(len, keys)))
        if headers:
            sizes = list(map(add, sizes, map(HeaderList.ByteSize, headers)))
        for begin, end in _parts(sizes, self._together):
            part = slice(begin, end)
            if end - begin == 1:
                yield self._alone(writer, partition, taken[begin], 0)
                continue
            offsets = [each.offset for each in taken[part]]
            data = writer.together(offsets, keys[part], values[part], times[part], headers[part])
            yield Started(Placed(partition, data, whole=True), taken[part])

    def _v1_start(self, taken: Taken, hold: Hold, wait_ms: int) -> bytes:
        marker = Marker(kind=Kind.START, id=hold.id, after_ms=wait_ms or self._lease_ms)
        return write_marker(marker, Content(key=_bytes(taken.raw.key()), value=_bytes(taken.raw.value())), v1=True)

    def message(self, taken: Taken) -> Message[Any]:
        """One that was started, as the consumer gets it."""
        raw = taken.raw
        view = UNCOUNTED_VIEW if self._v1 else QUEUE_VIEW
        return Message(taken.place.topic, raw.value(), raw, view, taken.hold, len(raw))


def _start(writer: StartWriter, taken: Taken, hold: Hold, wait_ms: int) -> bytes:
    raw = taken.raw
    key, value, headers = raw.key(), raw.value(), taken.headers
    time = _time(*raw.timestamp())
    if not headers and not wait_ms and type(key) is bytes and type(value) is bytes:
        return writer.plain(taken.offset, hold.attempt, key, value, time)
    origin = origin_of(headers) or Origin(taken.place.topic, taken.place.partition, taken.offset, time)
    # What waits is not delivered by this.
    attempt = hold.attempt - 1 if wait_ms else hold.attempt
    return writer.write(taken.offset, attempt, _bytes(key), _bytes(value), headers, origin, wait_ms=wait_ms)


def _time(kind: int, time: int) -> int:
    """When a record was sent, in milliseconds since 1970; 0 if it does not tell."""
    return time if kind == TIMESTAMP_CREATE_TIME and time > 0 else 0


def _bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def _header_list(headers: Headers) -> HeaderList:
    return HeaderList(headers=[Header(name=name, value=value) for name, value in headers])


def _parts(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Where to cut, so that a part has so many at most, and a record takes it unless it is one alone."""
    totals = list(accumulate(sizes))
    begin = taken = 0
    while begin < len(sizes):
        end = min(begin + most, max(begin + 1, bisect_right(totals, taken + PACKED_BYTES)))
        yield begin, end
        begin, taken = end, totals[end - 1]
