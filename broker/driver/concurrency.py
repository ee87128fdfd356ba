"""On one event loop: tasks, pauses, shared resources, and the check that a caller is on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from random import Random
from typing import Any, Final, Generic, TypeVar

from broker.errors import WrongEventLoop
from broker.hooks import logger

__all__ = ["Backoff", "SharedResource", "TaskSet", "check_loop", "jitter", "pause"]


jitter: Final = Random()
"""A random source for backoff jitter, since applications may have seeded `random`. Safe to use from any thread."""

_SPREAD: Final = 0.2
_MOST_DOUBLINGS: Final = 60
"""Keeps the power within a float."""


class Backoff:
    """The delays of one retry loop: `first` seconds, doubled after each failure up to `longest`, each ± 20 %."""

    __slots__ = ("_delay", "_first", "_longest")

    def __init__(self, first: float, longest: float) -> None:
        self._first = self._delay = first
        self._longest = longest

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        delay = self._delay
        self._delay = min(self._longest, 2 * delay)
        return _spread(delay)

    def after(self, failures: int) -> float:
        """Return the seconds to wait after so many failures, at least 1, that the caller counts."""
        return _spread(min(self._longest, self._first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)))

    def reset(self) -> None:
        """Start at `first` again: the operation succeeded."""
        self._delay = self._first


def _spread(delay: float) -> float:
    return delay * jitter.uniform(1 - _SPREAD, 1 + _SPREAD)


async def pause(seconds: float | None, stopped: asyncio.Event) -> None:
    """Sleep, for ever if `seconds` is None, but return at once when `stopped` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stopped.wait()
    except TimeoutError:
        return


T = TypeVar("T")


class TaskSet:
    """Background tasks that no caller awaits. Keeps a reference to each until it ends: the event loop keeps none.

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
        """Cancel every task; does not wait for them."""
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


def check_loop(home: asyncio.AbstractEventLoop | None) -> None:
    """Check that the caller runs on the event loop of an object; None, before the object has one, admits all.

    Without the check, a call from another loop waits for a future that no loop completes, or races with the tasks of
    the object.

    :raises WrongEventLoop: the caller runs on another loop, or on none.
    """
    if home is not None and asyncio._get_running_loop() is not home:
        ended = ", which has ended" if home.is_closed() else ""
        raise WrongEventLoop(
            f"A bus and its objects are used on the event loop that opened the bus{ended}; this is another",
            advice="Open a bus in each event loop: `async with broker.connect(...)` in the coroutine that asyncio.run "
            "runs. From other threads, use broker.blocking, or asyncio.run_coroutine_threadsafe with the bus's loop",
        )


R = TypeVar("R")


class _Opened(Generic[R]):
    def __init__(self, resource: R, opening: asyncio.Task[None]) -> None:
        self.resource = resource
        self.opening = opening
        self.users = 0


class SharedResource(Generic[R]):
    """A resource that opens with its first user and closes with its last.

    *Concurrency.* Opening and closing never overlap: an `acquire` during a close waits for its end. *Cancellation.* A
    user that is cancelled while the resource opens leaves the opening to the other users. *Failure.* All users that
    wait for an opening get its error; the next user tries with a new resource.

    :param name: the name of the resource in logs.
    :param create: makes the resource, without I/O.
    :param open: opens what `create` made.
    :param close: closes the resource, also after an opening that failed or was cancelled.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[], R],
        open: Callable[[R], Coroutine[Any, Any, None]],
        close: Callable[[R], Awaitable[None]],
    ) -> None:
        self._name = name
        self._create = create
        self._open = open
        self._close = close
        self._current: _Opened[R] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def unused(self) -> bool:
        """Whether the resource has no users and no close is running."""
        return self._current is None and self._closing is None

    async def acquire(self) -> R:
        """Return the open resource; every call that returns needs one `release`.

        :raises BaseException: the opening failed. Do not call `release`.
        """
        while self._closing is not None:
            await asyncio.wait((self._closing,))
        if (current := self._current) is None:
            resource = self._create()
            opening = asyncio.get_running_loop().create_task(self._open(resource), name=f"broker-open-{self._name}")
            current = self._current = _Opened(resource, opening)
        current.users += 1
        try:
            await asyncio.shield(current.opening)
        except BaseException:
            await self._leave(current)
            raise
        return current.resource

    async def release(self) -> None:
        """End the use of one `acquire`; returns when the resource is closed, if this was its last user."""
        if self._current is not None:
            await self._leave(self._current)

    async def close(self) -> None:
        """Close the resource, whatever users it has. May be called twice; no `acquire` may follow."""
        if self._current is not None:
            self._start_closing(self._current)
        if self._closing is not None:
            await asyncio.wait((self._closing,))

    async def _leave(self, opened: _Opened[R]) -> None:
        opened.users -= 1
        if opened.users == 0 and self._current is opened:
            await asyncio.wait((self._start_closing(opened),))

    def _start_closing(self, opened: _Opened[R]) -> asyncio.Task[None]:
        self._current = None
        closing = asyncio.get_running_loop().create_task(self._end(opened), name=f"broker-close-{self._name}")
        self._closing = closing
        closing.add_done_callback(self._closed)
        return closing

    async def _end(self, opened: _Opened[R]) -> None:
        opened.opening.cancel()
        await asyncio.wait((opened.opening,))
        await self._close(opened.resource)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closing = None
        if not closing.cancelled() and (error := closing.exception()) is not None:
            logger.warning("%s was not closed cleanly: %s", self._name, error)
