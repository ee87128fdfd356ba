"""Optional protocols of sources, admins, log readers and transactions. The core checks with `isinstance`.

The protocols of groups and queues are in `group_admin` and `queue_tracking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from broker.driver.contract import (
    MessageSource,
    MessageSubscription,
    RecordSource,
    SourceListener,
    TopicInfo,
    TopicPartition,
)
from broker.errors import BrokerError
from broker.messages import Message
from broker.records import Record, RecordRun
from broker.topic_patterns import TopicPattern

__all__ = [
    "ChecksConsumers",
    "CommitsRanges",
    "CompactsTopics",
    "ExpiresLeases",
    "FetchesRuns",
    "FollowsLogs",
    "HasTopicIdentity",
    "LogFollowerSpi",
    "PartitionsKeys",
    "Progress",
    "RedeliversInOrder",
    "ReportsIdle",
    "ReportsLeaseLeft",
    "ReportsOrigins",
    "ReportsSpans",
    "Span",
    "StoresAttempts",
    "SubscribesToPatterns",
    "TransactionalAcks",
]


# -- backends ----------------------------------------------------------------------------------------------


@runtime_checkable
class SubscribesToPatterns(Protocol):
    """A backend that delivers the topics of a pattern through one source; for others the core opens one per topic."""

    async def subscribe_to_pattern(
        self, pattern: TopicPattern, subscription: MessageSubscription, listener: SourceListener
    ) -> MessageSource:
        """As `subscribe`, for the topics that match, also those created later, which begin at their first message.

        `subscription.topic` is the text of the pattern.
        """
        ...


@runtime_checkable
class PartitionsKeys(Protocol):
    """A backend that tells where a key goes; only where `capabilities.publish.partition_of` is set."""

    def partition_of(self, topic: str, key: bytes, partitions: int) -> int:
        """The partition to which a message with this key, and without a partition, is published.

        Quick and without I/O.

        :param partitions: the number of the topic's partitions.
        :raises Unsupported: by these settings the key has no fixed partition.
        """
        ...


# -- message sources ---------------------------------------------------------------------------------------


@runtime_checkable
class ExpiresLeases(Protocol):
    """A source that knows when leases end, even if a renewal failed."""

    def expire_leases(self, messages: Sequence[Message[Any]]) -> None:
        """Report to the listener which of these messages have no lease any more, and any other lost message.

        Called right before messages are handed over; must be quick and do no I/O.
        """
        ...


@runtime_checkable
class ReportsLeaseLeft(Protocol):
    """A source that knows when each lease ends unless it is renewed. `Message.lease_lost` tells by this."""

    def lease_left(self, message: Message[Any]) -> float:
        """Seconds until the lease of an unsettled message ends; 0 or less if it has ended.

        Called from any thread; must be quick and do no I/O.
        """
        ...


@runtime_checkable
class RedeliversInOrder(Protocol):
    """A source of ordered messages that redelivers a key from its first lost or unsettled message on."""

    @property
    def redelivers_in_order(self) -> bool: ...


@runtime_checkable
class StoresAttempts(Protocol):
    """A source that stores attempts and delays of messages in the core's memory, so that they survive a crash."""

    async def store_attempt(self, message: Message[Any], delay: float) -> BrokerError | None:
        """Store that `message.delivery_attempt` deliveries count, and that the next one is due in `delay` seconds, or
        with 0 that it is delivered now. Return None, or the error.

        The core keeps the message and renews its lease.
        """
        ...


# -- record sources ----------------------------------------------------------------------------------------


@runtime_checkable
class FetchesRuns(Protocol):
    """A record source that fetches runs, whose records are created on demand."""

    async def fetch_runs(self, max_records: int, max_bytes: int, wait: float) -> Sequence[RecordRun]:
        """As `RecordSource.fetch`."""
        ...


class Progress(NamedTuple):
    """The finished offsets of a partition: all below `position`, and the half-open `ranges` above it, rising."""

    position: int
    ranges: Sequence[tuple[int, int]]


