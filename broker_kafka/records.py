"""The Record family: one member of a Kafka consumer group.

*Concurrency.* Everything here runs on the loop; the client lives in its `ConsumerThread`. *Records* of a partition come
in order, each once per assignment; what was taken and belongs to a partition that went away is dropped, because its
new owner reads it. *Commits* are fenced: one for a partition that is not ours is refused here, a release waits for the
commits that were begun, and the coordinator refuses members that it no longer knows. *Failure.* A position that the log
does not hold ends the reading with OffsetOutOfRange, or is reset and told, as `offset_reset` says. A topic that is
deleted ends it with TopicNotFound. While no broker can be reached, `fetch` raises ConnectionFailed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from broker import Bounds, BrokerError, Closed, Record, TopicPartition
from broker.driver import Ephemeral, Finished, RecordListener, RecordSubscription, TaskSet, Waker, logger
from broker_kafka.client.consumer import ConsumerThread
from broker_kafka.client.fetched import Arrivals
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, check_within, partitions_of
from broker_kafka.cluster.names import group_id
from broker_kafka.cluster.requests import delete_group, until_told
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.errors import not_ours, translate
from broker_kafka.group.commit_retry import MemberCommits
from broker_kafka.group.idle import Idleness
from broker_kafka.group.log_end import TailCommits
from broker_kafka.group.offset_reset import reset_of
from broker_kafka.group.start_offsets import Claims, Notes, StartPositions, told_if_slow
from broker_kafka.group.topic_ids import TopicIdentities
from broker_kafka.offsets.kafka import ThreadOffsetStore
from broker_kafka.offsets.protocol import GroupMember, StoredOffset

__all__ = ["KafkaRecordSource"]

_CLOSE_SECONDS: Final = 8.0
_REVOKE_SECONDS: Final = 30.0
_RESOLVE_SECONDS: Final = 30.0


class KafkaRecordSource:
    """Implements `RecordSource` and `FetchesRuns`. Positions live in Kafka, which knows its members.

    :param on_close: called when a close is over.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: RecordSubscription,
        listener: RecordListener,
        *,
        on_close: Callable[[KafkaRecordSource], object],
    ) -> None:
        self.connection: Final = connection
        self._on_close = on_close
        self._subscription = subscription
        self._listener = listener
        self._settings = settings = connection.settings
        self.group: Final = group_id(subscription.group)
        self._loop = asyncio.get_running_loop()
        config = connection.client_config("consumer") | {
            "group.id": self.group,
            "isolation.level": subscription.isolation,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
        }
        self.thread: Final = ConsumerThread(
            config,
            self,
            name=f"broker-kafka-{self.group}",
            warn=connection.warn,
            revoke_seconds=min(_REVOKE_SECONDS, settings.max_poll_interval_ms / 2000),
            ended=lambda partition, end: self.tails.ended(partition, end),
        )
        timeout = settings.request_timeout
        self._store = ThreadOffsetStore(self.thread, timeout=timeout)
        self._owner = GroupMember(self.group, -1)
        self._claims: Claims
        self._starts = StartPositions(
            connection,
            subscription.start,
            committed=subscription.isolation == "read_committed",
            whole=subscription.whole,
        )
        self._owned: dict[TopicPartition, int] = {}
        """What is assigned, and the number of the assignment."""
        self._assignments = 0
        self._notes = Notes()
        self._arrivals = Arrivals(self.thread.taken)
        self._commits = MemberCommits(
            self._store, self.thread, self._owned, self._owner, group=self.group, timeout=timeout
        )
        self._idleness = Idleness(
            connection,
            settings,
            self.thread,
            self._store,
            group=self.group,
            committed=subscription.isolation == "read_committed",
            topics=lambda: subscription.topics,
            held=self._owned.keys,
            paused=lambda: self._arrivals.paused,
        )
        self._tasks = TaskSet(
            f"broker-kafka-group-{self.group}", lambda error: self.failed(translate(error, f"Group {self.group!r}"))
        )
        self.tails: Final = TailCommits(self._commits, self._tasks, listener.event)
        self._identities = TopicIdentities(
            connection, self._store, self._tasks, held=self.assignment, owner=lambda: self._owner, gone=self._made_anew
        )
        self._failures: deque[BrokerError] = deque()
        self._waker = Waker()
        self._interrupted = self._fetching = self._closed = False
        self.resets: Counter[TopicPartition] = Counter()
        """How often the position of a partition was out of range and reset."""

    async def open(self) -> None:
        """Join the group. The first assignment comes later.

        :raises TopicNotFound: one of the topics does not exist.
        :raises BrokerError: the client cannot be made, or no broker answers.
        """
        topics = list(dict.fromkeys(self._subscription.topics))
        partitions = [partition for topic in topics for partition in await partitions_of(self.connection, topic)]
        await self.thread.start()
        stores_starts = self._starts.moves and not isinstance(self._subscription.group, Ephemeral)
        self._claims = Claims(self._store, self._starts, self._notes, stores_starts=stores_starts)
        await self._starts.capture(partitions)
        if stores_starts:
            await self._starts.found(self.group, partitions)
        await self.thread.subscribe(topics)

    # -- fetching ------------------------------------------------------------------------------------------

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return [record for run in await self.fetch_runs(max_records, max_bytes, wait) for record in run.make(None, 0)]

    async def fetch_runs(self, max_records: int, max_bytes: int, wait: float) -> Sequence[NativeRun]:
        self._check_open()
        self._fetching = True
        until = self._loop.time() + wait
        try:
            while True:
                if self._arrivals:
                    return self._arrivals.take(max_records, max_bytes)
                if self._failures:
                    raise self._failures.popleft()
                if self._interrupted:
                    return []
                left = until - self._loop.time()
                if left <= 0:
                    if self.connection.down:
                        raise self.connection.unreachable()
                    return []
                await self._waker.wait(left)
                if self._closed:
                    return []
        finally:
            self._fetching = self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    # -- ConsumerHost --------------------------------------------------------------------------------------

    def arrived(self, runs: Sequence[NativeRun]) -> None:
        # Also what comes too late to be read: the end behind it is not to go past it.
        self.tails.read(runs)
        if self._closed:
            self.thread.taken()
            return
        self._arrivals.add(runs)
        self._identities.read([run.topic for run in runs])
        self._waker.wake()

    async def assigning(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Look the positions up; what passes is tried again for a while, since the group waits for nobody here."""
        await self._identities.coming(partitions)
        with told_if_slow(self.group, partitions, self.connection.warn):
            found = await until_told(
                lambda: self._claims.positions(self._owner, partitions),
                lambda: not self._closed,
                within=_RESOLVE_SECONDS,
            )
        if found is None:
            raise Closed(f"The member of group {self.group!r} was closed")
        self.tails.begin(found, self._notes.begun(found))
        return found

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        if self._closed:
            return
        for partition in partitions:
            self._assignments += 1
            self._owned[partition] = self._assignments
        self._listener.assigned(partitions)

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        await self._identities.look()
        going = [partition for partition in partitions if partition in self._owned]
        self._arrivals.drop(set(going))
        try:
            async with asyncio.timeout_at(deadline):
                await self._listener.revoking(going, deadline)
        except TimeoutError:
            logger.warning("Group %r: giving %s up took too long", self.group, going)
        finally:
            for partition in going:
                self._owned.pop(partition, None)
            self._arrivals.drop(set(going))
        await self._commits.settled(deadline)
        self._identities.went(going)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        gone = [partition for partition in partitions if self._owned.pop(partition, None) is not None]
        self._arrivals.drop(set(gone))
        if gone:
            self._listener.lost(gone)
            self._identities.went(gone)

    def _made_anew(self, partitions: Collection[TopicPartition], error: BrokerError) -> None:
        self.lost(list(partitions))
        self.failed(error)

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        if (mine := self._owned.get(partition)) is not None:
            self._tasks.spawn(self._reset(partition, position, mine))

    def failed(self, error: BrokerError) -> None:
        if self._closed or (self._failures and error.retriable):
            return
        self._failures.append(error)
        self._waker.wake()

    async def _reset(self, partition: TopicPartition, position: int, mine: int) -> None:
        """A position is not in the log: an error, or as configured."""
        # Retention was quicker than the first fetch, and nobody has read or committed anything yet.
        unread = self._claims.begun.get(partition) == position
        reset = await reset_of(
            partition,
            position,
            group=self.group,
            policy="earliest" if unread else self._settings.offset_reset,
            bounds=lambda: self._bounds([partition]),
            ours=lambda: self._owned.get(partition) == mine,
        )
        if reset is None:
            return
        self.resets[partition] += 1
        self._notes.begin(partition, None)
        self._listener.event(reset)
        try:
            to = {partition: reset.to}
            await self.thread.seek(to, self.tails.moving(to, self._arrivals.drop))
        except BrokerError:
            if self._owned.get(partition) == mine:
                raise

    # -- positions -----------------------------------------------------------------------------------------

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        return await self.commit_noted({partition: (position, "") for partition, position in positions.items()})

    async def commit_noted(
        self, positions: Mapping[TopicPartition, tuple[int, str]]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        """`commit` with a text that is stored along with each position."""
        self._check_open()
        return await self.tails.commit(positions)

    # -- KeepsFinished -------------------------------------------------------------------------------------

    def finished(self, partition: TopicPartition) -> Sequence[tuple[int, int]]:
        return self._notes.finished(partition)

    async def commit_finished(
        self, positions: Mapping[TopicPartition, Finished]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        results = await self.commit_noted(self._notes.texts(positions))
        large = {each: positions[each] for each, error in results.items() if self._notes.is_too_large(error)}
        if not large:
            return results
        # This broker takes less than others do.
        self._notes.limit //= 2
        return {**results, **await self.commit_finished(large)}

    def fullness(self, partition: TopicPartition) -> float:
        return self._notes.fullness(partition)

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        stored = await self.stored(partitions)
        return {partition: None if found is None else found.offset for partition, found in stored.items()}

    async def stored(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, StoredOffset | None]:
        """`committed`, with the text that was stored along with each position."""
        self._check_open()
        positions: dict[TopicPartition, StoredOffset | None] = {}
        for partition, position in (await self._store.fetch(self.group, partitions)).items():
            if isinstance(position, BrokerError):
                raise position
            positions[partition] = position
        return positions

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self._check_open()
        self._check_owned(positions)
        targets = {partition: at for partition, at in positions.items() if at is not None}
        check_within(await self._bounds(list(targets)), targets)
        back = [partition for partition, at in positions.items() if at is None]
        if back:
            committed = await self.committed(back)
            targets |= {partition: at for partition, at in committed.items() if at is not None}
            targets |= await self._starts.of([partition for partition, at in committed.items() if at is None])
        self._check_owned(positions)
        await self.thread.seek(targets, self.tails.moving(targets, self._arrivals.drop))

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._arrivals.pause(map(TopicPartition._make, partitions))
        if not self._closed and self.thread.failure is None:
            self.thread.pause(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._arrivals.resume(map(TopicPartition._make, partitions))
        self._waker.wake()
        if not self._closed and self.thread.failure is None:
            self.thread.resume(partitions)

    def assignment(self) -> Sequence[TopicPartition]:
        return sorted(self._owned)

    async def is_idle(self, seconds: float) -> bool:
        return self._closed or await self._idleness.confirmed(seconds)

    async def group_metadata(self, partitions: Collection[TopicPartition] = ()) -> Any:
        """What a transaction needs to commit positions of this group; it is fenced by the present generation.

        :raises LeaseLost: one of the partitions is not ours.
        """
        self._check_open()
        self._check_owned(partitions)
        await self.tails.transacts(2 * self._settings.request_timeout)
        return await self.thread.group_metadata()

    async def member_id(self) -> str:
        """Its name in the group, as of now; empty before it has joined."""
        self._check_open()
        return await self.thread.call(lambda client: client.memberid() or "")

    async def _bounds(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, Bounds]:
        committed = self._subscription.isolation == "read_committed"
        return await bounds_of(self.connection, partitions, committed=committed)

    def _check_owned(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            if partition not in self._owned:
                raise not_ours(partition, self.group)

    # -- the end -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._leave()
        finally:
            self._on_close(self)

    async def _leave(self) -> None:
        self._commits.close()
        self._waker.wake()
        self._identities.close()
        await self._identities.look()
        self._tasks.cancel()
        if not await self.thread.stop(_CLOSE_SECONDS):
            logger.warning("Group %r: leaving it takes long, the other members wait for the session's end", self.group)
        self._owned.clear()
        self._arrivals.clear()
        if isinstance(self._subscription.group, Ephemeral) and self._commits.any:
            await delete_group(self.connection, self.group)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The member of group {self.group!r} was closed")
