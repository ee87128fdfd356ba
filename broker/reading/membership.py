"""`Membership`: one member of a group, with its partitions, commits and positions.

*Concurrency.* One event loop; calls may overlap. *Cancellation.* A requested commit is carried out even if its caller
is cancelled. *Failure.* Errors of the source are raised unchanged. Partitions are released even if the application's
`on_revoking` fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from broker.driver.assignments import (
    AssignedPartition,
    Assignments,
    check_reached,
    not_assigned,
    partition_lost,
)
from broker.driver.commits import Committer, Positions
from broker.driver.concurrency import Backoff, TaskSet
from broker.driver.contract import Backend, RecordSource, RecordSubscription, TopicPartition
from broker.driver.optional import ReportsIdle
from broker.driver.seeking import PartialSeek
from broker.errors import BrokerError, LeaseLost, OffsetOutOfRange, Unsupported
from broker.hooks import (
    Event,
    Hooks,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    PositionReset,
    Warned,
    logger,
)
from broker.reading.copartitions import GROWTH_SECONDS, Copartitions, counts_differ, partition_counts
from broker.reading.rebalance_callbacks import OnPartitions, RebalanceCallbacks
from broker.reading.record_fetcher import RecordFetcher
from broker.records import Record

__all__ = ["Membership"]

_COUNT_SECONDS: Final = 1.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0


class Membership:
    """Implements `RecordListener` for the source of the group.

    :param forget: called with partitions whose buffered records were dropped.
    """

    def __init__(
        self,
        assignments: Assignments,
        fetcher: RecordFetcher,
        *,
        group: str,
        hooks: Hooks,
        on_assigned: OnPartitions | None,
        on_revoking: OnPartitions | None,
        on_lost: OnPartitions | None,
        assign_timeout: float | None,
        copartitions: Copartitions | None,
        forget: Callable[[Sequence[TopicPartition]], None] | None,
    ) -> None:
        self._assignments = assignments
        self._fetcher = fetcher
        self._group = group
        self._hooks = hooks
        self._forget = forget
        self._callbacks = RebalanceCallbacks(
            group,
            on_assigned=on_assigned,
            on_revoking=on_revoking,
            on_lost=on_lost,
            assign_timeout=assign_timeout,
            opened=self._open,
            failed=fetcher.fail,
            warn=self.warn,
        )
        self._copartitions = copartitions
        self._held: set[TopicPartition] = set()
        """Assigned partitions whose numbers are not whole."""
        self._releases: dict[TopicPartition, asyncio.Future[None]] = {}
        """For each partition that is given up together with others, the end of the release."""
        self._counting = TaskSet("broker-partition-counts", lambda error: self.warn(f"Counting failed: {error!r}"))
        self._joined = False
        self._paused: set[TopicPartition] = set()
        """What is paused at the source; a source keeps pauses over assignments."""
        self._transaction: asyncio.Future[None] | None = None

    async def join(self, backend: Backend, subscription: RecordSubscription) -> None:
        """Join the group and begin to fetch."""
        self._records = backend.capabilities.records
        self._source: RecordSource = await backend.join(subscription, self)
        self._backend = backend
        self._joined = True
        self._committer = Committer(self._source, self._hooks, by_pattern=subscription.pattern is not None)
        if not self._assignments.current() and (assigned := self._source.assignment()):
            self._assignments.assign(self._complete(assigned))
            self._fetcher.joined()
        self._pause(list(self._held))
        self._hold_back([assigned for assigned in self._assignments if not assigned.revoking])
        if isinstance(self._source, ReportsIdle):
            # `is_idle` of the source is False until the group has answered.
            self._fetcher.joined()
        self._fetcher.start(self._source)

    async def leave(self) -> None:
        """Close the source without a commit."""
        try:
            await self._source.close()
        finally:
            self._assignments.give_up(list(self._assignments))

    async def end_callbacks(self, deadline: float) -> None:
        """Cancel `on_assigned`, and wait for `on_lost`, at most until the loop time `deadline`."""
        self._counting.cancel()
        await self._callbacks.close(max(0.0, deadline - asyncio.get_running_loop().time()))

    def calls_back_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this task runs `on_assigned` or `on_lost`."""
        return self._callbacks.runs_in(task)

    async def drain(self, deadline: float) -> None:
        """Wait, at most until the loop time `deadline`, for the requested commits."""
        await self._committer.drain(deadline)

    async def is_idle(self, seconds: float) -> bool:
        """Whether nothing is left to read, after so many seconds without a record."""
        if self._held or any(assigned.opening for assigned in self._assignments):
            return False
        return not isinstance(self._source, ReportsIdle) or await self._source.is_idle(seconds)

    # -- commits and positions -----------------------------------------------------------------------------

    async def commit(self) -> None:
        """Commit the positions after all records handed over so far.

        :raises LeaseLost: a partition with uncommitted records was lost since the last call; the others are committed.
        """
        self._check_no_transaction()
        lost, self._assignments.lost_uncommitted = self._assignments.lost_uncommitted, []
        await self._committer.commit(self._assignments.handed_over())
        if lost:
            raise partition_lost(lost[0])

    async def commit_records(self, records: Sequence[Record[Any]], owner: Any) -> None:
        """Commit the positions after these records, which settles all lower offsets of their partitions.

        :param owner: the consumer to which this member's records are bound.
        :raises LeaseLost: a partition was lost since the hand-over; the others are committed.
        """
        self._check_no_transaction()
        positions, lost = self._assignments.positions_of(records, owner)
        await self._committer.commit({**self._assignments.skipped_alone(), **positions})
        if lost is not None:
            raise lost

    async def commit_positions(self, positions: Mapping[TopicPartition, int]) -> None:
        """Commit the application's own positions.

        :raises OffsetOutOfRange: a position lies beyond what was handed over, or below the committed one; nothing is
            committed.
        :raises LeaseLost: a partition is not assigned to this member; the others are committed.
        """
        self._check_no_transaction()
        found, lost = await self._checked(positions)
        await self._committer.commit(found)
        if lost:
            raise not_assigned(lost[0], self._group, self._assignments.current())

    async def _checked(self, positions: Mapping[TopicPartition, int]) -> tuple[Positions, Sequence[TopicPartition]]:
        """The assignments of these positions, and the partitions that are not assigned.

        :raises OffsetOutOfRange: see `commit_positions`.
        """
        found, lost = self._assignments.assigned(positions)
        unknown = [partition for partition, (assigned, _) in found.items() if assigned.floor is None]
        if unknown:
            # Once for each assignment, and for each seek below what was committed.
            for partition, stored in (await self._source.committed(unknown)).items():
                found[partition][0].stored = -1 if stored is None else stored
            found, lost = self._assignments.assigned(positions)
        for assigned, position in found.values():
            check_reached(assigned, position)
        return found, lost

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        """The positions that the broker has stored."""
        return await self._source.committed(partitions)

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        """Continue reading at these positions; None is the committed one. Drops buffered records of the partitions.

        :raises Unsupported: the backend cannot seek.
        :raises LeaseLost: a partition is not assigned to this member.
        :raises OffsetOutOfRange: the log does not hold a position.
        :raises BrokerError: the seek failed; the error names the partitions that have moved.
        """
        if self._records is not None and not self._records.seek:
            raise Unsupported("This backend cannot seek within a group", advice="Use bus.log to read from a position")
        self._assignments.check_assigned(positions, self._group)
        for partition, position in positions.items():
            if position is not None and position < 0:
                topic, number = partition
                raise OffsetOutOfRange(
                    f"Position {position} of {topic!r}[{number}] lies before the first",
                    advice="An offset is 0 or more; None is the committed position",
                )
        if positions:
            await self._seek(positions)

    async def rewind(self) -> None:
        """Seek to the committed positions of all assigned partitions. While the broker is away, nothing is read.

        If it fails for good, the consumer ends with the error, since going on would skip records.
        """
        self._assignments.lost_uncommitted.clear()
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        async with self._fetcher.interrupted():
            while True:
                self._fetcher.buffer.drop(current := self._assignments.current())
                try:
                    await self._rewind(current)
                    return
                except BrokerError as error:
                    if not error.retriable:
                        self._fetcher.fail(error)
                        return
                    pause = backoff.next()
                    logger.warning("Rewinding group %r failed, next try in %.2f s: %s", self._group, pause, error)
                await asyncio.sleep(pause)

    async def _rewind(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            if partitions:
                await self._seek(dict.fromkeys(partitions))
        except LeaseLost:
            if len(partitions) > 1:
                for partition in partitions:
                    await self._rewind((partition,))

    async def _seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        async with self._fetcher.interrupted():
            try:
                await self._source.seek(positions)
            except PartialSeek as partial:
                self._sought({partition: positions[partition] for partition in partial.moved})
                raise partial.named() from None
            self._sought(positions)

    def _sought(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self._fetcher.buffer.drop(positions)
        if self._forget is not None:
            self._forget(list(positions))
        for partition, position in positions.items():
            if (assigned := self._assignments.get(partition)) is not None:
                assigned.sought(position)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Hand over no records of these partitions until `resume`.

        :raises LeaseLost: a partition is not assigned to this member; nothing is paused.
        """
        self._assignments.check_assigned(partitions, self._group)
        self._set_paused(partitions, paused=True)
        self._pause(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo `pause`.

        :raises LeaseLost: a partition is not assigned to this member; nothing is resumed.
        """
        self._assignments.check_assigned(partitions, self._group)
        self._set_paused(partitions, paused=False)
        self._resume(partitions)

    def _set_paused(self, partitions: Sequence[TopicPartition], *, paused: bool) -> None:
        for partition in partitions:
            if (assigned := self._assignments.get(partition)) is not None:
                assigned.paused = paused

    def _pause(self, partitions: Sequence[TopicPartition]) -> None:
        if not partitions:
            return
        self._paused.update(partitions)
        self._source.pause(partitions)
        self._fetcher.buffer.pause(partitions)

    def _resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Resume those that neither the application nor `on_assigned` holds back."""
        free = [
            partition
            for partition in partitions
            if (assigned := self._assignments.get(partition)) is None or not (assigned.paused or assigned.opening)
        ]
        if not free:
            return
        self._paused.difference_update(free)
        self._fetcher.resume(free)
        self._source.resume(free)

    # -- transactions --------------------------------------------------------------------------------------

    def enter_transaction(self) -> RecordSource:
        """Leave commits to a transaction until `leave_transaction`; return the source.

        :raises Unsupported: another transaction of this consumer is open.
        """
        self._check_no_transaction()
        self._transaction = asyncio.get_running_loop().create_future()
        self._assignments.lost_uncommitted.clear()
        return self._source

    async def positions_in_transaction(self, own: Mapping[TopicPartition, int] | None) -> Positions:
        """The positions to commit with the transaction: the application's own, or, with None, those after all records
        handed over and not committed.

        :raises LeaseLost: a partition with such records was lost since the transaction began, or one of `own` is not
            assigned.
        :raises OffsetOutOfRange: see `commit_positions`.
        """
        if self._assignments.lost_uncommitted:
            raise partition_lost(self._assignments.lost_uncommitted[0])
        if own is None:
            return self._assignments.handed_over()
        found, lost = await self._checked(own)
        if self._assignments.lost_uncommitted:
            raise partition_lost(self._assignments.lost_uncommitted[0])
        if lost:
            raise not_assigned(lost[0], self._group, self._assignments.current())
        # Positions that change nothing, too: the generation of the group, which goes with them, fences the transaction.
        return found

    def leave_transaction(self, committed: Positions | None = None) -> None:
        """The transaction has ended; it committed these positions, if any."""
        for assigned, position in (committed or {}).values():
            assigned.committed = max(assigned.committed, position)
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.set_result(None)

    def _check_no_transaction(self) -> None:
        if self._transaction is not None:
            raise Unsupported(
                "A transaction of this consumer is open, and commits its positions",
                advice="Leave the block of the transaction to commit",
            )

    # -- RecordListener ------------------------------------------------------------------------------------

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        if not (partitions := self._complete(partitions)):
            return
        new = self._assignments.assign(partitions)
        self._fetcher.joined()
        if self._joined:
            self._hold_back(new)
        if self._hooks.listening:
            current = tuple(self._assignments.current())
            self._hooks.emit(PartitionsAssigned(partitions=tuple(partitions), current=current))

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        running = {self._releases[each] for each in partitions if each in self._releases}
        if not (partitions := self._incomplete(partitions)):
            if running:
                # The number is being given up already, with its other partitions.
                await asyncio.wait(running, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
            return
        release = asyncio.get_running_loop().create_future()
        if self._copartitions is not None:
            self._releases.update(dict.fromkeys(partitions, release))
        try:
            await self._revoke(partitions, deadline)
        finally:
            release.set_result(None)
            for each in partitions:
                if self._releases.get(each) is release:
                    del self._releases[each]

    async def _revoke(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        going = self._assignments.begin_revoke(partitions)
        self._drop(partitions)
        if self._hooks.listening:
            current = tuple(self._assignments.current())
            self._hooks.emit(PartitionsRevoked(partitions=tuple(partitions), current=current))
        try:
            async with asyncio.timeout_at(deadline):
                await self._callbacks.revoking(partitions)
                if self._transaction is not None and any(assigned.has_uncommitted for assigned in going):
                    await asyncio.wait((self._transaction,))
            await self.drain(deadline)
        except TimeoutError:
            self.warn(f"The work on {list(partitions)} was not done when the partitions had to be released")
        except Exception as error:
            self.warn(f"on_revoking failed: {error!r}")
        finally:
            self._assignments.give_up(going)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        releasing = [each for each in partitions if self._assignments.get(each) is not None]
        if not (partitions := list(dict.fromkeys((*self._incomplete(partitions), *releasing)))):
            return
        self._assignments.give_up(self._assignments.begin_revoke(partitions))
        self._drop(partitions)
        if self._hooks.listening:
            current = tuple(self._assignments.current())
            self._hooks.emit(PartitionsLost(partitions=tuple(partitions), current=current))
        self._callbacks.lost(partitions)

    def event(self, event: Event) -> None:
        if isinstance(event, PositionReset):
            # The positions of what is read from now on may lie below what was committed.
            assigned = self._assignments.get(TopicPartition(*event.partition))
            if assigned is not None:
                assigned.sought(event.to)
        if self._hooks.listening:
            self._hooks.emit(event)

    def warn(self, text: str) -> None:
        """Warn the operator."""
        logger.warning(text)
        self.event(Warned(text=text))

    def _hold_back(self, new: Sequence[AssignedPartition]) -> None:
        """Call `on_assigned`, and hand over no record of these partitions before it has returned."""
        whole = self._held.intersection(assigned.partition for assigned in new)
        rewound = whole & self._assignments.dropped
        self._held -= whole
        self._assignments.dropped -= whole
        if not self._callbacks.awaits_assigned:
            held = [assigned for assigned in new if assigned.partition in rewound]
        else:
            held = new
        for assigned in held:
            assigned.opening = True
        if again := self._paused.intersection(assigned.partition for assigned in new):
            # A pause ends with its assignment.
            self._resume(list(again))
        if held:
            self._pause([assigned.partition for assigned in held])

            async def rewind(partitions: Sequence[TopicPartition]) -> None:
                if back := rewound.intersection(partitions):
                    await self._seek(dict.fromkeys(back))

            self._callbacks.assigned(held, rewind if rewound else None)

    def _open(self, new: Sequence[AssignedPartition]) -> None:
        """`on_assigned` has returned."""
        for assigned in new:
            assigned.opening = False
        self._fetcher.joined()
        self._resume([assigned.partition for assigned in new if not assigned.revoking])

    def _drop(self, partitions: Sequence[TopicPartition]) -> None:
        self._fetcher.buffer.drop(partitions)
        self._fetcher.resume(partitions)
        if self._forget is not None:
            self._forget(partitions)

    # -- copartitions --------------------------------------------------------------------------------------

    def _complete(self, partitions: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        """Of assigned partitions, those that the application gets: the numbers that became whole."""
        if self._copartitions is None:
            return partitions
        whole = self._copartitions.add(partitions)
        self._hold_parts()
        return whole

    def _incomplete(self, partitions: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        """Of partitions that are taken away, those that the application gives up: the numbers that were whole."""
        if self._copartitions is None:
            return partitions
        broken = self._copartitions.remove(partitions)
        # What the source keeps of a broken number was read beyond the committed position.
        self._assignments.dropped.update(broken)
        self._held.difference_update(partitions)
        self._hold_parts()
        return broken

    def _hold_parts(self) -> None:
        """Read nothing of numbers that are not whole."""
        assert self._copartitions is not None
        held = self._copartitions.held
        if new := [partition for partition in held if partition not in self._held]:
            self._held.update(new)
            self._assignments.refuse(partition for partition in new if self._assignments.get(partition) is None)
            if self._joined:
                self._pause(new)
        if held and not self._counting:
            self._counting.spawn(self._check_growth(self._copartitions))

    async def _check_growth(self, copartitions: Copartitions) -> None:
        """While numbers are not whole: end the consumer if the topics have different numbers of partitions."""
        loop = asyncio.get_running_loop()
        since: float | None = None
        while True:
            await asyncio.sleep(_COUNT_SECONDS)
            if not copartitions.held:
                return
            try:
                counts = await partition_counts(self._backend, copartitions.topics)
            except BrokerError:
                # The source reports what is wrong.
                continue
            if len(set(counts.values())) == 1:
                since = None
            elif since is None:
                since = loop.time()
                self.warn(counts_differ(counts, self._group).message)
            elif loop.time() - since >= GROWTH_SECONDS:
                self._fetcher.fail(counts_differ(counts, self._group))
                return
