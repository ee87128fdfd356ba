"""`ConsumerMember`: the member behind one open `GroupConsumer`, with its buffer, readers, streams and commits of marks.

*Assignment.* `on_assigned` runs before the first record of a partition is handed over. *Release.* Nothing more is
handed over; `on_revoking` runs and readers finish their work, both until the flush deadline; marks are committed; then
the partition is released. A release without work in flight costs no time. *Lost* partitions end at once, nothing is
committed, and `on_lost` runs. *Failure.* What the client repairs by itself is an event; every other error ends the
reading.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from broker import BrokerError, LeaseLost, TopicNotFound, TopicPartition
from broker.driver import (
    FetchFailed,
    Hooks,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    PositionReset,
    TaskSet,
    Warned,
    logger,
    not_assigned,
)
from broker_kafka.client.consumer import IN_FLIGHT, LARGEST_BATCH
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.group.assigned_partition import AssignedPartition
from broker_kafka.group.buffer import DeliveryBuffer
from broker_kafka.group.commits import CommitAttempts, MarkCommits
from broker_kafka.group.member import Member
from broker_kafka.group.options import GroupOptions, OnRebalance, Rebalance
from broker_kafka.group.readers import PartitionStreams, Readers
from broker_kafka.group.start_offsets import Claim
from broker_kafka.group.topic_ids import TopicIdStore
from broker_kafka.group.topics import TopicWatch, check_interval
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["ConsumerMember"]

_RELEASE_MARGIN: Final = 0.5
_STOP_SECONDS: Final = 5.0
_GRACE: Final = 1.0
"""Seconds for the brokers' answers after the deadline of a close: once to commit, and once to leave."""
_SLOW_CALLBACK: Final = 30.0
"""Seconds after which a running `on_assigned` is a warning; then after twice as long, and so on."""


