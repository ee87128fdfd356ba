"""`TaskSet`: background tasks that no caller awaits. Everything runs on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

__all__ = ["TaskSet"]

T = TypeVar("T")


class TaskSet:
    """Keeps a reference to each task until the task ends: the event loop keeps none.

    :param name: the name of every task, for debugging.
    :param failed: called on the loop with each exception that a task raises; cancellation is no failure.
    """

    def __init__(self, name: str, failed: Callable[[Exception], object]) -> None:
        self._name = name
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """The tasks that run."""
        return iter(tuple(self._tasks))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel every task; does not wait for their ends."""
        for task in self._tasks:
            task.cancel()

    async def wait(self, timeout: float) -> None:
        """Wait for the tasks that run now; cancel those that still run after `timeout` seconds, and wait for them."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=max(0.0, timeout))
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error)
