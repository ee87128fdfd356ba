"""What `broker.driver.queue_tracking` asks of a backend: a tracker that runs alone, and the leases that are open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from time import time
from typing import Final

from broker.driver import Histogram, Hooks, LogReaderSpi, OpenLease
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.admin.inspecting import open_leases, state_of
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.marker_topic import check_subscription, has_markers, require_markers
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.wire import read_content
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions

__all__ = ["KafkaQueueTracker", "list_open_leases"]

_SILENT: Final = 10.0
"""Seconds without an answer after which a tracker is in trouble; it asks each 2.5 s, and waits for 2 s."""


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
        self._topics = options.topics
        group = QueueFilter.of(subscription, connection.settings).queue
        self._tracker = Tracker(connection, group, hooks, options=options)
        self._on_close = on_close
        self._open = False

    async def open(self) -> None:
        tracker, settings = self._tracker, self._connection.settings
        check_subscription(tracker.subscription, settings.marker_topic)
        made = False
        if not self._topics:
            # Of a misspelt name a tracker would keep watch for ever, and say nothing.
            made = not await has_markers(self._connection, tracker.topic)
        await tracker.open()
        self._open = True
        if made:
            tracker.warn(
                f"Subscription {tracker.subscription!r} had no marker topic, and {tracker.topic!r} was made. If that "
                "is not its name, delete the topic; else name the topics of its messages, which a marker topic is "
                "measured by"
            )

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
        if self._connection.down:
            return f"No broker at {self._connection.servers} can be reached"
        if not self._open:
            return "It is being opened"
        silent = self._tracker.silent
        if silent > _SILENT:
            return f"No broker has told of {self._tracker.topic!r} for {silent:.0f} s"
        return self._tracker.trouble

    def metrics(self) -> Mapping[str, float | Histogram]:
        state, counts = self._tracker.state(), self._tracker.counts
        return {
            "partitions": len(state.partitions),
            "partitions_catching_up": len(state.catching_up),
            "open_leases": state.open,
            "open_lease_bytes": state.open_bytes,
            "due_leases": state.due,
            "oldest_lease_seconds": state.oldest or 0.0,
            "clock_lag_seconds": state.clock_lag or 0.0,
            "markers_lag": state.lag,
            "markers_uncommitted": state.uncommitted,
            "redelivery_lateness_seconds": counts.lateness,
            "redelivery_delay_seconds": counts.delay,
            **{f"{name}_total": count for name, count in asdict(counts).items() if isinstance(count, int)},
        }


async def list_open_leases(connection: Connection, log: LogReaderSpi, subscription: str) -> list[OpenLease]:
    """The open leases of a subscription for people, the oldest first, by the clock of this machine.

    :raises NotFound: the subscription has no marker topic.
    """
    group = QueueFilter.of(subscription, connection.settings).queue
    await require_markers(connection, group)
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
