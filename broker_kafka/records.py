"""`KafkaRecordSource`: the member of a Kafka consumer group behind `bus.records`.

*Concurrency.* Everything here runs on the loop; the client lives in its `ConsumerThread`. *Records* of a partition come
in order, each once per assignment; what was fetched of a partition that is revoked or lost is dropped, because its new
owner reads it. *Commits* are fenced: a commit of a partition that is not assigned is refused here, a release waits for
the commits that were begun, and the coordinator refuses former members. *Failure.* A position that the log does not
hold ends the reading with OffsetOutOfRange, or is reset, as `offset_reset` says. A deleted topic ends the reading with
TopicNotFound. While no broker can be reached, `fetch` raises ConnectionFailed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError

from broker import BrokerError, Closed, ConfigurationError, Record, TopicNotFound, TopicPartition
from broker.driver import Ephemeral, PositionReset, Progress, RecordListener, RecordSubscription, Waker, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.group_requests import delete_ephemeral_group
from broker_kafka.cluster.list_offsets import check_in_log, partitions_of
from broker_kafka.cluster.names import group_id
from broker_kafka.cluster.requests import retry_until_answered
from broker_kafka.codec.offset_metadata import LIMIT, decode, encode
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.errors import kafka_error, not_assigned
from broker_kafka.group.assigned_partition import Assignment
from broker_kafka.group.commits import CommitAttempts, RecordCommits
from broker_kafka.group.member import Member
from broker_kafka.group.start_offsets import Claim
from broker_kafka.group.topics import Subscription, TopicWatch, check_interval
from broker_kafka.offsets.protocol import CommitResults, StoredOffset
from broker_kafka.settings import KafkaSettings

__all__ = ["FetchedRuns", "KafkaRecordSource"]


_CLOSE_SECONDS: Final = 8.0
_REVOKE_SECONDS: Final = 30.0


class KafkaRecordSource(Member[Assignment]):
    """Implements `RecordSource`, `FetchesRuns`, `CommitsRanges` and `ReportsIdle`. Positions live in Kafka.

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
        super().__init__(
            connection,
            _in_numbers(connection.settings) if subscription.copartitioned else connection.settings,
            group_id(subscription.group),
            isolation=subscription.isolation,
            start=subscription.start,
            whole=subscription.whole,
            stores_starts=not isinstance(subscription.group, Ephemeral),
            revoke_seconds=min(_REVOKE_SECONDS, connection.settings.max_poll_interval_ms / 2000),
        )
        self._on_close = on_close
        self._subscription = subscription
        self._listener = listener
        self._commits = RecordCommits(
            CommitAttempts(
                self.store,
                lambda: self.claims.owner,
                group=self.group,
                timeout=connection.settings.request_timeout,
                beside=self.rebalance_commits,
                missing=self._missing,
            ),
            self.thread,
            self.assignments,
            group=self.group,
            log_ends=self.log_ends,
            tasks=self._tasks,
            emit=listener.event,
        )
        self._metadata = _FinishedRanges()
        self._records = FetchedRuns(self.thread.taken)
        self._failures: deque[BrokerError] = deque()
        self._waker = Waker()
        self._interrupted = self._fetching = False
        self._watch: TopicWatch | None = None
        if subscription.pattern is not None:
            self._watch = TopicWatch(
                connection,
                Subscription(tuple(subscription.topics), (subscription.pattern,)),
                interval=check_interval(connection.settings),
                subscribe=self.subscribe,
                failed=self.failed,
            )

    async def open(self) -> None:
        """Join the group. The first assignment comes later.

        :raises TopicNotFound: one of the topics does not exist.
        :raises BrokerError: the client cannot be made, or no broker answers.
        """
        if self._watch is not None:
            try:
                await self.join(await self._watch.open(), self._watch.start)
            except BaseException:
                await self._watch.stop()
                raise
            return
        topics = list(dict.fromkeys(self._subscription.topics))
        partitions = [partition for topic in topics for partition in await partitions_of(self.connection, topic)]
        await self.join(partitions, lambda: self.thread.subscribe(topics))

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
        if self._watch is not None:
            await self._watch.stop()
        self._topic_ids.close()
        await self._topic_ids.check()
        self._tasks.cancel()
        stopped, _ = await asyncio.gather(self.thread.stop(_CLOSE_SECONDS), self._close_rebalance_commits())
        if not stopped:
            logger.warning("Group %r: leaving takes long; its partitions wait for the end of the session", self.group)
        self.assignments.clear()
        self._records.clear()
        if isinstance(self._subscription.group, Ephemeral) and self._commits.attempted:
            await delete_ephemeral_group(self.connection, self.group)

    # -- fetching ------------------------------------------------------------------------------------------

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return [record for run in await self.fetch_runs(max_records, max_bytes, wait) for record in run.make(None, 0)]

    async def fetch_runs(self, max_records: int, max_bytes: int, wait: float) -> Sequence[NativeRun]:
        self._check_open()
        self._fetching = True
        until = self._loop.time() + wait
        try:
            while True:
                if self._records:
                    return self._records.take(max_records, max_bytes)
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

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._records.pause(map(TopicPartition._make, partitions))
        if not self._closed and self.thread.failure is None:
            self.thread.pause(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._records.resume(map(TopicPartition._make, partitions))
        self._waker.wake()
        if not self._closed and self.thread.failure is None:
            self.thread.resume(partitions)

    # -- positions -----------------------------------------------------------------------------------------

    async def commit(self, positions: Mapping[TopicPartition, int]) -> CommitResults:
        self._check_open()
        return await self._commits.commit({partition: StoredOffset(at) for partition, at in positions.items()})

    async def commit_with_metadata(self, positions: Mapping[TopicPartition, tuple[int, str]]) -> CommitResults:
        """`commit`, with the metadata of each position."""
        self._check_open()
        return await self._commits.commit({partition: StoredOffset(*at) for partition, at in positions.items()})

    def finished_ranges(self, partition: TopicPartition) -> Sequence[tuple[int, int]]:
        return self._metadata.finished_ranges(partition)

    async def commit_ranges(self, positions: Mapping[TopicPartition, Progress]) -> CommitResults:
        self._check_open()
        results = await self._commits.commit(self._metadata.encoded(positions))
        large = {each: positions[each] for each, error in results.items() if self._metadata.is_too_large(error)}
        if not large:
            return results
        # This broker is configured to take less than the default.
        self._metadata.limit //= 2
        return {**results, **await self.commit_ranges(large)}

    def fullness(self, partition: TopicPartition) -> float:
        return self._metadata.fullness(partition)

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        stored = await self.stored(partitions)
        return {partition: None if found is None else found.offset for partition, found in stored.items()}

    async def stored(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, StoredOffset | None]:
        """`committed`, with the metadata of each position."""
        self._check_open()
        return await super().stored(partitions)

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self._check_open()
        self._check_assigned(positions)
        targets = {partition: at for partition, at in positions.items() if at is not None}
        check_in_log(await self.bounds(list(targets)), targets)
        back = [partition for partition, at in positions.items() if at is None]
        if back:
            committed = await self.committed(back)
            targets |= {partition: at for partition, at in committed.items() if at is not None}
            targets |= await self._starts.of([partition for partition, at in committed.items() if at is None])
        self._check_assigned(positions)
        await self.move(targets)

    def never_transacts(self) -> None:
        """No transaction will commit positions of this member: see `RecordCommits`."""
        self._commits.never_transacts()

    async def group_metadata(self, partitions: Collection[TopicPartition] = ()) -> Any:
        """What a transaction needs to commit positions of this group; the present generation fences the transaction.

        :raises LeaseLost: one of the partitions is not assigned to this member.
        """
        self._check_open()
        self._check_assigned(partitions)
        await self._commits.transacts(2 * self._settings.request_timeout)
        return await self.thread.group_metadata()

    async def member_id(self) -> str:
        """The present member id; empty before the member has joined."""
        self._check_open()
        return await self.thread.call(lambda client: client.memberid() or "")

    def _check_assigned(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            if partition not in self.assignments:
                raise not_assigned(partition, self.group)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The member of group {self.group!r} was closed")

    # -- Member --------------------------------------------------------------------------------------------

    def _fetched(self, runs: Sequence[NativeRun]) -> None:
        if self._closed:
            self.thread.taken()
            return
        self._records.add(runs)
        self._waker.wake()

    def _make_assignment(self, partition: TopicPartition, claim: Claim) -> Assignment:
        stored = None if claim.new else claim.stored
        self._metadata.begin(partition, stored)
        self._commits.begin(partition, stored)
        return Assignment(partition)

    def _assigned(self, new: Sequence[Assignment]) -> None:
        self._listener.assigned([each.partition for each in new])

    async def _release(self, going: Sequence[Assignment], deadline: float) -> None:
        partitions = [each.partition for each in going]
        self._records.drop(set(partitions))
        try:
            async with asyncio.timeout_at(deadline):
                await self._listener.revoking(partitions, deadline)
        except TimeoutError:
            logger.warning("Group %r: the release of %s took too long", self.group, partitions)
        finally:
            for each in going:
                self._remove(each)
            self._records.drop(set(partitions))
        await self._commits.settled(deadline)

    def _lost(self, gone: Sequence[Assignment]) -> None:
        partitions = [each.partition for each in gone]
        self._records.drop(set(partitions))
        self._listener.lost(partitions)

    def _drop(self, moved: Sequence[Assignment]) -> None:
        self._records.drop({each.partition for each in moved})

    def _reset(self, assignment: Assignment, reset: PositionReset) -> None:
        self._metadata.begin(assignment.partition, None)

    def _log_ended(self, assignment: Assignment, after: int, end: int) -> None:
        self._commits.extend(assignment.partition)

    def _report_reset(self, reset: PositionReset) -> None:
        self._listener.event(reset)

    def failed(self, error: BrokerError) -> None:
        if self._closed or (self._failures and error.retriable):
            return
        if isinstance(error, TopicNotFound):
            self._missing({each.topic for each in self.assignments})
            if self._watch is not None:
                return
        self._failures.append(error)
        self._waker.wake()

    def _fail(self, error: BrokerError) -> None:
        self.failed(error)

    def _missing(self, topics: Collection[str]) -> None:
        self._topic_ids.missing(topics)
        if self._watch is not None:
            # A deleted topic that matched is no error.
            self._watch.check_soon()

    def _check_topics(self, topics: Collection[str]) -> None:
        if self._watch is not None:
            self._watch.check_soon()
            return
        for topic in topics:
            # The reader gets the error of a topic that does not exist.
            self._tasks.spawn(
                retry_until_answered(partial(partitions_of, self.connection, topic), lambda: not self._closed)
            )

    def _subscribed(self) -> Sequence[str]:
        return self._subscription.topics if self._watch is None else self._watch.topics

    def _paused(self) -> Collection[TopicPartition]:
        return self._records.paused


def _in_numbers(settings: KafkaSettings) -> KafkaSettings:
    """The settings with the assignor that keeps the partitions of a number together.

    :raises ConfigurationError: the settings name another assignor.
    """
    name, value = (
        ("partition_assignment_strategy", ("range",))
        if settings.group_protocol == "classic"
        else ("group_remote_assignor", "range")
    )
    if settings.is_given(name) and getattr(settings, name) != value:
        raise ConfigurationError(
            f"{name} is {getattr(settings, name)!r}, which splits the partitions of a number",
            advice=f"Set {name}=range, or leave it out: copartitioned consumers choose it by themselves",
        )
    return settings.replaced({name: value})


class _FinishedRanges:
    """The ranges finished above positions, as metadata of the stored offsets.

    :ivar limit: the longest metadata; halved when a broker takes less.
    """

    def __init__(self) -> None:
        self.limit = LIMIT
        self._stored: dict[TopicPartition, StoredOffset] = {}
        self._fullness: dict[TopicPartition, float] = {}

    def begin(self, partition: TopicPartition, stored: StoredOffset | None) -> None:
        """An assignment begins with what is stored; None if nothing is, or if it does not count."""
        self._fullness.pop(partition, None)
        self._stored.pop(partition, None)
        if stored is not None:
            self._stored[partition] = stored

    def finished_ranges(self, partition: TopicPartition) -> Sequence[tuple[int, int]]:
        """The ranges above the position from which the assignment began."""
        stored = self._stored.get(partition)
        return [] if stored is None else decode(stored.offset, stored.metadata)

    def encoded(self, positions: Mapping[TopicPartition, Progress]) -> dict[TopicPartition, StoredOffset]:
        """What to store."""
        stored: dict[TopicPartition, StoredOffset] = {}
        for partition, (position, ranges) in positions.items():
            metadata, self._fullness[partition] = encode(position, ranges, self.limit)
            stored[partition] = StoredOffset(position, metadata)
        return stored

    def fullness(self, partition: TopicPartition) -> float:
        """How much of the limit the last metadata would have taken."""
        return self._fullness.get(partition, 0.0)

    def is_too_large(self, error: BrokerError | None) -> bool:
        """Whether the broker refused metadata for its length, and a shorter one is worth a try."""
        found = None if error is None or error.native is None else kafka_error(error.native)
        return self.limit > 0 and found is not None and found.code() == KafkaError.OFFSET_METADATA_TOO_LARGE


class _Batch:
    __slots__ = ("from_thread", "runs")

    def __init__(self, runs: Sequence[NativeRun], *, from_thread: bool = True) -> None:
        self.runs = deque(runs)
        self.from_thread = from_thread
        """Whether the thread waits for room."""


class FetchedRuns:
    """The fetched batches that are not read yet, in order of arrival; runs of paused partitions are kept aside.

    :param taken: called for each batch of the thread that was read or dropped.
    """

    def __init__(self, taken: Callable[[], object]) -> None:
        self._taken = taken
        self._batches: deque[_Batch] = deque()
        self.paused: set[TopicPartition] = set()
        """Partitions whose runs are kept aside."""
        self._aside: dict[TopicPartition, list[NativeRun]] = {}

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, runs: Sequence[NativeRun]) -> None:
        """A batch came."""
        self._batches.append(_Batch(runs))
        if self.paused:
            self._set_aside()

    def take(self, max_records: int, max_bytes: int) -> list[NativeRun]:
        """The next batch, or the wanted part of it: at least one record. There must be a batch."""
        batch = self._batches[0]
        runs, taken = batch.runs, list[NativeRun]()
        while runs:
            run = runs.popleft()
            count = min(max_records, len(run) if run.size <= max_bytes else run.within(max_bytes))
            if not taken:
                count = max(1, count)
            if count < len(run):
                if count:
                    run, rest = run.split(count)
                    taken.append(run)
                    run = rest
                runs.appendleft(run)
                return taken
            taken.append(run)
            max_records -= len(run)
            max_bytes -= run.size
        self._batches.popleft()
        if batch.from_thread:
            self._taken()
        return taken

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the runs of these."""
        self._take_out(partitions)
        for partition in partitions:
            self._aside.pop(partition, None)

    def clear(self) -> None:
        """Forget everything."""
        self._batches.clear()
        self._aside.clear()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Keep the runs of these aside until they are resumed."""
        self.paused.update(partitions)
        self._set_aside()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `pause`; runs that were kept aside are read before later ones."""
        for partition in partitions:
            self.paused.discard(partition)
            runs = self._aside.pop(partition, None)
            if runs:
                self._batches.append(_Batch(runs, from_thread=False))

    def _set_aside(self) -> None:
        for run in self._take_out(self.paused):
            self._aside.setdefault(TopicPartition(run.topic, run.partition), []).append(run)

    def _take_out(self, partitions: Collection[TopicPartition]) -> list[NativeRun]:
        taken: list[NativeRun] = []
        kept: deque[_Batch] = deque()
        for batch in self._batches:
            rest: deque[NativeRun] = deque()
            for run in batch.runs:
                (taken if (run.topic, run.partition) in partitions else rest).append(run)
            if rest:
                batch.runs = rest
                kept.append(batch)
            elif batch.from_thread:
                self._taken()
        self._batches = kept
        return taken
