"""What a queue client is starting and committing: a fetch may leave it behind, and partitions that go wait for it.

*Concurrency.* One event loop. *Cancellation.* What was begun goes on, whoever waited for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

__all__ = ["UnderWay"]

R = TypeVar("R")

_GRACE: Final = 1.0
"""Seconds that a fetch which is interrupted waits for what is being started."""


class UnderWay:
    """Make it on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.Future[Any]] = set()
        # A future, and no event: waiting for it beside a task takes no task of its own, each time anew.
        self._interrupted: asyncio.Future[None] = self._loop.create_future()

    def interrupt(self) -> None:
        """Have a fetch leave behind what takes long."""
        if not self._interrupted.done():
            self._interrupted.set_result(None)

    def go_on(self) -> None:
        """Have the next fetch wait again."""
        if self._interrupted.done():
            self._interrupted = self._loop.create_future()

    @contextmanager
    def claim(self) -> Generator[None]:
        """While something is claimed, of which the single steps are tasks."""
        claim = self._loop.create_future()
        self._open.add(claim)
        try:
            yield
        finally:
            self._open.discard(claim)
            claim.set_result(None)

    async def unless_interrupted(self, work: Coroutine[Any, Any, R]) -> R | None:
        """Its result; None if the fetch was interrupted and it takes long. It goes on then.

        What was started and not committed is read again by whoever has its partition; of what was committed and not
        handed over the lease ends.
        """
        task = self._loop.create_task(work, name="broker-kafka-claim")
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            return task.result() if await self.is_done(task) else None
        finally:
            if not task.done():
                task.add_done_callback(_look_at)

    async def is_done(self, task: asyncio.Task[Any]) -> bool:
        """Wait for it; False if the fetch was interrupted and it takes long."""
        await asyncio.wait({task, self._interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=_GRACE)
        return task.done()

    async def over(self, by: float) -> None:
        """Wait until nothing is under way, also of what a fetch has left behind; at most until this loop time."""
        while self._open and (left := by - self._loop.time()) > 0:
            await asyncio.wait(self._open, timeout=left)


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
