"""`LoopWatch`: sees what blocks the event loop of consumers, warns once of each culprit, and grants the loop its turns.

While a handler blocks the loop, nothing else runs: no lease is renewed and no position committed. A timer on the loop
beats. A thread sees that beats are missing, and which task the loop runs meanwhile, which no code on the loop can see.
Workers and iterations that never suspend ask `turn_due` before each message, and then let the loop run what waits.

*Concurrency.* One watch for each event loop, shared by its consumers. *Failure.* A warning needs the same task in two
looks of the thread, so that a suspended or starved process causes none. One look is enough where the thread could not
run and the loop's thread computed meanwhile: one long call of C code, such as a regular expression, keeps the
interpreter to itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Final
from weakref import ReferenceType, WeakKeyDictionary, ref

from broker.hooks import logger

__all__ = ["LoopWatch"]

_PART_OF_LEASE: Final = 3
"""A lease is renewed after a third of it: a loop that is held for longer delays renewals."""
_WITHOUT_LEASE: Final = 10.0
"""Seconds that stand for the lease where there is none: Kafka's session here. Its client keeps the session, but commits
and rebalances wait for the loop."""
_LOOKS: Final = 4
"""Beats, and looks of the thread, per limit."""
_LAST_LOOK: Final = 1.0
_TURN: Final = 1 / 20
"""The part of the time held that a turn lasts, so that a server can answer within it."""

_ADVICE: Final = (
    "Call what blocks with `await asyncio.to_thread(...)`; as a handler of messages, a plain function runs in a thread"
)
_watches: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, ReferenceType[LoopWatch]]] = WeakKeyDictionary()


class LoopWatch:
    """The watch of one event loop; `LoopWatch.join` gets it.

    :ivar turn_due: the loop time from which on the loop needs a turn; infinite while no consumer uses the watch.
    :param clock: seconds, from any thread.
    :param running: the task that the loop runs now, from any thread.
    :param computed: seconds that the loop's thread has computed, from any thread; None asks the system.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], float] = time.monotonic,
        running: Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None] = asyncio.current_task,
        computed: Callable[[], float] | None = None,
    ) -> None:
        self.turn_due = inf
        self._loop = loop
        self._clock = clock
        self._running = running
        self._computed = computed or _processor_time()
        self._last_look = clock(), self._computed()
        self._limits: list[float] = []
        self._limit = inf
        self._names: dict[asyncio.Task[Any], str] = {}
        self._warned: set[str] = set()
        self._beat_at = 0.0
        self._suspect: asyncio.Task[Any] | None = None
        self._culprit: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def join(cls, lease_seconds: float | None) -> LoopWatch:
        """Watch the running loop for one more consumer; `leave` ends that. None is a consumer without leases."""
        loop = asyncio.get_running_loop()
        known = _watches.get(loop)
        if known is not None and (watch := known()) is not None:
            watch.add(lease_seconds)
            return watch
        watch = cls(loop)
        _watches[loop] = ref(watch)
        watch.add(lease_seconds)
        watch.start()
        return watch

    def add(self, lease_seconds: float | None) -> None:
        """Watch for one more consumer with such leases."""
        self._limits.append(_limit(lease_seconds))
        self._limit = min(self._limits)
        self.beat()

    def leave(self, lease_seconds: float | None) -> None:
        """A consumer with such leases has closed."""
        self._limits.remove(_limit(lease_seconds))
        self._limit = min(self._limits, default=inf)
        if not self._limits:
            self.turn_due = inf
            self._stopped.set()
            if self._thread is not None:
                # It ends at once; a close leaves no thread behind.
                self._thread.join(_LAST_LOOK)
            if self._timer is not None:
                self._timer.cancel()
            _watches.pop(self._loop, None)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._look_often, name="broker-loop-watch", daemon=True)
        self._thread.start()

    def named(self, workers: Iterable[asyncio.Task[Any]], name: str) -> None:
        """These tasks run the handler of this name."""
        self._names.update(dict.fromkeys(workers, f"Handler {name}"))

    def forget(self, workers: Iterable[asyncio.Task[Any]]) -> None:
        """Undo `named`."""
        for worker in workers:
            self._names.pop(worker, None)

    async def turn(self) -> float:
        """Let the loop run what waits; returns the loop time."""
        # Other workers may have held the loop again before this one continues.
        while (now := self._loop.time()) > self.turn_due:  # noqa: ASYNC110  # the loop needs time, not an event
            await asyncio.sleep(_TURN * (now - self.turn_due + self._limit / 2))
        return now

    def beat(self) -> None:
        """The loop runs; called by its timer."""
        now = self._clock()
        culprit, self._culprit, self._suspect = self._culprit, None, None
        held, self._beat_at = now - self._beat_at, now
        if culprit is not None and held > self._limit:
            self._warn(culprit, f"held the event loop for {held:.1f} s")
        if self._timer is not None:
            self._timer.cancel()
        self.turn_due = self._loop.time() + self._limit / 2
        self._timer = self._loop.call_later(self._limit / _LOOKS, self.beat)

    def look(self) -> None:
        """See which task holds the loop, if one does; called by the thread."""
        beat_at, now, computed = self._beat_at, self._clock(), self._computed()
        since, computed_before = self._last_look
        self._last_look = now, computed
        held = now - beat_at
        if held <= self._limit / 2:
            return
        task = self._running(self._loop)
        alone = now - since > self._limit / 2 and computed - computed_before > (now - since) / 2
        if task is None or (task is not self._suspect and not alone):
            self._suspect = task
            return
        culprit = self._names.get(task) or _name_of(task)
        if beat_at == self._beat_at:
            self._culprit = culprit
            if held > _PART_OF_LEASE * self._limit:
                # It may never end.
                self._warn(culprit, f"has held the event loop for {held:.1f} s and still does")

    def _warn(self, culprit: str, what: str) -> None:
        if culprit not in self._warned:
            self._warned.add(culprit)
            logger.warning(
                "%s %s, longer than %.3g s: meanwhile no lease is renewed, no position committed, and no other handler "
                "runs. %s",
                culprit,
                what,
                self._limit,
                _ADVICE,
            )

    def _look_often(self) -> None:
        while not self._stopped.wait(self._limit / _LOOKS) and not self._loop.is_closed():
            self.look()


def _limit(lease_seconds: float | None) -> float:
    return (lease_seconds or _WITHOUT_LEASE) / _PART_OF_LEASE


def _processor_time() -> Callable[[], float]:
    """Reads the processor time of the calling thread, from any thread; always 0 where the system does not tell."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return lambda: 0.0
    clock = clock_of(threading.get_ident())

    def read() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:
            return 0.0  # the thread has ended

    return read


def _name_of(task: asyncio.Task[Any]) -> str:
    name, function = task.get_name(), getattr(task.get_coro(), "__qualname__", None)
    if function is None:
        return f"Task {name}"
    # A task that was given no name has a number.
    return f"Task {function}" if name.startswith("Task-") else f"Task {function} ({name})"
