"""`Portal`: calls into an event loop from other threads; the loop is the portal's own, in a thread, or a running one.

The first call starts the thread of an own loop, so that a portal that is only made needs none.

*Concurrency.* Several threads may call at once. A call from a thread with an event loop blocks that loop. A call from
the portal's own loop would deadlock, so it raises.

*Cancellation.* An exception in a waiting caller, such as KeyboardInterrupt, cancels the call and is raised when the
call has ended. A result that arrives too late is passed to `undelivered`. A second interrupt does not wait.

*Processes.* A portal belongs to the process that opened it; in a forked child every call raises `Closed`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Generic

from typing_extensions import ParamSpec, TypeVar

from broker.errors import BrokerError, Closed

__all__ = ["Call", "Portal"]

P = ParamSpec("P")
R = TypeVar("R")

_GLANCE: Final = 0.5
"""Seconds between wake-ups of a waiting thread: some platforms deliver Ctrl-C only then."""
_CONNECT: Final = "Create a new one with broker.blocking.connect(...)"
_LONGEST_END: Final = 5.0
"""Seconds that cancelled tasks have to end after `stop`."""


class Portal:
    """One event loop, running in a daemon thread from the first call to `stop` or `close`.

    `Portal.to_running_loop()` leads to the loop that is running instead; `stop` and `close` are not for it.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    @classmethod
    def to_running_loop(cls) -> Portal:
        """A portal to the event loop of the caller, for threads that it starts."""
        portal = cls()
        portal._loop = asyncio.get_running_loop()
        portal._thread = threading.current_thread()
        portal._pid = os.getpid()
        return portal

    def stop(self) -> None:
        """Stop the loop and cancel its tasks; the next call starts a new one. May be called in a forked child."""
        loop = self._loop
        if loop is None or self._pid != os.getpid():
            return
        self._loop = None
        atexit.unregister(self.close)
        loop.call_soon_threadsafe(loop.stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_END + 1)

    def close(self) -> None:
        """`stop`, and let no call start the loop again. May be called twice."""
        self._closed = True
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the loop runs in this process."""
        return self._loop is not None and not self._loop.is_closed() and self._pid == os.getpid()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether calls raise Closed: the portal was closed, or belongs to another process."""
        return self._closed or (self._loop is not None and self._pid != os.getpid())

    def call(self, function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Await `function(*args, **kwargs)` on the loop, in the caller's context; return its result.

        :raises Closed: the portal is not open, was closed during the call, or belongs to another process.
        """
        return self.wait(Call(function, args, kwargs))

    def wait(self, call: Call[R]) -> R:
        """Start a call and wait for its end, as `call` does."""
        loop = self._checked_loop()
        try:
            try:
                loop.call_soon_threadsafe(call.start, loop)
            except RuntimeError:
                if loop.is_closed():
                    raise _closed_meanwhile() from None
                raise
            while not call.done.acquire(timeout=_GLANCE):
                if self._thread is None or not self._thread.is_alive() or loop.is_closed():
                    call.error = _closed_meanwhile()
                    break
        except BaseException:
            if self.running:
                loop.call_soon_threadsafe(call.interrupt, loop)
                while not call.wound_up.acquire(timeout=_GLANCE) and self.running:
                    pass
            raise
        if call.error is not None:
            try:
                raise call.error
            finally:
                # The error's traceback holds this frame, which would hold the error.
                del call
        return call.result  # pyright: ignore[reportReturnType]

    def next(self, call: Call[R | None], opened: bool) -> R | None:
        """`wait` for the next item of an iteration; None, which ends it, if a consumer that was open has closed."""
        try:
            return self.wait(call)
        except Closed:
            if opened and self._closed:
                return None
            raise

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a plain function on the loop, or in this thread if no loop runs; return its result."""
        if self._loop is None:
            return function(*args, **kwargs)

        async def run() -> R:
            return function(*args, **kwargs)

        return self.wait(Call(run))

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a plain function on the loop; does nothing without a loop."""
        if self._loop is not None and self.running:
            self._loop.call_soon_threadsafe(function, *args)

    def spawn(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Schedule a coroutine function on the loop; does nothing without a loop."""
        loop = self._loop
        if loop is not None:
            self.call_soon(lambda: loop.create_task(function()))

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._closed:
                raise Closed("The bus is closed", advice=_CONNECT)
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run_loop, args=(loop,), name="broker-blocking", daemon=True)
                self._pid = os.getpid()
                self._thread.start()
                # A loop that runs during the shutdown of the interpreter fails with obscure errors.
                atexit.register(self.close)
            return self._loop

    def _checked_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop or self._started_loop()
        if self._pid != os.getpid():
            raise Closed(
                f"The bus belongs to process {self._pid}, and this is its child {os.getpid()}",
                advice="Open a bus in the child, with the same URL or settings object",
            )
        if self._thread is threading.current_thread():
            raise BrokerError(
                "A blocking call was made on the event loop of the bus, where it would wait for itself",
                advice="Make the call in another thread; hooks and callbacks of futures run on that loop",
            )
        return loop


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