class ConsumerMember(Member[AssignedPartition]):
    """:param owner: the consumer, which its records name.

    :ivar finishes: whether the application finishes records one by one, so that a release waits for them.
    """

    def __init__(self, connection: Connection, options: GroupOptions, hooks: Hooks, owner: Any) -> None:
        super().__init__(
            connection,
            options.settings,
            options.group,
            isolation=options.isolation,
            start=options.begin,
            store=options.store,
            revoke_seconds=options.flush_seconds + options.commit_seconds + _RELEASE_MARGIN,
            # The batches in flight come on top of what waits here, and are to be no more than that.
            max_batch=max(1, min(LARGEST_BATCH, options.max_buffered // IN_FLIGHT)),
        )
        self._options = options
        self._hooks = hooks
        self.readers: Final = Readers(options.stop_when_idle, self.is_idle)
        self.buffer: Final = DeliveryBuffer(
            self.assignments,
            self.thread,
            owner,
            max_records=options.max_buffered,
            max_bytes=options.max_buffered_bytes,
            codec=options.codec,
            changed=self.readers.wake,
        )
        self.streams: Final = PartitionStreams(self.buffer, self.readers, owner)
        self.commits: Final = MarkCommits(
            CommitAttempts(
                self.store,
                lambda: self.claims.owner,
                group=self.group,
                timeout=options.settings.request_timeout,
                beside=self.rebalance_commits,
                missing=self._missing,
            ),
            self.assignments,
            interval=options.commit_interval,
            every=options.commit_every,
            report=lambda place, error: self._warn(f"{place.topic!r}[{place.partition}] is not committed: {error}"),
            bounds=lambda places: bounds_of(connection, places, committed=False),
            hold=self._hold,
        )
        self._held: list[AssignedPartition] = []
        """Partitions of which nothing is handed over until a commit succeeds."""
        self._watch = TopicWatch(
            connection,
            options.subscription,
            interval=check_interval(options.settings),
            subscribe=self.subscribe,
            failed=self.readers.fail,
        )
        # `_run_callback` logs the errors of a callback, with its event.
        self._callbacks = TaskSet("broker-kafka-rebalance", lambda error: None)
        self._flush_timeouts: set[asyncio.Timeout] = set()
        """Of the releases that run."""
        self._leave_by: float | None = None
        self._closer: asyncio.Task[Any] | None = None
        self.finishes = False

    async def open(self) -> None:
        """Join the group; closed again if that fails.

        :raises TopicNotFound: an explicit topic does not exist.
        :raises ConfigurationError: `start` names a partition that a topic does not have.
        :raises BrokerError: the client cannot be made, or no broker answers.
        """
        try:
            await self.join(await self._watch.open(), self._watch.start)
        except BaseException:
            await self._watch.stop()
            await self.thread.stop(_STOP_SECONDS)
            raise

    async def leave(self, timeout: float, caller: asyncio.Task[Any] | None) -> None:
        """Release everything and leave the group.

        :param timeout: seconds for the work in hand.
        :param caller: a task that waits for this, and so cannot finish its work meanwhile.
        """
        try:
            await self._watch.stop()
        finally:
            await self._leave(timeout, caller)

    async def _leave(self, timeout: float, caller: asyncio.Task[Any] | None) -> None:
        self._leave_by = self._loop.time() + timeout
        self._closer = caller
        self.readers.end()
        for running in self._flush_timeouts:
            if not running.expired():
                running.reschedule(min(running.when() or self._leave_by, self._leave_by))
        self._topic_ids.close()
        try:
            await self._topic_ids.check()
            # No rebalance waits, so that the commit may take all the time, for instance of a broker's restart.
            await self._give_up([each for each in self.assignments.values() if not each.revoking], self._leave_by)
        finally:
            # Whatever happened, the group must not keep a member that is not read.
            self.commits.close()
            self._tasks.cancel()
            await asyncio.gather(
                self.thread.stop(max(_GRACE, self._leave_by - self._loop.time())), self._close_rebalance_commits()
            )
            self._closed = True
            here = asyncio.current_task()
            for callback in self._callbacks:
                if callback is not here:
                    callback.cancel()
            self._let_go(list(self.assignments.values()))

    async def is_idle(self, seconds: float) -> bool:
        # What is held back is unread.
        return not self._held and await super().is_idle(seconds)

    # -- for the consumer ----------------------------------------------------------------------------------

    @property
    def topics(self) -> list[str]:
        """What is subscribed to."""
        return self._watch.topics

    def assigned_partition(self, topic: str, partition: int) -> AssignedPartition | None:
        """The present assignment of a partition."""
        return self.assignments.get(TopicPartition(topic, partition))

    def staying(self, partitions: Iterable[TopicPartition]) -> list[AssignedPartition]:
        """The assignments of these.

        :raises LeaseLost: one is not assigned, or is being revoked.
        """
        found: list[AssignedPartition] = []
        for partition in partitions:
            assigned = self.assignments.get(partition)
            if assigned is None or assigned.revoking:
                raise self.not_assigned(partition)
            found.append(assigned)
        return found

    def not_assigned(self, partition: TopicPartition) -> LeaseLost:
        """The error of a call for a partition that this member does not have."""
        return not_assigned(partition, self.group, self.assignment())

    def is_callback(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this task runs one of the application's callbacks."""
        return any(task is callback for callback in self._callbacks)

    def with_topic_ids(self, positions: Mapping[TopicPartition, StoredOffset]) -> Mapping[TopicPartition, StoredOffset]:
        """These with the ids of their topics, if the store keeps them."""
        return self.store.with_topic_ids(positions) if isinstance(self.store, TopicIdStore) else positions

    # -- Member --------------------------------------------------------------------------------------------

    def _fetched(self, runs: Sequence[NativeRun]) -> None:
        self.readers.active()
        self.buffer.add(runs)

    def _make_assignment(self, partition: TopicPartition, claim: Claim) -> AssignedPartition:
        return AssignedPartition(partition, claim.stored, claim.begin)

    def _assigned(self, new: Sequence[AssignedPartition]) -> None:
        partitions = [each.partition for each in new]
        # A pause ends with its assignment; the client keeps it.
        self.thread.resume(partitions)
        self.readers.active()
        self.readers.wake()
        current = tuple(self.assignment())
        if self._hooks.listening:
            self._hooks.emit(PartitionsAssigned(partitions=tuple(partitions), current=current))
        self._tasks.spawn(self._open(new, Rebalance(assigned=tuple(sorted(partitions)), current=current)))

    async def _open(self, new: Sequence[AssignedPartition], event: Rebalance) -> None:
        """Run `on_assigned`, then hand records over."""
        call = self._call(self._options.on_assigned, event)
        seconds = _SLOW_CALLBACK
        while call is not None and not (await asyncio.wait((call,), timeout=seconds))[0]:
            # The callback may load the state of partitions, however long that takes.
            seconds *= 2
            self._warn(f"on_assigned has not returned; {list(event.assigned)} are not read until it does")
        opened = [each for each in new if not (each.revoking or each.gone)]
        self.buffer.open(opened)
        for each in opened:
            self.streams.add(each)

    async def _release(self, going: Sequence[AssignedPartition], deadline: float) -> None:
        await self._give_up(going, None)

    async def _give_up(self, going: Sequence[AssignedPartition], commit_by: float | None) -> None:
        """:param commit_by: the loop time for the commit, with a grace period; None is `commit_seconds`."""
        if not going:
            return
        for each in going:
            each.revoking = True
        try:
            await self._flush(going, commit_by)
        finally:
            self._let_go(going)

    async def _flush(self, going: Sequence[AssignedPartition], commit_by: float | None) -> None:
        """Let the application finish its work on these, and commit the marks."""
        self.buffer.drop(going)
        self.readers.wake()
        deadline = self._loop.time() + self._options.flush_seconds
        if self._leave_by is not None:
            deadline = min(deadline, self._leave_by)
        revoked, current = tuple(sorted(each.partition for each in going)), tuple(self.assignment())
        if self._hooks.listening:
            self._hooks.emit(PartitionsRevoked(partitions=revoked, current=current))
        call = self._call(self._options.on_revoking, Rebalance(revoked=revoked, current=current, deadline=deadline))
        timeout = asyncio.timeout_at(deadline)
        self._flush_timeouts.add(timeout)
        try:
            async with timeout:
                await self.readers.settled(going, lambda: self._is_finished(going), self._closer)
                if call is not None:
                    await asyncio.wait((call,))
        except TimeoutError:
            self._warn(f"The work on {list(revoked)} did not finish before they had to be released")
            if call is not None:
                call.cancel()
        finally:
            self._flush_timeouts.discard(timeout)
        now = self._loop.time()
        await self.commits.flush(
            going, now + self._options.commit_seconds if commit_by is None else max(commit_by, now + _GRACE)
        )

    def _lost(self, gone: Sequence[AssignedPartition]) -> None:
        self.buffer.drop(gone)
        self.readers.wake()
        lost, current = tuple(sorted(each.partition for each in gone)), tuple(self.assignment())
        if self._hooks.listening:
            self._hooks.emit(PartitionsLost(partitions=lost, current=current))
        self._call(self._options.on_lost, Rebalance(lost=lost, current=current))

    def _drop(self, moved: Sequence[AssignedPartition]) -> None:
        for each in moved:
            each.marks.moved()
        self.buffer.drop(moved)

    def _reset(self, assignment: AssignedPartition, reset: PositionReset) -> None:
        assignment.marks.rebase()

    def _log_ended(self, assignment: AssignedPartition, after: int, end: int) -> None:
        if grown := assignment.marks.end(after, end):
            self.commits.grew(grown)

    def _report_reset(self, reset: PositionReset) -> None:
        if self._hooks.listening:
            self._hooks.emit(reset)

    def failed(self, error: BrokerError) -> None:
        if isinstance(error, TopicNotFound):
            self._missing({each.topic for each in self.assignments})
        elif not error.retriable:
            self.readers.fail(error)
        else:
            logger.info("Group %r: %s", self.group, error)
            if self._hooks.listening:
                self._hooks.emit(FetchFailed(topic=self.group, error=error, pause=0.0))

    def _missing(self, topics: Collection[str]) -> None:
        self._topic_ids.missing(topics)
        # The client of a classic group finds out only when its metadata is due.
        self._watch.check_soon()

    def _fail(self, error: BrokerError) -> None:
        self.readers.fail(error)

    def _check_topics(self, topics: Collection[str]) -> None:
        if not self.readers.ended:
            self._watch.check_soon()

    def _subscribed(self) -> Sequence[str]:
        return self._watch.topics

    def _paused(self) -> Collection[TopicPartition]:
        return {place for place, each in self.assignments.items() if each.paused}

    # -- inside --------------------------------------------------------------------------------------------

    def _hold(self, held: bool) -> None:
        """Hand over nothing while no commit succeeds: what is handled then would be handled again after a crash."""
        if held:
            logger.info("Group %r: nothing more is handed over until a commit succeeds", self.group)
            self._held = [each for each in self.assignments.values() if each.opened]
            for each in self._held:
                each.opened = False
        else:
            self.buffer.open([each for each in self._held if not each.gone])
            self._held = []

    def _is_finished(self, going: Sequence[AssignedPartition]) -> bool:
        return not self.finishes or not any(each.marks.runs.unfinished for each in going)

    def _let_go(self, going: Sequence[AssignedPartition]) -> None:
        for each in going:
            self._remove(each)
        self.buffer.drop(going)
        self.readers.wake()

    def _call(self, callback: OnRebalance | None, event: Rebalance) -> asyncio.Task[None] | None:
        return None if callback is None else self._callbacks.spawn(_run_callback(callback, event))

    def _warn(self, text: str) -> None:
        text = f"Group {self.group!r}: {text}"
        logger.warning(text)
        if self._hooks.listening:
            self._hooks.emit(Warned(text=text))


async def _run_callback(callback: OnRebalance, event: Rebalance) -> None:
    try:
        answer = callback(event)
        if inspect.isawaitable(answer):
            await answer
    except Exception:
        # A failed callback must not keep a partition from its next owner.
        logger.exception("A rebalance callback failed on %s", event)
