"""Records on their way to be messages of a queue: what of them is to be started, and what their STARTs say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import msgspec
from confluent_kafka import TIMESTAMP_CREATE_TIME

from broker.messages import Message
from broker.spi import TopicPartition
from broker_kafka.headers import NativeRecord
from broker_kafka.partitioning import partition_of
from broker_kafka.queue.hold import Hold
from broker_kafka.queue.marker_format import MarkerFormat
from broker_kafka.queue.marker_producer import Placed
from broker_kafka.queue.own_records import OwnRecords
from broker_kafka.queue.placing import marker_partition
from broker_kafka.queue.redelivery import attempts_of, origin_of
from broker_kafka.queue.views import QUEUE_VIEW, UNCOUNTED_VIEW
from broker_kafka.queue.wire import Content, Headers, Kind, Marker, MessageId, Origin, StartWriter, write_marker
from broker_kafka.runs import NativeRun
from broker_kafka.scheduling import due_of

__all__ = ["Starting", "Taken"]

_offset: Final = cast("Callable[[Any], int]", NativeRecord.offset)
_told_headers: Final = cast("Callable[[Any], Sequence[tuple[str, bytes | None]] | None]", NativeRecord.headers)

_MOST: Final = 2**32 - 1
"""The largest count that a START can tell."""


class Taken(msgspec.Struct, eq=False, gc=False):
    """A record that was taken from the group and is not committed.

    :ivar headers: of the record.
    :ivar assignment: the number of the assignment that it came in.
    :ivar hold: None for one that is another queue's, and is passed over.
    :ivar due: when it may be handed over, in milliseconds since 1970.
    :ivar waits: whether its START says that it is not due, so that a tracker sends it again when it is.
    """

    place: TopicPartition
    assignment: int
    raw: NativeRecord
    offset: int
    headers: Headers
    hold: Hold | None
    due: int = 0
    waits: bool = False


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
        own: OwnRecords,
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
        for raw, offset, told in zip(messages, map(_offset, messages), map(_told_headers, messages), strict=True):
            hold, due = None, 0
            headers = tuple(told) if told else ()
            if by_key:
                key = _bytes(raw.key())
                partition = usual if key is None else partition_of(key, self._partitions)
            if not headers and own.keys is None:
                hold = Hold(MessageId(topic, number, offset, queue), partition, 1)
            elif own.has(raw.key(), headers):
                hold = Hold(MessageId(topic, number, offset, queue), partition, attempts_of(headers) + 1)
                due = due_of(headers)
            found.append(Taken(place, assignment, raw, offset, headers, hold, due))
        return found

    def starts(self, taken: Iterable[Taken], now: int) -> list[Placed]:
        """The STARTs of these, but for those that are another queue's.

        :param now: milliseconds since 1970; what is not due by then is told to wait.
        """
        found: list[Placed] = []
        place: TopicPartition | None = None
        writer: StartWriter | None = None
        for each in taken:
            hold = each.hold
            if hold is None:
                continue
            if writer is None or each.place is not place:
                place = each.place
                writer = StartWriter(
                    *place,
                    self._queue,
                    lease_ms=self._lease_ms,
                    holder=self._holder,
                    max_attempts=self._most,
                    dead_letter=self._dead_letter,
                )
            wait_ms = max(0, each.due - now)
            each.waits = wait_ms > 0
            data = self._v1_start(each, hold, wait_ms) if self._v1 else _start(writer, each, hold, wait_ms)
            found.append(Placed(hold.partition, data))
        return found

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
    kind, time = raw.timestamp()
    if kind != TIMESTAMP_CREATE_TIME or time < 0:
        time = 0
    if not headers and not wait_ms and type(key) is bytes and type(value) is bytes:
        return writer.plain(taken.offset, hold.attempt, key, value, time)
    origin = origin_of(headers) or Origin(taken.place.topic, taken.place.partition, taken.offset, time)
    # What waits is not delivered by this.
    attempt = hold.attempt - 1 if wait_ms else hold.attempt
    return writer.write(taken.offset, attempt, _bytes(key), _bytes(value), headers, origin, wait_ms=wait_ms)


def _bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data
