"""The messages of a queue that are not done, for people: those that are open and those that nobody has taken.

Nothing is changed. *Concurrency.* Any number at once. *Cancellation.* Leaves nothing behind. *Failure.* Errors of the
brokers are raised.
"""

from __future__ import annotations

from contextlib import aclosing
from time import time
from typing import Any

from broker import Bounds, Record, TopicPartition
from broker.driver import LogReaderSpi, QueuedMessage
from broker_kafka.cluster.connection import Connection
from broker_kafka.codec.headers import RECORD_VIEW, headers_of
from broker_kafka.queue.admin.inspecting import open_leases, read_untaken, state_of, untaken_ranges
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.queue_names import require_markers
from broker_kafka.queue.markers.redelivery import attempts_of
from broker_kafka.queue.markers.wire import Headers, MessageId, read_content

__all__ = ["queued_messages"]


async def queued_messages(
    connection: Connection, log: LogReaderSpi, subscription: str, limit: int
) -> list[QueuedMessage]:
    """As `TracksQueues.queued_messages`."""
    own = QueueFilter.of(subscription, connection.settings)
    await require_markers(connection, own.queue)
    # Before the leases: what is taken meanwhile is in both then, and never in neither.
    ready: list[Record[Any]] = []
    for place, bounds in (await untaken_ranges(connection, log, own.queue)).items():
        ready += await _first_of(log, own, place, bounds, limit)
    leases = await open_leases(connection, log, subscription)
    now = int(1000 * time())
    shown = [_taken(lease, now) for lease in sorted(leases, key=lambda lease: lease.started)[:limit]]
    taken = {(lease.id.topic, lease.id.partition, lease.id.offset) for lease in leases}
    ready = [record for record in ready if (record.topic, record.partition, record.offset) not in taken]
    return shown + [_ready(record) for record in sorted(ready, key=_age)[: limit - len(shown)]]


async def _first_of(
    log: LogReaderSpi, own: QueueFilter, place: TopicPartition, bounds: Bounds, count: int
) -> list[Record[Any]]:
    found: list[Record[Any]] = []
    async with aclosing(read_untaken(log, own, place, bounds, count)) as batches:
        async for batch in batches:
            found += batch
            if len(found) >= count:
                break
    return found


def _age(record: Record[Any]) -> tuple[float, int, int]:
    moment = record.broker_time or record.publish_time
    return (moment.timestamp() if moment else 0.0, record.partition, record.offset)


class _Kept:
    """A record as its START tells it, for `RECORD_VIEW`."""

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


def _taken(lease: Lease, now: int) -> QueuedMessage:
    content = read_content(lease.data)
    raw = _Kept(lease.id, content.headers)
    return QueuedMessage(
        topic=lease.id.topic,
        partition=lease.id.partition,
        offset=lease.id.offset,
        state=state_of(lease, now),
        attempt=lease.attempt,
        due_in=(lease.deadline - now) / 1000,
        id=RECORD_VIEW.id(raw),
        key=content.key,
        data=content.value,
        attributes=RECORD_VIEW.attributes(raw),
    )


def _ready(record: Record[Any]) -> QueuedMessage:
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
