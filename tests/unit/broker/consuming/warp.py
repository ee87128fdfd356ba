"""An event loop with simulated time, which jumps to the next timer when all tasks wait, and an in-memory broker."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any
from unittest import mock

from broker_inmem import Broker, BrokerOptions
from broker_inmem.clock import SystemClock, Timer


class WarpSelector(selectors.DefaultSelector):
    """Never waits for a timer, and for a socket only if there is no timer."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(None)
        events = super().select(0)
        if not events and timeout > 0:
            self.passed += timeout
        return events


class WarpLoop(asyncio.SelectorEventLoop):
    """`time()`, and `time.time` inside `warped`, advance by jumps only, not with the work."""

    def __init__(self) -> None:
        self.selector = WarpSelector()
        super().__init__(self.selector)
        self._began = time.time()

    def time(self) -> float:
        return self.selector.passed

    def wall(self) -> float:
        return self._began + self.selector.passed


class WarpClock(SystemClock):
    """A broker clock in the loop's time."""

    def __init__(self, loop: WarpLoop) -> None:
        super().__init__()
        self._loop = loop

    def time(self) -> float:
        return round(self._loop.wall(), 6)

    def call_at(self, when: float, callback: Callable[[], object], loop: asyncio.AbstractEventLoop) -> Timer:
        return loop.call_later(max(0.0, when - self.time()), callback)


def in_jumping_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorates an asyncio test: a loop whose time jumps runs the test, which may wait for no thread."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=WarpLoop) as runner:
            runner.run(test(*arguments, **named))

    return run


def warped(test: Callable[[Broker], Awaitable[None]]) -> None:
    """Run a test in simulated time, with its own broker."""
    with asyncio.Runner(loop_factory=WarpLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, WarpLoop)

        async def run() -> None:
            clock = WarpClock(loop)
            await test(Broker(BrokerOptions(session_seconds=1.0, rebalance_seconds=2.0), clock=clock))

        with mock.patch("time.time", loop.wall):
            runner.run(run())
