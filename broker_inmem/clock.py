"""The server's time: the system's, or one that a test advances.

Everything that the server times (leases, delays, schedules, sessions, transactions, retention) uses its clock. The wait
of a client's fetch uses the event loop. Clocks never run backwards and may be used from several threads; a timer's
callback must be safe from any thread.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from typing import Final, Protocol

__all__ = ["Clock", "ManualClock", "SystemClock", "Timer"]


class Timer(Protocol):
    """A callback that waits for its time."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The clock of a server."""

    def time(self) -> float:
        """Seconds since 1970, UTC."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], loop: asyncio.AbstractEventLoop) -> Timer:
        """Call back when the clock has reached `when`; called on `loop`'s thread."""
        ...


class SystemClock:
    """Real time that is not disturbed when the machine's wall clock is set."""

    def __init__(self) -> None:
        self._origin: Final = time.time() - time.monotonic()

    def time(self) -> float:
        # In whole microseconds, like a datetime: searching for a message's broker time finds that message.
        return round(self._origin + time.monotonic(), 6)

    def call_at(self, when: float, callback: Callable[[], object], loop: asyncio.AbstractEventLoop) -> Timer:
        return loop.call_later(max(0.0, when - self.time()), callback)


class ManualClock:
    """A clock that changes only when it is advanced.

    :param start: the first time, timezone-aware.
    """

    def __init__(self, start: datetime = datetime(2025, 1, 1, tzinfo=UTC)) -> None:
        self._now = start.timestamp()
        self._lock = threading.Lock()
        self._timers: list[tuple[float, int, _ManualTimer]] = []
        self._numbers = count()

    def time(self) -> float:
        return self._now

    def now(self) -> datetime:
        """The time as a datetime, UTC."""
        return datetime.fromtimestamp(self._now, UTC)

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`: timers that become due fire in order, and act when their event loops run next.

        May be called from any thread.

        :raises ValueError: seconds is negative.
        """
        if seconds < 0:
            raise ValueError(f"A clock does not run backwards: {seconds}")
        target = self._now + seconds
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > target:
                    self._now = max(self._now, target)
                    return
                when, _, timer = heapq.heappop(self._timers)
                self._now = max(self._now, when)
            timer.fire()

    def call_at(self, when: float, callback: Callable[[], object], loop: asyncio.AbstractEventLoop) -> Timer:
        timer = _ManualTimer(callback, loop)
        with self._lock:
            if len(self._timers) > 64:
                self._timers = [item for item in self._timers if item[2].waiting]
                heapq.heapify(self._timers)
            heapq.heappush(self._timers, (when, next(self._numbers), timer))
            due = when <= self._now
        if due:
            loop.call_soon(timer.fire)
        return timer


class _ManualTimer:
    __slots__ = ("_callback", "_loop")

    def __init__(self, callback: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._callback: Callable[[], object] | None = callback
        self._loop = loop

    @property
    def waiting(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None and not self._loop.is_closed():
            callback()
