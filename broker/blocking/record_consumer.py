"""`RecordConsumer` without `await`: reads partitions of a log as a member of a group, from any number of threads.

*Cancellation.* KeyboardInterrupt in a waiting call loses no record: the consumer seeks back to the records that the
call would have returned, and `commit()` commits only up to there.

*Failure.* A retriable error is an event, any other error is raised once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypedDict

from typing_extensions import TypeVar, Unpack

from broker.blocking.consumer import MessageConsumer
from broker.blocking.portal import Call, Portal
from broker.blocking.settling import BlockingRecord, BlockingRecordBatch
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryTopics
from broker.driver.contract import TopicPartition
from broker.errors import Closed, LeaseLost
from broker.hooks import Hooks
from broker.reading import record_consumer as asynchronous
from broker.records import Record

__all__ = ["AsMessagesOptions", "RecordConsumer"]

T = TypeVar("T", default=bytes)


class AsMessagesOptions(TypedDict, total=False):
    """The options of `as_messages(...)`; see `broker.RecordConsumer.as_messages`."""

    retry: Retry | None
    retry_topics: RetryTopics | None
    dead_letter: str | Drop | None
    ordered_by_key: bool
    max_outstanding: int
    max_outstanding_bytes: int
    prefetch: int | None
    max_gap: int
    commit_every: int
    commit_interval: float
    stop_when_idle: float | None
    close_timeout: float | None


class RecordConsumer(Generic[T]):
    """A member of a group; created by `bus.records`. Joins the group when its `with` block is entered."""

    def __init__(self, consumer: asynchronous.RecordConsumer[T], portal: Portal, hooks: Hooks) -> None:
        self.asynchronous = consumer
        self._portal = portal
        self._hooks = hooks

    @property
    def closed(self) -> bool:
        """Whether the consumer was closed, or ended by an error."""
        return self.asynchronous.closed

    @property
    def healthy(self) -> bool:
        """Whether the consumer is open and its last fetch succeeded."""
        return self.asynchronous.healthy

    def __enter__(self) -> Self:
        """Join the group.

        :raises TopicNotFound: one of the topics does not exist.
        :raises Unsupported: the backend has no records.
        :raises BrokerError: the group could not be joined.
        """
        self._portal.call(self.asynchronous.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group: waiting calls raise Closed, iterations end.

        Waits for pending commits, at most `close_timeout` seconds, and commits nothing itself. The group persists.
        May be called twice.
        """
        if self._portal.running:
            self._portal.call(self.asynchronous.close)

    # -- reading -----------------------------------------------------------------------------------------

    def next_record(self, timeout: float | None = None) -> BlockingRecord[T] | None:
        """The next record, or None after `timeout` idle seconds; without a timeout, after `stop_when_idle` or never.

        :raises DecodeError: the payload cannot be decoded (only with `on_decode_error="raise"`).
        :raises Closed: the consumer was closed.
        """
        record = self._portal.wait(Call(self.asynchronous.next_record, (timeout,), undelivered=self._unread_one))
        return None if record is None else BlockingRecord(record, self._portal)

    def next_batch(self, max_records: int = 1000, timeout: float | None = None) -> BlockingRecordBatch[T]:
        """The available records, 1 to `max_records`; an empty batch after `timeout` idle seconds.

        :raises DecodeError: the next payload cannot be decoded (only with `on_decode_error="raise"`).
        :raises Closed: the consumer was closed.
        """
        call = Call(self.asynchronous.next_batch, (max_records, timeout), undelivered=self._unread)
        return BlockingRecordBatch(self._portal.wait(call), self._portal)

    def __iter__(self) -> Iterator[BlockingRecord[T]]:
        """Iterate over the records until the consumer is closed or idle. Leaving the loop loses no record."""
        records = aiter(self.asynchronous)
        while True:
            record = self._portal.wait(Call(anext, (records, None), undelivered=self._unread_one))
            if record is None:
                return
            yield BlockingRecord(record, self._portal)

    def batches(self, max_records: int = 1000) -> Iterator[BlockingRecordBatch[T]]:
        """Iterate over batches of records until the consumer is closed or idle. Leaving the loop loses no record."""
        batches: Any = self.asynchronous.batches(max_records)
        while True:
            batch = self._portal.wait(Call(anext, (batches, None), undelivered=self._unread))
            if batch is None:
                return
            yield BlockingRecordBatch(batch, self._portal)

    async def _unread_one(self, record: Record[T] | None) -> None:
        if record is not None:
            await self._unread((record,))

    async def _unread(self, records: Sequence[Record[T]] | None) -> None:
        """Seek back to these records, except in revoked partitions."""
        first: dict[tuple[str, int], int | None] = {}
        for record in records or ():
            first.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        for partition, offset in first.items():
            try:
                await self.asynchronous.seek({partition: offset})
            except (LeaseLost, Closed):
                continue

    def as_messages(self, **options: Unpack[AsMessagesOptions]) -> MessageConsumer[T]:
        """A consumer that serves the records as messages, which are settled one by one. It replaces this consumer.

        :param options: as for `broker.RecordConsumer.as_messages`.
        :raises ConfigurationError: the options contradict each other.
        :raises Closed: this consumer was already opened or closed.
        """
        return MessageConsumer(self._portal.run(self.asynchronous.as_messages, **options), self._portal, self._hooks)

    # -- committing and positions ------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the positions after all records delivered so far.

        :raises LeaseLost: a partition with uncommitted records was revoked since the last call; the others are
            committed.
        :raises BrokerError: the commit failed; it may be repeated.
        """
        self._portal.call(self.asynchronous.commit)

    def committed(self, partitions: Iterable[tuple[str, int]] | None = None) -> Mapping[TopicPartition, int | None]:
        """The committed position of each partition, or None; by default of all assigned partitions."""
        return self._portal.call(self.asynchronous.committed, partitions)

    def seek(self, positions: Mapping[tuple[str, int], int | None]) -> None:
        """Continue reading at these positions; None is the committed position, otherwise `start`.

        :raises LeaseLost: a partition is not assigned to this member.
        :raises OffsetOutOfRange: the log does not hold a position.
        :raises Unsupported: the backend cannot seek.
        """
        self._portal.call(self.asynchronous.seek, positions)

    def pause(self, partitions: Iterable[tuple[str, int]] | None = None) -> None:
        """Stop delivering records of these partitions (by default of all assigned ones) until `resume`.

        :raises LeaseLost: a partition is not assigned to this member; nothing is paused.
        """
        self._portal.run(self.asynchronous.pause, partitions)

    def resume(self, partitions: Iterable[tuple[str, int]] | None = None) -> None:
        """Undo `pause`.

        :raises LeaseLost: a partition is not assigned to this member; nothing is resumed.
        """
        self._portal.run(self.asynchronous.resume, partitions)

    def assignment(self) -> list[TopicPartition]:
        """The partitions of this member, without those that are being revoked."""
        return self._portal.run(self.asynchronous.assignment)
