"""What nobody has taken of a queue: the records of its topics behind the positions of its group. Reads only.

*Concurrency.* Any number at once. *Cancellation.* Leaves nothing behind. *Failure.* Errors of the brokers are raised;
a topic that is gone holds nothing.

What is open in a queue, read from its marker topic without a group; nothing is changed.

*Concurrency.* Any number at once. *Cancellation.* Leaves nothing behind. *Failure.* A subscription without a marker
topic has nothing open; other errors of the brokers are raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from broker import Bounds, BrokerError, NotFound, OffsetOutOfRange, Record, TopicPartition
from broker.driver import LogReaderSpi
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.codec.headers import headers_of
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.topic import marker_topic_name, tracker_group
from broker_kafka.queue.markers.wire import read_markers
from broker_kafka.queue.tracker.markers_queue import MarkersQueue

__all__ = ["open_in", "open_leases", "read_untaken", "state_of", "untaken_ranges"]


async def untaken_ranges(connection: Connection, log: LogReaderSpi, subscription: str) -> dict[TopicPartition, Bounds]:
    """From where to where nobody has taken anything, for every partition of the topics that the group reads.

    :raises SubscriptionNotFound: there is no such group.
    """
    positions = (await KafkaGroups(connection).describe(subscription)).positions
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


async def read_untaken(
    log: LogReaderSpi, own: QueueFilter, place: TopicPartition, bounds: Bounds, batch: int
) -> AsyncGenerator[list[Record[Any]]]:
    """The records of a range that are messages of the queue, in batches of at most so many."""
    if bounds.first < bounds.next:
        async for records in log.read(*place, bounds.first, bounds.next, batch):
            yield [record for record in records if own.has(record.key, headers_of(record.native) or ())]


_BATCH = 1000


async def open_leases(connection: Connection, log: LogReaderSpi, subscription: str) -> list[Lease]:
    """Every message of the subscription that has a START and no END, as of now.

    It reads the marker topic from where the trackers have committed.

    :raises BrokerError: the brokers do not tell.
    """
    own, shared = QueueFilter.of(subscription, connection.settings), connection.settings.marker_topic
    topic = marker_topic_name(own.queue, shared)
    if not is_topic_name(topic):
        return []
    try:
        bounds = await log.bounds(topic)
    except NotFound:
        return []
    places = [TopicPartition(topic, partition) for partition in bounds]
    stored = await GroupOffsetStore(connection).fetch(tracker_group(own.queue, shared), places)
    found: list[Lease] = []
    for place in places:
        position = stored[place]
        if isinstance(position, BrokerError):
            raise position
        first, following = bounds[place.partition]
        start = first if position is None else max(first, position.offset)
        found += await open_in(log, place, start, following)
    return [lease for lease in found if own.has_lease(lease)]


async def open_in(log: LogReaderSpi, place: TopicPartition, start: int, stop: int) -> list[Lease]:
    """The same of one marker partition, as of the offset `stop`, read from `start`."""
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
            # Retention was quicker; what it removed is known to nobody.
            return list(markers)
    return list(markers)


def state_of(lease: Lease, now: int) -> str:
    """`held`, `waiting` or `due`, at this time in milliseconds since 1970."""
    return "due" if lease.deadline <= now else "waiting" if lease.released else "held"
