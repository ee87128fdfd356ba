"""What a tracker can be told, and what it tells: options, counts, and the events of `bus.hooks`. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker import BrokerError
from broker.driver import Event, Histogram
from broker_kafka.queue.tracker.partition_state import PartitionOptions

__all__ = ["QueueTracked", "TrackerCounts", "TrackerOptions", "TrackerState", "Tracking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerOptions:
    """:ivar topics: the message topics; a new marker topic is measured by them.
    :ivar marker_partitions: of a new marker topic.
    :ivar topic: the message topic of markers that name none, as those of kafka-mq-go.
    :ivar batch: the most messages of one transaction, so that many leases that end at once do not hold up the rest.
    :ivar batch_bytes: the most bytes of them; one message is sent however large it is.
    :ivar commit_markers: how many markers at most are read again after a crash, beside those that are open.
    :ivar commit_after: seconds that a marker waits for that at most.
    :ivar retry_after: seconds until what could not be sent is tried again.
    :ivar refused_after: the same for what the brokers refuse, at first; then ever longer, up to an hour.
    :ivar tell_each: seconds between two `QueueTracked` events.
    :ivar partition: of clocks, gates and renewals.
    """

    topics: Sequence[str] = ()
    marker_partitions: int | None = None
    topic: str = ""
    batch: int = 500
    batch_bytes: int = 4 * 1024 * 1024
    commit_markers: int = 10_000
    commit_after: float = 1.0
    retry_after: float = 1.0
    refused_after: float = 30.0
    tell_each: float = 5.0
    partition: PartitionOptions = field(default_factory=PartitionOptions)


@dataclass(slots=True, kw_only=True)
class TrackerCounts:
    """What a tracker has done since it was opened.

    :ivar markers: read, the unknown ones included.
    :ivar unknown: records that were no marker known here; they are passed over.
    :ivar redelivered: messages that were sent again.
    :ivar dead_lettered: messages that were written to their dead-letter topic.
    :ivar waiting_for_readers: times at which a due message was left to the log, since its readers' position has not
        passed it.
    :ivar renewed: STARTs that were repeated.
    :ivar refused: times at which the brokers refused a message.
    :ivar doubts: times at which it was not known what had been written, so that a partition was read anew.
    :ivar commits: of positions.
    :ivar lateness: seconds from when a message was due until it was sent again, or its dead letter written,
        whatever it waited for in between.
    :ivar delay: the same since the START of its delivery.
    """

    markers: int = 0
    unknown: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    waiting_for_readers: int = 0
    renewed: int = 0
    refused: int = 0
    doubts: int = 0
    commits: int = 0
    lateness: Histogram = field(default_factory=Histogram)
    delay: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerState:
    """How a tracker is doing now.

    :ivar partitions: the marker partitions that it has.
    :ivar catching_up: those of them of which not all is read that was written before: nothing is sent for them yet.
    :ivar open: messages that were started and have not ended.
    :ivar open_bytes: what these take in memory.
    :ivar due: those of them that are being sent again, or wait for that.
    :ivar oldest: seconds since the first START of the oldest of them, by the clock of the log; None if there is none.
    :ivar clock_lag: seconds by which the time up to which all is read is behind the brokers' time, as far as it is
        known, of the partition where that is most; None if none has a time. No lease ends in them. Some 3 s are usual.
    :ivar lag: records of markers that are not read yet, as far as it is known.
    :ivar uncommitted: records of markers behind the committed positions.
    """

    partitions: Sequence[int]
    catching_up: Sequence[int]
    open: int
    open_bytes: int
    due: int
    oldest: float | None
    clock_lag: float | None
    lag: int
    uncommitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTracked(Event):
    """Now and then: how the tracker of a queue is doing, and all it has done."""

    subscription: str
    state: TrackerState
    counts: TrackerCounts


class Tracking(Protocol):
    """The tracker of a subscription, as who consumes it sees it."""

    @property
    def failure(self) -> BrokerError | None:
        """Why nothing comes again any more."""
        ...
