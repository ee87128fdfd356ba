"""Reads what a queue holds: open messages from its marker topic, and the backlog behind the positions of its group.

Nothing is changed, and no group is joined. *Concurrency.* Any number of calls at once. *Cancellation.* Leaves nothing
behind. *Failure.* Errors of the brokers are raised; a missing topic holds nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from time import time
from typing import Any, Final

from msgspec.structs import replace

from broker import Bounds, NotFound, OffsetOutOfRange, Record, TopicPartition
from broker.driver import LogReaderSpi, OpenLease, QueuedMessage
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.codec.headers import RECORD_VIEW, headers_of
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset, positions_in
from broker_kafka.queue.markers.commit_text import topic_mark_in
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.marker_topic import marker_topic_name, require_markers, tracker_group
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.redelivery import attempts_of
from broker_kafka.queue.markers.wire import Headers, MessageId, read_content, read_markers
from broker_kafka.queue.tracker.markers_queue import MarkersQueue

__all__ = [
    "backlog_ranges",
    "list_open_leases",
    "open_leases",
    "open_leases_in",
    "queued_messages",
    "read_backlog",
    "topic_without_name",
]

_BATCH: Final = 1000


async def list_open_leases(connection: Connection, log: LogReaderSpi, subscription: str) -> list[OpenLease]:
    """As `TracksQueues.open_leases`: the oldest first, with ages by the clock of this machine.

    :raises NotFound: the subscription has no marker topic.
    """
    await require_markers(connection, subscription)
    leases = await _with_topics(connection, subscription, await open_leases(connection, log, subscription))
    now = int(1000 * time())
    return sorted([_open_lease(lease, now) for lease in leases], key=lambda lease: -lease.age)


async def queued_messages(
    connection: Connection, log: LogReaderSpi, subscription: str, limit: int
) -> list[QueuedMessage]:
    """As `TracksQueues.queued_messages`: open messages, the oldest first, and then the backlog."""
    queue_filter = QueueFilter.of(subscription, connection.settings)
    await require_markers(connection, subscription)
    # Before the leases: a message that is started meanwhile is then in both, and never in neither.
    backlog: list[Record[Any]] = []
    for place, bounds in (await backlog_ranges(connection, log, subscription)).items():
        backlog += await _first_of(log, queue_filter, place, bounds, limit)
    leases = await _with_topics(connection, subscription, await open_leases(connection, log, subscription))
    now = int(1000 * time())
    shown = [_open_message(lease, now) for lease in sorted(leases, key=lambda lease: lease.started)[:limit]]
    started = {(lease.id.topic, lease.id.partition, lease.id.offset) for lease in leases}
    backlog = [record for record in backlog if (record.topic, record.partition, record.offset) not in started]
    return shown + [_ready_message(record) for record in sorted(backlog, key=_oldest_first)[: limit - len(shown)]]


# -- open messages ---------------------------------------------------------------------------------------------


async def open_leases(connection: Connection, log: LogReaderSpi, subscription: str) -> list[Lease]:
    """Every message of the subscription that has a START and no END, as of now.

    Reads the marker topic from the committed positions of the trackers.
    """
    queue_filter, shared = QueueFilter.of(subscription, connection.settings), connection.settings.marker_topic
    topic = marker_topic_name(subscription, shared)
    if not is_topic_name(topic):
        return []
    try:
        bounds = await log.bounds(topic)
    except NotFound:
        return []
    places = [TopicPartition(topic, partition) for partition in bounds]
    stored = positions_in(await GroupOffsetStore(connection).fetch(tracker_group(subscription, shared), places))
    found: list[Lease] = []
    for place in places:
        position = stored.get(place)
        first, following = bounds[place.partition]
        start = first if position is None else max(first, position.offset)
        found += await open_leases_in(log, place, start, following)
    return [lease for lease in found if queue_filter.matches_lease(lease)]


async def open_leases_in(log: LogReaderSpi, place: TopicPartition, start: int, stop: int) -> list[Lease]:
    """The open leases of one marker partition as of the offset `stop`, read from `start`."""
    markers = MarkersQueue(start)
    if start < stop:
        try:
            async for batch in log.read(place.topic, place.partition, start, stop, _BATCH):
                for record in batch:
                    time = record.broker_time
                    milliseconds = 0 if time is None else int(1000 * time.timestamp())
                    for marker, data in read_markers(record.data):
                        if marker is not None:
                            markers.read(record.offset, milliseconds, marker, data)
        except OffsetOutOfRange:
            # Retention removed markers meanwhile.
            return list(markers)
    return list(markers)


async def _with_topics(connection: Connection, subscription: str, leases: list[Lease]) -> list[Lease]:
    """The leases, with the topic of V1 markers, which name none."""
    if all(lease.id.topic for lease in leases):
        return leases
    stored = positions_in(await GroupOffsetStore(connection).stored(subscription))
    topic = topic_without_name(QueueFilter.of(subscription, connection.settings), stored)
    return [lease if lease.id.topic else replace(lease, id=lease.id._replace(topic=topic)) for lease in leases]


def topic_without_name(queue_filter: QueueFilter, stored: Mapping[TopicPartition, StoredOffset]) -> str:
    """The topic of the messages whose markers name none; empty if it is not certain. A marker topic has one at most.

    :param stored: the positions of the subscription.
    """
    topics = {place.topic for place in stored}
    if len(topics) > 1:
        marks = (None, queue_filter.topic_mark)
        topics = {place.topic for place, position in stored.items() if topic_mark_in(position.metadata) in marks}
    return topics.pop() if len(topics) == 1 else ""


def _state_of(lease: Lease, now: int) -> str:
    return "due" if lease.deadline <= now else "waiting" if lease.released else "held"


def _open_lease(lease: Lease, now: int) -> OpenLease:
    return OpenLease(
        topic=lease.id.topic,
        partition=lease.id.partition,
        offset=lease.id.offset,
        queue=lease.id.queue,
        state=_state_of(lease, now),
        attempt=lease.attempt,
        age=max(0.0, (now - lease.started) / 1000),
        due_in=(lease.deadline - now) / 1000,
        holder=read_content(lease.data).holder,
        reason=lease.reason,
        size=len(lease.data),
    )


def _open_message(lease: Lease, now: int) -> QueuedMessage:
    content = read_content(lease.data)
    raw = _StartedRecord(lease.id, content.headers)
    return QueuedMessage(
        topic=lease.id.topic,
        partition=lease.id.partition,
        offset=lease.id.offset,
        state=_state_of(lease, now),
        attempt=lease.attempt,
        due_in=(lease.deadline - now) / 1000,
        id=RECORD_VIEW.id(raw),
        key=content.key,
        data=content.value,
        attributes=RECORD_VIEW.attributes(raw),
    )


class _StartedRecord:
    """The record of a message by its START, for `RECORD_VIEW`."""

    def __init__(self, id: MessageId, headers: Headers) -> None:
        self._id = id
        self._headers = headers

    def headers(self) -> Headers:
        return self._headers

    def topic(self) -> str:
        return self._id.topic

    def partition(self) -> int:
        return self._id.partition

    def offset(self) -> int:
        return self._id.offset


# -- the backlog -----------------------------------------------------------------------------------------------


async def backlog_ranges(connection: Connection, log: LogReaderSpi, subscription: str) -> dict[TopicPartition, Bounds]:
    """The offsets behind the positions of the group, for every partition of the topics that it reads.

    :raises SubscriptionNotFound: there is no such group.
    """
    positions = (await KafkaGroups(connection).describe_group(subscription)).positions
    found: dict[TopicPartition, Bounds] = {}
    for topic in sorted({place.topic for place in positions}):
        try:
            bounds = await log.bounds(topic)
        except NotFound:
            continue
        for partition, (first, following) in bounds.items():
            place = TopicPartition(topic, partition)
            found[place] = Bounds(min(following, max(first, positions.get(place, first))), following)
    return found


async def read_backlog(
    log: LogReaderSpi, queue_filter: QueueFilter, place: TopicPartition, bounds: Bounds, batch: int
) -> AsyncGenerator[list[Record[Any]]]:
    """The records of a range that are messages of the queue, in batches of at most so many."""
    if bounds.first < bounds.next:
        async for records in log.read(*place, bounds.first, bounds.next, batch):
            yield [record for record in records if queue_filter.matches(record.key, headers_of(record.native) or ())]


async def _first_of(
    log: LogReaderSpi, queue_filter: QueueFilter, place: TopicPartition, bounds: Bounds, count: int
) -> list[Record[Any]]:
    found: list[Record[Any]] = []
    async with aclosing(read_backlog(log, queue_filter, place, bounds, count)) as batches:
        async for batch in batches:
            found += batch
            if len(found) >= count:
                break
    return found


def _oldest_first(record: Record[Any]) -> tuple[float, int, int]:
    moment = record.broker_time or record.publish_time
    return (moment.timestamp() if moment else 0.0, record.partition, record.offset)


def _ready_message(record: Record[Any]) -> QueuedMessage:
    return QueuedMessage(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        state="ready",
        attempt=attempts_of(headers_of(record.native) or ()),
        due_in=None,
        id=record.id,
        key=record.key,
        data=record.data,
        attributes=record.attributes,
    )
