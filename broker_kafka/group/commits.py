"""Commits of one member of a group.

`CommitAttempts` stores positions once. Above it is one of two: `RecordCommits`, for `bus.records`, retries and moves
positions past the ends of partitions; `MarkCommits`, for `GroupConsumer`, decides when marks are committed.

*Ends of partitions.* Behind the last record there may be transaction markers and records of aborted transactions. No
reader gets these, so the position after the last record is moved past them: within its commit, or by another commit
after the answer. Otherwise a group that has read everything would have a lag until another record comes. A position
never passes the start of an open transaction, where the partition ends for readers of committed data.

*Concurrency.* One event loop. *Cancellation.* A commit that was begun continues when its caller is cancelled.
*Failure.* Each partition has its own answer, whatever a store raises. `RecordCommits.commit` retries for a few seconds
in the middle of a rebalance, and while a coordinator moves, as long as the assignment lasts and no newer commit of the
partition was begun. `MarkCommits` keeps what was not stored and retries at its next turn. Errors of background commits
are reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

from confluent_kafka import KafkaError

from broker import (
    BackendError,
    Bounds,
    BrokerError,
    LeaseLost,
    OffsetOutOfRange,
    OperationTimeout,
    TopicNotFound,
    TopicPartition,
)
from broker.driver import Backoff, CommitPatience, Event, PositionsCommitted, RecordRun, TaskSet, logger
from broker_kafka.cluster.list_offsets import out_of_range_text
from broker_kafka.cluster.requests import is_retriable
from broker_kafka.errors import commit_unanswered, kafka_error, not_assigned
from broker_kafka.group.assigned_partition import AssignedPartition
from broker_kafka.group.rebalance_commits import RebalanceCommits
from broker_kafka.offsets.protocol import CommitResults, GroupMember, OffsetStore, StoredOffset

__all__ = ["CallbackState", "CommitAttempts", "LogEnds", "MarkCommits", "RecordCommits"]

_RETRY_PAUSE: Final = 0.1
_LONGEST_RETRY_PAUSE: Final = 0.5
_RETRY_SECONDS: Final = 5.0
_OPEN_REBALANCE: Final = 0.5
"""Seconds without an answer to a commit after which the group is taken to rebalance."""
_STILL_OPEN: Final = 0.05
"""The same while the commit before had no answer either."""
_SUSPENDED: Final = 0.5
"""A timer that is so late shows that this process did not run."""
_FLUSH_PAUSE: Final = 0.05
_LONGEST_FLUSH_PAUSE: Final = 0.2
_GENERATION_CHANGES: Final = frozenset(
    {KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH}
)
"""The brokers are a generation ahead of the client: they take the commit of a present member a moment later, and the
client of a former member finds out."""


class CommitAttempts:
    """Stores positions of this member, without retries.

    :param owner: the member in its present generation.
    :param timeout: seconds for one answer of the store.
    :param beside: stores positions while the answer waits for the end of a rebalance.
    :param missing: called with the topics that the store did not find.
    """

    def __init__(
        self,
        store: OffsetStore,
        owner: Callable[[], GroupMember],
        *,
        group: str,
        timeout: float,
        beside: RebalanceCommits | None = None,
        missing: Callable[[set[str]], object] = lambda topics: None,
    ) -> None:
        self._store = store
        self._beside = beside
        self._rebalancing = False
        """Whether the last commit had no answer before its positions were stored beside it."""
        self._owner = owner
        self._group = group
        self._timeout = timeout
        self._missing = missing
        self._loop = asyncio.get_running_loop()

    async def attempt(self, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False) -> CommitResults:
        """Store positions once, of whatever partitions. A process that was suspended waits a second time."""
        results = await self._attempt(positions, rewind)
        if missing := {place.topic for place, error in results.items() if isinstance(error, TopicNotFound)}:
            self._missing(missing)
        return results

    async def _attempt(self, positions: Mapping[TopicPartition, StoredOffset], rewind: bool) -> CommitResults:
        if self._beside is not None:
            await self._beside.idle()
        answer = asyncio.ensure_future(self._store.commit(self._owner(), positions, rewind=rewind))
        until = self._loop.time() + self._timeout
        try:
            if self._beside is not None and await self._is_stored_beside(answer, positions, self._beside, until):
                return dict.fromkeys(positions)
            for _ in range(2):
                await asyncio.wait((answer,), timeout=max(0.0, until - self._loop.time()))
                if answer.done():
                    return self._checked(positions, answer.result())
                if self._loop.time() < until + _SUSPENDED:
                    break
                until = self._loop.time() + self._timeout
        except BrokerError as error:
            return dict.fromkeys(positions, error)
        except Exception as error:
            return dict.fromkeys(positions, _store_failed(error))
        finally:
            answer.cancel()
        late = OperationTimeout(f"A commit of group {self._group!r} was not answered in {self._timeout:g} s")
        return dict.fromkeys(positions, late)

    async def _is_stored_beside(
        self,
        answer: asyncio.Future[CommitResults],
        positions: Mapping[TopicPartition, StoredOffset],
        beside: RebalanceCommits,
        until: float,
    ) -> bool:
        """Whether the positions were stored past the client before its answer came, until the loop time `until`."""
        patience = _STILL_OPEN if self._rebalancing else _OPEN_REBALANCE
        await asyncio.wait((answer,), timeout=min(patience, self._timeout))
        self._rebalancing = False
        if answer.done():
            return False
        stored, left = beside.begin(positions), max(0.0, until - self._loop.time())
        await asyncio.wait((answer, stored), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        self._rebalancing = not answer.done() and stored.done() and stored.result()
        return self._rebalancing

    def _checked(self, positions: Mapping[TopicPartition, StoredOffset], answer: CommitResults) -> CommitResults:
        """The answers of a store, which may be the application's."""
        results: dict[TopicPartition, BrokerError | None] = {}
        for partition in positions:
            result: object = answer[partition] if partition in answer else commit_unanswered(partition, self._group)
            if result is None or isinstance(result, BrokerError):
                results[partition] = result
            else:
                results[partition] = _store_failed(
                    TypeError(f"it returned {result!r}, which is neither None nor a BrokerError")
                )
        return results


