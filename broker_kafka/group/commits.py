"""Commits of what was marked: by time, by count, on demand, and before partitions go.

*Concurrency.* One commit at a time, so that a later one never overtakes an earlier. *Cancellation.* A commit that was
begun goes on. *Failure.* Every partition has its own answer. What could not be stored stays to be stored, and is tried
again at the next turn, until the partition is gone. What nobody awaits is reported. Whatever a store raises is the
answer for each partition of the call; it never ends a release.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final

from confluent_kafka import KafkaError

from broker import BackendError, Bounds, BrokerError, OffsetOutOfRange, OperationTimeout, TopicNotFound, TopicPartition
from broker.driver import logger
from broker_kafka.cluster.list_offsets import not_within
from broker_kafka.errors import kafka_error
from broker_kafka.group.assigned_partition import Held
from broker_kafka.offsets.protocol import CommitResults, GroupMember, OffsetStore, StoredOffset

__all__ = ["Commits"]

_AGAIN: Final = 0.05
_FOR_NOW: Final = frozenset(
    {KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH}
)
"""The group is changing, and the brokers are a generation ahead of the client: the same commit is taken in a moment, if
this is a member still. If it is none, the client finds out, and the partitions are lost."""
_UNANSWERED: Final = BrokerError("The offset store did not answer for this partition", retriable=True)


class Commits:
    """:param interval: seconds after which what was marked is committed; None is never.
    :param every: offsets after which it is; None is never.
    :param timeout: seconds for one commit.
    :param report: is told of the errors of commits that nobody awaits.
    :param ends: asks for the bounds of partitions.
    :param gone: is told that a commit was refused since its topic seems to be gone.
    """

    def __init__(
        self,
        held: Mapping[TopicPartition, Held],
        store: OffsetStore,
        owner: Callable[[], GroupMember],
        *,
        interval: float | None,
        every: int | None,
        timeout: float,
        report: Callable[[TopicPartition, BrokerError], None],
        ends: Callable[[Sequence[TopicPartition]], Awaitable[Mapping[TopicPartition, Bounds]]],
        gone: Callable[[], None],
    ) -> None:
        self._held = held
        self._store = store
        self._owner = owner
        self._interval = interval
        self._every = every
        self._timeout = timeout
        self._report = report
        self._ends = ends
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._one_at_a_time = asyncio.Lock()
        self._grown = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[CommitResults]] = set()
        self._clock: asyncio.Timeout | None = None
        """Of the commit that runs."""
        self._closed = False

    def grew(self, offsets: int) -> None:
        """A mark changed, by so many offsets."""
        self._grown += offsets
        if self._every is not None and self._grown >= self._every and self._running is None:
            self._begin()
        elif self._timer is None:
            self._set_timer()

    async def commit(self, partitions: Collection[Held]) -> CommitResults:
        """Commit what is dirty of these."""
        task = self._loop.create_task(self._commit(partitions), name="broker-kafka-commit")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def flush(self, partitions: Collection[Held], deadline: float) -> None:
        """Commit what is dirty of these, again while that may help, at most until the loop time `deadline`."""
        while True:
            results = await self._commit_until(partitions, deadline)
            passing = [error for error in results.values() if error is not None and _passes(error)]
            if not passing or self._loop.time() + _AGAIN >= deadline:
                break
            await asyncio.sleep(_AGAIN)
        for partition, error in results.items():
            if error is not None:
                self._report(partition, error)

    async def _commit_until(self, partitions: Collection[Held], deadline: float) -> CommitResults:
        # None may still wait in the client's thread when the partitions are released, since it would be carried out
        # in the next generation.
        if self._clock is not None and not self._clock.expired() and (self._clock.when() or deadline) >= deadline:
            self._clock.reschedule(deadline)
        try:
            async with asyncio.timeout_at(deadline + _AGAIN):
                return await self._commit(partitions, deadline)
        except TimeoutError:
            late = OperationTimeout("The commit got no answer before the partition had to be released")
            return {held.partition: late for held in partitions if held.marks.pending}

    def close(self) -> None:
        """Begin no more by itself."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _commit(self, partitions: Collection[Held], deadline: float | None = None) -> CommitResults:
        # Whoever waits here commits what is marked once it is its turn.
        async with self._one_at_a_time:
            refused = await self._refused_leaps(partitions)
            forward: dict[TopicPartition, StoredOffset] = {}
            backward: dict[TopicPartition, StoredOffset] = {}
            committing: dict[TopicPartition, Held] = {}
            for held in partitions:
                marks = held.marks
                if marks.dirty and marks.current is not None and not held.gone:
                    (backward if marks.rewinds else forward)[held.partition] = marks.current
                    committing[held.partition] = held
                    marks.trying()
            results = {
                **await self._carry_out(forward, False, deadline),
                **await self._carry_out(backward, True, deadline),
            }
            for partition, error in results.items():
                if error is None:
                    committing[partition].marks.stored({**forward, **backward}[partition])
            if any(isinstance(error, TopicNotFound) for error in results.values()):
                # The client of a classic group finds out only when its metadata is due.
                self._gone()
            return {**results, **refused}

    async def _refused_leaps(self, partitions: Collection[Held]) -> dict[TopicPartition, BrokerError | None]:
        """Have marks of what was not fetched count if the log reaches so far; why others do not."""
        leaps = {held: held.marks.leap for held in partitions if held.marks.leap is not None and not held.gone}
        if not leaps:
            return {}
        try:
            bounds = await self._ends([held.partition for held in leaps])
        except BrokerError as error:
            return {held.partition: error for held in leaps}
        refused: dict[TopicPartition, BrokerError | None] = {}
        for held, leap in leaps.items():
            within = bounds[held.partition]
            held.marks.landed(leap, within=leap.offset <= within.next)
            if leap.offset > within.next:
                (topic, number), text = held.partition, not_within(within)
                refused[held.partition] = OffsetOutOfRange(
                    f"Position {leap.offset} of {topic!r}[{number}] {text}, so it is no mark",
                    advice="Mark what was read; the mark is as it was before",
                )
        return refused

    async def _carry_out(
        self, positions: Mapping[TopicPartition, StoredOffset], rewind: bool, deadline: float | None
    ) -> CommitResults:
        if not positions:
            return {}
        until = self._loop.time() + self._timeout
        try:
            async with asyncio.timeout_at(until if deadline is None else min(until, deadline)) as self._clock:
                answer = await self._store.commit(self._owner(), positions, rewind=rewind)
                return {partition: _told(answer.get(partition, _UNANSWERED)) for partition in positions}
        except BrokerError as error:
            return dict.fromkeys(positions, error)
        except TimeoutError as error:
            if self._clock is not None and not self._clock.expired():
                return dict.fromkeys(positions, _broken(error))  # the store's own
            return dict.fromkeys(positions, OperationTimeout("The commit got no answer in time"))
        except Exception as error:
            return dict.fromkeys(positions, _broken(error))
        finally:
            self._clock = None

    def _set_timer(self) -> None:
        if self._interval is not None and not self._closed:
            self._timer = self._loop.call_later(self._interval, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._running is None:
            self._begin()
        else:
            self._set_timer()

    def _begin(self) -> None:
        if self._closed:
            return
        self._grown = 0
        self._running = self._loop.create_task(self._in_background(), name="broker-kafka-commits")

    async def _in_background(self) -> None:
        try:
            results = await self.commit(list(self._held.values()))
            for partition, error in results.items():
                if error is not None and not _passes(error):
                    self._report(partition, error)
        except Exception:
            logger.exception("A commit in the background failed")
        finally:
            self._running = None
            if self._timer is None and any(held.marks.pending for held in self._held.values()):
                self._set_timer()


def _told(answer: object) -> BrokerError | None:
    """What a store answered for a partition, which may be one of the application's own."""
    if answer is None or isinstance(answer, BrokerError):
        return answer
    return _broken(TypeError(f"it answered {answer!r}, which is neither None nor a BrokerError"))


def _broken(error: Exception) -> BackendError:
    return BackendError(
        f"The offset store failed: {error!r}",
        native=error,
        advice="A store answers for each partition and raises nothing; the next commit tries again",
    )


def _passes(error: BrokerError) -> bool:
    native = None if error.native is None else kafka_error(error.native)
    return error.retriable or (native is not None and native.code() in _FOR_NOW)
