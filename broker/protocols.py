"""The protocols that application code types against, and nothing else.

The facade satisfies all of them, and so do the hand-written fakes of an application's own tests. Take
the narrowest that will do: a function that publishes takes a `Topic`, one that drains takes a `MessageStream`.

All of them: calls come from one event loop. Idle is an answer (None or an empty batch), a close ends an iteration,
`Closed` is what a call after it raises, cancellation is `asyncio.CancelledError`, any other error a
`BrokerError`. A cancelled or abandoned call loses no message: what was not handed over is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol, overload, runtime_checkable

from typing_extensions import TypeVar

from broker.driver.contract import Bounds, Lag, Start, SubscriptionInfo, TopicInfo
from broker.driver.group_admin import GroupInfo, PositionChange
from broker.messages import Message, MessageBatch
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.records import Record, RecordBatch

__all__ = [
    "Admin",
    "BatchHandler",
    "BatchedMessageIterator",
    "BatchedMessageStream",
    "BatchedReceiver",
    "BatchedRecordIterator",
    "BatchedRecordStream",
    "Codec",
    "GroupAdmin",
    "Handler",
    "LogReader",
    "MessageIterator",
    "MessageStream",
    "Publisher",
    "Receiver",
    "RecordIterator",
    "RecordStream",
    "RedriveReport",
    "Topic",
    "Transaction",
    "TransactionalPublisher",
]

T = TypeVar("T", default=bytes)
T_co = TypeVar("T_co", covariant=True, default=bytes)
T_contra = TypeVar("T_contra", contravariant=True, default=bytes)

Handler = Callable[[Message[T]], Awaitable[object]]
"""Handles one message: returning acks it, raising settles it by the retry policy."""
BatchHandler = Callable[[MessageBatch[T]], Awaitable["Sequence[BaseException | None] | None"]]
"""Handles a batch: None acks all that it left open; a sequence tells per message None (ack) or the failure."""


@runtime_checkable
class Codec(Protocol[T]):
    """Turns payloads into bytes and back. Both ways are pure and quick: they run on the event loop."""

    def encode(self, payload: T) -> bytes | None: ...
    def decode(self, data: bytes | None) -> T:
        """:raises DecodeError: the bytes are not what this codec reads."""
        ...


class Topic(Protocol[T_contra]):
    """A place to publish to. Safe to share between tasks; order per key is that of the calls."""

    @property
    def name(self) -> str: ...

    async def publish(
        self,
        payload: T_contra | OutboundMessage,
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Publish one message and wait until the broker has it.

        `key` and `attributes` go with a payload; an OutboundMessage carries its own.
        A cancelled call may have published.

        :raises BrokerError: it is not on the broker, or nobody knows (OperationTimeout).
        """
        ...

    @overload
    async def publish_batch(
        self, payloads: Sequence[T_contra | OutboundMessage], *, receipts: Literal[True] = True
    ) -> list[Receipt]: ...
    @overload
    async def publish_batch(
        self, payloads: Sequence[T_contra | OutboundMessage], *, receipts: Literal[False]
    ) -> None: ...
    @overload
    async def publish_batch(
        self, payloads: Sequence[T_contra | OutboundMessage], *, receipts: bool
    ) -> list[Receipt] | None: ...
    async def publish_batch(
        self, payloads: Sequence[T_contra | OutboundMessage], *, receipts: bool = True
    ) -> list[Receipt] | None:
        """Publish many messages, in order per key; return a receipt for each.

        :param receipts: False returns None, which is faster on some brokers.
        :raises PublishError: some messages failed; `outcomes` has the result of each.
        """
        ...

    async def enqueue(
        self,
        payload: T_contra | OutboundMessage,
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> asyncio.Future[Receipt]:
        """Hand one message to the publishing pipeline; awaiting the call is the back-pressure, the future the receipt.

        Messages of one key leave in the order of the calls. Cancelling the call while it waits to be let in queues
        nothing; right after that, its message goes all the same. A future that nobody looked at before `flush` or
        `close` has its failure raised there.
        """
        ...

    async def flush(self) -> None:
        """Wait until everything enqueued is on the broker.

        :raises PublishError: something was not, and nobody looked at its future.
        """
        ...


class Publisher(Protocol):
    """Opens topics, without I/O."""

    def topic(self, name: str) -> Topic[bytes]: ...


class Transaction(Protocol):
    """One open transaction."""

    async def publish(
        self,
        topic: str,
        payload: bytes | OutboundMessage | None,
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> Receipt: ...
    @overload
    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: Literal[True] = True
    ) -> list[Receipt]: ...
    @overload
    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: Literal[False]
    ) -> None: ...
    @overload
    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: bool
    ) -> list[Receipt] | None: ...
    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: bool = True
    ) -> list[Receipt] | None:
        """As `Topic.publish_batch`. A message that fails aborts the transaction at the end of its block."""
        ...

    async def ack(self, message: Message[Any]) -> None:
        """Ack a message by the commit: it counts together with what was published, or neither does.

        :raises Unsupported: messages of this consumer cannot be acked in it; says why.
        :raises LeaseLost, AlreadySettled: the message is not open.
        """
        ...

    async def ack_batch(self, messages: Iterable[Message[Any]]) -> None:
        """The same of many; of all or, if it raises, of none."""
        ...


