"""`SharedTrackers`: the trackers of one backend, one for each marker topic that has consumers.

*Concurrency.* One event loop; a tracker is opened once for all of its consumers. *Cancellation.* A cancelled consumer
leaves an opening tracker to the others. *Failure.* A tracker that cannot be opened is dropped, and its error raised.
"""

from __future__ import annotations

import asyncio
from typing import Final

from broker import BrokerError, Closed, ConfigurationError
from broker.driver import Hooks, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.markers.marker_topic import tracker_group
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions

__all__ = ["SharedTrackers"]

_CLOSE_SECONDS: Final = 5.0


class _Shared:
    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.users = 0
        self.opening: asyncio.Task[None] = asyncio.get_running_loop().create_task(tracker.open(topic_checked=True))


class SharedTrackers:
    """Made without I/O."""

    def __init__(self, connection: Connection, hooks: Hooks) -> None:
        self._connection = connection
        self._hooks = hooks
        self._shared: dict[str, _Shared] = {}
        """By the trackers' group."""
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._topics: dict[str, str] = {}
        """Of messages with V1 markers, by the trackers' group."""
        self._closed = False

    async def use(self, subscription: str, topic: str) -> Tracker:
        """The running tracker of the subscription; call `leave` once for each call of this.

        The marker topic must exist.

        :param topic: what is consumed; the topic of markers that name none is that of the first caller.
        :raises BrokerError: the tracker cannot be opened; `leave` must not be called then.
        """
        group = self._group(subscription)
        if (before := self._closing.get(group)) is not None:
            # Two trackers of one process would share the partitions for a moment, and rebalance again.
            await asyncio.wait({before})
        if self._closed:
            raise Closed("The connection to Kafka is closed", advice="Consume before the bus is closed")
        shared = self._shared.get(group)
        if shared is None:
            options = TrackerOptions(topic=topic)
            tracker = Tracker(self._connection, subscription, self._hooks, options=options)
            shared = self._shared[group] = _Shared(tracker)
        shared.users += 1
        try:
            await asyncio.shield(shared.opening)
        except BaseException:
            await self.leave(subscription)
            raise
        return shared.tracker

    def keep_to_one_topic(self, subscription: str, topic: str) -> None:
        """V1 markers name no topic: those of a second topic would be taken for those of the first.

        :raises ConfigurationError: another topic was consumed with this marker topic over this connection.
        """
        first = self._topics.setdefault(self._group(subscription), topic)
        if first != topic:
            raise ConfigurationError(
                f"Subscription {subscription!r} cannot read topic {topic!r} beside {first!r} with marker_format=v1: "
                "their markers name no topic",
                advice="Use another marker_topic for it, or marker_format=v2-single",
            )

    async def leave(self, subscription: str) -> None:
        """Remove a consumer; the last one closes the tracker."""
        group = self._group(subscription)
        shared = self._shared.get(group)
        if shared is None:
            return
        shared.users -= 1
        if shared.users == 0:
            del self._shared[group]
            await asyncio.wait({self._begin_close(group, shared)}, timeout=_CLOSE_SECONDS)

    async def close(self) -> None:
        """Close all trackers; may be called twice."""
        self._closed = True
        shared, self._shared = self._shared, {}
        for group, each in shared.items():
            self._begin_close(group, each)
        if self._closing:
            await asyncio.wait(set(self._closing.values()), timeout=_CLOSE_SECONDS)

    def _group(self, subscription: str) -> str:
        return tracker_group(subscription, self._connection.settings.marker_topic)

    def _begin_close(self, group: str, shared: _Shared) -> asyncio.Task[None]:
        closing = asyncio.get_running_loop().create_task(_close(shared), name=f"broker-kafka-tracker-{group}")
        self._closing[group] = closing
        closing.add_done_callback(lambda task: self._close_done(group, task))
        return closing

    def _close_done(self, group: str, task: asyncio.Task[None]) -> None:
        if self._closing.get(group) is task:
            del self._closing[group]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("The tracker %r did not close cleanly: %s", group, error)


async def _close(shared: _Shared) -> None:
    shared.opening.cancel()
    await asyncio.wait({shared.opening})
    if not shared.opening.cancelled():
        error = shared.opening.exception()
        if error is not None and not isinstance(error, BrokerError):
            logger.warning("A tracker failed to open: %s", error)
    await shared.tracker.close()
