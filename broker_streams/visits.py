"""`Visit`: calls a `Visitor` for every row of the partitions of a member, between their messages.

*Failure.* A visit ends with `VisitAborted` when a partition leaves, or goes back to an earlier checkpoint, or when the
visitor fails. What was visited before then stays, where it was part of a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final

from broker import BrokerError
from broker_streams.partition import PartitionRunner
from broker_streams.wording import counted

__all__ = ["Visit", "VisitAborted"]

_AT_ONCE: Final = 100
"""Rows that are visited before messages get a turn."""


class VisitAborted(BrokerError):
    """A visit ended early: a partition left, or the processor stopped. Some rows were visited.

    :ivar visited: how many; the last of them may have been undone.
    """

    default_advice = "Visit again: a visitor should be able to see a row twice"

    def __init__(self, visited: int, reason: str, native: BaseException | None = None) -> None:
        super().__init__(f"The visit ended after {counted(visited, 'row')}: {reason}", native=native)
        self.visited = visited


class Visit:
    """One visit.

    :param owns: whether a partition is at work here.
    :param checkpoint: writes a checkpoint of these partitions.
    :param failed: called with a partition whose visitor failed, and the error.
    """

    def __init__(
        self,
        name: str,
        meta: Any,
        runners: Collection[PartitionRunner],
        *,
        owns: Callable[[PartitionRunner], bool],
        checkpoint: Callable[[Collection[PartitionRunner]], Awaitable[None]],
        failed: Callable[[PartitionRunner, BaseException], object],
    ) -> None:
        self._name = name
        self._meta = meta
        self._runners = runners
        self._owns = owns
        self._checkpoint = checkpoint
        self._failed = failed
        self._undone = {runner: runner.undone for runner in runners}
        self._failure: BaseException | None = None
        self._halted: PartitionRunner | None = None
        self._visited = 0

    async def run(self) -> int:
        """Visit all rows; return how many, once that is part of a checkpoint.

        :raises VisitAborted: it ended early.
        """
        # The rows are listed from the stores, which are as of the last checkpoint.
        await self._write()
        async with asyncio.TaskGroup() as tasks:
            for runner in self._runners:
                tasks.create_task(self._visit(runner))
        self._check()
        await self._write()
        return self._visited

    async def _visit(self, runner: PartitionRunner) -> None:
        after: bytes | None = None
        while self._goes_on(runner):
            if (room := runner.room) < 1:
                await self._write()
                continue
            found = runner.stored_keys(after, min(room, _AT_ONCE))
            if not found:
                return
            try:
                visited = await runner.visit(self._name, self._meta, found)
            except Exception as error:
                self._failure = error
                self._failed(runner, error)
                return
            if visited is None:
                self._halted = runner
                return
            self._visited += visited
            after = found[-1]
            await asyncio.sleep(0)

    async def _write(self) -> None:
        try:
            await self._checkpoint(self._runners)
        except BrokerError as error:
            raise VisitAborted(self._visited, "a checkpoint failed", error) from error
        self._check()

    def _goes_on(self, runner: PartitionRunner) -> bool:
        return self._owns(runner) and runner.undone == self._undone[runner]

    def _check(self) -> None:
        if self._failure is not None:
            raise VisitAborted(self._visited, "the visitor failed", self._failure) from self._failure
        for runner in self._runners:
            if runner is self._halted or not self._goes_on(runner):
                raise VisitAborted(self._visited, f"partition {runner.partition} left, or went back to a checkpoint")