@runtime_checkable
class CommitsRanges(Protocol):
    """A record source that stores finished ranges with a committed position, if they fit."""

    def finished_ranges(self, partition: TopicPartition) -> Sequence[tuple[int, int]]:
        """The ranges that were stored with the position at which the current assignment began."""
        ...

    async def commit_ranges(
        self, positions: Mapping[TopicPartition, Progress]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        """As `RecordSource.commit`; stores the lowest ranges that fit."""
        ...

    def fullness(self, partition: TopicPartition) -> float:
        """The size of the ranges of the last commit as a fraction of their room; above 1, some did not fit."""
        ...


@runtime_checkable
class ReportsIdle(Protocol):
    """A source whose fetch may return nothing because other members hold the unread messages."""

    async def is_idle(self, seconds: float) -> bool:
        """Whether nothing is left for this member, after `seconds` without a message or a new partition.

        False if the source does not know yet; the core calls again soon.
        """
        ...


# -- admin and log reader ----------------------------------------------------------------------------------


@runtime_checkable
class CompactsTopics(Protocol):
    """An admin that makes compacted topics; `capabilities.records.compacted_topics` is set.

    Compaction keeps the last record of each key at its offset. It may remove earlier ones of that key, and tombstones
    after a while. Positions stay valid: a read from the offset of a removed record goes on at the next one that is
    left. The topic takes no message without a key.
    """

    async def ensure_compacted_topic(
        self, name: str, *, partitions: int | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """As `ensure_topic`, for a compacted topic without a retention.

        :raises Unsupported: the topic exists and is not compacted.
        """
        ...


@runtime_checkable
class HasTopicIdentity(Protocol):
    """An admin that reads a topic's identity with fewer requests than its description."""

    async def topic_identity(self, name: str) -> str | None:
        """The same as `describe_topic(name).identity`.

        :raises TopicNotFound: the topic does not exist.
        """
        ...


@runtime_checkable
class ReportsOrigins(Protocol):
    """An admin of a broker that writes dead letters itself, and so knows the topics that they come from."""

    def dead_letter_origins(self, topic: str) -> Sequence[str] | None:
        """The topics of all letters in this dead-letter topic, as `dead-letter-topic` names them; None if any client
        may have written them."""
        ...


class Span(NamedTuple):
    """Offsets from `start` up to `stop` that hold records, in batches: a batch begins at each multiple of `step`, and
    has at most `step` records."""

    start: int
    stop: int
    step: int


@runtime_checkable
class ReportsSpans(Protocol):
    """A log reader for which the difference of two offsets is not the number of records between them."""

    async def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """The spans of offsets between two positions that still hold records, rising."""
        ...


class LogFollowerSpi(Protocol):
    """Partitions of a topic that are read without end. It may implement `FetchesRuns`."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        """As `RecordSource.fetch`; also returns, perhaps with nothing, when a partition is read to its present end.

        Nothing is skipped, and only committed records are returned.

        :raises OffsetOutOfRange: retention removed records before they were read.
        :raises TopicNotFound, TopicRecreated: the topic was deleted, or recreated, where the backend notices it.
        """
        ...

    def interrupt(self) -> None: ...

    def reached(self, partition: int) -> int:
        """The position up to which everything in the partition was fetched: what lay below was returned, or is gone.

        No lower than the offset after the last record that `fetch` returned.
        """
        ...

    async def add(self, positions: Mapping[int, int]) -> None:
        """Read these partitions, too; they were added to the topic."""
        ...

    async def close(self) -> None: ...


class FollowsLogs(Protocol):
    """A log reader that waits for new records. The core goes by `capabilities.records.follow`."""

    async def follow(self, topic: str, positions: Mapping[int, int]) -> LogFollowerSpi:
        """Read these partitions without end, from these positions on.

        :raises OffsetOutOfRange: the log does not hold a position.
        :raises TopicNotFound: the topic does not exist.
        """
        ...


# -- transactions ------------------------------------------------------------------------------------------


@runtime_checkable
class ChecksConsumers(Protocol):
    """A `TransactionSpi` that checks, before a transaction begins, whether it can commit a consumer's positions."""

    async def check_consumer(self, source: RecordSource) -> None:
        """Check that the transaction can commit positions of this source.

        :raises ConfigurationError: the source is of another broker.
        :raises BrokerError: the check failed.
        """
        ...


@runtime_checkable
class TransactionalAcks(Protocol):
    """A `TransactionSpi` that can ack messages.

    The core adds acks last, when everything else is in the transaction. Until then it renews the leases of the
    messages, as without a transaction.
    """

    def check_source(self, source: MessageSource) -> None:
        """:raises Unsupported: the transaction cannot ack messages of this source; the error says why."""
        ...

    async def add_acks(self, source: MessageSource, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Stop renewing the leases of these messages, and write their acks into the open transaction.

        Returns None, LeaseLost or another error of each message. Unless all are None, the core aborts.
        """
        ...

    def acks_aborted(self, source: MessageSource, messages: Sequence[Message[Any]]) -> None:
        """The acks that `add_acks` wrote are aborted: renew the leases of these messages again."""
        ...
