"""What `broker.queue_tracking` asks of a backend: a tracker that runs alone, and the leases that are open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from time import time

from broker.hooks import Hooks
from broker.queue_tracking import OpenLease
from broker.spi import LogReaderSpi
from broker_kafka.admin_requests import describe
from broker_kafka.connection import Connection
from broker_kafka.queue.inspecting import open_leases, state_of
from broker_kafka.queue.lease import Lease
from broker_kafka.queue.marker_topic import marker_topic_name
from broker_kafka.queue.own_records import OwnRecords
from broker_kafka.queue.tracker import Tracker
from broker_kafka.queue.tracking import TrackerOptions
from broker_kafka.queue.wire import read_content

__all__ = ["KafkaQueueTracker", "shown_leases"]


class KafkaQueueTracker:
    """Implements `QueueTracker`.

    :param on_close: called when a close is over.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: str,
        hooks: Hooks,
        options: TrackerOptions,
        on_close: Callable[[KafkaQueueTracker], object],
    ) -> None:
        self._connection = connection
        group = OwnRecords.of(subscription, connection.settings).queue
        self._tracker = Tracker(connection, group, hooks, options=options)
        self._on_close = on_close

    async def open(self) -> None:
        await self._tracker.open()

    async def wait(self) -> None:
        await self._tracker.wait()

    async def close(self) -> None:
        try:
            await self._tracker.close()
        finally:
            self._on_close(self)

    def trouble(self) -> str:
        if self._tracker.failure is not None:
            return str(self._tracker.failure)
        return f"No broker at {self._connection.servers} can be reached" if self._connection.down else ""

    def metrics(self) -> Mapping[str, float]:
        state = self._tracker.state()
        return {
            "partitions": len(state.partitions),
            "partitions_catching_up": len(state.catching_up),
            "open_leases": state.open,
            "open_lease_bytes": state.open_bytes,
            "due_leases": state.due,
            "oldest_lease_seconds": state.oldest or 0.0,
            "markers_lag": state.lag,
            "markers_uncommitted": state.uncommitted,
            **{f"{name}_total": count for name, count in asdict(self._tracker.counts).items()},
        }


async def shown_leases(connection: Connection, log: LogReaderSpi, subscription: str) -> list[OpenLease]:
    """The open leases of a subscription for people, the oldest first, by the clock of this machine.

    :raises TopicNotFound: the subscription has no marker topic.
    """
    group = OwnRecords.of(subscription, connection.settings).queue
    await describe(connection, marker_topic_name(group, connection.settings.marker_topic))
    leases = await open_leases(connection, log, subscription)
    now = int(1000 * time())
    return sorted([_shown(lease, now) for lease in leases], key=lambda lease: -lease.age)


def _shown(lease: Lease, now: int) -> OpenLease:
    return OpenLease(
        topic=lease.id.topic,
        partition=lease.id.partition,
        offset=lease.id.offset,
        queue=lease.id.queue,
        state=state_of(lease, now),
        attempt=lease.attempt,
        age=max(0.0, (now - lease.started) / 1000),
        due_in=(lease.deadline - now) / 1000,
        holder=read_content(lease.data).holder,
        reason=lease.reason,
        size=len(lease.data),
    )
