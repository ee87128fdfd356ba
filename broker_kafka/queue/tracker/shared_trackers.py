"""`SharedTrackers`: the trackers of one backend, one for each marker topic that has consumers.

*Concurrency.* One event loop; a tracker is opened once for all of its consumers. *Cancellation.* A cancelled consumer
leaves an opening tracker to the others. *Failure.* A tracker that cannot be opened is dropped, and its error raised.
"""

from __future__ import annotations

import asyncio
from typing import Final

from broker import Closed, ConfigurationError
from broker.driver import Hooks, SharedResource
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.markers.marker_topic import tracker_group
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions

__all__ = ["SharedTrackers"]

_CLOSE_SECONDS: Final = 5.0


class SharedTrackers:
    """Opens a tracker for its first consumer, and closes it after its last. Creating one does no I/O."""

    def __init__(self, connection: Connection, hooks: Hooks) -> None:
        self._connection = connection
        self._hooks = hooks
        self._shared: dict[str, SharedResource[Tracker]] = {}
        """By the trackers' group."""
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
        shared = self._shared.get(group)
        if shared is None:

            def create() -> Tracker:
                if self._closed:
                    raise Closed("The connection to Kafka is closed", advice="Consume before the bus is closed")
                return Tracker(self._connection, subscription, self._hooks, options=TrackerOptions(topic=topic))

            shared = self._shared[group] = SharedResource(f"tracker of {group!r}", create, _open, Tracker.close)
        try:
            return await shared.acquire()
        except BaseException:
            self._remove_unused(group)
            raise

    def keep_to_one_topic(self, subscription: str, topic: str) -> None:
        """V1 markers name no topic: those of a second topic would count as those of the first.

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
        if (shared := self._shared.get(group)) is not None:
            await asyncio.wait({asyncio.ensure_future(shared.release())}, timeout=_CLOSE_SECONDS)
            self._remove_unused(group)

    async def close(self) -> None:
        """Close all trackers; may be called twice."""
        self._closed = True
        closing = {asyncio.ensure_future(shared.close()) for shared in self._shared.values()}
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)

    def _group(self, subscription: str) -> str:
        return tracker_group(subscription, self._connection.settings.marker_topic)

    def _remove_unused(self, group: str) -> None:
        if (shared := self._shared.get(group)) is not None and shared.unused:
            del self._shared[group]


async def _open(tracker: Tracker) -> None:
    await tracker.open(topic_checked=True)
