"""`Member`: one member of a Kafka consumer group, behind `bus.records` and `GroupConsumer` alike.

It owns the client's thread, the assigned partitions, their claims and starts, the ids of their topics, and the reset of
positions that the log does not hold. A subclass hands records over, and decides what is committed before a release.

*Concurrency.* One loop. *Assignment.* Positions are claimed from the offset store, then the partition is assigned, then
its records come. *Release.* The subclass finishes the work in hand and commits, until a deadline; then the partition is
gone. *Lost* partitions are gone at once, and nothing of them is committed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Generic, Literal, TypeVar

from broker import Bounds, BrokerError, TopicPartition
from broker.driver import REDRIVE_SUBSCRIPTION, PartialSeek, PositionReset, Start, TaskSet
from broker_kafka.client.consumer import IN_FLIGHT, LARGEST_BATCH, ConsumerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.config.properties import in_own_group
from broker_kafka.errors import translate
from broker_kafka.group.assigned_partition import Assignment
from broker_kafka.group.commits import LogEnds
from broker_kafka.group.idle import Idleness
from broker_kafka.group.rebalance_commits import RebalanceCommits
from broker_kafka.group.start_offsets import Claim, Claims, StartPositions, resolve_reset, warn_if_slow
from broker_kafka.group.topic_ids import TopicIds, TopicIdStore
from broker_kafka.offsets.kafka import ThreadOffsetStore
from broker_kafka.offsets.protocol import OffsetStore, StoredOffset, positions_in
from broker_kafka.settings import KafkaSettings

__all__ = ["Member"]

A = TypeVar("A", bound=Assignment)


class Member(ABC, Generic[A]):
    """Implements `ConsumerHost`.

    :param settings: of this member's client; the bus's, or changed by the options of a consumer.
    :param start: where partitions begin that the group has no position for.
    :param whole: topics that begin at their first record whatever `start` says.
    :param store: where positions live; None is Kafka.
    :param stores_starts: whether a start of "latest" is stored when it is claimed.
    :param revoke_seconds: how long a release may take.

    :ivar assignments: what is assigned, partitions that are being revoked included.
    :ivar rebalance_commits: stores positions in an open rebalance; None with KIP-848, where the client does.
    :ivar resets: how often the position of a partition was out of range and reset.
    """

    def __init__(
        self,
        connection: Connection,
        settings: KafkaSettings,
        group: str,
        *,
        isolation: Literal["read_committed", "read_uncommitted"],
        start: Start | Mapping[TopicPartition, int],
        whole: Collection[str] = (),
        store: OffsetStore | None = None,
        stores_starts: bool = True,
        revoke_seconds: float,
        max_batch: int = LARGEST_BATCH,
    ) -> None:
        self.connection = connection
        self.group = group
        self.assignments: dict[TopicPartition, A] = {}
        self.resets: Counter[TopicPartition] = Counter()
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._read_committed = isolation == "read_committed"
        self._claimed: dict[TopicPartition, Claim] = {}
        self._closed = False
        self._tasks = TaskSet(
            f"broker-kafka-group-{group}", lambda error: self.failed(translate(error, f"Group {group!r}"))
        )
        self.log_ends = LogEnds()
        config = settings.client_config("consumer")
        if group == REDRIVE_SUBSCRIPTION:
            config = in_own_group(config)
        config |= {
            "error_cb": connection.client_config("consumer")["error_cb"],
            "group.id": group,
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
        }
        self.thread = ConsumerThread(
            config,
            self,
            name=f"broker-kafka-{group}",
            warn=connection.warn,
            max_batch=max_batch,
            in_flight=IN_FLIGHT,
            revoke_seconds=revoke_seconds,
            ended=self.ended,
        )
        self.store: ThreadOffsetStore | TopicIdStore = (
            ThreadOffsetStore(self.thread, timeout=settings.request_timeout)
            if store is None
            else TopicIdStore(store, lambda topic: self._topic_ids.of(topic), self._reset_of_deleted_topic)
        )
        classic = settings.group_protocol == "classic" and isinstance(self.store, ThreadOffsetStore)
        self.rebalance_commits = RebalanceCommits(connection, group, self.thread.group_metadata) if classic else None
        self._starts = StartPositions(connection, start, committed=self._read_committed, whole=whole)
        self._stores_starts = stores_starts and self._starts.moves
        self.claims = Claims(
            connection,
            group,
            self.store,
            self._starts,
            stores_starts=self._stores_starts,
            metadata=None if store is None else self.thread.group_metadata,
            wanted=lambda: not self._closed,
        )
        self._topic_ids = TopicIds(
            connection,
            self.store,
            self._tasks,
            assigned=self.assignment,
            owner=lambda: self.claims.owner,
            recreated=self._recreated,
        )
        self._idleness = Idleness(
            connection,
            settings,
            self.thread,
            self.store,
            group=group,
            read_committed=self._read_committed,
            topics=self._subscribed,
            assigned=self.assignments.keys,
            paused=self._paused,
        )

    async def join(self, partitions: Sequence[TopicPartition], subscribe: Callable[[], Awaitable[object]]) -> None:
        """Start the client and join the group. :param partitions: those of the topics, as of now.

        :raises ConfigurationError: `start` names a partition that does not exist.
        :raises BrokerError: the client cannot be made, or no broker answers.
        """
        self._starts.check(partitions)
        await self.thread.start()
        await self._starts.capture(partitions)
        if self._stores_starts and isinstance(self.store, ThreadOffsetStore):
            await self._starts.create_group(self.group, partitions)
        await subscribe()

    async def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe to these topics instead of the present ones."""
        if topics:
            await self.thread.subscribe(topics)
        else:
            await self.thread.call(lambda client: client.unsubscribe())

    def assignment(self) -> Sequence[TopicPartition]:
        """What is assigned and stays, sorted."""
        return sorted(partition for partition, each in self.assignments.items() if not each.revoking)

    async def is_idle(self, seconds: float) -> bool:
        """Whether nothing is left to read, after so many seconds without a record."""
        return self._closed or await self._idleness.confirmed(seconds)

    # -- for subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def _fetched(self, runs: Sequence[NativeRun]) -> None:
        """A batch came; answer with `ConsumerThread.taken` when it has left."""

    @abstractmethod
    def _make_assignment(self, partition: TopicPartition, claim: Claim) -> A: ...

    @abstractmethod
    def _assigned(self, new: Sequence[A]) -> None:
        """These were added to `assignments`."""

    @abstractmethod
    async def _release(self, going: Sequence[A], deadline: float) -> None:
        """Finish the work on these, commit, and remove them from `assignments`, until the loop time `deadline`."""

    @abstractmethod
    def _lost(self, gone: Sequence[A]) -> None:
        """These were removed from `assignments`."""

    @abstractmethod
    def _drop(self, moved: Sequence[A]) -> None:
        """Forget the records of these: they are read from elsewhere."""

    @abstractmethod
    def _reset(self, assignment: A, reset: PositionReset) -> None:
        """The position of this was reset; reading moves."""

    @abstractmethod
    def _log_ended(self, assignment: A, after: int, end: int) -> None:
        """There is no record from `after` to `end`, where the partition ends for now."""

    @abstractmethod
    def _report_reset(self, reset: PositionReset) -> None: ...

    @abstractmethod
    def _fail(self, error: BrokerError) -> None:
        """Reading ends with this error."""

    @abstractmethod
    def _check_topics(self, topics: Collection[str]) -> None:
        """No partition of these is assigned any more: they may have been deleted, which KIP-848 does not report."""

    @abstractmethod
    def _subscribed(self) -> Sequence[str]:
        """The topics that are subscribed to."""

    @abstractmethod
    def _paused(self) -> Collection[TopicPartition]: ...

    # -- ConsumerHost --------------------------------------------------------------------------------------

    def arrived(self, runs: Sequence[NativeRun]) -> None:
        # Records that are dropped count too: the position at the end must not pass them.
        self.log_ends.fetched(runs)
        self._topic_ids.fetched([run.topic for run in runs])
        self._fetched(runs)

    async def assigning(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        await self._topic_ids.assigning(partitions)
        with warn_if_slow(self.group, partitions, self.connection.warn):
            claimed = await self.claims.claim(partitions)
        self._claimed |= claimed
        return {partition: claim.begin for partition, claim in claimed.items()}

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        if self._closed:
            return
        new: list[A] = []
        for partition in partitions:
            claim = self._claimed.pop(partition)
            self.log_ends.begin({partition: claim.begin})
            assignment = self.assignments[partition] = self._make_assignment(partition, claim)
            new.append(assignment)
        self._assigned(new)

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        await self._topic_ids.check()
        going = self._assignments_of(partitions)
        await self._release(going, deadline)
        self._check_released(going)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        gone = self._assignments_of(partitions)
        for each in gone:
            self._remove(each)
        if gone:
            self._lost(gone)
            self._check_released(gone)

    def ended(self, partition: TopicPartition, end: int) -> None:
        """All of a partition below `end` came, where it ends for now."""
        gap, assignment = self.log_ends.ended(partition, end), self.assignments.get(partition)
        if gap is not None and assignment is not None:
            self._log_ended(assignment, *gap)

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        if (assignment := self.assignments.get(partition)) is not None:
            self._tasks.spawn(self._reset_position(assignment, position))

    @abstractmethod
    def failed(self, error: BrokerError) -> None: ...

    # -- positions -----------------------------------------------------------------------------------------

    async def move(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read from these positions; fetched records of the partitions are dropped.

        :raises LeaseLost: a partition is not assigned, and no other has moved.
        :raises PartialSeek: a partition is not assigned; others have moved.
        """
        done: list[TopicPartition] = []

        def moved(partitions: Sequence[TopicPartition]) -> None:
            done.extend(partitions)
            self._drop(self._assignments_of(partitions))
            self.log_ends.begin({each: positions[each] for each in partitions})

        try:
            await self.thread.seek(positions, moved)
        except BrokerError as error:
            if done:
                raise PartialSeek(done, error) from None
            raise

    async def bounds(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, Bounds]:
        """The bounds of partitions, as readers of this isolation see them."""
        return await bounds_of(self.connection, partitions, committed=self._read_committed)

    async def stored(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, StoredOffset | None]:
        """The stored positions of partitions; None where nothing is stored.

        :raises BrokerError: the store cannot be read.
        """
        found = await self.store.fetch(self.group, partitions)
        stored = positions_in(found)
        return {partition: stored.get(partition) for partition in found}

    async def _close_rebalance_commits(self) -> None:
        if self.rebalance_commits is not None:
            await self.rebalance_commits.close()

    async def _reset_position(self, assignment: A, position: int) -> None:
        """The log does not hold a position: apply `offset_reset`."""
        partition = assignment.partition
        # Retention was faster than the first fetch: nothing was read or committed yet.
        unread = self.claims.started.get(partition) == position
        reset = await self._resolve_reset(
            partition,
            position,
            "earliest" if unread else self._settings.offset_reset,
            lambda: self._is_current(assignment),
        )
        if reset is None:
            return
        self._reset(assignment, reset)
        self._count_reset(reset)
        try:
            await self.move({partition: reset.to})
        except BrokerError:
            if self._is_current(assignment):
                raise

    async def _reset_of_deleted_topic(self, partition: TopicPartition, position: int) -> int:
        """Where a partition begins whose stored position belongs to a deleted topic of the same name.

        :raises OffsetOutOfRange: `offset_reset` is "error".
        """
        reset = await self._resolve_reset(
            partition, position, self._settings.offset_reset, lambda: True, "belongs to a topic that was deleted"
        )
        assert reset is not None  # it is always wanted: the claim fails if the partition is gone
        self._count_reset(reset)
        return reset.to

    async def _resolve_reset(
        self, partition: TopicPartition, position: int, policy: str, wanted: Callable[[], bool], reason: str = ""
    ) -> PositionReset | None:
        return await resolve_reset(
            partition,
            position,
            group=self.group,
            policy=policy,
            bounds=lambda: self.bounds([partition]),
            wanted=wanted,
            reason=reason,
        )

    def _count_reset(self, reset: PositionReset) -> None:
        self.resets[TopicPartition(*reset.partition)] += 1
        self._report_reset(reset)

    # -- inside --------------------------------------------------------------------------------------------

    def _is_current(self, assignment: A) -> bool:
        return self.assignments.get(assignment.partition) is assignment and not assignment.revoking

    def _assignments_of(self, partitions: Sequence[TopicPartition]) -> list[A]:
        return [each for partition in partitions if (each := self.assignments.get(partition)) is not None]

    def _remove(self, assignment: A) -> None:
        assignment.revoking = assignment.gone = True
        if self.assignments.get(assignment.partition) is assignment:
            del self.assignments[assignment.partition]

    def _recreated(self, partitions: Collection[TopicPartition], error: BrokerError) -> None:
        self.lost(list(partitions))
        self._fail(error)

    def _check_released(self, released: Sequence[A]) -> None:
        topics = {each.partition.topic for each in released} - {each.topic for each in self.assignments}
        if topics and not self._closed:
            self._check_topics(topics)
