"""Queues on a broker without leases: an optional protocol beside `Backend`, and its results.

On such a broker a process must redeliver messages when leases end. Consumers do so while they run; a separate tracker
also works while no consumer runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from broker.exposition import Histogram

__all__ = ["Histogram", "OpenLease", "PurgedQueue", "QueueTracker", "QueuedMessage", "TracksQueues"]


class QueueTracker(Protocol):
    """One tracker of a subscription; the trackers of a subscription share the work. Used on the event loop."""

    async def open(self) -> None:
        """Start.

        :raises BrokerError: the tracker could not start.
        """
        ...

    async def wait(self) -> None:
        """Wait until the tracker is closed.

        :raises BrokerError: the tracker failed.
        """
        ...

    async def close(self) -> None:
        """Close within seconds, even without a connection. May be called twice."""
        ...

    def trouble(self) -> str:
        """Why the tracker does not work at present; empty if it does."""
        ...

    def metrics(self) -> Mapping[str, float | Histogram]:
        """The metrics by name; names of counters end in `_total`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease:
    """A message that was delivered and is not settled.

    :ivar topic: with `partition` and `offset`, the position of the message. Empty where neither its markers nor the
        positions of the subscription name it.
    :ivar state: `held` by a consumer; `waiting` for its delay, after a nack or release; or `due` for redelivery.
    :ivar attempt: the number of deliveries that count.
    :ivar age: seconds since the first delivery.
    :ivar due_in: seconds until the redelivery; below 0 if it is late.
    :ivar holder: the name of the consumer that has the message.
    :ivar reason: the reason of the last nack or release.
    :ivar size: bytes of the message's markers.
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
    """A message of a queue that is not settled.

    :ivar topic: with `partition` and `offset`, the position of the message. Empty where neither its markers nor the
        positions of the subscription name it.
    :ivar state: `ready` if it was never delivered; otherwise the state of an `OpenLease`.
    :ivar attempt: the number of deliveries that count; 0 if there was none.
    :ivar due_in: seconds until the redelivery, below 0 if it is late; None if the state is `ready`.
    :ivar id: the id that consumers see.
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

    :ivar open: messages that were delivered and are not settled.
    :ivar ready: messages that were never delivered; for a large backlog the number of log entries.
    """

    open: int
    ready: int


@runtime_checkable
class TracksQueues(Protocol):
    """A backend whose queues need trackers."""

    def queue_tracker(self, subscription: str, *, topics: Sequence[str] = (), unnamed: str = "") -> QueueTracker:
        """A tracker that is not open yet; it is closed with the connection.

        :param topics: the topics of the messages; the storage of the tracker is sized for these.
        :param unnamed: the topic of messages whose state names none, as in formats of other programs.
        """
        ...

    async def open_leases(self, subscription: str) -> Sequence[OpenLease]:
        """The messages that were delivered and are not settled, by age. Read-only; does not affect consumers.

        :raises NotFound: the queue does not exist.
        """
        ...

    async def queued_messages(self, subscription: str, limit: int) -> Sequence[QueuedMessage]:
        """At most `limit` messages that are not settled: delivered ones by age, then the others by time.

        Read-only; does not affect consumers.

        :raises NotFound: the queue does not exist.
        """
        ...

    async def purge_queue(self, subscription: str, *, dry_run: bool = False) -> PurgedQueue:
        """Drop all messages of the queue that were published before now and are not settled; a dry run only counts.

        A second purge finishes an interrupted one. Other subscriptions of the topics keep their messages.

        :raises NotFound: the queue does not exist.
        :raises BackendError: consumers or trackers of the queue are open, or were opened meanwhile.
        """
        ...
