"""`BlockingMessage`, `BlockingRecord` and their batches: settled without `await`.

Any thread may use them, one at a time. Reading an attribute is direct; settling is a round trip to the loop of the bus.
Interrupting a call that settles does not stop the settlement.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, overload

from typing_extensions import TypeVar

from broker.blocking.portal import Call, Portal
from broker.hooks import Hooks
from broker.messages import Message, MessageBatch, SettleState
from broker.records import Record, RecordBatch

if TYPE_CHECKING:
    import pyarrow

__all__ = ["BlockingMessage", "BlockingMessageBatch", "BlockingRecord", "BlockingRecordBatch"]

T = TypeVar("T", default=bytes)


class BlockingMessage(Generic[T]):
    """A delivered message, settled on its own; see `broker.Message`.

    A `with message:` block acks the message at its end. If the block raises an `Exception`, the retry policy settles
    the message, and the exception is an event, not raised. KeyboardInterrupt and the like release the message and are
    raised.
    """

    __slots__ = ("_context", "_hooks", "_message", "_portal", "_tokens")

    def __init__(self, message: Message[T], portal: Portal, hooks: Hooks) -> None:
        self._message = message
        self._portal = portal
        self._hooks = hooks
        self._context: contextvars.Context | None = None
        self._tokens: list[contextvars.Token[Any]] = []

    @property
    def topic(self) -> str:
        return self._message.topic

    @property
    def data(self) -> bytes | None:
        return self._message.data

    @property
    def payload(self) -> T:
        """The body, decoded by the consumer's codec; without a codec the bytes themselves."""
        return self._message.payload

    @property
    def id(self) -> str:
        """The publisher's id, otherwise the broker's; the same on every redelivery."""
        return self._message.id

    @property
    def key(self) -> bytes | None:
        return self._message.key

    @property
    def attributes(self) -> Mapping[str, str]:
        return self._message.attributes

    @property
    def publish_time(self) -> datetime | None:
        """The producer's clock, UTC."""
        return self._message.publish_time

    @property
    def broker_time(self) -> datetime | None:
        """The broker's clock, UTC."""
        return self._message.broker_time

    @property
    def delivery_attempt(self) -> int | None:
        """Number of deliveries, including this one and retries from memory; None if the broker does not count."""
        return self._message.delivery_attempt

    @property
    def native(self) -> Any:
        """The client library's own object; it belongs to the loop of the bus."""
        return self._message.native

    @property
    def asynchronous(self) -> Message[T]:
        """The `broker.Message`, to be used only on the loop of the bus."""
        return self._message

    @property
    def state(self) -> SettleState:
        """The state of the message."""
        return self._message.state

    @property
    def lease_lost(self) -> bool:
        """Whether another consumer may have the message: stop the work, an ack will fail."""
        return self._message.lease_lost

    def ack(self) -> None:
        """Acknowledge the message as handled. A second ack does nothing.

        :raises LeaseLost: the lease ended, or the broker refused the ack; the message is redelivered.
        :raises AlreadySettled: the message was settled differently.
        :raises SettleError: the broker did not confirm the ack (only with confirmed acks).
        """
        self._portal.call(self._message.ack)

    def nack(self, delay: float | None = None) -> None:
        """Have the message redelivered.

        :param delay: seconds until redelivery; None is the first delay of the retry policy.
        :raises Unsupported: the delay exceeds the longest one that the broker or the lease supports.
        :raises LeaseLost, AlreadySettled, SettleError: as for `ack`.
        """
        self._portal.call(self._message.nack, delay)

    def reject(self, reason: str = "rejected") -> None:
        """Dead-letter the message with this reason. Returns when the letter is written and the message settled.

        :raises ConfigurationError: the reason is not a str.
        :raises LeaseLost: the lease ended; the message is redelivered, even if its letter was already written.
        :raises AlreadySettled: the message was settled differently.
        :raises SettleError: the letter is written but the message may be redelivered, or the consumer closed first.
        """
        self._portal.call(self._message.reject, reason)

    def extend(self, seconds: float) -> None:
        """Renew the lease until `seconds` from now, even beyond `max_lease`.

        :raises LeaseLost: the lease has already ended.
        :raises Unsupported: leases cannot be renewed (`capabilities.messages.lease` is "fixed").
        """
        self._portal.call(self._message.extend, seconds)

    def __enter__(self) -> Self:
        if not self._hooks.handling:
            # Without interceptors this only sets a flag, which needs no round trip.
            self._message.in_use = True
            return self
        self._context = contextvars.copy_context()
        self._portal.wait(Call(self._message.__aenter__, context=self._context))
        # Context variables that interceptors set, such as the current trace, apply to the block in this thread.
        for variable, value in self._context.items():
            if variable.get(_MISSING) is not value:
                self._tokens.append(variable.set(value))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        tokens, self._tokens = self._tokens, []
        for token in reversed(tokens):
            token.var.reset(token)
        context, self._context = self._context, None
        return self._portal.wait(Call(self._message.__aexit__, (kind, error, trace), context=context))

    def __repr__(self) -> str:
        return repr(self._message)


