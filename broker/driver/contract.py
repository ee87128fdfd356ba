"""What brokers say of topics, subscriptions and logs, for every backend; and who answers in short.

What a backend implements. Small, batch first, and not the protocols that applications use. Its contract:

*Loop.* Every call comes from the one event loop in which `Backend.open` ran. A client library's thread
or callback must not call back into the core: it appends to a queue and wakes the loop, because an
exception raised inside such a callback can end the process.

*Fetch.* One `fetch` of a source runs at a time, and it is never cancelled: `interrupt()` ends it, and what
it had by then comes back as its result. It returns as soon as it has anything, at most `max_messages`
and, but for one message, at most `max_bytes`; with nothing after `wait` seconds it returns an empty list,
which means idle and nothing else. It never raises for idleness and never drops what it took from the
broker: an error is raised by the next call, after what came before it was handed over.

*Concurrency.* `settle`, `extend`, `commit`, `pause`, `resume` and `seek` may be called while a fetch runs,
and each other; the backend serialises what its client cannot do in parallel. `settle` is not cancelled
either. Calls after `close` raise `Closed`.

*Errors.* A backend raises the classes of `broker.errors` and nothing else, with the client's exception as
`native`. `retriable` decides what the core does: a retriable error of `fetch` is reported as an event and
the fetch is repeated after a pause; any other stops the consumer. Authentication failures are told as
such, even if the client says time-out. `settle`, `publish` and `commit` return an error per item instead of
raising, so that one bad item does not take its batch with it; they raise only if nothing was tried.
A backend whose client reconnects by itself lets it, and reports through `listener.event`.

*Delivery.* What `fetch` returned is the core's until it is settled: a backend forgets nothing of it. If a
backend learns that messages or partitions are no longer ours it calls `listener.lost` in that moment. What
a source with `redelivers_in_order = True` lost or could not settle comes again from the first of its key on.

*Close.* `close` gives back at once what was fetched and not settled wherever the broker allows it, and waits
for nothing else. It deletes nothing there but an ephemeral subscription. It may be called twice, or after a failure.


Checks where a new subscription or group is to begin. Pure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from broker.capabilities import Capabilities
from broker.checks import check_time, refused
from broker.envelopes import View
from broker.errors import BrokerError
from broker.hooks import Event
from broker.messages import Message, Outcome
from broker.names import Ephemeral
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.records import Record, RecordRun

__all__ = [
    "AdminSpi",
    "Backend",
    "Bounds",
    "FetchesRuns",
    "Finished",
    "HasTopicIdentity",
    "KeepsFinished",
    "KeepsTries",
    "Lag",
    "LogReaderSpi",
    "MessageSource",
    "MessageSubscription",
    "PublishTarget",
    "RecordListener",
    "RecordSource",
    "RecordSubscription",
    "RedeliversInOrder",
    "ReportsIdle",
    "ReportsSpans",
    "RetryTopic",
    "Settlement",
    "SourceListener",
    "Span",
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
    """What the broker says of a topic.

    :ivar identity: another one after the topic was deleted and made again, whose offsets mean other records; None
        where the broker does not tell.
    """

    name: str
    partitions: int | None = None
    messages: int | None = None
    bytes: int | None = None
    identity: str | None = None
    native: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionInfo:
    """What the broker says of a subscription or group."""

    topic: str
    name: str
    native: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far behind a subscription is.

    :ivar waiting: messages, or records, not delivered yet.
    :ivar unsettled: delivered and not settled; None where the broker does not tell.
    :ivar partitions: records behind per partition, for a record group.
    :ivar current: whether it is as of now; else the broker tells what was some minutes ago.
    """

    waiting: int
    unsettled: int | None = None
    partitions: Mapping[int, int] = field(default_factory=dict[int, int])
    current: bool = True


@runtime_checkable
class HasTopicIdentity(Protocol):
    """Provisioning that asks the broker less for a topic's identity than for its description; optional."""

    async def topic_identity(self, name: str) -> str | None:
        """What `describe_topic` has as `identity`. :raises TopicNotFound: there is none."""
        ...


class Span(NamedTuple):
    """Positions from `start` to `stop`, half-open, in which records lie as batches: at each whole multiple of `step`
    begins one, of at most `step` records."""

    start: int
    stop: int
    step: int