class TransactionalPublisher(Protocol):
    """Publishes so that readers of committed data see all of a transaction or nothing."""

    def transaction(self, consumer: BatchedRecordStream[Any] | None = None) -> AbstractAsyncContextManager[Transaction]:
        """A transaction; with a consumer, the positions of the records it handed over are committed in it.

        Leaving the block commits. An exception inside it aborts, rewinds the consumer to its committed
        positions, and is raised further; messages that were to be acked in it are open again.

        :raises TransactionAborted: it was undone and rewound; do the work again.
        :raises TransactionFatal: this publisher is fenced; make a new one.
        """
        ...


class MessageIterator(Protocol[T]):
    async def next_message(self, timeout: float | None = None) -> Message[T] | None:
        """The next message; None after `timeout` idle seconds. None as timeout waits for ever.

        :raises Closed: the consumer was closed.
        """
        ...


class BatchedMessageIterator(Protocol[T]):
    async def next_batch(self, max_messages: int = 100, timeout: float | None = None) -> MessageBatch[T]:
        """What is there, at least one and at most `max_messages`; empty after `timeout` idle seconds."""
        ...


class MessageStream(Protocol[T]):
    """`async for message in stream:`; it ends when the consumer is closed."""

    def __aiter__(self) -> AsyncIterator[Message[T]]: ...


class BatchedMessageStream(Protocol[T]):
    """`async for batch in stream.batches():`; it ends when the consumer is closed."""

    def batches(self, max_messages: int = 100) -> AsyncIterator[MessageBatch[T]]: ...


class Receiver(Protocol[T]):
    async def receive(self, handler: Handler[T], *, concurrency: int = 1) -> None:
        """Run the handler on every message, `concurrency` at once, until the consumer is closed."""
        ...


class BatchedReceiver(Protocol[T]):
    async def receive_batches(
        self, handler: BatchHandler[T], *, max_messages: int = 100, concurrency: int = 1
    ) -> None: ...


class RecordIterator(Protocol[T]):
    async def next_record(self, timeout: float | None = None) -> Record[T] | None: ...


class BatchedRecordIterator(Protocol[T]):
    async def next_batch(self, max_records: int = 1000, timeout: float | None = None) -> RecordBatch[T]: ...


class RecordStream(Protocol[T]):
    def __aiter__(self) -> AsyncIterator[Record[T]]: ...


class BatchedRecordStream(Protocol[T]):
    def batches(self, max_records: int = 1000) -> AsyncIterator[RecordBatch[T]]: ...


class LogReader(Protocol):
    """Reads a topic's log without a group."""

    async def partitions(self, topic: str) -> Sequence[int]: ...
    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        """The first readable offset of each partition, and the position after its last."""
        ...

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]: ...
    def read(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None, *, max_records: int = 1000
    ) -> AsyncIterator[RecordBatch[bytes]]:
        """Records with start <= offset < stop in batches; None means the bound the log has now.

        :raises OffsetOutOfRange: retention removed `start`, or `stop` lies beyond the end.
        """
        ...


class RedriveReport(Protocol):
    """What a redrive did."""

    @property
    def moved(self) -> int: ...
    @property
    def by_topic(self) -> Mapping[str, int]: ...
    @property
    def skipped(self) -> int:
        """Messages without an origin; they stay in the dead-letter topic."""
        ...


class Admin(Protocol):
    """Provisioning and operations. `ensure_` and `delete_` may be repeated; the rest raises NotFound."""

    async def ensure_topic(
        self, name: str, *, partitions: int | None = None, retention: timedelta | None = None, **options: Any
    ) -> TopicInfo: ...
    async def delete_topic(self, name: str) -> None: ...
    async def topics(self) -> list[str]: ...
    async def describe_topic(self, name: str) -> TopicInfo: ...
    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start = "earliest", **options: Any
    ) -> SubscriptionInfo: ...
    async def delete_subscription(self, topic: str, name: str) -> None: ...
    async def subscriptions(self, topic: str) -> list[str]: ...
    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo: ...
    async def purge(self, topic: str) -> int | None: ...
    async def lag(self, topic: str, subscription: str) -> Lag: ...
    async def redrive(
        self,
        dead_letter_topic: str,
        *,
        limit: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> RedriveReport:
        """Publish dead letters to the topic each came from; every subscription of that topic sees them."""
        ...


class GroupAdmin(Protocol):
    """Groups of record consumers over all topics, where `capabilities.records.group_admin` says so."""

    async def groups(self) -> list[GroupInfo]: ...
    async def describe_group(self, name: str) -> GroupInfo: ...
    async def reset_group(
        self,
        name: str,
        *,
        to: Start | int | None = None,
        shift: int | None = None,
        topics: Sequence[str] = (),
        partitions: Sequence[int] = (),
        dry_run: bool = False,
    ) -> list[PositionChange]: ...
    async def delete_group(self, name: str) -> None: ...
