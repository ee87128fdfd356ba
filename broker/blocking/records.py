"""Records without `await`: `RecordConsumer`, the records that it reads, `LogReader` and `LogFollower`.

*Concurrency.* Any number of threads may share a consumer, reader or follower; one thread at a time uses a record.

*Cancellation.* KeyboardInterrupt in a waiting call loses no record: the consumer seeks back to the records that the
call would have returned, and `commit()` commits only up to there; a follower hands them over again. Interrupting a
commit does not stop it.

*Failure.* A retriable error is an event, any other error is raised once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, overload

from typing_extensions import TypeVar, Unpack

from broker.blocking.messages import HostBus, MessageConsumer
from broker.consumer_state import ConsumerState
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryTopics
from broker.driver.contract import Bounds, TopicPartition
from broker.driver.optional import Span
from broker.errors import Closed, LeaseLost
from broker.hooks import Hooks
from broker.protocols import OwnPositions
from broker.reading import log_follower, log_reader, record_consumer
from broker.reading.log_follower import Others
from broker.records import Record, RecordBatch
from broker.threads.portal import Call, Portal

if TYPE_CHECKING:
    import pyarrow

__all__ = ["AsMessagesOptions", "BlockingRecord", "BlockingRecordBatch", "LogFollower", "LogReader", "RecordConsumer"]

T = TypeVar("T", default=bytes)


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
    def given_id(self) -> str | None:
        """The publisher's id; None if the SDK or the broker made the id. `OutboundMessage.from_message` copies it."""
        return self._record.given_id

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

        :param columns: topic, partition, offset, id, key, data, payload, attributes, publish_time, broker_time, or the
            times as whole milliseconds since 1970, which cost less: publish_time_ms, broker_time_ms.
        :raises ConfigurationError: a column does not exist, or `columns` is empty.
        """
        return self._batch.rows(*columns)

    def by_partition(self) -> dict[TopicPartition, BlockingRecordBatch[T]]:
        """The batch as one batch for each of its partitions, with the same records in the same order.

        `for place, part in batch.by_partition().items()`. Committing a part commits its partition only.
        """
        return {place: BlockingRecordBatch(part, self._portal) for place, part in self._batch.by_partition().items()}

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


class AsMessagesOptions(TypedDict, total=False):
    """The options of `as_messages(...)`; see `broker.RecordConsumer.as_messages`."""

    retry: Retry | None
    retry_topics: RetryTopics | None
    dead_letter: str | Drop | None
    ordered_by_key: bool
    max_outstanding: int
    max_outstanding_bytes: int
    prefetch: int | None
    max_rate: float | None
    max_gap: int
    commit_every: int
    commit_interval: float
    stop_when_idle: float | None
    close_timeout: float | None


class RecordConsumer(Generic[T]):
    """A member of a group; created by `bus.records`. Joins the group when its `with` block is entered."""

    def __init__(
        self,
        consumer: record_consumer.RecordConsumer[T],
        portal: Portal,
        hooks: Hooks,
        bus: HostBus | None = None,
    ) -> None:
        self.asynchronous = consumer
        self._bus = bus
        self._joined = False
        self._portal = portal
        self._hooks = hooks

    @property
    def closed(self) -> bool:
        """Whether the consumer was closed, or ended by an error."""
        return self.asynchronous.closed

    @property
    def state(self) -> ConsumerState:
        """What the consumer does now; see `broker.RecordConsumer`."""
        return self.asynchronous.state

    def __enter__(self) -> Self:
        """Join the group.

        :raises TopicNotFound: one of the topics does not exist.
        :raises Unsupported: the backend has no records.
        :raises BrokerError: the group could not be joined.
        """
        self._portal.call(self.asynchronous.__aenter__)
        self._joined = True
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
        if not self._portal.ended:
            self._portal.call(self.asynchronous.close)

    # -- reading -----------------------------------------------------------------------------------------

    def next_record(self, timeout: float | None = None) -> BlockingRecord[T] | None:
        """The next record, or None after `timeout` idle seconds; without a timeout, after `stop_when_idle` or never.

        :raises DecodeError: the payload cannot be decoded (only with `on_decode_error="raise"`).
        :raises Closed: the consumer was closed.
        """
        record = self._portal.wait(Call(self.asynchronous.next_record, (timeout,), undelivered=self._unread_one))
        return None if record is None else BlockingRecord(record, self._portal)

    def next_batch(
        self, max_records: int = 5000, timeout: float | None = None, *, max_wait: float | None = None
    ) -> BlockingRecordBatch[T]:
        """The available records, 1 to `max_records`; an empty batch after `timeout` idle seconds.

        :param max_wait: seconds for which the first record waits for a full batch; see `broker.RecordConsumer`.
        :raises DecodeError: the next payload cannot be decoded (only with `on_decode_error="raise"`).
        :raises Closed: the consumer was closed.
        """
        call = Call(
            self.asynchronous.next_batch, (max_records, timeout), {"max_wait": max_wait}, undelivered=self._unread
        )
        return BlockingRecordBatch(self._portal.wait(call), self._portal)

    def __iter__(self) -> Iterator[BlockingRecord[T]]:
        """Iterate over the records until the consumer is closed or idle. Leaving the loop loses no record."""
        records = aiter(self.asynchronous)
        while True:
            record = self._portal.next(Call(anext, (records, None), undelivered=self._unread_one), self._joined)
            if record is None:
                return
            yield BlockingRecord(record, self._portal)

    def batches(self, max_records: int = 5000, *, max_wait: float | None = None) -> Iterator[BlockingRecordBatch[T]]:
        """Iterate over batches of records until the consumer is closed or idle. Leaving the loop loses no record.

        :param max_wait: as for `next_batch`.
        """
        batches: Any = self.asynchronous.batches(max_records, max_wait=max_wait)
        while True:
            batch: Any = self._portal.next(Call(anext, (batches, None), undelivered=self._unread), self._joined)
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
        consumer = self._portal.run(self.asynchronous.as_messages, **options)
        return MessageConsumer(consumer, self._portal, self._hooks, self._bus)

    # -- committing and positions ------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the positions after all records delivered so far.

        :raises LeaseLost: a partition with uncommitted records was revoked since the last call; the others are
            committed.
        :raises BrokerError: the commit failed; it may be repeated.
        """
        self._portal.call(self.asynchronous.commit)

    def commit_records(self, records: Sequence[BlockingRecord[T]]) -> None:
        """Commit the positions after these records, which settles all lower offsets. A position never falls.

        :raises LeaseLost: a partition was revoked, or another consumer delivered the records; the other partitions are
            committed.
        :raises BrokerError: the commit failed; it may be repeated.
        """
        own = [record._record for record in records]  # pyright: ignore[reportPrivateUsage]
        self._portal.call(self.asynchronous.commit_records, own)

    def commit_positions(self, positions: OwnPositions) -> None:
        """Commit positions of your own: for each partition the next offset to read, which settles all lower ones.

        :raises OffsetOutOfRange: a position lies beyond what was delivered, or below the committed one; nothing is
            committed. To commit another, `seek` there first.
        :raises LeaseLost: a partition is not assigned to this member; the others are committed.
        :raises ConfigurationError: `positions` is not a mapping of partitions to offsets.
        :raises BrokerError: the commit failed; it may be repeated.
        """
        self._portal.call(self.asynchronous.commit_positions, positions)

    def committed(self, partitions: Iterable[tuple[str, int]] | None = None) -> Mapping[TopicPartition, int | None]:
        """The committed position of each partition, or None; by default of all assigned partitions."""
        return self._portal.call(self.asynchronous.committed, partitions)

    def seek(self, positions: Mapping[tuple[str, int], int | None]) -> None:
        """Continue reading at these positions; None is the committed position, otherwise `start`.

        All partitions and positions are checked before the first one moves. If the broker fails later, or a partition
        is lost at that moment, some may have moved: the error names these.

        :raises LeaseLost: a partition is not assigned to this member.
        :raises OffsetOutOfRange: the log does not hold a position.
        :raises Unsupported: the backend cannot seek.
        :raises ConfigurationError: `positions` is not a mapping of partitions to offsets.
        """
        self._portal.call(self.asynchronous.seek, positions)

    def pause(self, partitions: Iterable[tuple[str, int]] | None = None) -> None:
        """Stop delivering records of these partitions (by default of all assigned ones) until `resume`.

        Partitions that are assigned later are not paused.

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


class LogReader:
    """The type of `bus.log`."""

    def __init__(self, reader: log_reader.LogReaderFacade, portal: Portal) -> None:
        self._reader = reader
        self._portal = portal

    def partitions(self, topic: str) -> Sequence[int]:
        """The numbers of the topic's partitions.

        :raises TopicNotFound: the topic does not exist.
        """
        return self._portal.call(self._reader.partitions, topic)

    def bounds(self, topic: str) -> Mapping[int, Bounds]:
        """The first readable offset of each partition, and the position after its last record.

        :raises TopicNotFound: the topic does not exist.
        """
        return self._portal.call(self._reader.bounds, topic)

    def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """The first position of each partition whose broker time is not before `time`, otherwise the end.

        :raises ConfigurationError: the time has no timezone.
        :raises Unsupported: the backend cannot search by time.
        """
        return self._portal.call(self._reader.position_at, topic, time)

    def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """The spans of offsets between two positions that hold records, for planning. Dense offsets are one span.

        :raises NotFound: the topic or partition does not exist.
        """
        return self._portal.call(self._reader.spans, topic, partition, start, stop)

    def read(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None, *, max_records: int = 1000
    ) -> Iterator[BlockingRecordBatch[bytes]]:
        """The records with start <= offset < stop, in batches of at most `max_records`.

        None as start or stop is the bound of the log at the start of the read. The read never waits for new records.
        The records cannot be committed. Leaving or interrupting the loop has no effect on the log.

        :raises OffsetOutOfRange: retention removed `start`, or `stop` is beyond the end.
        :raises NotFound: the topic or partition does not exist.
        :raises ConfigurationError: the arguments contradict each other.
        """
        return self._iterate(self._reader.read(topic, partition, start, stop, max_records=max_records))

    def follow(
        self, topic: str, positions: Mapping[int, int] | None = None, *, others: Others | None = None
    ) -> LogFollower:
        """The records from these positions on, without end and without a group. Does no I/O: `with` opens it.

        `with bus.log.follow("orders", {0: 17}) as log: for batch in log.batches(): ...`

        :param positions: the partitions to follow, each with the offset to begin at; None is all partitions, from their
            first record on.
        :param others: where partitions that `positions` does not name begin: "earliest" or "latest". Partitions that
            are added later are followed, too, from their first record on. None follows only what is named.
        :raises ConfigurationError: an argument is invalid.
        :raises OffsetOutOfRange: a position is negative; opening checks the rest.
        :raises Unsupported: the backend cannot follow its log.
        """
        follower = self._portal.run(partial(self._reader.follow, topic, positions, others=others))
        return LogFollower(follower, self._portal)

    def _iterate(self, batches: Any) -> Iterator[BlockingRecordBatch[bytes]]:
        try:
            while (batch := self._portal.call(anext, batches, None)) is not None:
                yield BlockingRecordBatch(batch, self._portal)
        finally:
            # The garbage collector may run this in any thread, so the close runs later on the loop.
            self._portal.spawn(batches.aclose)


class LogFollower:
    """A followed log; created by `bus.log.follow`, opened and closed by `with`."""

    def __init__(self, follower: log_follower.LogFollower, portal: Portal) -> None:
        self._follower = follower
        self._portal = portal
        self._opened = False

    @property
    def closed(self) -> bool:
        """Whether the follower was closed, or ended by an error."""
        return self._follower.closed

    @property
    def healthy(self) -> bool:
        """Whether the follower is open and its last fetch succeeded."""
        return self._follower.healthy

    def __enter__(self) -> Self:
        """Find the positions, and begin to fetch.

        :raises NotFound: the topic, or one of the partitions, does not exist.
        :raises OffsetOutOfRange: the log does not hold a position.
        """
        self._portal.call(self._follower.__aenter__)
        self._opened = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop: waiting calls raise Closed, iterations end. May be called twice; leaves nothing on the broker."""
        if not self._portal.ended:
            self._portal.call(self._follower.close)

    @property
    def behind(self) -> frozenset[int]:
        """The partitions that have not caught up yet.

        A partition has caught up when all records that the log held at the start were handed over, or have gone since.
        Partitions that are added later are never behind.
        """
        return self._follower.behind

    def next_batch(self, max_records: int = 1000, timeout: float | None = None) -> BlockingRecordBatch[bytes]:
        """The available records, 1 to `max_records`; an empty batch after `timeout` idle seconds.

        An empty batch also comes once when partitions have caught up and no record comes with that; see `behind`.

        :raises TopicRecreated: the topic was deleted and recreated: positions mean other records.
        :raises TopicNotFound: the topic was deleted.
        :raises OffsetOutOfRange: retention removed records before they were read.
        :raises Closed: the follower was closed.
        """
        call = Call(self._follower.next_batch, (max_records, timeout), undelivered=self._give_back)
        return BlockingRecordBatch(self._portal.wait(call), self._portal)

    def batches(self, max_records: int = 1000) -> Iterator[BlockingRecordBatch[bytes]]:
        """Iterate over batches of records until the follower is closed. Leaving the loop loses no record.

        A batch is empty when partitions have caught up and no record came with that; see `behind`.
        """
        batches: Any = self._follower.batches(max_records)
        while True:
            batch: Any = self._portal.next(Call(anext, (batches, None), undelivered=self._give_back), self._opened)
            if batch is None:
                return
            yield BlockingRecordBatch(batch, self._portal)

    async def _give_back(self, records: Sequence[Record[bytes]] | None) -> None:
        self._follower.give_back(records or ())
