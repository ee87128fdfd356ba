"""Ends of partitions: behind the last record may lie marks of transactions, and records of some that were undone.

No reader gets these, so the position after that last record goes past them: with its commit, or by itself once that was
answered. Else a group that has read all would be behind until another record comes. It never goes past the begin of an
open transaction, since a partition ends there for readers of committed data.

*Concurrency.* Used on the loop. *Transactions* of the application commit positions where this does not see it, and a
commit from here could undo theirs. So nothing is committed by itself before the application has committed, or has said
that it never does so in transactions; and nothing any more once it does. *Failure.* What cannot be committed is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from broker import BrokerError, TopicPartition
from broker.driver import Event, PositionsCommitted, RecordRun, TaskSet, logger

__all__ = ["TailCommits", "Tails"]

Results = Mapping[TopicPartition, BrokerError | None]


class Tails:
    """Where each partition ends of which all was fetched. Pure."""

    def __init__(self) -> None:
        self._reached: dict[TopicPartition, int] = {}
        """After the last record that was fetched."""
        self._tails: dict[TopicPartition, tuple[int, int]] = {}

    def begin(self, positions: Mapping[TopicPartition, int]) -> None:
        """These are read from here on; one below 0 is not known."""
        for partition, position in positions.items():
            self._tails.pop(partition, None)
            self._reached.pop(partition, None)
            if position >= 0:
                self._reached[partition] = position

    def read(self, runs: Iterable[RecordRun]) -> None:
        """These were fetched."""
        for run in runs:
            self._reached[TopicPartition(run.topic, run.partition)] = run.last + 1

    def holds(self, partition: TopicPartition, position: int) -> bool:
        """Whether this is known to be no further than the log goes."""
        return position <= self.beyond(partition, self._reached.get(partition, -1))

    def ended(self, partition: TopicPartition, end: int) -> tuple[int, int] | None:
        """All below `end` was fetched; from where to where no record is, if that is anywhere."""
        reached = self._reached.get(partition)
        if reached is None or end <= reached:
            return None
        self._tails[partition] = (reached, end)
        return reached, end

    def beyond(self, partition: TopicPartition, position: int) -> int:
        """The position from which as much is read as from this one: the highest that is known."""
        begin, end = self._tails.get(partition, (0, 0))
        return end if begin <= position < end else position


class _Commits(Protocol):
    async def commit(self, positions: Mapping[TopicPartition, tuple[int, str]]) -> Results: ...

    async def settled(self, deadline: float) -> None: ...


class TailCommits:
    """Commits of a member, which go past what no reader gets.

    :param commits: carries them out.
    :param emit: is told of those that nobody asked for.
    """

    def __init__(self, commits: _Commits, tasks: TaskSet, emit: Callable[[Event], object]) -> None:
        self._commits = commits
        self._tasks = tasks
        self._emit = emit
        self._tails = Tails()
        self._newest: dict[TopicPartition, object] = {}
        self._stored: dict[TopicPartition, int] = {}
        """What the brokers have, as far as nothing else can have been stored since."""
        self._claimed: dict[TopicPartition, int] = {}
        """What they had when the assignment began."""
        self._alone = True
        self._trusts_claims = False
        self.read = self._tails.read
        self.beyond = self._tails.beyond

    def begin(self, positions: Mapping[TopicPartition, int], stored: Mapping[TopicPartition, int]) -> None:
        """An assignment begins here. :param stored: what the brokers have of it, where no text is with it."""
        self._tails.begin(positions)
        for partition in positions:
            self._stored.pop(partition, None)
            self._claimed.pop(partition, None)
        (self._stored if self._trusts_claims else self._claimed).update(stored)

    def never_transacts(self) -> None:
        """No transaction will commit positions."""
        self._trusts_claims = True
        claimed, self._claimed = self._claimed, {}
        self._stored.update(claimed)
        for partition in claimed:
            self._go_past(partition)

    def moving(
        self, positions: Mapping[TopicPartition, int], drop: Callable[[Sequence[TopicPartition]], object]
    ) -> Callable[[Sequence[TopicPartition]], None]:
        """For `ConsumerThread.seek` to these. :param drop: forgets what came of partitions."""

        def moved(partitions: Sequence[TopicPartition]) -> None:
            drop(partitions)
            self._tails.begin({each: positions[each] for each in partitions})

        return moved

    def ended(self, partition: TopicPartition, end: int) -> None:
        """All below `end` was fetched."""
        if self._tails.ended(partition, end) is not None:
            self._go_past(partition)

    async def commit(self, positions: Mapping[TopicPartition, tuple[int, str]]) -> Results:
        """As `MemberCommits.commit`; a text stays with the position that it was written for."""
        wanted = {
            partition: (at if text else self._tails.beyond(partition, at), text)
            for partition, (at, text) in positions.items()
        }
        this = object()
        for partition in wanted:
            self._newest[partition] = this
            self._stored.pop(partition, None)
            self._claimed.pop(partition, None)
        results = await self._commits.commit(wanted)
        for partition, error in results.items():
            if self._newest.get(partition) is this:
                del self._newest[partition]
                at, text = wanted[partition]
                # A text tells more than the position, such as who stored it: to go past would take it away.
                if error is None and self._alone and not text:
                    self._stored[partition] = at
                    self._go_past(partition)
        return results

    async def transacts(self, timeout: float) -> None:
        """Transactions commit positions from now on; returns when what was begun is over, after so long at most."""
        if self._alone:
            self._alone = False
            self._stored.clear()
            await self._commits.settled(asyncio.get_running_loop().time() + timeout)

    def _go_past(self, partition: TopicPartition) -> None:
        stored = self._stored.get(partition)
        if stored is not None and self._tails.beyond(partition, stored) > stored:
            self._tasks.spawn(self._commit(partition, stored))

    async def _commit(self, partition: TopicPartition, stored: int) -> None:
        if self._stored.get(partition) != stored:
            return
        end = self._tails.beyond(partition, stored)
        error = (await self.commit({partition: (stored, "")}))[partition]
        if error is None:
            self._emit(PositionsCommitted(positions={partition: end}))
        else:
            logger.info("The position of %s stays behind its end: %s", partition, error)