class Call(Generic[R]):
    """A call into a portal.

    :param undelivered: awaited with the result if the caller was interrupted.
    :param on_interrupt: called on the loop with the task if the caller is interrupted; by default cancels the task.
    :param context: the context of the call; by default a copy of the caller's.
    """

    __slots__ = (
        "_context",
        "_finished",
        "_interrupted",
        "_on_interrupt",
        "_start",
        "_task",
        "_undelivered",
        "done",
        "error",
        "result",
        "wound_up",
    )

    def __init__(
        self,
        function: Callable[..., Awaitable[R]],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        undelivered: Callable[[R], Awaitable[object]] | None = None,
        on_interrupt: Callable[[asyncio.Task[Any]], object] = _cancel,
        context: contextvars.Context | None = None,
    ) -> None:
        self._start = (function, args, kwargs or {})
        self._undelivered = undelivered
        self._on_interrupt = on_interrupt
        # Not `or`: a context without variables is false.
        self._context = contextvars.copy_context() if context is None else context
        self._task: asyncio.Task[None] | None = None
        self._finished = False
        self._interrupted = False
        self.result: R | None = None
        self.error: BaseException | None = None
        # A bare lock is the cheapest wait that a signal can interrupt.
        self.done = threading.Lock()
        self.done.acquire()
        self.wound_up = threading.Lock()
        self.wound_up.acquire()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the task. Runs on the loop."""
        self._task = loop.create_task(self._run(), context=self._context)
        self._task.add_done_callback(self._ended)

    def interrupt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abandon the result, and release `wound_up` when the task has ended. Runs on the loop."""
        if self._task is None:
            self.wound_up.release()
        elif self._finished:
            self._wind_up(loop)
        else:
            self._interrupted = True
            self._on_interrupt(self._task)

    async def _run(self) -> None:
        function, args, kwargs = self._start
        try:
            self.result = await function(*args, **kwargs)
        except Exception as error:
            self.error = error
        # Earlier than the done callback of the task, so that the caller wakes sooner.
        self._finished = True
        self.done.release()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._finished:
            self._finished = True
            self.error = _closed_meanwhile() if task.cancelled() else task.exception()
            self.done.release()
        if self._interrupted:
            self._wind_up(task.get_loop())

    def _wind_up(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._undelivered is None or self.error is not None:
            self.wound_up.release()
        else:
            last = loop.create_task(_await(self._undelivered(self.result)))  # pyright: ignore[reportArgumentType]
            last.add_done_callback(lambda _: self.wound_up.release())


async def _await(awaitable: Awaitable[R]) -> R:
    return await awaitable


def _closed_meanwhile() -> Closed:
    return Closed("The bus was closed during the call, or its event loop ended", advice="Open a new one")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_LONGEST_END))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