class RecordCommits:
    """Commits for `bus.records`: retries in a rebalance, and moves positions past the ends of partitions.

    Transactions of the application commit positions without this class, and a commit from here could undo theirs. So
    nothing is moved before the application has committed, or has said that it never commits in transactions, and
    nothing after its first transaction. A move that fails is logged.

    :param assignments: the present assignment of each partition; only compared.
    :param emit: called with the events of commits that this class begins.

    :ivar attempted: whether anything was committed, or tried.
    """

    def __init__(
        self,
        attempts: CommitAttempts,
        thread: CallbackState,
        assignments: Mapping[TopicPartition, object],
        *,
        group: str,
        log_ends: LogEnds,
        tasks: TaskSet,
        emit: Callable[[Event], object],
    ) -> None:
        self._attempts = attempts
        self._thread = thread
        self._assignments = assignments
        self._group = group
        self._log_ends = log_ends
        self._tasks = tasks
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._in_flight = _commit_tasks()
        self._newest: dict[TopicPartition, asyncio.Task[CommitResults]] = {}
        """The commit of each partition that was begun last; kept when it ends, since an older one may wait to retry."""
        self._stored: dict[TopicPartition, int] = {}
        """What the brokers have, as long as nothing else can have been stored since."""
        self._claimed: dict[TopicPartition, int] = {}
        """What they had when the assignment began."""
        self._transactional = False
        self._trusts_claims = False
        self._closed = False
        self.attempted = False

    def begin(self, partition: TopicPartition, stored: StoredOffset | None) -> None:
        """An assignment begins. :param stored: what the brokers have."""
        self._stored.pop(partition, None)
        self._claimed.pop(partition, None)
        # Metadata says more than the position: to move the position would remove the metadata.
        if stored is not None and not stored.metadata:
            (self._stored if self._trusts_claims else self._claimed)[partition] = stored.offset

    def never_transacts(self) -> None:
        """No transaction will commit positions."""
        self._trusts_claims = True
        claimed, self._claimed = self._claimed, {}
        self._stored.update(claimed)
        for partition in claimed:
            self.extend(partition)

    async def transacts(self, timeout: float) -> None:
        """Transactions commit positions from now on; waits `timeout` seconds at most for running commits."""
        if not self._transactional:
            self._transactional = True
            self._stored.clear()
            await self.settled(self._loop.time() + timeout)

    async def commit(self, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        """Store positions, with retries; one with metadata is not moved."""
        results: dict[TopicPartition, BrokerError | None] = {}
        ours: dict[TopicPartition, StoredOffset] = {}
        assignments: dict[TopicPartition, object] = {}
        for partition, at in positions.items():
            self._stored.pop(partition, None)
            self._claimed.pop(partition, None)
            if partition in self._assignments:
                ours[partition] = at if at.metadata else StoredOffset(self._log_ends.beyond(partition, at.offset))
                # A partition may be revoked before the task begins.
                assignments[partition] = self._assignments[partition]
            else:
                results[partition] = not_assigned(partition, self._group)
        if not ours:
            return results
        task = self._in_flight.spawn(self._commit_with_retries(ours, assignments))
        self._newest.update(dict.fromkeys(ours, task))
        results |= await asyncio.shield(task)
        for partition, at in ours.items():
            newest = self._newest[partition] is task
            if newest and results[partition] is None and not self._transactional and not at.metadata:
                self._stored[partition] = at.offset
                self.extend(partition)
        return results

    def extend(self, partition: TopicPartition) -> None:
        """Move the stored position to the end of the partition, if it can be."""
        stored = self._stored.get(partition)
        if stored is not None and self._log_ends.beyond(partition, stored) > stored:
            self._tasks.spawn(self._extend(partition, stored))

    async def settled(self, deadline: float) -> None:
        """Wait for the commits that were begun, until this loop time at most."""
        if self._in_flight:
            await asyncio.wait(list(self._in_flight), timeout=max(0.0, deadline - self._loop.time()))

    def close(self) -> None:
        """Stop retrying."""
        self._closed = True

    async def _commit_with_retries(
        self, positions: Mapping[TopicPartition, StoredOffset], assignments: dict[TopicPartition, object]
    ) -> CommitResults:
        self.attempted = True
        within = self._thread.calling_back
        results = dict(await self._attempts.attempt(positions))
        # The answer may have waited for the end of a rebalance: the time for retries begins only now.
        until, backoff = self._loop.time() + _RETRY_SECONDS, Backoff(_RETRY_PAUSE, _LONGEST_RETRY_PAUSE)
        # A member in the middle of a rebalance has no generation, and may keep its partitions in the next one. A new
        # coordinator loads the offsets of the former one, and the client does not wait for all of that.
        while retried := {
            partition: positions[partition]
            for partition, error in results.items()
            if (isinstance(error, LeaseLost) or (is_retriable(error) and not isinstance(error, OperationTimeout)))
            and partition in assignments
            and self._assignments.get(partition) == assignments[partition]
        }:
            # The generation does not change within a callback; an attempt before it was of an earlier generation.
            left = until - self._loop.time()
            if (within and self._thread.calling_back) or self._closed or left < 0:
                break
            await asyncio.sleep(min(backoff.next(), left))
            for partition in retried:
                newest = self._newest[partition]
                if newest is not asyncio.current_task():
                    # A retry would undo the newer position: its answer counts.
                    del assignments[partition]
                    results[partition] = (await asyncio.shield(newest))[partition]
            if still := {partition: positions[partition] for partition in retried if partition in assignments}:
                within = self._thread.calling_back
                results |= await self._attempts.attempt(still)
        return results

    async def _extend(self, partition: TopicPartition, stored: int) -> None:
        if self._stored.get(partition) != stored:
            return
        end = self._log_ends.beyond(partition, stored)
        error = (await self.commit({partition: StoredOffset(stored)}))[partition]
        if error is None:
            self._emit(PositionsCommitted(positions={partition: end}))
        else:
            logger.info("The position of %s stays before its end: %s", partition, error)


class MarkCommits:
    """Commits what the application marked: by time, by count, on demand, and before partitions go; one at a time.

    :param attempts: stores the positions.
    :param interval: seconds after which marks are committed; None is never.
    :param every: offsets after which they are; None is never.
    :param report: called with the errors of background commits.
    :param bounds: reads the bounds of partitions.
    :param hold: of `CommitPatience`, for background commits.
    """

    def __init__(
        self,
        attempts: CommitAttempts,
        assignments: Mapping[TopicPartition, AssignedPartition],
        *,
        interval: float | None,
        every: int | None,
        report: Callable[[TopicPartition, BrokerError], None],
        bounds: Callable[[Sequence[TopicPartition]], Awaitable[Mapping[TopicPartition, Bounds]]],
        hold: Callable[[bool], object],
    ) -> None:
        self._patience = CommitPatience(hold)
        self._attempts = attempts
        self._assignments = assignments
        self._interval = interval
        self._every = every
        self._report = report
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._one_at_a_time = asyncio.Lock()
        self._grown = 0
        self._timer: asyncio.TimerHandle | None = None
        self._background: asyncio.Task[None] | None = None
        self._in_flight = _commit_tasks()
        self._timeout: asyncio.Timeout | None = None
        """Of the running attempt."""
        self._closed = False

    def grew(self, offsets: int) -> None:
        """A mark grew by so many offsets."""
        self._grown += offsets
        if self._every is not None and self._grown >= self._every and self._background is None:
            self._begin()
        elif self._timer is None:
            self._set_timer()

    async def commit(self, partitions: Collection[AssignedPartition]) -> CommitResults:
        """Commit the pending marks of these."""
        return await asyncio.shield(self._in_flight.spawn(self._commit(partitions)))

    async def flush(self, partitions: Collection[AssignedPartition], deadline: float) -> None:
        """Commit the pending marks of these, with retries until the loop time `deadline`; errors are reported."""
        backoff = Backoff(_FLUSH_PAUSE, _LONGEST_FLUSH_PAUSE)
        while True:
            results = await self._commit_until(partitions, deadline)
            transient = any(error is not None and _is_transient(error) for error in results.values())
            left = deadline - _FLUSH_PAUSE - self._loop.time()
            if not transient or left <= 0:
                break
            await asyncio.sleep(min(backoff.next(), left))
        for partition, error in results.items():
            if error is not None:
                self._report(partition, error)

    def close(self) -> None:
        """Begin no more background commits."""
        self._closed = True
        self._patience.succeeded()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _commit_until(self, partitions: Collection[AssignedPartition], deadline: float) -> CommitResults:
        # No commit may still wait in the client's thread when partitions are released: the next generation would send
        # it.
        timeout = self._timeout
        if timeout is not None and not timeout.expired() and (timeout.when() or deadline) >= deadline:
            timeout.reschedule(deadline)
        try:
            async with asyncio.timeout_at(deadline + _FLUSH_PAUSE):
                return await self._commit(partitions, deadline)
        except TimeoutError:
            late = OperationTimeout("The commit was not answered before the partition had to be released")
            return {each.partition: late for each in partitions if each.marks.pending}

    async def _commit(self, partitions: Collection[AssignedPartition], deadline: float | None = None) -> CommitResults:
        # Waiters commit what is marked when their turn comes.
        async with self._one_at_a_time:
            refused = await self._refused_leaps(partitions)
            forward: dict[TopicPartition, StoredOffset] = {}
            backward: dict[TopicPartition, StoredOffset] = {}
            committing: dict[TopicPartition, AssignedPartition] = {}
            for each in partitions:
                marks = each.marks
                if marks.dirty and marks.current is not None and not each.gone:
                    (backward if marks.rewinds else forward)[each.partition] = marks.current
                    committing[each.partition] = each
                    marks.trying()
            results = {
                **await self._attempt(forward, deadline, rewind=False),
                **await self._attempt(backward, deadline, rewind=True),
            }
            for partition, error in results.items():
                if error is None:
                    committing[partition].marks.stored({**forward, **backward}[partition])
            return {**results, **refused}

    async def _attempt(
        self, positions: Mapping[TopicPartition, StoredOffset], deadline: float | None, *, rewind: bool
    ) -> CommitResults:
        if not positions:
            return {}
        try:
            async with asyncio.timeout_at(deadline) as self._timeout:
                return await self._attempts.attempt(positions, rewind=rewind)
        except TimeoutError:
            return dict.fromkeys(positions, OperationTimeout("The commit was not answered in time"))
        finally:
            self._timeout = None

    async def _refused_leaps(
        self, partitions: Collection[AssignedPartition]
    ) -> dict[TopicPartition, BrokerError | None]:
        """Accept marks above all that was fetched if the log reaches so far; the errors of the others."""
        leaps = {each: each.marks.leap for each in partitions if each.marks.leap is not None and not each.gone}
        if not leaps:
            return {}
        try:
            bounds = await self._bounds([each.partition for each in leaps])
        except BrokerError as error:
            return {each.partition: error for each in leaps}
        refused: dict[TopicPartition, BrokerError | None] = {}
        for each, leap in leaps.items():
            within = bounds[each.partition]
            each.marks.landed(leap, within=leap.offset <= within.next)
            if leap.offset > within.next:
                (topic, number), text = each.partition, out_of_range_text(within)
                refused[each.partition] = OffsetOutOfRange(
                    f"Position {leap.offset} of {topic!r}[{number}] {text}, so it is no mark",
                    advice="Mark what was read; the earlier mark is unchanged",
                )
        return refused

    def _set_timer(self) -> None:
        if self._interval is not None and not self._closed:
            self._timer = self._loop.call_later(self._interval, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._background is None:
            self._begin()
        else:
            self._set_timer()

    def _begin(self) -> None:
        if self._closed:
            return
        self._grown = 0
        self._background = self._loop.create_task(self._commit_in_background(), name="broker-kafka-commits")

    async def _commit_in_background(self) -> None:
        self._patience.trying()
        try:
            results = await self.commit(list(self._assignments.values()))
            if not any(error is not None and _is_transient(error) for error in results.values()):
                self._patience.succeeded()
            for partition, error in results.items():
                if error is not None and not _is_transient(error):
                    self._report(partition, error)
        except Exception:
            logger.exception("A background commit failed")
        finally:
            self._background = None
            if self._timer is None and any(each.marks.pending for each in self._assignments.values()):
                self._set_timer()


class LogEnds:
    """Where each partition ends that was fetched to its end. Pure."""

    def __init__(self) -> None:
        self._reached: dict[TopicPartition, int] = {}
        """After the last record that was fetched."""
        self._ends: dict[TopicPartition, tuple[int, int]] = {}

    def begin(self, positions: Mapping[TopicPartition, int]) -> None:
        """These are read from here on; a position below 0 is unknown."""
        for partition, position in positions.items():
            self._ends.pop(partition, None)
            self._reached.pop(partition, None)
            if position >= 0:
                self._reached[partition] = position

    def fetched(self, runs: Iterable[RecordRun]) -> None:
        for run in runs:
            self._reached[TopicPartition(run.topic, run.partition)] = run.last + 1

    def covers(self, partition: TopicPartition, position: int) -> bool:
        """Whether the log is known to reach this position."""
        return position <= self.beyond(partition, self._reached.get(partition, -1))

    def ended(self, partition: TopicPartition, end: int) -> tuple[int, int] | None:
        """All below `end` was fetched; the range without records before it, if there is one."""
        reached = self._reached.get(partition)
        if reached is None or end <= reached:
            return None
        self._ends[partition] = (reached, end)
        return reached, end

    def beyond(self, partition: TopicPartition, position: int) -> int:
        """The highest position known that has the same records before it as this one."""
        begin, end = self._ends.get(partition, (0, 0))
        return end if begin <= position < end else position


class CallbackState(Protocol):
    """Whether the member's `ConsumerThread` is within a callback of its client."""

    @property
    def calling_back(self) -> bool: ...


def _commit_tasks() -> TaskSet:
    """Commits that go on when their callers are cancelled."""
    return TaskSet("broker-kafka-commit", lambda error: logger.warning("A commit failed: %r", error))


def _store_failed(error: Exception) -> BackendError:
    return BackendError(
        f"The offset store failed: {error!r}",
        native=error,
        advice="A store returns an answer for each partition and raises nothing; the next commit tries again",
    )


def _is_transient(error: BrokerError) -> bool:
    """Whether a later commit of the same member may succeed."""
    native = None if error.native is None else kafka_error(error.native)
    return error.retriable or (native is not None and native.code() in _GENERATION_CHANGES)
