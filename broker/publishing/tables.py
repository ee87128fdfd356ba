"""Writers of tables: rows and a checkpoint of one partition of a compacted topic, together, by one writer at a time.

*Concurrency.* Writes of a writer are carried out one after the other. *Cancellation.* A cancelled write is carried out
all the same; the next one waits for it. *Failure.* A refused write has written nothing. `TransactionFatal` says that
another writer of the partition was opened; after `OperationTimeout` the rows may have been written, and the same write
may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, Final

from broker.capabilities import Capabilities
from broker.checks import is_whole, refused
from broker.driver.concurrency import TaskSet, check_loop
from broker.driver.contract import Backend
from broker.driver.limits import MessageLimits
from broker.driver.tables import CHECKPOINT_KEY, TableWriterSpi, WritesTables, keyless_message, not_compacted
from broker.errors import BackendError, BrokerError, Closed, InvalidMessage, NotFound, PublishError, TransactionFatal
from broker.hooks import Hooks, PublishCall, Published, logger
from broker.names import check_name
from broker.outbound import OutboundMessage, check_batch
from broker.publishing.transactions import TransactionalPublisherFacade

__all__ = ["TableWriterFacade", "open_table_writer"]

_LONGEST_END: Final = 30.0


class TableWriterFacade:
    """Implements `TableWriter`; created by `bus.table_writer`.

    :ivar topic: the table.
    :ivar partition: the partition that it writes.
    """

    def __init__(self, topic: str, partition: int, spi: TableWriterSpi, most_rows: int | None, backend: str) -> None:
        self.topic: Final = topic
        self.partition: Final = partition
        self._spi = spi
        self._most_rows = most_rows
        self._backend = backend
        self._one_at_a_time = asyncio.Lock()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._writes = TaskSet(
            "broker-table-write", lambda error: logger.debug("A write to table %r raised: %r", topic, error)
        )

    async def write(self, rows: Sequence[OutboundMessage], *, checkpoint: bytes) -> None:
        """Write rows, and with them the checkpoint, which replaces the former one of the partition.

        :param rows: with a key each, which replace the rows of these keys; data None deletes one. Of a key that occurs
            twice the last row counts. May be empty.
        :param checkpoint: the body of the record under `CHECKPOINT_KEY`.
        :raises InvalidMessage, MessageTooLarge: a row or the checkpoint is invalid, or there are too many rows; nothing
            was written.
        :raises TransactionAborted: nothing was written; repeat the write.
        :raises TransactionFatal: another writer of the partition was opened, and this one can write no more.
        :raises OperationTimeout: the outcome is unknown; repeat the write.
        :raises Closed: the writer is closed.
        """
        check_loop(self._loop)
        if self._closed:
            raise Closed(f"The writer of partition {self.partition} of table {self.topic!r} is closed")
        messages = self._checked(rows)
        if not isinstance(checkpoint, bytes):
            # None would delete the checkpoint.
            raise InvalidMessage(
                f"checkpoint is {checkpoint!r} of type {type(checkpoint).__name__}", advice="It takes bytes"
            )
        messages.append(OutboundMessage(checkpoint, CHECKPOINT_KEY, partition=self.partition))
        # A task of its own: a cancelled caller must not leave half a write behind.
        await asyncio.shield(self._writes.spawn(self._write(messages)))

    async def close(self) -> None:
        """Wait for running writes, at most 30 seconds, and close. May be called twice."""
        check_loop(self._loop)
        if not self._closed:
            self._closed = True
            if running := tuple(self._writes):
                await asyncio.wait(running, timeout=_LONGEST_END)
            await self._spi.close()

    async def _write(self, messages: Sequence[OutboundMessage]) -> None:
        async with self._one_at_a_time:
            try:
                await self._spi.write(messages)
            except BrokerError:
                raise
            except Exception as error:
                raise BackendError(f"Writing to table {self.topic!r} failed: {error}", native=error) from error

    def _checked(self, rows: Sequence[OutboundMessage]) -> list[OutboundMessage]:
        check_batch(rows)
        if self._most_rows is not None and len(rows) > self._most_rows:
            raise InvalidMessage(
                f"The write has {len(rows)} rows; {self._backend} takes {self._most_rows} together with a checkpoint",
                advice="Write a checkpoint more often; capabilities.publish.table_rows has the limit",
            )
        return [self._row(row) for row in rows]

    def _row(self, row: OutboundMessage) -> OutboundMessage:
        if not isinstance(row, OutboundMessage):
            raise InvalidMessage(
                f"A row is of type {type(row).__name__}", advice="A row is an OutboundMessage(data, key)"
            )
        if row.key is None:
            raise keyless_message(self.topic)
        if row.key == CHECKPOINT_KEY:
            raise InvalidMessage(
                f"A row has the key {CHECKPOINT_KEY!r}, which is the checkpoint's", advice="Pass it as checkpoint="
            )
        if row.partition == self.partition and row.id is row.deliver_at is None:
            return row
        if row.partition not in (None, self.partition):
            raise InvalidMessage(
                f"A row has the partition {row.partition}, and this writer writes {self.partition}",
                advice="Open a writer for each partition",
            )
        for field in ("id", "deliver_at"):
            if getattr(row, field) is not None:
                raise InvalidMessage(
                    f"A row has {field}={getattr(row, field)!r}",
                    advice="Leave it out: a row is written at once",
                )
        return OutboundMessage(
            row.data,
            row.key,
            row.attributes,
            ttl=row.ttl,
            partition=self.partition,
            publish_time=row.publish_time,
            native=row.native,
        )


class _ByTransaction:
    """Implements `TableWriterSpi` by one transaction for each write."""

    def __init__(self, topic: str, partition: int, publisher: TransactionalPublisherFacade) -> None:
        self._topic = topic
        self._partition = partition
        self._publisher = publisher

    async def write(self, rows: Sequence[OutboundMessage]) -> None:
        try:
            async with self._publisher.transaction() as transaction:
                await transaction.publish_batch(self._topic, rows, receipts=False)
        except PublishError as error:
            raise next((each for each in error.outcomes if isinstance(each, BrokerError)), error) from error
        except TransactionFatal as error:
            raise TransactionFatal(
                f"The writer of partition {self._partition} of table {self._topic!r} ended: {error.message}",
                native=error,
                advice="Stop if another process writes the table; otherwise open a new writer",
            ) from error

    async def close(self) -> None:
        await self._publisher.close()


class _Direct:
    """Implements `TableWriterSpi` by that of a backend, with checks, interceptors and events."""

    def __init__(self, topic: str, spi: TableWriterSpi, limits: MessageLimits, hooks: Hooks) -> None:
        self._topic = topic
        self._spi = spi
        self._limits = limits
        self._hooks = hooks

    async def write(self, rows: Sequence[OutboundMessage]) -> None:
        with PublishCall(self._hooks.publishing, self._topic, rows) as call:
            for refusal in self._limits.refused(call.messages).values():
                raise refusal
            await self._write(call.messages)
            call.outcomes = [None] * len(rows)

    async def _write(self, rows: Sequence[OutboundMessage]) -> None:
        started = perf_counter()
        outcome: BaseException | None = None
        try:
            await self._spi.write(rows)
        except BaseException as error:
            outcome = error
            raise
        finally:
            if self._hooks.hears_publishes:
                seconds = perf_counter() - started
                self._hooks.emit(Published(topic=self._topic, outcomes=[outcome] * len(rows), seconds=seconds))

    async def close(self) -> None:
        await self._spi.close()


@asynccontextmanager
async def open_table_writer(
    topic: str,
    partition: int,
    backend: Backend,
    capabilities: Capabilities,
    hooks: Hooks,
    check_open: Callable[[], None],
) -> AsyncGenerator[TableWriterFacade]:
    """Open the writer of a partition, which fences an older one; close it when the block ends.

    :param check_open: raises Closed if the bus is not open.
    :raises Unsupported: the topic is not compacted, or was made without what its tables need.
    :raises NotFound: the topic or partition does not exist.
    """
    check_name(topic, "topic")
    if not is_whole(partition) or partition < 0:
        raise refused("partition", partition, "a number of 0 or more")
    check_open()
    info = await backend.admin().describe_topic(topic)
    if not info.compacted:
        raise not_compacted(topic)
    if info.partitions is not None and partition >= info.partitions:
        raise NotFound(
            f"Table {topic!r} has no partition {partition}", advice=f"It has partitions 0 to {info.partitions - 1}"
        )
    spi = await _open(topic, partition, backend, capabilities, hooks)
    writer = TableWriterFacade(topic, partition, spi, capabilities.publish.table_rows, capabilities.backend)
    try:
        yield writer
    finally:
        await writer.close()


async def _open(topic: str, partition: int, backend: Any, capabilities: Capabilities, hooks: Hooks) -> TableWriterSpi:
    if isinstance(backend, WritesTables):
        spi = await backend.table_writer(topic, partition)
        return _Direct(topic, spi, MessageLimits(capabilities), hooks)
    name = f"anybroker-table.{topic}.{partition}"
    publisher = TransactionalPublisherFacade(name, await backend.transaction(name), capabilities, hooks)
    return _ByTransaction(topic, partition, publisher)
