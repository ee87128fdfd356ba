"""The contract between the core and a backend. Small and batch first; applications use other protocols.

Optional protocols are in `optional`, `group_admin` and `queue_tracking`.

*Loop.* Every call comes from the event loop in which `Backend.open` ran. A thread or callback of the client library
must not call the core: an exception raised in a callback can end the process. The callback appends to a queue and wakes
the loop.

*Fetch.* One `fetch` of a source runs at a time and is never cancelled: `interrupt()` ends it, and the messages it has
are its result. `fetch` returns as soon as it has a message: at most `max_messages`, and at most `max_bytes` except for
a single larger message. After `wait` seconds without a message it returns an empty list, which means idle and nothing
else. `fetch` does not raise for idleness and drops nothing that it took from the broker: an error that occurs after
some messages is raised by the next call.

*Concurrency.* `settle`, `extend`, `commit`, `pause`, `resume` and `seek` may be called during a fetch and during each
other; the backend serialises what its client cannot do in parallel. `settle` is not cancelled either. Calls after
`close` raise `Closed`.

*Errors.* A backend raises only the classes of `broker.errors`, with the client's exception as `native`. `retriable`
decides what the core does: a retriable error of `fetch` is reported as an event, and the fetch is repeated after a
pause; any other error stops the consumer. Failed authentication raises `AuthenticationFailed`, also if the client
reports a time-out. `settle`, `publish` and `commit` return one error per item, so that a bad item does not fail its
batch; they raise only if nothing was tried. A client that reconnects by itself does so; the backend reports it with
`listener.event`.

*Delivery.* The core owns the messages that `fetch` returned until they are settled; the backend keeps track of them.
When a backend learns that messages or partitions are lost, it calls `listener.lost` at once. A source with
`redelivers_in_order = True` redelivers a key from its first lost or unsettled message on.

*Close.* `close` releases fetched and unsettled messages at once, where the broker allows it, and waits for nothing
else. It deletes nothing on the broker except an ephemeral subscription. It may be called twice, and after a failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from broker.capabilities import Capabilities
from broker.checks import check_time, refused
from broker.envelopes import TopicPartition, View
from broker.errors import BrokerError
from broker.hooks import Event
from broker.messages import Message, Outcome
from broker.names import Ephemeral
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.records import Record
from broker.topic_patterns import TopicPattern

__all__ = [
    "AdminSpi",
    "Backend",
    "Bounds",
    "Lag",
    "LogReaderSpi",
    "MessageSource",
    "MessageSubscription",
    "PublishTarget",
    "RecordListener",
    "RecordSource",
    "RecordSubscription",
    "RetryTopic",
    "Settlement",
    "SourceListener",
    "Start",
    "SubscriptionInfo",
    "TopicInfo",
    "TopicPartition",
    "TransactionSpi",
    "View",
    "check_start",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    """The description of a topic.

    :ivar identity: changes when the topic is deleted and recreated, because offsets then mean other records; None where
        the broker has none.
    :ivar compacted: the broker removes records that a later record of the same key supersedes.
    """

    name: str
    partitions: int | None = None
    messages: int | None = None
    bytes: int | None = None
    identity: str | None = None
    compacted: bool = False
    native: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionInfo:
    """The description of a subscription or group."""

    topic: str
    name: str
    native: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far behind a subscription is.

    :ivar waiting: messages, or records, not delivered yet.
    :ivar unsettled: delivered and not settled; None where the broker does not report them.
    :ivar partitions: records behind per partition, for a record group.
    :ivar current: False if the broker reports values that are some minutes old.
    """

    waiting: int
    unsettled: int | None = None
    partitions: Mapping[int, int] = field(default_factory=dict[int, int])
    current: bool = True


Start = Literal["earliest", "latest"] | datetime
"""Where a new subscription or group begins; a datetime is timezone-aware."""


class Bounds(NamedTuple):
    """What a partition's log holds: the first offset that can be read, and the position after the last."""

    first: int
    next: int


class RetryTopic(NamedTuple):
    """One of the topics on which messages of `origin` wait for their next try, each for `delay` seconds."""

    name: str
    origin: str
    delay: float


