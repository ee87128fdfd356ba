"""Purges a queue: moves the group's positions to the ends of its topics, and writes an END for each open message.

*Order.* Consumers and trackers must be closed. A tracker that is cut off is fenced first, as by a new owner of its
partitions; then the positions move, which the coordinator refuses while the group has members; then the ENDs are
written. *Concurrency.* Of two purges one is fenced by the other. *Failure.* What was dropped stays dropped; another
purge drops the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from broker import BackendError, Bounds, OperationTimeout, TopicPartition
from broker.driver import GroupReset, LogReaderSpi, PurgedQueue
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.cluster.requests import retry_while
from broker_kafka.fenced_writer import OutcomeUnknown, OutgoingRecord
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.queue.admin.inspecting import backlog_ranges, open_leases, open_leases_in, read_backlog
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.marker_topic import require_markers, tracker_group
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.wire import Kind, Marker, write_marker
from broker_kafka.queue.tracker.partition_claim import WRITER_CLOSE, PartitionClaim, claim_partitions

__all__ = ["purge_queue"]

_MAX_COUNTED: Final = 100_000
"""A longer backlog is counted by offsets, not read."""
_BATCH: Final = 1000


async def purge_queue(
    connection: Connection, log: LogReaderSpi, subscription: str, *, dry_run: bool = False
) -> PurgedQueue:
    """As `TracksQueues.purge_queue`.

    Messages in an open transaction stay. So do those with V1 markers in a shared topic, which name no queue, unless
    `queue_id` identifies their queue.
    """
    queue_filter, shared = QueueFilter.of(subscription, connection.settings), connection.settings.marker_topic
    trackers = tracker_group(subscription, shared)
    places = await partitions_of(connection, await require_markers(connection, subscription))
    ranges = await backlog_ranges(connection, log, subscription)
    if dry_run:
        leases = [
            lease
            for lease in await open_leases(connection, log, subscription)
            if _is_purgeable(queue_filter, lease, shared)
        ]
        return PurgedQueue(open=len(leases), ready=await _count(log, queue_filter, ranges))
    groups = KafkaGroups(connection)
    for group, members in ((subscription, "consumers"), (trackers, "consumers and trackers")):
        await groups.refuse_members(group, f"queue {subscription!r} is not purged", members=members)
    claims = await claim_partitions(connection, GroupOffsetStore(connection), trackers, places)
    try:
        ready = await _skip(groups, log, queue_filter, ranges)
        await _wait_until_visible(connection, log, claims)
        return PurgedQueue(open=await _end_open(log, queue_filter, claims, shared), ready=ready)
    finally:
        await asyncio.gather(*(each.writer.stop(WRITER_CLOSE) for each in claims.values()))


async def _count(log: LogReaderSpi, queue_filter: QueueFilter, ranges: Mapping[TopicPartition, Bounds]) -> int:
    """The number of messages of the queue in these ranges; of offsets if there are many."""
    total = sum(bounds.next - bounds.first for bounds in ranges.values())
    if total > _MAX_COUNTED:
        return total
    count = 0
    for place, bounds in ranges.items():
        async for records in read_backlog(log, queue_filter, place, bounds, _BATCH):
            count += len(records)
    return count


async def _skip(
    groups: KafkaGroups, log: LogReaderSpi, queue_filter: QueueFilter, ranges: Mapping[TopicPartition, Bounds]
) -> int:
    """Move the group to the ends of its topics; returns how many messages that skips."""
    topics = sorted({place.topic for place in ranges})
    if not topics:
        return 0
    changes = await groups.reset_group(queue_filter.queue, GroupReset(to="latest", topics=topics), dry_run=False)
    for change in changes:
        if change.error is not None:
            raise change.error
    skipped = {
        change.partition: Bounds(ranges[change.partition].first, change.after)
        for change in changes
        if change.partition in ranges
    }
    return await _count(log, queue_filter, skipped)


async def _wait_until_visible(
    connection: Connection, log: LogReaderSpi, claims: Mapping[TopicPartition, PartitionClaim]
) -> None:
    """Wait until the transactions that the claims aborted hide no records any more.

    :raises OperationTimeout: another transaction is open.
    """
    (topic,) = {place.topic for place in claims}

    async def hidden_partitions() -> list[int]:
        bounds = await log.bounds(topic)
        return [place.partition for place, claim in claims.items() if bounds[place.partition].next < claim.end]

    if hidden := await retry_while(connection.settings.request_timeout, hidden_partitions, bool):
        raise OperationTimeout(
            f"An open transaction hides markers of {topic!r}[{hidden[0]}]",
            advice="Purge again once it has ended, at the latest after its transaction.timeout.ms",
        )


def _is_purgeable(queue_filter: QueueFilter, lease: Lease, shared: str | None) -> bool:
    """Whether the lease is certainly of this queue: V1 markers in a shared topic name their queue by key only."""
    return queue_filter.matches_lease(lease) and bool(lease.id.queue or queue_filter.key is not None or shared is None)


async def _end_open(
    log: LogReaderSpi, queue_filter: QueueFilter, claims: Mapping[TopicPartition, PartitionClaim], shared: str | None
) -> int:
    """Write the END of every open message; returns how many."""
    count = 0
    for place, claimed in claims.items():
        found = await open_leases_in(log, place, claimed.start, claimed.end)
        leases = [lease for lease in found if _is_purgeable(queue_filter, lease, shared)]
        if not leases:
            continue
        try:
            await claimed.writer.write(_ends(place, leases))
        except OutcomeUnknown as error:
            if not error.fenced:
                raise
            raise BackendError(
                f"A consumer or tracker of {queue_filter.queue!r} was opened while it was purged",
                native=error,
                retriable=True,
                advice="Close it and purge again",
            ) from error
        count += len(leases)
    return count


def _ends(place: TopicPartition, leases: Sequence[Lease]) -> list[OutgoingRecord]:
    # One record each, and V1 where the START was V1: a tracker of kafka-mq-go may read them.
    return [
        OutgoingRecord(
            place.topic,
            None,
            write_marker(Marker(kind=Kind.END, id=lease.id), v1=lease.id.is_v1),
            (),
            place.partition,
        )
        for lease in leases
    ]
