"""Runs synchronous handlers in threads, at most so many at once, and lets go of those that never return.

*Concurrency.* `run` is awaited on the portal's loop; each call has a thread to itself, which is used again afterwards.
*Cancellation.* A thread cannot be stopped. When `run` is cancelled its thread is abandoned: the handler goes on to
its end, its outcome is dropped, and another thread takes its place. With `finish` set, the end is waited for and given
to `late` first; a second cancellation abandons then. *Failure.* What the handler raises is raised by `run`, also
`SystemExit` and the like, wrapped in `HandlerExit` because these would end the loop. Threads are daemons: a handler
that never returns does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from typing_extensions import ParamSpec, TypeVar

__all__ = ["HandlerExit", "HandlerThreads", "in_thread"]

P = ParamSpec("P")
R = TypeVar("R")

Late = Callable[[R | None, BaseException | None], Awaitable[object]]
"""Is awaited with the result or the error of a handler that ended after its caller was cancelled."""


class HandlerExit(Exception):
    """A handler raised what is no `Exception`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error: Final = error


class _Job:
    """One call of a handler, its outcome, and the future that wakes whoever waits for it."""

    __slots__ = ("_call", "_context", "_loop", "_result", "done", "error", "woken")

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._loop = loop
        self._result: Any = None
        self.done = False
        self.error: Exception | None = None
        self.woken: asyncio.Future[None] = loop.create_future()

    def run(self) -> None:
        """In the thread."""
        result: Any = None
        error: Exception | None = None
        try:
            result = self._context.run(self._call)
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = HandlerExit(raised)
        try:
            self._loop.call_soon_threadsafe(self._tell, result, error)
        except RuntimeError:
            # The loop is closed: nobody is left to be told.
            return

    def _tell(self, result: Any, error: Exception | None) -> None:
        self._result, self.error, self.done = result, error, True
        if not self.woken.done():
            self.woken.set_result(None)

    async def wait(self) -> None:
        """Return when there is an outcome; may be cancelled and called again."""
        while not self.done:
            if self.woken.done():
                self.woken = self._loop.create_future()
            await self.woken

    def outcome(self) -> Any:
        """Return or raise what the handler did."""
        if self.error is not None:
            raise self.error
        return self._result


class _Worker:
    """One thread and the queue that feeds it; None ends it."""

    __slots__ = ("jobs",)

    def __init__(self, name: str) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()
            del job


class HandlerThreads:
    """The threads of one `receive`.

    :ivar finish: whether a cancelled `run` waits for its handler.
    """

    def __init__(self, name: str) -> None:
        self.finish = False
        self._name = name
        self._idle: list[_Worker] = []
        self._closed = False

    async def run(
        self,
        call: Callable[[], R],
        *,
        late: Callable[[R | None, BaseException | None], Awaitable[object]] | None = None,
    ) -> R:
        """Call it in a thread, in a copy of this task's context."""
        job = _Job(call, asyncio.get_running_loop())
        worker = self._idle.pop() if self._idle else _Worker(self._name)
        worker.jobs.put(job)
        try:
            await job.wait()
        except asyncio.CancelledError:
            if self.finish and late is not None:
                try:
                    await job.wait()
                finally:
                    worker.jobs.put(None)
                await _tell_late(job, late)
            else:
                worker.jobs.put(None)
            raise
        if self._closed:
            worker.jobs.put(None)
        else:
            self._idle.append(worker)
        return job.outcome()

    def close(self) -> None:
        """End the idle threads now, and the others as they become idle."""
        self._closed = True
        for worker in self._idle:
            worker.jobs.put(None)
        self._idle.clear()


async def _tell_late(job: _Job, late: Callable[[Any, BaseException | None], Awaitable[object]]) -> None:
    error = job.error
    if error is None:
        await late(job.outcome(), None)
    else:
        await late(None, error.error if isinstance(error, HandlerExit) else error)


def in_thread(function: Callable[P, R]) -> Callable[P, Awaitable[R]]:
    """The function as a coroutine function that runs it in a thread of its own."""

    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        threads = HandlerThreads("broker-callback")
        try:
            return await threads.run(partial(function, *args, **kwargs))
        finally:
            threads.close()

    return run
