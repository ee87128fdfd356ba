"""Ends of partitions. Behind the last record there may be transaction markers and records of aborted transactions.

No reader gets these, so the position after the last record is moved past them: within its commit, or by a commit of its
own once that was answered. Otherwise a group that has read everything would have a lag until another record comes. A
position never passes the begin of an open transaction, where a partition ends for readers of committed data.

*Concurrency.* Used on the loop. *Transactions* of the application commit positions without this module, and a commit
from here could undo theirs. So nothing is committed before the application has committed, or has said that it never
commits in transactions; and nothing after its first transaction. *Failure.* What cannot be committed is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from broker import TopicPartition
from broker.driver import Event, PositionsCommitted, RecordRun, logger
from broker_kafka.client.tasks import Tasks
from broker_kafka.group.commits import CallbackState, MemberCommits
from broker_kafka.offsets.protocol import CommitResults, GroupMember, OffsetStore, StoredOffset

__all__ = ["LogEndCommits", "LogEnds"]


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


class LogEndCommits(MemberCommits):
    """`MemberCommits` that moves positions past the ends of partitions.

    :param emit: called with the events of commits that this class begins.
    """

    def __init__(
        self,
        store: OffsetStore,
        thread: CallbackState,
        assignments: Mapping[TopicPartition, object],
        owner: Callable[[], GroupMember],
        *,
        group: str,
        timeout: float,
        log_ends: LogEnds,
        tasks: Tasks,
        emit: Callable[[Event], object],
    ) -> None:
        super().__init__(store, thread, assignments, owner, group=group, timeout=timeout)
        self._log_ends = log_ends
        self._tasks = tasks
        self._emit = emit
        self._latest: dict[TopicPartition, object] = {}
        self._stored: dict[TopicPartition, int] = {}
        """What the brokers have, as long as nothing else can have been stored since."""
        self._claimed: dict[TopicPartition, int] = {}
        """What they had when the assignment began."""
        self._transactional = False
        self._trusts_claims = False

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
            await self.settled(asyncio.get_running_loop().time() + timeout)

    async def commit(self, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        """`MemberCommits.commit`; a position with metadata is not moved."""
        wanted = {
            partition: at if at.metadata else StoredOffset(self._log_ends.beyond(partition, at.offset))
            for partition, at in positions.items()
        }
        this = object()
        for partition in wanted:
            self._latest[partition] = this
            self._stored.pop(partition, None)
            self._claimed.pop(partition, None)
        results = await super().commit(wanted)
        for partition, error in results.items():
            if self._latest.get(partition) is this:
                del self._latest[partition]
                at = wanted[partition]
                if error is None and not self._transactional and not at.metadata:
                    self._stored[partition] = at.offset
                    self.extend(partition)
        return results

    def extend(self, partition: TopicPartition) -> None:
        """Move the stored position to the end of the partition, if it can be."""
        stored = self._stored.get(partition)
        if stored is not None and self._log_ends.beyond(partition, stored) > stored:
            self._tasks.spawn(self._extend(partition, stored))

    async def _extend(self, partition: TopicPartition, stored: int) -> None:
        if self._stored.get(partition) != stored:
            return
        end = self._log_ends.beyond(partition, stored)
        error = (await self.commit({partition: StoredOffset(stored)}))[partition]
        if error is None:
            self._emit(PositionsCommitted(positions={partition: end}))
        else:
            logger.info("The position of %s stays before its end: %s", partition, error)
