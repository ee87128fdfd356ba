"""`BlockingMessage`, `BlockingRecord` and their batches: what is received, settled without `await`.

Thin views of the objects of the bus's event loop. Reading them takes no detour and may be done in any thread, in
one at a time; each settlement is one round trip to the loop. An interrupted settlement goes on, because it belongs to
the consumer.
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
    """A unit that is settled on its own; see `broker.Message`.

    Used as `with message:` it is acked when the block ends, and settled by the consumer's retry policy
    when the block raises an `Exception`, which is reported to the hooks and not raised further. KeyboardInterrupt
    and the like give it back and go on.
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
        """The body as the consumer's codec decoded it; the bytes themselves without a codec."""
        return self._message.payload

    @property
    def id(self) -> str:
        """The publisher's id if it gave one, else the broker's; the same on every redelivery."""
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
        """How many times it was delivered, this time included; None where nobody counts."""
        return self._message.delivery_attempt

    @property
    def native(self) -> Any:
        """The client library's own object; it belongs to the bus's loop."""
        return self._message.native

    @property
    def asynchronous(self) -> Message[T]:
        """The message of the bus's loop, to be used there alone."""
        return self._message

    @property
    def state(self) -> SettleState:
        """Where it stands."""
        return self._message.state

    @property
    def lease_lost(self) -> bool:
        """Whether somebody else may have it by now: stop the work, an ack will be refused."""
        return self._message.lease_lost

    def ack(self) -> None:
        """Say that it was handled. Harmless when it was acked before.

        :raises LeaseLost: its lease ended, or the broker refused the ack; it comes again.
        :raises AlreadySettled: it was settled another way.
        :raises SettleError: the broker did not confirm (only where acks are confirmed).
        """
        self._portal.call(self._message.ack)

    def nack(self, delay: float | None = None) -> None:
        """Have it delivered again, after `delay` seconds; None leaves that to the retry policy's first step.

        :raises Unsupported: nobody can keep a delay that long.
        :raises LeaseLost, AlreadySettled, SettleError: as for `ack`.
        """
        self._portal.call(self._message.nack, delay)

    def reject(self, reason: str = "rejected") -> None:
        """Give up on it: it goes to the dead letters with this reason.

        :raises LeaseLost, AlreadySettled, SettleError: as for `ack`.
        """
        self._portal.call(self._message.reject, reason)

    def extend(self, seconds: float) -> None:
        """Keep the lease renewed until `seconds` from now, beyond `max_lease` if need be.

        :raises LeaseLost: it was lost before.
        """
        self._portal.call(self._message.extend, seconds)

    def __enter__(self) -> Self:
        if not self._hooks.handling:
            # Without interceptors entering sets one flag, which is not worth a round trip.
            self._message.in_use = True
            return self
        self._context = contextvars.copy_context()
        self._portal.wait(Call(self._message.__aenter__, context=self._context))
        # What interceptors set on the loop, such as the current trace, is seen in this thread's block too.
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
    """Messages handed over together, to be settled together or one by one."""

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
        """Ack those that are still open.

        :raises SettleError: the first failure, after all were tried; each message's `state` tells its own.
        """
        self._portal.call(self._batch.ack)

    def nack(self, delay: float | None = None) -> None:
        """Have those that are still open delivered again, after `delay` seconds.

        :raises SettleError: the first failure, after all were tried.
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
        """The body as the consumer's codec decoded it; the bytes themselves without a codec."""
        return self._record.payload

    @property
    def id(self) -> str:
        """The publisher's id if it gave one, else one made of partition and offset."""
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
        """The client library's own object; it belongs to the bus's loop."""
        return self._record.native

    def commit(self) -> None:
        """Settle this record and every lower offset of its partition.

        :raises LeaseLost: the partition was taken away since; its new owner reads the record again.
        :raises SettleError: the broker did not take the commit.
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
        """Settle all records of the batch and every lower offset of their partitions.

        :raises LeaseLost: a partition was taken away since; the commits of the others were carried out.
        """
        self._portal.call(self._batch.commit)

    def rows(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """As `RecordBatch.rows`: these columns of each record, without making records where the backend can."""
        return self._batch.rows(*columns)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """The batch as columns: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

        :param columns: only these, in this order. Ids, attributes and times cost several times what the others do.
        :raises ConfigurationError: there is no such column.
        :raises MissingClient: pyarrow is not installed.
        """
        return self._batch.to_arrow(columns)

    def __repr__(self) -> str:
        return repr(self._batch)


_MISSING = object()