@runtime_checkable
class ReportsSpans(Protocol):
    """A log reader whose offsets do not count records; optional."""

    async def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """Where between two positions records lie now, rising; what retention removed is left out."""
        ...


Start = Literal["earliest", "latest"] | datetime
"""Where a new subscription or group begins; a datetime is timezone-aware."""


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


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
    """One message and what is to become of it."""

    message: Message[Any]
    outcome: Outcome
    delay: float | None = None
    """Seconds, for NACK and RELEASE; never above `capabilities.messages.native_delay`."""
    reason: str = ""
    error: str = ""
    """For REJECT: why, and what the handler raised last, if it did; of a NACK, only the latter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSubscription:
    """What a MessageSource is to deliver. One topic: the core merges several."""

    topic: str
    subscription: str | Ephemeral
    start: Start = "earliest"
    create: bool = True
    """Create the subscription if it is missing; else a missing one raises SubscriptionNotFound."""
    ordered_by_key: bool = False
    confirm_acks: bool = False
    max_outstanding: int = 1000
    """The most messages the core will hold unsettled, for the broker's own bound; the core enforces it anyway."""
    max_deliveries: int | None = None
    """The core gives up after so many deliveries; the broker's own limit must lie above it, or be off."""
    dead_letter: str | None = None
    """Where to, for a backend that itself gives up what outlives its consumers: once each, and told as by the core."""
    retry_topics: Sequence[RetryTopic] = ()
    """Delivered likewise, each message when it is due; only where `capabilities.messages.retry_topics` says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSubscription:
    """What a RecordSource is to deliver."""

    topics: Sequence[str]
    group: str | Ephemeral
    start: Start = "earliest"
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    whole: Collection[str] = ()
    """Those of the topics that a new group reads from their first record on, whatever `start` says."""


class SourceListener(Protocol):
    """What a source tells the core between fetches; called on the loop, returns at once."""

    def lost(self, messages: Sequence[Message[Any]]) -> None:
        """These are no longer ours: the broker gives them to somebody again."""
        ...

    def passed_over(self, messages: Sequence[Message[Any]]) -> None:
        """These were taken and come again, for their leases are over; later ones of their keys wait for them."""
        ...

    def event(self, event: Event) -> None:
        """Report a reconnect, a warning of the client and the like to the hooks."""
        ...


class RecordListener(Protocol):
    """What a record source tells the core of its partitions."""

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """These are ours from now on; their records may follow."""
        ...

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        """These are about to go. The source awaits this, at most until the loop time `deadline`, before it lets
        them go; commits of them are still possible meanwhile, and none of their records is fetched any more."""
        ...

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """These are gone already: another member may read them now, and commits of them are refused."""
        ...

    def event(self, event: Event) -> None: ...


class MessageSource(Protocol):
    """The messages of one subscription of one topic."""

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]: ...

    def interrupt(self) -> None:
        """End the running fetch, if any, with what it has."""
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        """Carry these out; one entry each: None, or why it failed. LeaseLost says that the message comes again. Where
        acks are not confirmed, None means that it was sent."""
        ...

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """Renew the leases of these by one lease period. Called only in lease mode `renew`."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class RedeliversInOrder(Protocol):
    """A source of ordered messages that redelivers a key from its first lost or unsettled message on; optional."""

    @property
    def redelivers_in_order(self) -> bool: ...


@runtime_checkable
class KeepsTries(Protocol):
    """A source of messages that writes down what the core does with them from memory, which else dies with it;
    optional."""

    async def keep(self, message: Message[Any], delay: float) -> BrokerError | None:
        """`message.delivery_attempt` deliveries count, and the next is not before so many seconds; 0 if the last of
        these is now. The message stays ours, and its lease renewed. None, or why that could not be written."""
        ...


