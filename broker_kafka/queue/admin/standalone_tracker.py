"""`KafkaQueueTracker`: a tracker that runs without consumers, as `broker tracker` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Final

from broker.driver import Histogram, Hooks
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.markers.marker_topic import check_subscription, marker_topic_exists
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions

__all__ = ["KafkaQueueTracker"]

_LONGEST_UNANSWERED: Final = 10.0
"""Seconds without an answer that count as trouble; the tracker sends a request every 2.5 s and waits 2 s."""


class KafkaQueueTracker:
    """Implements `QueueTracker`.

    :param on_close: called at the end of a close.
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
        self._tracker = Tracker(connection, subscription, hooks, options=options)
        self._on_close = on_close
        self._open = False

    async def open(self) -> None:
        tracker, settings = self._tracker, self._connection.settings
        check_subscription(tracker.subscription, settings.marker_topic)
        # Only this warning tells a misspelt subscription from a new one.
        created = not self._topics and not await marker_topic_exists(self._connection, tracker.topic)
        await tracker.open()
        self._open = True
        if created:
            tracker.warn(
                f"Subscription {tracker.subscription!r} had no marker topic, and {tracker.topic!r} was created. If the "
                "name is misspelt, delete that topic; else name the topics of its messages, which give a marker topic "
                "its number of partitions and its message size"
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
            return "The tracker is opening"
        unanswered = self._tracker.unanswered_seconds
        if unanswered > _LONGEST_UNANSWERED:
            return f"No broker has answered about {self._tracker.topic!r} for {unanswered:.0f} s"
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
