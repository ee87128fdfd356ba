"""`shares_restart`: lets tests that restart the server share one restart, for servers that restart slowly.

The first of these tests in a class runs all of them concurrently, each with its own harness, and keeps their outcomes;
the others return theirs. A call of `restart` waits until all running tests have called it.

*Concurrency.* One event loop at a time. *Cancellation.* Ends all running tests; the next test runs them again.
*Failure.* A test raises its own failure; a failed restart is raised by all tests that wait for it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker.testing.harness import Harness
from broker.testing.promises import missing_capability

__all__ = ["RESTART_GROUP", "shares_restart"]

_Test = Callable[[Any, Harness], Awaitable[None]]
_ALONE = "__alone__"
RESTART_GROUP = "restart"
"""The xdist group of tests that share a restart: they must run in one process."""

_outcomes: dict[type, dict[str, BaseException | None]] = {}
"""Outcomes of tests that have run and were not collected yet, by class and name."""


def shares_restart(test: _Test) -> _Test:
    """Run this test together with the others of its class that have this mark, if `Harness.shares_restarts` is set."""

    @functools.wraps(test)
    async def shared(self: object, harness: Harness) -> None:
        if not harness.shares_restarts:
            await test(self, harness)
            return
        case, name = type(self), test.__name__
        if name not in _outcomes.get(case, {}):
            _outcomes[case] = await _run(case, harness)
        error = _outcomes[case].pop(name)
        if error is not None:
            raise error

    vars(shared)[_ALONE] = test
    vars(shared)["__together__"] = RESTART_GROUP
    return shared


class _Restart:
    """Restarts the server each time that all running tests have requested it."""

    def __init__(self, restart: Callable[[], Awaitable[None]], running: int) -> None:
        self._restart = restart
        self._running = running
        self._waiting: list[asyncio.Future[None]] = []

    async def request(self) -> None:
        """Return when the server has been restarted."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        await self._begin()
        await done

    async def leave(self) -> None:
        """A running test has ended."""
        self._running -= 1
        await self._begin()

    async def _begin(self) -> None:
        if not self._waiting or len(self._waiting) < self._running:
            return
        waiting, self._waiting = self._waiting, []
        try:
            await self._restart()
        except Exception as error:
            for done in waiting:
                if not done.done():
                    done.set_exception(error)
        for done in waiting:
            if not done.done():
                done.set_result(None)


async def _run(case: type, harness: Harness) -> dict[str, BaseException | None]:
    capabilities = (await harness.bus()).capabilities
    tests: list[_Test] = [
        test for name in dir(case) if (test := getattr(getattr(case, name), _ALONE, None)) is not None
    ]
    able = [test for test in tests if missing_capability(test, capabilities, harness) is None]
    restart = _Restart(harness.restart, len(able))

    async def outcome(test: _Test) -> BaseException | None:
        twin = harness.twin()
        vars(twin)["restart"] = restart.request
        try:
            try:
                await twin.start()
                await test(case(), twin)
            finally:
                await restart.leave()
                await twin.stop()
        except (Exception, pytest.fail.Exception) as error:
            return error
        return None

    ended = await asyncio.gather(*map(outcome, able))
    return {test.__name__: error for test, error in zip(able, ended, strict=True)}
