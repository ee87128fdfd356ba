"""Queues whose messages are tracked by processes of ours: what a backend may implement besides `Backend`.

On a broker without leases, a process has to watch for leases that end. Consumers do so while they run; a separate
tracker also works while no consumer runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

__all__ = ["Histogram", "OpenLease", "PurgedQueue", "QueueTracker", "QueuedMessage", "TracksQueues"]


_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 10_000.0, 86_400.0)


@dataclass(slots=True)
class Histogram:
    """Counts of durations.

    :ivar bounds: the upper bound of each bucket, in seconds; ascending.
    :ivar counts: the count of each bucket, and one for longer durations.
    :ivar sum: of all seconds.
    """

    bounds: tuple[float, ...] = _BOUNDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class QueueTracker(Protocol):
    """One tracker of a subscription; any number of processes share the work. Used on the event loop."""

    async def open(self) -> None:
        """Start.

        :raises BrokerError: the tracker could not start.
        """
        ...

    async def wait(self) -> None:
        """Wait until it is closed.

        :raises BrokerError: the tracker failed.
        """
        ...

    async def close(self) -> None:
        """Close within seconds, even without a connection; may be called twice."""
        ...

    def trouble(self) -> str:
        """Why it does not track now, as text; empty if it does."""
        ...

    def metrics(self) -> Mapping[str, float | Histogram]:
        """Its metrics by name; counters end in `_total`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease:
    """A message that was delivered and is not done.

    :ivar topic: where the message lies, with `partition` and `offset`.
    :ivar state: `held` by a worker; `waiting`, given back, for its time; or `due`, to be sent again by a tracker.
    :ivar attempt: how many deliveries of it count.
    :ivar age: seconds since its first delivery.
    :ivar due_in: seconds until the redelivery; below 0 if it is late.
    :ivar holder: the name of the consumer that has it.
    :ivar reason: why it was given back.
    :ivar size: bytes of its markers.
    """

    topic: str
    partition: int
    offset: int
    queue: str
    state: str
    attempt: int
    age: float
    due_in: float
    holder: str = ""
    reason: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMessage:
    """A message of a queue that is not done.

    :ivar topic: where the message lies, with `partition` and `offset`.
    :ivar state: `ready` if no consumer has it; else the state of an `OpenLease`.
    :ivar attempt: how many deliveries of it count; 0 if it had none.
    :ivar due_in: seconds until the redelivery, below 0 if it is late; None if it is ready.
    :ivar id: as consumers see it.
    """

    topic: str
    partition: int
    offset: int
    state: str
    attempt: int
    due_in: float | None
    id: str
    key: bytes | None
    data: bytes | None
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgedQueue:
    """The number of messages that a purge drops.

    :ivar open: messages that were delivered and not done.
    :ivar ready: messages that no consumer had; log entries, where there are more than are worth reading.
    """

    open: int
    ready: int


@runtime_checkable
class TracksQueues(Protocol):
    """A backend whose queues need trackers."""

    def queue_tracker(self, subscription: str, *, topics: Sequence[str] = (), unnamed: str = "") -> QueueTracker:
        """A tracker that is not open yet; it is closed with the connection.

        :param topics: of the messages; what the tracker stores its state in is made to measure for these.
        :param unnamed: the topic of messages whose state names none, as older formats do.
        """
        ...

    async def open_leases(self, subscription: str) -> Sequence[OpenLease]:
        """The messages that were delivered and are not done, by age. Read-only; it does not affect consumers.

        :raises NotFound: the subscription has no such state.
        """
        ...

    async def queued_messages(self, subscription: str, limit: int) -> Sequence[QueuedMessage]:
        """Messages that are not done, at most `limit`: those that were delivered, by age, then those that no consumer
        has, by time. Read-only; it does not affect consumers.

        :raises NotFound: the subscription has no such state.
        """
        ...

    async def purge_queue(self, subscription: str, *, dry_run: bool = False) -> PurgedQueue:
        """Drop every message of the subscription that was sent before now and is not done; a dry run only counts them.

        A second purge finishes an interrupted one. Other subscriptions of the topics keep theirs.

        :raises NotFound: the subscription has no such state.
        :raises BackendError: consumers or trackers of it are open, or were opened meanwhile.
        """
        ...
