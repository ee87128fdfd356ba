"""`GroupConsumer`: the whole of Kafka's consumer groups, for applications that need more than `bus.records`.

*Concurrency.* One event loop; its methods may be called from any of its tasks. Marking is synchronous and does no I/O.
*Cancellation.* A cancelled step of an iteration has taken nothing; a commit that was begun continues. *Failure.* What
the client repairs by itself is an event of `bus.hooks`. Every other error ends the reading: each iteration raises it
after the records that came before; marks can still be committed, and `close` commits them. *Delivery.* Records of a
partition come in order, each once per assignment. Records that are not marked and committed are read again by the next
owner of the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Literal, NamedTuple, Self

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as NativePartition
from typing_extensions import TypeVar

from broker import (
    AnyCodec,
    Bus,
    Closed,
    ConfigurationError,
    LeaseLost,
    Record,
    RecordBatch,
    TopicPartition,
    TopicPattern,
    Unsupported,
)
from broker.driver import LoopWatch, PartialSeek, check_loop, check_partitions, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import check_in_log
from broker_kafka.group.assigned_partition import AssignedPartition
from broker_kafka.group.consumer_member import ConsumerMember
from broker_kafka.group.options import (
    GroupOptions,
    GroupStart,
    OnRebalance,
    check_kind,
    check_record,
    read_positions,
    read_records,
    with_options,
)
from broker_kafka.group.pending_offsets import OffsetStash, check_position
from broker_kafka.group.readers import AllBatches, AllRecords, PartitionStream, check_limit
from broker_kafka.group.topics import read_topics
from broker_kafka.offsets.arguments import check_metadata
from broker_kafka.offsets.protocol import CommitResults, GroupMember, OffsetStore, StoredOffset

__all__ = ["GroupConsumer", "SavePoint"]


T = TypeVar("T", default=bytes)


class SavePoint(NamedTuple):
    """The positions that a store saves in one transaction with the results of some records.

    :ivar owner: the member; the store refuses it once a newer member owns one of the partitions.
    """

    owner: GroupMember
    positions: Mapping[TopicPartition, StoredOffset]


class GroupConsumer(Generic[T]):
    """A member of a Kafka consumer group. `async with` joins the group; a consumer opens once.

    Read all partitions as one, by `async for record in group` or `group.batches()`, or each as a stream, by
    `group.partitions()`.

    :param bus: an open bus on Kafka.
    :param topics: names, patterns, or some of both.
    :param group: its members share the partitions.
    :param start: where partitions without a stored position begin: "earliest", "latest", a time, or a mapping of
        `TopicPartition` to the next offset to read; partitions that it leaves out begin at their first record.
    :param codec: decodes payloads; None leaves them bytes. A record that cannot be decoded raises a DecodeError in its
        place, with the `record`, which is to be marked like any other; the next step continues behind it. A codec with
        `prepare` is refused.
    :param store: where positions live; None is Kafka. The caller closes the store.
    :param isolation: whether records of open and aborted transactions are seen.
    :param on_assigned: called with a `Rebalance` before the first record of new partitions is handed over.
    :param on_revoking: called before partitions are released; its return says that everything is flushed.
    :param on_lost: called when partitions went to another member before they could be released.
    :param flush_timeout: the seconds that `on_revoking`, and work in flight, may delay a release; None is 10, or half
        of `max_poll_interval_ms` if that is less.
    :param commit_interval: seconds after which marks are committed; None is never by time.
    :param commit_every: offsets after which marks are committed; None is never by number. A release always commits.
    :param max_buffered: the most records that wait here to be handed over.
    :param max_buffered_bytes: the most bytes that wait here; one batch of the client may exceed them.
    :param stop_when_idle: end the iterations after so many seconds without a record; None is never.
    :param close_timeout: the seconds that `close` waits for work in flight and callbacks.
    :param options: settings of `KafkaSettings` for consumers, in place of the bus's: `group_protocol`,
        `partition_assignment_strategy`, `group_instance_id`, `session_timeout_ms`, `offset_reset`, `properties` …
    :raises ConfigurationError: an argument cannot be used.
    :raises Unsupported: the bus is not on Kafka.
    """

    def __init__(
        self,
        bus: Bus,
        topics: str | TopicPattern | Sequence[str | TopicPattern],
        *,
        group: str,
        start: GroupStart = "earliest",
        codec: AnyCodec[T] | None = None,
        store: OffsetStore | None = None,
        isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
        on_assigned: OnRebalance | None = None,
        on_revoking: OnRebalance | None = None,
        on_lost: OnRebalance | None = None,
        flush_timeout: float | None = None,
        commit_interval: float | None = 1.0,
        commit_every: int | None = None,
        max_buffered: int = 20_000,
        max_buffered_bytes: int = 64 * 1024 * 1024,
        stop_when_idle: float | None = None,
        close_timeout: float = 30.0,
        **options: Any,
    ) -> None:
        if not isinstance(bus, Bus):
            raise ConfigurationError(
                f"bus is {bus!r}", advice="Give the result of broker.connect(...); GroupConsumer has no blocking form"
            )
        connection: object = getattr(bus.backend, "connection", None)
        if not isinstance(connection, Connection):
            raise Unsupported(
                f"GroupConsumer works on Kafka only, and the backend is {bus.capabilities.backend!r}",
                advice="Use bus.records(...), or connect to kafka://",
            )
        self._hooks = bus.hooks
        self._connection = connection
        self._options = GroupOptions(
            subscription=read_topics(topics),
            group=group,
            start=start,
            codec=codec,
            store=store,
            isolation=isolation,
            on_assigned=on_assigned,
            on_revoking=on_revoking,
            on_lost=on_lost,
            flush_timeout=flush_timeout,
            commit_interval=commit_interval,
            commit_every=commit_every,
            max_buffered=max_buffered,
            max_buffered_bytes=max_buffered_bytes,
            stop_when_idle=stop_when_idle,
            close_timeout=close_timeout,
            settings=with_options(connection.settings, options),
        )
        self.group: Final = group
        self._mode = ""
        self._member: ConsumerMember | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._check_bus = bus.check_open
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_watch: LoopWatch | None = None

    # -- opening and closing -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Join the group. Partitions are assigned a moment later.

        :raises TopicNotFound: an explicit topic does not exist.
        :raises BrokerError: the client cannot be made, or no broker answers.
        """
        if self._member is not None or self._closed:
            raise Closed("A group consumer opens once", advice="Make another GroupConsumer(...)")
        self._check_bus()
        self._loop = asyncio.get_running_loop()
        self._member = ConsumerMember(self._connection, self._options, self._hooks, self)
        try:
            await self._member.open()
        except BaseException:
            self._closed = True
            raise
        self._connection.attach(self)
        self._loop_watch = LoopWatch.join(None)
        self._opened_at = self._loop.time()
        logger.info("Reading %s in group %s", ", ".join(self._member.topics) or "no topic yet", self.group)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Release all partitions as in a rebalance, which commits the marks, and leave the group.

        Work in flight and `on_revoking` get `close_timeout` seconds. Further calls wait for the same close; cancelling
        a caller does not stop it. Within a rebalance callback, the call returns at once.
        """
        check_loop(self._loop)
        member, task = self._member, asyncio.current_task()
        if member is None or self._closed:
            self._closed = True
            return
        if self._closing is None:
            work = member.leave(self._options.close_timeout, task)
            self._closing = asyncio.create_task(self._close(work), name="broker-kafka-group-close")
        if not member.is_callback(task):
            await asyncio.shield(self._closing)

    async def _close(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._closed = True
            if self._loop_watch is not None:
                self._loop_watch.leave(None)
            self._connection.detach(self)
            if (member := self._member) is not None:
                logger.info(
                    "Stopped reading %s in group %s after %.1f s: %d records handed over%s",
                    ", ".join(member.topics),
                    self.group,
                    asyncio.get_running_loop().time() - self._opened_at,
                    member.buffer.handed_over,
                    "" if member.readers.error is None else f"; ended by an error: {member.readers.error.message}",
                )

    @property
    def closed(self) -> bool:
        """Whether the consumer was closed, or has failed."""
        return (
            self._closed
            or self._closing is not None
            or (self._member is not None and self._member.readers.error is not None)
        )

    # -- reading -------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Record[T]]:
        """The records of all partitions, until the consumer is closed."""
        member = self._read_as("all")
        return AllRecords[T](member.buffer, member.readers)

    def batches(self, max_records: int = 5000) -> AsyncIterator[RecordBatch[T]]:
        """Batches of fetched records of all partitions, at most `max_records` each, until the consumer is closed."""
        member = self._read_as("all")
        return AllBatches[T](member.buffer, member.readers, check_limit(max_records), self)

    def partitions(self) -> AsyncIterator[PartitionStream[T]]:
        """A stream for each assigned partition, until the consumer is closed.

        Read each stream in a task of its own; a stream that is not read does not delay the others.
        """
        return self._read_as("partitions").streams

    # -- marking; all positions are the next offset to read -----------------------------------------------

    def mark(self, record: Record[Any], metadata: str = "") -> bool:
        """This record and all lower offsets of its partition are done; committed later, with the metadata.

        A mark below an earlier one changes nothing.

        :returns: False if the partition was released since, and its next owner reads the record again; or if another
            consumer handed the record over.
        :raises ConfigurationError: not a record, or metadata that cannot be stored: not a text, or with NUL or lone
            surrogates.
        """
        assigned = self._assignment_of(record, metadata)
        if assigned is None:
            return False
        self._grew(assigned.marks.mark(record.offset + 1, metadata))
        return True

    def mark_all(self, records: Iterable[Record[Any]], metadata: str = "") -> bool:
        """`mark` for each of these; False if one of the marks was False.

        :raises ConfigurationError: one is not a record, or the metadata cannot be stored; nothing is marked.
        """
        several = read_records(records)
        ours = True
        top: Record[Any] | None = None
        for record in several:
            # In a run of one assignment only the highest record counts.
            if top is None:
                top = record
            elif (
                record.partition != top.partition
                or record.generation != top.generation
                or record.topic != top.topic
                or record.owner is not top.owner
            ):
                ours &= self.mark(top, metadata)
                top = record
            elif record.offset > top.offset:
                top = record
        return (top is None or self.mark(top, metadata)) and ours

    def finish(self, record: Record[Any], metadata: str = "") -> bool:
        """This record is done, lower offsets perhaps not: the mark moves as far as all records are done.

        For concurrent work on records of one partition. A release then waits for all records that were handed over, at
        most `flush_timeout`.

        :returns: False if the partition was released since, and its next owner may read the record again; or if another
            consumer handed the record over.
        :raises ConfigurationError: not a record, or metadata that cannot be stored.
        """
        member = self._open_member()
        assigned = self._assignment_of(record, metadata)
        if assigned is None:
            return False
        member.finishes = True
        self._grew(assigned.marks.finish(record.offset, metadata))
        if assigned.revoking:
            member.readers.returned()
        return True

    def reset(self, record: Record[Any], metadata: str = "") -> bool:
        """Move the mark back: this record is the last that is done. Above the mark it changes nothing.

        Reading is not affected. To let the next owner read this record again, give `record.offset` to
        `reset_position`.

        :returns: False if nothing was changed.
        :raises ConfigurationError: not a record, or metadata that cannot be stored.
        """
        assigned = self._assignment_of(record, metadata)
        return assigned is not None and self._reset(assigned, record.offset + 1, metadata)

    def mark_position(self, topic: str, partition: int, position: int, metadata: str = "") -> bool:
        """All offsets below `position`, the next to read, are done; False if the partition is not assigned.

        The commit of a position beyond the end of the log is answered with OffsetOutOfRange, and is no mark.

        :raises ConfigurationError: an impossible partition or position, or metadata that cannot be stored.
        """
        check_position(TopicPartition(topic, partition), position, metadata)
        assigned = self._open_member().assigned_partition(topic, partition)
        if assigned is None:
            return False
        self._mark_at(assigned, StoredOffset(position, metadata))
        return True

    def reset_position(self, topic: str, partition: int, position: int, metadata: str = "") -> bool:
        """Move the mark back to `position`, the next to read. Above the mark it changes nothing.

        :returns: False if nothing was changed.
        :raises ConfigurationError: an impossible partition or position, or metadata that cannot be stored.
        """
        check_position(TopicPartition(topic, partition), position, metadata)
        assigned = self._open_member().assigned_partition(topic, partition)
        return assigned is not None and self._reset(assigned, position, metadata)

    def mark_stashed(self, stash: OffsetStash) -> list[TopicPartition]:
        """Mark the positions of a stash, and empty it; returns the partitions that were released since.

        :raises ConfigurationError: not a stash.
        """
        return self._drain(stash, self._mark_at)

    def reset_stashed(self, stash: OffsetStash) -> list[TopicPartition]:
        """Reset to the positions of a stash, and empty it; returns the partitions that were released since.

        :raises ConfigurationError: not a stash.
        """
        return self._drain(stash, lambda assigned, position: self._reset(assigned, *position[:2]))

    async def save_point(self, records: Sequence[Record[Any]]) -> SavePoint:
        """The positions to save in one transaction with the results of these records: `store.save(tx, *point)`.

        If a partition went to another member since, the store refuses them, which rolls the results back.

        :raises LeaseLost: a partition was revoked or lost already, or a record is another consumer's.
        :raises ConfigurationError: one is not a record.
        """
        member = self._open_member()
        positions: dict[TopicPartition, StoredOffset] = {}
        for record in read_records(records):
            assigned = self._assignment_of(record)
            if assigned is None:
                raise LeaseLost(
                    f"Partition {record.partition} of topic {record.topic!r} was taken away from this member of group "
                    f"{self.group!r} before its results were saved",
                    advice="Drop the results; its new owner reads these records again",
                )
            before = positions.get(assigned.partition)
            after = record.offset + 1 if before is None else max(before.offset, record.offset + 1)
            positions[assigned.partition] = StoredOffset(assigned.marks.covers(after))
        return SavePoint(member.claims.owner, member.with_topic_ids(positions))

    def saved(self, point: SavePoint) -> None:
        """The transaction with this save point was committed: its positions need no commit.

        A save point of another consumer changes nothing.

        :raises ConfigurationError: not a save point.
        """
        check_kind("point", point, SavePoint, "what save_point(records) returned")
        member = self._open_member()
        present = member.claims.owner
        if (point.owner.group, point.owner.member) != (present.group, present.member):
            return
        for place, position in point.positions.items():
            assigned = member.assigned_partition(*place)
            if assigned is not None:
                stored = position._replace(topic_id="")
                assigned.marks.mark(*stored[:2])
                if assigned.marks.current == stored:
                    assigned.marks.stored(stored)

    # -- committing ----------------------------------------------------------------------------------------

    async def commit(self, partitions: Iterable[tuple[str, int]] | None = None) -> CommitResults:
        """Commit the pending marks of these partitions, or of all.

        :returns: an entry for each partition with a pending mark: None, or the error. The next commit retries a failed
            mark while its partition is assigned. A named partition that is not assigned has a LeaseLost.
        :raises ConfigurationError: not partitions.
        """
        member = self._open_member()
        wanted = list(member.assignments) if partitions is None else check_partitions(partitions)
        refused = {place: member.not_assigned(place) for place in wanted if place not in member.assignments}
        return {**await self._commit(wanted), **refused}

    async def commit_records(self, records: Sequence[Record[Any]]) -> None:
        """Mark these records and all lower offsets of their partitions, and commit; `record.commit()` calls it.

        :raises LeaseLost: a partition was revoked or lost since, or the records are another consumer's; the others are
            committed.
        :raises ConfigurationError: one is not a record.
        :raises BrokerError: a position was not stored.
        """
        several = read_records(records)
        ours = self.mark_all(several)
        places = {TopicPartition(record.topic, record.partition) for record in several}
        for error in (await self._commit(places)).values():
            if error is not None:
                raise error
        if not ours:
            raise LeaseLost(
                f"A partition of {sorted(places)} was taken away from this member of group {self.group!r} before the "
                "commit",
                advice="Its new owner reads from the last commit on; make the work repeatable",
            )

    async def committed(
        self, partitions: Iterable[tuple[str, int]] | None = None
    ) -> Mapping[TopicPartition, StoredOffset | None]:
        """The stored positions of these partitions, or of all that are assigned; None where nothing is stored.

        :raises ConfigurationError: not partitions.
        :raises BrokerError: the store cannot be read.
        """
        wanted = self.assignment() if partitions is None else check_partitions(partitions)
        return await self._open_member().stored(wanted)

    # -- positions -----------------------------------------------------------------------------------------

    def assignment(self) -> list[TopicPartition]:
        """The partitions of this member, without those that are being revoked."""
        return list(self._open_member().assignment())

    def subscription(self) -> list[str]:
        """The topics that are read, including those that match patterns."""
        return list(self._open_member().topics)

    def positions(self) -> Mapping[TopicPartition, StoredOffset | None]:
        """The mark of each partition, committed or not; None where nothing was ever marked or stored."""
        marks = {place: each.marks for place, each in self._open_member().assignments.items()}
        return {place: marks[place].leap or marks[place].current for place in self.assignment()}

    async def seek(self, positions: Mapping[TopicPartition, int] | Mapping[tuple[str, int], int]) -> None:
        """Read from these offsets; fetched records of the partitions are dropped. Marks do not change.

        :raises LeaseLost: a partition is not assigned to this member.
        :raises OffsetOutOfRange: the log does not hold a position.
        :raises ConfigurationError: not positions of partitions.
        """
        member = self._open_member()
        wanted = read_positions(positions)
        member.staying(wanted)
        check_in_log(await member.bounds(list(wanted)), wanted)
        member.staying(wanted)
        try:
            await member.move(wanted)
        except PartialSeek as partial:
            raise partial.named() from None

    def pause(self, partitions: Iterable[tuple[str, int]] | None = None) -> None:
        """Hand over nothing of these partitions, or of all, until `resume`, or the end of their assignment.

        Nothing is lost, and the member stays in its group.

        :raises LeaseLost: a partition is not assigned to this member; nothing is paused.
        """
        member = self._open_member()
        for assigned in self._chosen(partitions):
            member.buffer.pause(assigned)

    def resume(self, partitions: Iterable[tuple[str, int]] | None = None) -> None:
        """Undo `pause`. :raises LeaseLost: a partition is not assigned to this member; nothing is resumed."""
        member = self._open_member()
        for assigned in self._chosen(partitions):
            member.buffer.resume(assigned)

    async def high_water_marks(self) -> Mapping[TopicPartition, int]:
        """The end offset of each assigned partition, from the last fetch; not all of one moment.

        With `read_committed`, records of open transactions count too.
        """
        member = self._open_member()
        places = self.assignment()

        def look(client: Consumer) -> dict[TopicPartition, int]:
            found: dict[TopicPartition, int] = {}
            for place in places:
                _, following = client.get_watermark_offsets(NativePartition(*place), cached=True)
                if following >= 0:
                    found[place] = following
            return found

        known = await member.thread.call(look)
        missing = [place for place in places if place not in known]
        bounds = await member.bounds(missing)
        return {place: known[place] if place in known else bounds[place].next for place in places}

    async def lag(self) -> Mapping[TopicPartition, int]:
        """How many offsets of each assigned partition are not marked, up to its present end.

        Offsets without a record, which compaction and transactions leave, count too, except at the end of a partition
        whose records are all marked.
        """
        member = self._open_member()
        places = self.assignment()
        bounds = await member.bounds(places)
        behind: dict[TopicPartition, int] = {}
        for place in places:
            assigned = member.assignments.get(place)
            position = None if assigned is None else assigned.position
            first, following = bounds[place]
            behind[place] = max(0, following - max(first, first if position is None else position))
        return behind

    @property
    def resets(self) -> Mapping[TopicPartition, int]:
        """How often retention overtook the position of each partition, so that reading continued elsewhere."""
        return dict(self._open_member().resets)

    # -- inside --------------------------------------------------------------------------------------------

    async def _commit(self, places: Iterable[TopicPartition]) -> CommitResults:
        member = self._open_member()
        found = [member.assignments[place] for place in places if place in member.assignments]
        return await member.commits.commit(found)

    def _chosen(self, partitions: Iterable[tuple[str, int]] | None) -> list[AssignedPartition]:
        member = self._open_member()
        if partitions is None:
            return list(member.assignments.values())
        wanted = check_partitions(partitions)
        for place in wanted:
            if place not in member.assignments:
                raise member.not_assigned(place)
        return [member.assignments[place] for place in wanted]

    def _read_as(self, mode: str) -> ConsumerMember:
        member = self._open_member()
        if self._mode and self._mode != mode:
            raise ConfigurationError(
                "This consumer cannot be read both as a whole and by partition",
                advice="Use partitions(), or batches() and async for; open two consumers for both",
            )
        if not self._mode:
            self._mode = mode
            if mode == "partitions":
                member.buffer.by_partition()
            else:
                member.streams.disable()
        return member

    def _open_member(self) -> ConsumerMember:
        check_loop(self._loop)
        if self._member is None:
            raise Closed("The group consumer is not open", advice="Enter it: async with GroupConsumer(...) as group")
        if self._closed:
            raise Closed("The group consumer was closed", advice="Make another GroupConsumer(...)")
        return self._member

    def _mark_at(self, assigned: AssignedPartition, position: StoredOffset) -> None:
        seen = self._open_member().log_ends.covers(assigned.partition, position.offset)
        self._grew((assigned.marks.mark if seen else assigned.marks.leap_to)(*position[:2]))

    def _grew(self, offsets: int) -> None:
        if offsets:
            self._open_member().commits.grew(offsets)

    def _reset(self, assigned: AssignedPartition, position: int, metadata: str) -> bool:
        if not assigned.marks.reset(position, metadata):
            return False
        self._open_member().commits.grew(1)
        return True

    def _drain(
        self, stash: OffsetStash, apply: Callable[[AssignedPartition, StoredOffset], object]
    ) -> list[TopicPartition]:
        check_kind("stash", stash, OffsetStash, "an OffsetStash")
        member, gone = self._open_member(), list[TopicPartition]()
        for place, stashed in stash.drain().items():
            assigned = member.assigned_partition(*place)
            by_name = stashed.generation is None
            if assigned is None or not (
                by_name or (stashed.generation == assigned.generation and stashed.owner is self)
            ):
                gone.append(place)
            else:
                apply(assigned, stashed.position)
        return gone

    def _assignment_of(self, record: Record[Any], metadata: str = "") -> AssignedPartition | None:
        """The assignment that handed this record over, if it is this consumer's and is not over.

        :raises ConfigurationError: not a record, or metadata that cannot be stored.
        """
        if type(record) is not Record:
            check_record(record)
        if metadata != "":
            check_metadata((record.topic, record.partition), metadata)
        assigned = self._open_member().assigned_partition(record.topic, record.partition)
        # Generations are unique within this module only: other consumers have their own.
        if assigned is None or assigned.generation != record.generation or record.owner is not self:
            return None
        return assigned
