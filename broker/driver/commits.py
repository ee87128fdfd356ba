"""`Committer`: commits positions with one call to the source at a time; later requests form the next call.

*Concurrency.* Calls may overlap; the positions of a partition reach the broker in rising order. *Cancellation.* A
requested commit is carried out even if its caller is cancelled; its failure is then a `Warned` event. *Failure.* Each
caller gets the error of its own partitions; no commit is repeated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from broker.driver.assignments import AssignedPartition, partition_lost
from broker.driver.contract import RecordSource, TopicPartition
from broker.driver.optional import CommitsRanges, Progress
from broker.errors import BackendError, BrokerError, NotFound
from broker.hooks import Hooks, PositionsCommitted, Warned, logger

__all__ = ["CommitPatience", "Committer", "Positions"]

Positions = Mapping[TopicPartition, tuple[AssignedPartition, int]]
"""For each partition the assignment that the commit is for, and the next offset to read."""

_Errors = Mapping[TopicPartition, BrokerError]


class _Round:
    __slots__ = ("answered", "positions")

    def __init__(self, answered: asyncio.Future[_Errors]) -> None:
        self.positions: dict[TopicPartition, tuple[AssignedPartition, int]] = {}
        self.answered: Final = answered


class Committer:
    """The commits of one record source.

    :param progress: returns the progress of an assignment when its commit is sent; for a source that `CommitsRanges`.
    :param by_pattern: the topics are those that match a pattern: the partitions of a deleted one count as lost.
    """

    def __init__(
        self,
        source: RecordSource,
        hooks: Hooks,
        progress: Callable[[AssignedPartition, int], Progress] | None = None,
        *,
        by_pattern: bool = False,
    ) -> None:
        self._source = source
        self._by_pattern = by_pattern
        self._progress = progress
        self._ranges = source if progress is not None and isinstance(source, CommitsRanges) else None
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._next: _Round | None = None
        self._task: asyncio.Task[None] | None = None

    async def commit(self, positions: Positions) -> None:
        """Commit these positions, except those that are already committed.

        :raises LeaseLost: a partition was lost; the others were committed.
        :raises BrokerError: a commit failed; the others were committed.
        """
        wanted = {
            partition: at for partition, at in positions.items() if at[1] > at[0].committed or at[0].ranges_changed
        }
        if not wanted:
            return
        answered = self._join(wanted)
        try:
            errors = await asyncio.shield(answered)
        except asyncio.CancelledError:
            answered.add_done_callback(lambda done: done.cancelled() or self._report(done.result(), wanted))
            raise
        for partition in wanted:
            if partition in errors:
                raise errors[partition]

    async def drain(self, deadline: float) -> bool:
        """Wait, at most until the loop time `deadline`, for the requested commits; return whether all are answered."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=max(0.0, deadline - self._loop.time()))
        return self._task is None

    def _join(self, wanted: Positions) -> asyncio.Future[_Errors]:
        current = self._next
        if current is None:
            current = self._next = _Round(self._loop.create_future())
        for partition, (assigned, position) in wanted.items():
            other = current.positions.get(partition)
            if other is None or other[0] is not assigned or other[1] < position:
                current.positions[partition] = (assigned, position)
        if self._task is None:
            self._task = self._loop.create_task(self._run(), name="broker-commit")
        return current.answered

    async def _run(self) -> None:
        try:
            while self._next is not None:
                current, self._next = self._next, None
                try:
                    current.answered.set_result(await self._carry_out(current.positions))
                except asyncio.CancelledError:
                    current.answered.cancel()
                    raise
        finally:
            self._task = None

    async def _carry_out(self, positions: Positions) -> _Errors:
        errors: dict[TopicPartition, BrokerError] = {}
        sent: dict[TopicPartition, int] = {}
        for partition, (assigned, position) in positions.items():
            if assigned.lost:
                errors[partition] = partition_lost(partition)
            elif position > assigned.committed or assigned.ranges_changed:
                sent[partition] = position
        if not sent:
            return errors
        progress: dict[TopicPartition, Progress] = {}
        if self._progress is not None and self._ranges is not None:
            for partition, position in sent.items():
                assigned = positions[partition][0]
                progress[partition] = self._progress(assigned, position)
                sent[partition] = progress[partition].position
                assigned.ranges_changed = False
        results = await self._send(sent, progress)
        for partition, position in sent.items():
            assigned = positions[partition][0]
            error = results.get(partition)
            if error is None:
                assigned.committed = max(assigned.committed, position)
            else:
                gone = self._by_pattern and isinstance(error, NotFound)
                errors[partition] = partition_lost(partition) if gone else error
                assigned.ranges_changed = partition in progress
        if self._hooks.listening:
            stored: dict[tuple[str, int], int] = {at: sent[at] for at in sent if at not in errors}
            if stored:
                self._hooks.emit(PositionsCommitted(positions=stored))
        return errors

    async def _send(
        self, sent: Mapping[TopicPartition, int], progress: Mapping[TopicPartition, Progress]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        try:
            if self._ranges is not None and progress:
                return await self._ranges.commit_ranges(progress)
            return await self._source.commit(sent)
        except BrokerError as error:
            return dict.fromkeys(sent, error)
        except Exception as error:
            return dict.fromkeys(sent, BackendError(f"The backend failed to commit: {error}", native=error))

    def _report(self, errors: _Errors, wanted: Positions) -> None:
        for partition in wanted:
            if partition in errors:
                text = f"A background commit of {partition.topic}[{partition.partition}] failed: {errors[partition]}"
                logger.warning(text)
                if self._hooks.listening:
                    self._hooks.emit(Warned(text=text))


class CommitPatience:
    """Holds work back while no commit succeeds: what is handled then would be handled again after a crash.

    Used on one event loop.

    :param hold: called with True after `SECONDS` without a success, and with False at the next one.
    :ivar lost: whether work is held back.
    """

    SECONDS: Final = 2.0

    def __init__(self, hold: Callable[[bool], object]) -> None:
        self.lost = False
        self._hold = hold
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        """From the first commit without success on."""

    def trying(self) -> None:
        """A commit begins."""
        if self._timer is None:
            self._timer = self._loop.call_later(self.SECONDS, self._lose)

    def succeeded(self) -> None:
        """A commit succeeded, or none is to come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.lost:
            self.lost = False
            self._hold(False)

    def _lose(self) -> None:
        self.lost = True
        self._hold(True)
