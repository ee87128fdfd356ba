"""The protocols that applications type against.

The bus and its objects satisfy them, and so do hand-written fakes in an application's tests. Use the narrowest one: a
function that publishes takes a `Topic`, a function that reads to the end takes a `MessageStream`.

All calls come from one event loop.

| event | shows as |
|---|---|
| idle until the timeout | None, or an empty batch |
| close | the iteration ends; a later call raises `Closed` |
| cancellation | `asyncio.CancelledError`; no message is lost: undelivered messages are given back |
| any other error | `BrokerError` |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol, overload, runtime_checkable

from typing_extensions import TypeVar

from broker.driver.contract import Bounds, Lag, Start, SubscriptionInfo, TopicInfo, TopicPartition
from broker.driver.group_admin import GroupInfo, PositionChange
from broker.envelopes import Envelope
from broker.messages import Message, MessageBatch
from broker.outbound import OutboundMessage, OutboundPayload
from broker.receipts import Receipt
from broker.records import Record, RecordBatch
from broker.threads.messages import BlockingMessage, BlockingMessageBatch

__all__ = [
    "Admin",
    "AnyCodec",
    "AsyncBatchHandler",
    "AsyncHandler",
    "BatchHandler",
    "BatchedMessageIterator",
    "BatchedMessageStream",
    "BatchedReceiver",
    "BatchedRecordIterator",
    "BatchedRecordStream",
    "Codec",
    "EnvelopeCodec",
    "FollowedLog",
    "GroupAdmin",
    "Handler",
    "LogReader",
    "MessageIterator",
    "MessageStream",
    "OwnPositions",
    "PlainBatchHandler",
    "PlainHandler",
    "PreparesBatches",
    "Publisher",
    "Receiver",
    "RecordIterator",
    "RecordStream",
    "RedriveReport",
    "TableWriter",
    "Topic",
    "Transaction",
    "TransactionalPublisher",
]

T = TypeVar("T", default=bytes)
T_co = TypeVar("T_co", covariant=True, default=bytes)
T_contra = TypeVar("T_contra", contravariant=True, default=bytes)

AsyncHandler = Callable[[Message[T]], Awaitable[object]]
"""An `async def` function that handles one message on the event loop, which it must not block."""
PlainHandler = Callable[[BlockingMessage[T]], object]
"""A function that is not `async def` and handles one message in a thread. It must return no awaitable."""
Handler = AsyncHandler[T] | PlainHandler[T]
"""Handles one message. Returning acks the message; raising settles it by the retry policy."""

AsyncBatchHandler = Callable[[MessageBatch[T]], Awaitable["Sequence[BaseException | None] | None"]]
"""An `async def` function that handles a batch on the event loop, which it must not block."""
PlainBatchHandler = Callable[[BlockingMessageBatch[T]], "Sequence[BaseException | None] | None"]
"""A function that is not `async def` and handles a batch in a thread."""
BatchHandler = AsyncBatchHandler[T] | PlainBatchHandler[T]
"""Handles a batch. Returns None to ack all open messages, or for each message None (ack) or an exception."""


OwnPositions = Mapping[TopicPartition, int] | Mapping[tuple[str, int], int]
"""For each partition the next offset to read."""


@runtime_checkable
class Codec(Protocol[T]):
    """Turns payloads into bytes and back. Both methods run on the event loop, so they must be fast."""

    def encode(self, payload: T) -> bytes | None:
        """:raises InvalidMessage: the payload cannot be encoded."""
        ...

    def decode(self, data: bytes | None) -> T:
        """:raises DecodeError: the bytes cannot be decoded."""
        ...


@runtime_checkable
class EnvelopeCodec(Protocol[T]):
    """A codec that sees the whole message, for formats that put a type, a schema id or a time into attributes.

    Give one wherever a `Codec` goes. Both methods run on the event loop, so they must be fast.
    """

    def pack(self, payload: T, message: OutboundMessage, topic: str) -> OutboundMessage:
        """The message to publish, made by `message.replace(data=…, attributes=…)`.

        :param message: the fields that the caller gave, without a body.
        :raises InvalidMessage: the payload cannot be encoded.
        """
        ...

    def unpack(self, envelope: Envelope) -> T:
        """:param envelope: a received `Message` or `Record`.

        :raises DecodeError: the message cannot be decoded.
        """
        ...


AnyCodec = Codec[T] | EnvelopeCodec[T]


@runtime_checkable
class PreparesBatches(Protocol):
    """An `EnvelopeCodec` that fetches what `unpack` needs, such as schemas, before messages are handed over."""

    async def prepare(self, envelopes: Sequence[Envelope]) -> None:
        """Called once for each batch that a consumer has fetched, before their first `unpack`.

        An exception stops the hand-over: the consumer logs the error and calls again with growing pauses. For a message
        that no call can help, return: `unpack` then raises for this message alone.
        """
        ...


class Topic(Protocol[T_contra]):
    """A topic to publish to. Tasks may share it; messages of a key are published in the order of the calls."""

    @property
    def name(self) -> str: ...

    async def publish(
        self,
        payload: T_contra | OutboundMessage | OutboundPayload[T_contra],
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Publish one message; return when the broker has stored it. A cancelled call may have published.

        :param payload: what the codec of the topic encodes, an `OutboundPayload` of it, or an `OutboundMessage`.
        :param key: the key of a payload, like the other fields; an outbound payload or message has its own.
        :raises OperationTimeout: no answer in time; the message may be on the broker.
        :raises BrokerError: the message was not published.
        """
        ...

    @overload
    async def publish_batch(
        self,
        payloads: Sequence[T_contra | OutboundMessage | OutboundPayload[T_contra]],
        *,
        receipts: Literal[True] = True,
    ) -> list[Receipt]: ...
    @overload
    async def publish_batch(
        self, payloads: Sequence[T_contra | OutboundMessage | OutboundPayload[T_contra]], *, receipts: Literal[False]
    ) -> None: ...
    @overload
    async def publish_batch(
        self, payloads: Sequence[T_contra | OutboundMessage | OutboundPayload[T_contra]], *, receipts: bool
    ) -> list[Receipt] | None: ...
    async def publish_batch(
        self, payloads: Sequence[T_contra | OutboundMessage | OutboundPayload[T_contra]], *, receipts: bool = True
    ) -> list[Receipt] | None:
        """Publish many messages, in order per key; return a receipt for each.

        :param receipts: False returns None, which is faster on some brokers.
        :raises PublishError: some messages failed; `outcomes` has the result of each.
        """
        ...

    async def enqueue(
        self,
        payload: T_contra | OutboundMessage | OutboundPayload[T_contra],
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[Receipt]:
        """Queue one message for publishing; return a future of its receipt. Waits while the queue is full.

        Messages of a key are published in the order of the calls. A call cancelled while it waits for room queues
        nothing; cancelled later, its message is published all the same. `flush` and `close` raise the failure of a
        future whose outcome was not retrieved.
        """
        ...

    async def flush(self) -> None:
        """Wait until all queued messages are on the broker.

        :raises PublishError: some messages failed, and the outcomes of their futures were not retrieved.
        """
        ...


class Publisher(Protocol):
    """Opens topics, without I/O; `broker.Bus` is one."""

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
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
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
        """Ack a message with the commit of the transaction: its ack and the published messages count, or neither.

        :raises Unsupported: the transaction cannot ack messages of this consumer; the error says why.
        :raises LeaseLost, AlreadySettled: the message is not open.
        """
        ...

    async def ack_batch(self, messages: Iterable[Message[Any]]) -> None:
        """`ack` for many messages: for all of them or, if the call raises, for none."""
        ...


class TransactionalPublisher(Protocol):
    """Publishes in transactions: readers of committed data see all messages of a transaction, or none."""

    def transaction(
        self,
        consumer: BatchedRecordStream[Any] | None = None,
        *,
        positions: OwnPositions | Callable[[], OwnPositions] | None = None,
        rewind: bool = True,
    ) -> AbstractAsyncContextManager[Transaction]:
        """A transaction, for `async with`. Leaving the block commits.

        An exception in the block aborts the transaction, rewinds the consumer to its committed positions and is raised
        again; messages acked in the transaction are open again.

        :param consumer: commit the positions after all records that it has delivered, as part of the transaction.
        :param positions: commit these positions of the consumer instead; a mapping, or a function that returns one,
            which is read at the end of the block.
        :param rewind: False leaves the consumer where it is after an abort, for work that is kept and written again.
        :raises TransactionAborted: the transaction was rolled back and the consumer rewound; repeat the work.
        :raises TransactionFatal: the publisher is fenced; open a new one.
        """
        ...


class TableWriter(Protocol):
    """Writes one partition of a table: a topic made by `ensure_topic(compacted=True)`."""

    async def write(self, rows: Sequence[OutboundMessage], *, checkpoint: bytes) -> None:
        """Write rows, and with them the checkpoint, which replaces the former one of the partition.

        All or nothing where `capabilities.publish.atomic_tables` says so; else the checkpoint comes after all rows.

        :raises TransactionAborted: nothing was written; repeat the write.
        :raises TransactionFatal: another writer of the partition was opened, and this one can write no more.
        :raises OperationTimeout: the outcome is unknown; repeat the write.
        """
        ...


class MessageIterator(Protocol[T]):
    """Returns messages one by one."""

    async def next_message(self, timeout: float | None = None) -> Message[T] | None:
        """The next message, or None after `timeout` idle seconds. Without a timeout it waits forever.

        :raises Closed: the consumer was closed.
        """
        ...


class BatchedMessageIterator(Protocol[T]):
    """Returns messages in batches."""

    async def next_batch(
        self, max_messages: int = 100, timeout: float | None = None, *, max_wait: float | None = None
    ) -> MessageBatch[T]:
        """The available messages, 1 to `max_messages`; an empty batch after `timeout` idle seconds.

        :param max_wait: seconds for which the first message waits for a full batch.
        """
        ...


class MessageStream(Protocol[T]):
    """`async for message in stream:`; ends when the consumer is closed."""

    def __aiter__(self) -> AsyncIterator[Message[T]]: ...


class BatchedMessageStream(Protocol[T]):
    """`async for batch in stream.batches():`; ends when the consumer is closed."""

    def batches(self, max_messages: int = 100, *, max_wait: float | None = None) -> AsyncIterator[MessageBatch[T]]: ...


class Receiver(Protocol[T]):
    """Calls a handler with messages."""

    async def receive(self, handler: Handler[T], *, concurrency: int = 1) -> None:
        """Call the handler with every message, up to `concurrency` at once, until the consumer is closed.

        A handler that is not `async def` runs in threads.
        """
        ...


class BatchedReceiver(Protocol[T]):
    """Calls a handler with batches of messages."""

    async def receive_batches(
        self,
        handler: BatchHandler[T],
        *,
        max_messages: int = 100,
        max_wait: float | None = None,
        concurrency: int = 1,
    ) -> None:
        """Call the handler with batches that are full or whose first message has waited `max_wait` seconds."""
        ...


class RecordIterator(Protocol[T]):
    """Returns records one by one."""

    async def next_record(self, timeout: float | None = None) -> Record[T] | None: ...


class BatchedRecordIterator(Protocol[T]):
    """Returns records in batches."""

    async def next_batch(
        self, max_records: int = 5000, timeout: float | None = None, *, max_wait: float | None = None
    ) -> RecordBatch[T]: ...


class RecordStream(Protocol[T]):
    """`async for record in stream:`; ends when the consumer is closed."""

    def __aiter__(self) -> AsyncIterator[Record[T]]: ...


class BatchedRecordStream(Protocol[T]):
    """`async for batch in stream.batches():`; ends when the consumer is closed."""

    def batches(self, max_records: int = 5000, *, max_wait: float | None = None) -> AsyncIterator[RecordBatch[T]]: ...


class FollowedLog(Protocol):
    """Reads a log without end and without a group; as a loop, `async for batch in log.batches():`."""

    @property
    def behind(self) -> frozenset[int]:
        """The partitions that have not caught up with what the log held at the start."""
        ...

    async def next_batch(self, max_records: int = 1000, timeout: float | None = None) -> RecordBatch[bytes]:
        """The available records, 1 to `max_records`; an empty batch after `timeout` idle seconds, and once when
        partitions have caught up without another record."""
        ...

    def batches(self, max_records: int = 1000) -> AsyncIterator[RecordBatch[bytes]]: ...


class LogReader(Protocol):
    """Reads the log of a topic without a group."""

    async def partitions(self, topic: str) -> Sequence[int]: ...
    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        """The first readable offset of each partition, and the position after its last record."""
        ...

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]: ...
    def read(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None, *, max_records: int = 1000
    ) -> AsyncIterator[RecordBatch[bytes]]:
        """The records with start <= offset < stop, in batches. None is the first or last position of the log now.

        :raises OffsetOutOfRange: retention removed `start`, or `stop` is beyond the end.
        """
        ...

    def follow(
        self,
        topic: str,
        positions: Mapping[int, int] | None = None,
        *,
        others: Literal["earliest", "latest"] | None = None,
    ) -> AbstractAsyncContextManager[FollowedLog]:
        """The records of these partitions, each from its position on, without end; None is the whole topic."""
        ...


class RedriveReport(Protocol):
    """The result of a redrive."""

    @property
    def moved(self) -> int: ...
    @property
    def by_topic(self) -> Mapping[str, int]: ...
    @property
    def skipped(self) -> int:
        """Messages without an origin, which stay in the dead-letter topic."""
        ...


class Admin(Protocol):
    """Provisioning and operations. The `ensure_` and `delete_` methods are idempotent; the others raise NotFound."""

    async def ensure_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        retention: timedelta | None = None,
        compacted: bool | None = None,
        **options: Any,
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
        to: Sequence[str] | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> RedriveReport:
        """Publish each dead letter to the topic it came from, if `to` names it; every subscription of that topic
        receives the message."""
        ...


class GroupAdmin(Protocol):
    """Administration of groups of record consumers over all topics (`capabilities.records.group_admin`)."""

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