class Settlement(msgspec.Struct, frozen=True, gc=False):
    """One message and its outcome."""

    message: Message[Any]
    outcome: Outcome
    delay: float | None = None
    """Seconds, for NACK and RELEASE; never above `capabilities.messages.native_delay`."""
    reason: str = ""
    error: str = ""
    """The last error of the handler, if it raised; for REJECT and NACK. `reason` is only for REJECT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSubscription:
    """What a MessageSource is to deliver. One topic: the core merges several."""

    topic: str
    subscription: str | Ephemeral
    start: Start = "earliest"
    create: bool = True
    """Create a missing subscription; otherwise a missing one raises SubscriptionNotFound."""
    ordered_by_key: bool = False
    confirm_acks: bool = False
    max_outstanding: int = 1000
    """The most unsettled messages of the core, for a limit of the broker; the core enforces it anyway."""
    max_deliveries: int | None = None
    """The core gives up after so many deliveries; the broker's own limit must be higher, or off."""
    dead_letter: str | None = None
    """The topic for a backend that dead-letters messages itself: one letter each, in the format of the core."""
    retry_topics: Sequence[RetryTopic] = ()
    """Also delivered, each message when it is due; only where `capabilities.messages.retry_topics` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSubscription:
    """What a RecordSource is to deliver."""

    topics: Sequence[str]
    """Empty if there is a pattern."""
    group: str | Ephemeral
    pattern: TopicPattern | None = None
    """Read the topics that match instead, also those created later, which begin at their first record; only where
    `capabilities.records.topic_patterns` is set."""
    start: Start = "earliest"
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    whole: Collection[str] = ()
    """Topics that a new group reads from the first record on, regardless of `start`."""
    copartitioned: bool = False
    """Assign the partitions of a number of all topics to one member; only where `capabilities.records.copartitioned` is
    set. While they move one after the other, the core reports only complete numbers to the application."""

    @property
    def topics_text(self) -> str:
        """The names of the topics, or the text of the pattern."""
        return ", ".join(self.topics) if self.pattern is None else str(self.pattern)

    def reads(self, topic: str) -> bool:
        """Whether the topic is named or matches."""
        return topic in self.topics or (self.pattern is not None and self.pattern.matches(topic))


class SourceListener(Protocol):
    """The core's callbacks for a message source; called on the loop, return at once."""

    def lost(self, messages: Sequence[Message[Any]]) -> None:
        """These messages are lost: the broker redelivers them, to this or another consumer."""
        ...

    def expired(self, messages: Sequence[Message[Any]]) -> None:
        """The leases of these expired before hand-over: they are redelivered, and later messages of their keys wait."""
        ...

    def event(self, event: Event) -> None:
        """Report a reconnect, a warning of the client and the like to the hooks."""
        ...


class RecordListener(Protocol):
    """The core's callbacks for a record source."""

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """These partitions are assigned; their records may follow. The core may pause them within this call."""
        ...

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        """These partitions are being revoked. The source awaits this call, at most until the loop time `deadline`,
        before it releases them. Commits are still possible; their records are no longer fetched."""
        ...

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """These partitions are lost: another member may read them, and commits are refused."""
        ...

    def event(self, event: Event) -> None: ...