class BlockingMessageBatch(Sequence[BlockingMessage[T]], Generic[T]):
    """Messages delivered together, to be settled together or one by one."""

    __slots__ = ("_batch", "_hooks", "_portal")

    def __init__(self, batch: MessageBatch[T], portal: Portal, hooks: Hooks) -> None:
        self._batch = batch
        self._portal = portal
        self._hooks = hooks

    @overload
    def __getitem__(self, index: int) -> BlockingMessage[T]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockingMessage[T]]: ...
    def __getitem__(self, index: int | slice) -> BlockingMessage[T] | Sequence[BlockingMessage[T]]:
        if isinstance(index, slice):
            return [BlockingMessage(message, self._portal, self._hooks) for message in self._batch[index]]
        return BlockingMessage(self._batch[index], self._portal, self._hooks)

    def __len__(self) -> int:
        return len(self._batch)

    def __iter__(self) -> Iterator[BlockingMessage[T]]:
        for message in self._batch:
            yield BlockingMessage(message, self._portal, self._hooks)

    def ack(self) -> None:
        """Ack the messages that are still open.

        :raises SettleError: the first failure, after all messages were tried; `state` has the result of each.
        """
        self._portal.call(self._batch.ack)

    def nack(self, delay: float | None = None) -> None:
        """Have the messages that are still open redelivered after `delay` seconds.

        :raises SettleError: the first failure, after all messages were tried.
        """
        self._portal.call(self._batch.nack, delay)

    def __repr__(self) -> str:
        return repr(self._batch)


class BlockingRecord(Generic[T]):
    """An entry of an ordered, partitioned log; see `broker.Record`."""

    __slots__ = ("_portal", "_record")

    def __init__(self, record: Record[T], portal: Portal) -> None:
        self._record = record
        self._portal = portal

    @property
    def topic(self) -> str:
        return self._record.topic

    @property
    def partition(self) -> int:
        return self._record.partition

    @property
    def offset(self) -> int:
        return self._record.offset

    @property
    def key(self) -> bytes | None:
        return self._record.key

    @property
    def data(self) -> bytes | None:
        return self._record.data

    @property
    def payload(self) -> T:
        """The body, decoded by the consumer's codec; without a codec the bytes themselves."""
        return self._record.payload

    @property
    def id(self) -> str:
        """The publisher's id, otherwise one made of partition and offset."""
        return self._record.id

    @property
    def attributes(self) -> Mapping[str, str]:
        return self._record.attributes

    @property
    def publish_time(self) -> datetime | None:
        """The producer's clock, UTC."""
        return self._record.publish_time

    @property
    def broker_time(self) -> datetime | None:
        """The broker's clock, UTC."""
        return self._record.broker_time

    @property
    def native(self) -> Any:
        """The client library's own object; it belongs to the loop of the bus."""
        return self._record.native

    def commit(self) -> None:
        """Commit the position after this record, which settles all lower offsets of the partition.

        :raises LeaseLost: the partition was revoked; its new owner reads the record again.
        :raises BrokerError: the commit failed; it may be repeated.
        """
        self._portal.call(self._record.commit)

    def __repr__(self) -> str:
        return repr(self._record)


class BlockingRecordBatch(Sequence[BlockingRecord[T]], Generic[T]):
    """Records read together, in order within each partition."""

    __slots__ = ("_batch", "_portal")

    def __init__(self, batch: RecordBatch[T], portal: Portal) -> None:
        self._batch = batch
        self._portal = portal

    @overload
    def __getitem__(self, index: int) -> BlockingRecord[T]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockingRecord[T]]: ...
    def __getitem__(self, index: int | slice) -> BlockingRecord[T] | Sequence[BlockingRecord[T]]:
        if isinstance(index, slice):
            return [BlockingRecord(record, self._portal) for record in self._batch[index]]
        return BlockingRecord(self._batch[index], self._portal)

    def __len__(self) -> int:
        return len(self._batch)

    def __iter__(self) -> Iterator[BlockingRecord[T]]:
        for record in self._batch:
            yield BlockingRecord(record, self._portal)

    def commit(self) -> None:
        """Commit the positions after the batch, which settles all lower offsets of its partitions.

        :raises LeaseLost: a partition was revoked; the other partitions are committed.
        :raises BrokerError: the commit failed; it may be repeated.
        """
        self._portal.call(self._batch.commit)

    def rows(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Iterate over the records as tuples of these columns: the fastest way to read a batch.

        `for key, data, offset in batch.rows("key", "data", "offset")` creates no `Record` objects on some backends.

        :param columns: topic, partition, offset, id, key, data, payload, attributes, publish_time or broker_time.
        :raises ConfigurationError: a column does not exist, or `columns` is empty.
        """
        return self._batch.rows(*columns)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """The batch as a `pyarrow.Table`.

        Columns: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

        :param columns: only these columns, in this order; ids, attributes and times are the slow ones.
        :raises ConfigurationError: a column does not exist.
        :raises MissingClient: pyarrow is not installed.
        """
        return self._batch.to_arrow(columns)

    def __repr__(self) -> str:
        return repr(self._batch)


_MISSING = object()
