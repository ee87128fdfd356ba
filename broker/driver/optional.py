"""Optional protocols: what a backend may implement besides the contract. The core checks with `isinstance`.

Groups and queues, which have results of their own, are in `group_admin` and `queue_tracking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from broker.driver.contract import MessageSource, RecordSource, TopicPartition
from broker.errors import BrokerError
from broker.messages import Message
from broker.records import RecordRun

__all__ = [
    "ChecksConsumers",
    "CommitsRanges",
    "ExpiresLeases",
    "FetchesRuns",
    "HasTopicIdentity",
    "Progress",
    "RedeliversInOrder",
    "ReportsIdle",
    "ReportsLeaseLeft",
    "ReportsSpans",
    "Span",
    "StoresAttempts",
    "TransactionalAcks",
]


# -- message sources ---------------------------------------------------------------------------------------


@runtime_checkable
class ExpiresLeases(Protocol):
    """A source that knows when leases end, even if a renewal failed."""

    def expire_leases(self, messages: Sequence[Message[Any]]) -> None:
        """Report to the listener those of these whose leases are over, and any other message that is lost.

        Called right before messages are handed over, one or many; must be quick and do no I/O.
        """
        ...


@runtime_checkable
class ReportsLeaseLeft(Protocol):
    """A source in lease mode `fixed` that knows when each lease ends."""

    def lease_left(self, message: Message[Any]) -> float:
        """The seconds until the lease ends; 0 or less if it has ended."""
        ...


@runtime_checkable
class RedeliversInOrder(Protocol):
    """A source of ordered messages that redelivers a key from its first lost or unsettled message on."""

    @property
    def redelivers_in_order(self) -> bool: ...


@runtime_checkable
class StoresAttempts(Protocol):
    """A source that stores the attempts and delays of messages that wait in the core's memory, so that they survive a
    crash."""

    async def store_attempt(self, message: Message[Any], delay: float) -> BrokerError | None:
        """Store that `message.delivery_attempt` deliveries count and that the next one is due in `delay` seconds; with
        0 the current delivery is the last that counts. Return None, or the error.

        The core keeps the message, and renews its lease.
        """
        ...


# -- record sources ----------------------------------------------------------------------------------------


@runtime_checkable
class FetchesRuns(Protocol):
    """A record source that fetches runs, whose records the reader creates when it needs them."""

    async def fetch_runs(self, max_records: int, max_bytes: int, wait: float) -> Sequence[RecordRun]:
        """As `RecordSource.fetch`."""
        ...


class Progress(NamedTuple):
    """The finished offsets of a partition: all below `position`, and `ranges` above it, half-open and rising."""

    position: int
    ranges: Sequence[tuple[int, int]]


@runtime_checkable
class CommitsRanges(Protocol):
    """A record source that stores finished ranges with a committed position, as far as they fit."""

    def finished_ranges(self, partition: TopicPartition) -> Sequence[tuple[int, int]]:
        """The ranges that were stored with the position at which the current assignment began."""
        ...

    async def commit_ranges(
        self, positions: Mapping[TopicPartition, Progress]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        """As `RecordSource.commit`; stores the lowest ranges that fit."""
        ...

    def fullness(self, partition: TopicPartition) -> float:
        """The size of the ranges of the last commit as a fraction of the room for them; above 1, some did not fit."""
        ...


@runtime_checkable
class ReportsIdle(Protocol):
    """A source whose fetch may return nothing because other members hold the unread messages."""

    async def is_idle(self, seconds: float) -> bool:
        """Whether this member has nothing left, after `seconds` without a message or a new partition.

        False if it is not known yet; the core calls again soon.
        """
        ...


# -- admin and log reader ----------------------------------------------------------------------------------


@runtime_checkable
class HasTopicIdentity(Protocol):
    """An admin that reads a topic's identity with fewer requests than its description."""

    async def topic_identity(self, name: str) -> str | None:
        """`describe_topic(name).identity`. :raises TopicNotFound: the topic does not exist."""
        ...


class Span(NamedTuple):
    """Positions from `start` to `stop`, half-open, that hold batches of records. A batch begins at each multiple of
    `step`, and has at most `step` records."""

    start: int
    stop: int
    step: int


@runtime_checkable
class ReportsSpans(Protocol):
    """A log reader whose offsets do not count records."""

    async def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """The spans between two positions that hold records now, rising; without those that retention removed."""
        ...


# -- transactions ------------------------------------------------------------------------------------------


@runtime_checkable
class ChecksConsumers(Protocol):
    """A `TransactionSpi` that checks, before a transaction begins, whether it can commit a consumer's positions."""

    async def check_consumer(self, source: RecordSource) -> None:
        """:raises ConfigurationError: the source is of another broker. :raises BrokerError: the check failed."""
        ...


@runtime_checkable
class TransactionalAcks(Protocol):
    """A `TransactionSpi` in which messages can be acked.

    The core adds acks last, when everything else is in the transaction. Until then it keeps the leases of the
    messages renewed, as without a transaction.
    """

    def check_source(self, source: MessageSource) -> None:
        """:raises Unsupported: messages of this source cannot be acked in the transaction; says why."""
        ...

    async def add_acks(self, source: MessageSource, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Stop renewing the leases of these, and write their acks into the open transaction.

        One entry each: None, LeaseLost, or another error. Unless all are None, the core commits nothing.
        """
        ...

    def acks_aborted(self, source: MessageSource, messages: Sequence[Message[Any]]) -> None:
        """The acks that `add_acks` wrote are aborted: renew the leases of these again."""
        ...
