"""`HandlerThreads`: runs synchronous handlers in reusable threads, and abandons those that never return.

*Concurrency.* `run` is awaited on the loop of the portal; each running call has its own thread.

*Cancellation.* A thread cannot be stopped. A cancelled `run` abandons its thread: the handler keeps running, and its
outcome is ignored. With `finish` set, `run` first waits for the handler and passes the outcome to `late`; a second
cancellation abandons the thread, too.

*Failure.* `run` raises the handler's exception. `SystemExit` and the like are wrapped in `HandlerExit`, since they
would end the loop. Threads are daemons: a handler that never returns does not keep the process alive.
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
"""Awaited with the result or the error of a handler that ended after `run` was cancelled."""


class HandlerExit(Exception):
    """A handler raised a `BaseException` that is not an `Exception`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error: Final = error


class _Job:
    """A call of a handler, its outcome, and the future that wakes the waiting task."""

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
            self._loop.call_soon_threadsafe(self._finish, result, error)
        except RuntimeError:
            # The loop is closed, so no task waits.
            return

    def _finish(self, result: Any, error: Exception | None) -> None:
        self._result, self.error, self.done = result, error, True
        if not self.woken.done():
            self.woken.set_result(None)

    async def wait(self) -> None:
        """Return when the call has ended; may be cancelled and called again."""
        while not self.done:
            if self.woken.done():
                self.woken = self._loop.create_future()
            await self.woken

    def outcome(self) -> Any:
        """Return the result or raise the error of the handler."""
        if self.error is not None:
            raise self.error
        return self._result


class _Worker:
    """A thread with a queue of jobs; None ends the thread."""

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
        abandoned: Callable[[], object] | None = None,
    ) -> R:
        """Run the call in a thread, in a copy of this task's context.

        :param abandoned: called if the thread is abandoned.
        """
        job = _Job(call, asyncio.get_running_loop())
        worker = self._idle.pop() if self._idle else _Worker(self._name)
        worker.jobs.put(job)
        try:
            await job.wait()
        except asyncio.CancelledError:
            worker.jobs.put(None)
            try:
                if self.finish and late is not None:
                    await job.wait()
                    await _pass_on(job, late)
            finally:
                if not job.done and abandoned is not None:
                    abandoned()
            raise
        if self._closed:
            worker.jobs.put(None)
        else:
            self._idle.append(worker)
        return job.outcome()

    def close(self) -> None:
        """End idle threads now, and the others when they become idle."""
        self._closed = True
        for worker in self._idle:
            worker.jobs.put(None)
        self._idle.clear()


async def _pass_on(job: _Job, late: Callable[[Any, BaseException | None], Awaitable[object]]) -> None:
    error = job.error
    if error is None:
        await late(job.outcome(), None)
    else:
        await late(None, error.error if isinstance(error, HandlerExit) else error)


def in_thread(function: Callable[P, R]) -> Callable[P, Awaitable[R]]:
    """Wrap a function in a coroutine function that runs it in a new thread."""

    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        threads = HandlerThreads("broker-callback")
        try:
            return await threads.run(partial(function, *args, **kwargs))
        finally:
            threads.close()

    return run
