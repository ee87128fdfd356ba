"""Options, counts and state of a tracker, and the event that reports them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.driver import Event, Histogram
from broker_kafka.queue.tracker.partition_state import PartitionOptions

__all__ = ["QueueTracked", "TrackerCounts", "TrackerOptions", "TrackerState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerOptions:
    """:ivar topics: the message topics; a new marker topic is measured by them.
    :ivar marker_partitions: of a new marker topic.
    :ivar topic: the message topic of markers that name none, as those of kafka-mq-go.
    :ivar batch: the most messages of one transaction, so that many leases which end at once do not hold up other work.
    :ivar batch_bytes: the most bytes of one transaction; a single message may be larger.
    :ivar commit_markers: the most markers that are read again after a crash, besides those of open messages.
    :ivar commit_after: seconds after which a marker is committed at the latest.
    :ivar retry_after: seconds until a failed transaction is retried.
    :ivar refused_after: seconds until a refused message is retried; grows up to an hour.
    :ivar report_interval: seconds between two `QueueTracked` events.
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
    report_interval: float = 5.0
    partition: PartitionOptions = field(default_factory=PartitionOptions)


@dataclass(slots=True, kw_only=True)
class TrackerCounts:
    """What a tracker has done since it was opened.

    :ivar markers: read, the unknown ones included.
    :ivar unknown: records that are no known marker; they are skipped.
    :ivar redelivered: messages that were sent again.
    :ivar dead_lettered: messages that were written to their dead-letter topic.
    :ivar waiting_for_readers: due messages left to the readers of the log, whose position has not passed them.
    :ivar renewed: STARTs that were repeated.
    :ivar refused: times at which the brokers refused a message.
    :ivar unknown_outcomes: transactions of unknown outcome, after which a partition was read again.
    :ivar commits: of positions.
    :ivar lateness: seconds from when a message was due until it was redelivered, or its dead letter written.
    :ivar delay: the same since the START of its delivery.
    """

    markers: int = 0
    unknown: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    waiting_for_readers: int = 0
    renewed: int = 0
    refused: int = 0
    unknown_outcomes: int = 0
    commits: int = 0
    lateness: Histogram = field(default_factory=Histogram)
    delay: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerState:
    """How a tracker is doing now.

    :ivar partitions: the marker partitions that it has.
    :ivar catching_up: partitions whose earlier markers are still being read; nothing is redelivered from them yet.
    :ivar open: messages with a START and no END.
    :ivar open_bytes: the memory that their STARTs take.
    :ivar due: open messages that are being redelivered, or wait for that.
    :ivar oldest: seconds since the first START of the oldest open message, by the clock of the log.
    :ivar clock_lag: the largest lag of a partition's clock behind the brokers' time in seconds, about 3 as a rule; None
        if no partition has a time. Leases that end within the lag are redelivered later.
    :ivar lag: records of markers that are not read yet.
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
    """Emitted at intervals: the state of a queue's tracker, and its counts."""

    subscription: str
    state: TrackerState
    counts: TrackerCounts
