"""Runs the tests of a class that restart the server around one restart, for a server that takes long to come back.

Each of them stays a test and a promise of its own, with a harness of its own: they run at once, the `restart` of
theirs waits until all of them ask for it or are over, and each has its own outcome. The first that is asked for runs
them all; the others tell what became of them then.

*Concurrency.* One event loop at a time. *Cancellation.* Ends all that run; the next one that is asked for runs them
anew. *Failure.* Of a test: raised by that test. Of the restart: raised to all that wait for it.
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
"""What tests are named together that share a restart: whoever runs tests in several processes keeps them in one."""

_outcomes: dict[type, dict[str, BaseException | None]] = {}
"""Of tests that have run and were not asked for yet, by class and name."""


def shares_restart(test: _Test) -> _Test:
    """Run this test with the others of its class that are marked so, where `Harness.shares_restarts` says so."""

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
    """One restart for all that are running; another one when all that are left ask again."""

    def __init__(self, restart: Callable[[], Awaitable[None]], running: int) -> None:
        self._restart = restart
        self._running = running
        self._waiting: list[asyncio.Future[None]] = []

    async def ask(self) -> None:
        """Wait until the server has been restarted."""
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(asked)
        await self._begin()
        await asked

    async def leave(self) -> None:
        """One that was running is over."""
        self._running -= 1
        await self._begin()

    async def _begin(self) -> None:
        if not self._waiting or len(self._waiting) < self._running:
            return
        waiting, self._waiting = self._waiting, []
        try:
            await self._restart()
        except Exception as error:
            for asked in waiting:
                if not asked.done():
                    asked.set_exception(error)
        for asked in waiting:
            if not asked.done():
                asked.set_result(None)


async def _run(case: type, harness: Harness) -> dict[str, BaseException | None]:
    capabilities = (await harness.bus()).capabilities
    tests: list[_Test] = [
        test for name in dir(case) if (test := getattr(getattr(case, name), _ALONE, None)) is not None
    ]
    able = [test for test in tests if missing_capability(test, capabilities, harness) is None]
    restart = _Restart(harness.restart, len(able))

    async def outcome(test: _Test) -> BaseException | None:
        twin = harness.twin()
        vars(twin)["restart"] = restart.ask
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