class RecordSource(Protocol):
    """The partitions of a group that this member has been given."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        """In order within each partition; runs of one partition are kept together."""
        ...

    def interrupt(self) -> None: ...

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        """Store the next position to read of each partition. LeaseLost for one that is not ours any more."""
        ...

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]: ...
    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        """Read on from here; None is the committed position, or the start if there is none."""
        ...

    def pause(self, partitions: Sequence[TopicPartition]) -> None: ...
    def resume(self, partitions: Sequence[TopicPartition]) -> None: ...
    def assignment(self) -> Sequence[TopicPartition]: ...
    async def close(self) -> None: ...


@runtime_checkable
class FetchesRuns(Protocol):
    """A record source that leaves it to the reader to make records, which many need few of; optional."""

    async def fetch_runs(self, max_records: int, max_bytes: int, wait: float) -> Sequence[RecordRun]:
        """As `RecordSource.fetch`."""
        ...


class Finished(NamedTuple):
    """How far a partition is done: all below `position`, and these ranges above it, half-open and rising."""

    position: int
    ranges: Sequence[tuple[int, int]]


@runtime_checkable
class KeepsFinished(Protocol):
    """A record source that can store what is finished above a committed position; optional."""

    def finished(self, partition: TopicPartition) -> Sequence[tuple[int, int]]:
        """The ranges that were stored with the position from which the present assignment began."""
        ...

    async def commit_finished(
        self, positions: Mapping[TopicPartition, Finished]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        """`commit`, and as much as there is room for of what is finished above; the lowest ranges first."""
        ...

    def fullness(self, partition: TopicPartition) -> float:
        """How much of the room the last commit would have taken; above 1, something was left out."""
        ...


@runtime_checkable
class ReportsIdle(Protocol):
    """A source that may give nothing because others hold what is unread; optional."""

    async def is_idle(self, seconds: float) -> bool:
        """Whether nothing is left for this member, after so many seconds in which nothing came and no partition did.

        False if that is not known yet; it is asked again in a moment.
        """
        ...


class PublishTarget(Protocol):
    """Where one topic's messages go; opening it does no I/O, a missing topic shows at the first publish."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        """Publish these in order per key; one entry each. Several calls may run at once.

        Cancelling the caller leaves the outcome of its messages unknown and disturbs no other call.

        :param receipts: without them, None may stand for a message that is on the broker, where that is quicker.
        """
        ...

    async def close(self) -> None: ...


class TransactionSpi(Protocol):
    """A transactional producer of one id; opening it fences an older one. One transaction at a time."""

    async def begin(self) -> None: ...
    async def publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        """The outcome of each; without receipts, None for a message that is in the transaction."""
        ...

    async def add_offsets(self, source: RecordSource, positions: Mapping[TopicPartition, int]) -> None: ...
    async def commit(self) -> None:
        """:raises TransactionAborted: it was undone. :raises TransactionFatal: the producer is fenced."""
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
        """The records with start <= offset < stop, in batches. It ends when all that lie below `stop` were read,
        and never waits for records that are not there yet.

        :raises OffsetOutOfRange: `start` was removed by retention, or `stop` lies beyond the end.
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
        """Remove all messages; how many there were, if the broker tells."""
        ...

    async def lag(self, topic: str, subscription: str) -> Lag: ...


class Backend(Protocol):
    """One connection to one broker. Made from a settings object, without I/O.

    A backend class has `settings_type`, a subclass of `broker.driver.settings.BackendSettings`, and is made as
    `BackendClass(settings, hooks)`.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def open(self) -> None:
        """Connect. :raises ConnectionFailed, AuthenticationFailed: after one honest try."""
        ...

    def publish_target(self, topic: str) -> PublishTarget: ...
    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource: ...
    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource: ...
    async def transaction(self, transactional_id: str) -> TransactionSpi: ...
    def log_reader(self) -> LogReaderSpi: ...
    def admin(self) -> AdminSpi: ...
    async def check_health(self) -> float:
        """One round trip to the server; its seconds."""
        ...

    async def close(self) -> None: ...


def check_start(start: Start, name: str = "start", *, also: str = "") -> Start:
    """Return the start if it is one.

    :param name: of the argument.
    :param also: what the argument takes besides, for the error.
    :raises ConfigurationError: it is neither "earliest" nor "latest" nor a time with a timezone.
    """
    if isinstance(start, datetime):
        check_time(name, start)
    elif start not in ("earliest", "latest"):
        raise refused(name, start, f'"earliest", "latest"{also and f", {also}"} or a datetime')
    return start