class MessageSource(Protocol):
    """The messages of one subscription of one topic."""

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]: ...

    def interrupt(self) -> None:
        """End the running fetch, if any; it returns what it has."""
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        """Settle messages; returns None or the error of each. LeaseLost means that the message is redelivered. Without
        confirmed acks, None means sent."""
        ...

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Renew the leases of these messages by one lease period; returns None or the error of each.

        Called only in lease mode `renew`.
        """
        ...

    async def close(self) -> None: ...


class RecordSource(Protocol):
    """The partitions of a group that are assigned to this member."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        """Records in order within each partition; consecutive records of a partition stay together."""
        ...

    def interrupt(self) -> None: ...

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        """Store the next position to read of each partition; returns None or the error of each.

        LeaseLost is the error of a partition that is no longer assigned to this member.
        """
        ...

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]: ...
    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        """Continue reading at these positions; None is the committed position, otherwise `start`.

        Whether the partitions are assigned, and the log holds the positions, is checked before the first one moves.

        :raises BrokerError: none has moved.
        :raises PartialSeek: some have moved.
        """
        ...

    def pause(self, partitions: Sequence[TopicPartition]) -> None: ...
    def resume(self, partitions: Sequence[TopicPartition]) -> None: ...
    def assignment(self) -> Sequence[TopicPartition]: ...
    async def close(self) -> None: ...


class PublishTarget(Protocol):
    """Publishes to one topic. Opening it does no I/O: a missing topic raises at the first publish."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        """Publish messages in order per key; returns the outcome of each. Several calls may run at once.

        Cancelling the caller leaves the outcome of its messages unknown and disturbs no other call.

        :param receipts: if False, None may be the outcome of a message that is on the broker, where that is faster.
        """
        ...

    async def close(self) -> None: ...


class TransactionSpi(Protocol):
    """A transactional producer of one id; opening it fences an older one. One transaction at a time."""

    async def begin(self) -> None: ...
    async def publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        """Publish in the transaction; returns the outcome of each message, which may be None without receipts."""
        ...

    async def add_offsets(self, source: RecordSource, positions: Mapping[TopicPartition, int]) -> None: ...
    async def commit(self) -> None:
        """:raises TransactionAborted: it was rolled back. :raises TransactionFatal: the producer is fenced."""
        ...

    async def abort(self) -> None: ...
    async def close(self) -> None: ...


class LogReaderSpi(Protocol):
    """Reads of a topic's log without a group."""

    async def partitions(self, topic: str) -> Sequence[int]: ...
    async def bounds(self, topic: str) -> Mapping[int, Bounds]: ...
    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """The first position of each partition whose broker time is not before `time`."""
        ...

    def read(
        self, topic: str, partition: int, start: int, stop: int, max_records: int
    ) -> AsyncIterator[Sequence[Record[Any]]]:
        """The records with start <= offset < stop, in batches. Ends at `stop`, and never waits for new records.

        :raises OffsetOutOfRange: retention removed `start`, or `stop` is beyond the end.
        :raises NotFound: the topic or partition does not exist.
        """
        ...


class AdminSpi(Protocol):
    """Provisioning. Every `ensure` and `delete` may be repeated."""

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo: ...
    async def delete_topic(self, name: str) -> None: ...
    async def list_topics(self) -> Sequence[str]: ...
    async def describe_topic(self, name: str) -> TopicInfo: ...
    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo: ...
    async def delete_subscription(self, topic: str, name: str) -> None: ...
    async def list_subscriptions(self, topic: str) -> Sequence[str]: ...
    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo: ...
    async def purge(self, topic: str) -> int | None:
        """Remove all messages; return their number, or None if the broker does not report it."""
        ...

    async def lag(self, topic: str, subscription: str) -> Lag: ...


class Backend(Protocol):
    """One connection to one broker. Created from a settings object, without I/O.

    A backend class has `settings_type`, a subclass of `broker.driver.settings.BackendSettings`, and is created as
    `Class(settings, hooks)`.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def open(self) -> None:
        """Connect; tries once.

        :raises ConnectionFailed, AuthenticationFailed: the attempt failed.
        """
        ...

    def publish_target(self, topic: str) -> PublishTarget: ...
    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource: ...
    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource: ...
    async def transaction(self, transactional_id: str) -> TransactionSpi: ...
    def log_reader(self) -> LogReaderSpi: ...
    def admin(self) -> AdminSpi: ...
    async def check_health(self) -> float:
        """Make one round trip to the server; return its seconds."""
        ...

    async def close(self) -> None: ...


def check_start(start: Start, name: str = "start", *, also: str = "") -> Start:
    """Return the start if it is valid.

    :param name: the name of the argument, for the error.
    :param also: what else the argument takes, for the error.
    :raises ConfigurationError: it is neither "earliest" nor "latest" nor a time with a timezone.
    """
    if isinstance(start, datetime):
        check_time(name, start)
    elif start not in ("earliest", "latest"):
        raise refused(name, start, f'"earliest", "latest"{also and f", {also}"} or a datetime')
    return start
