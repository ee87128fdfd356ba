"""The helpers of `broker.driver` that backends share: backoff, task sets, shared resources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import get_origin

import broker.driver
from broker.driver import Backoff, SharedResource, TaskSet, pause


def test_every_name_of_the_driver_is_documented() -> None:
    undocumented: list[str] = []
    for name in broker.driver.__all__:
        value = getattr(broker.driver, name)
        # Constants and type aliases carry their docs in the source; callables and classes carry them at run time.
        named = isinstance(value, type) or (callable(value) and get_origin(value) is None)
        doc = (value.__doc__ or "").strip()
        # A dataclass without a docstring gets its signature as one.
        if named and (not doc or doc.startswith(f"{name}(")):
            undocumented.append(name)
    assert undocumented == []


def test_backoff_doubles_up_to_its_bound_with_jitter() -> None:
    backoff = Backoff(0.1, 1.0)
    for nominal in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert 0.8 * nominal <= backoff.next() <= 1.2 * nominal
    backoff.reset()
    assert backoff.next() <= 0.12


def test_a_backoff_counts_no_failures_of_its_caller() -> None:
    backoff = Backoff(0.1, 1.0)
    for failures, nominal in ((1, 0.1), (3, 0.4), (5, 1.0), (5000, 1.0)):
        assert 0.8 * nominal <= backoff.after(failures) <= 1.2 * nominal
    assert backoff.next() <= 0.12


def test_two_backoffs_differ() -> None:
    assert Backoff(1.0, 1.0).next() != Backoff(1.0, 1.0).next()


async def test_a_pause_ends_when_stopped() -> None:
    stopped = asyncio.Event()
    pausing = asyncio.create_task(pause(60, stopped))
    await asyncio.sleep(0)
    assert not pausing.done()
    stopped.set()
    async with asyncio.timeout(60):
        await pausing


async def test_a_pause_ends_after_its_time() -> None:
    stopped = asyncio.Event()
    await pause(0.001, stopped)
    assert not stopped.is_set()


async def test_a_task_set_reports_failures_and_drops_finished_tasks() -> None:
    failures: list[Exception] = []
    tasks = TaskSet("test", failures.append)

    async def fail() -> None:
        raise ValueError("broken")

    async def answer() -> int:
        return 3

    tasks.spawn(fail())
    assert await tasks.spawn(answer()) == 3
    await asyncio.sleep(0)
    assert [str(failure) for failure in failures] == ["broken"]
    assert len(tasks) == 0


async def test_a_task_set_cancels() -> None:
    failures: list[Exception] = []
    tasks = TaskSet("test", failures.append)
    sleeper = tasks.spawn(asyncio.sleep(60))
    tasks.cancel()
    await asyncio.wait((sleeper,))
    late = tasks.spawn(asyncio.sleep(60))
    await tasks.wait(0.001)
    assert sleeper.cancelled() and late.cancelled()
    assert (failures, list(tasks)) == ([], [])


class _Resource:
    def __init__(self, log: list[str], gate: asyncio.Event, error: Callable[[], Exception | None]) -> None:
        self._log = log
        self._gate = gate
        self._error = error

    async def open(self) -> None:
        self._log.append("open")
        await self._gate.wait()
        if (error := self._error()) is not None:
            raise error

    async def close(self) -> None:
        self._log.append("close")


def _shared(
    log: list[str], *, gate: asyncio.Event | None = None, error: Callable[[], Exception | None] = lambda: None
) -> SharedResource[_Resource]:
    if gate is None:
        gate = asyncio.Event()
        gate.set()
    return SharedResource("test", lambda: _Resource(log, gate, error), _Resource.open, _Resource.close)


async def test_a_shared_resource_opens_once_and_closes_with_its_last_user() -> None:
    log: list[str] = []
    shared = _shared(log)
    first, second = await asyncio.gather(shared.acquire(), shared.acquire())
    assert first is second
    await shared.release()
    assert log == ["open"]
    await shared.release()
    assert log == ["open", "close"] and shared.unused
    assert await shared.acquire() is not first
    await shared.close()
    await shared.close()
    await shared.release()
    assert log == ["open", "close", "open", "close"]


async def test_a_cancelled_user_leaves_the_opening_to_the_others() -> None:
    log: list[str] = []
    gate = asyncio.Event()
    shared = _shared(log, gate=gate)
    cancelled, kept = asyncio.create_task(shared.acquire()), asyncio.create_task(shared.acquire())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait((cancelled,))
    gate.set()
    await kept
    assert log == ["open"]
    await shared.release()


async def test_the_last_cancelled_user_cancels_the_opening() -> None:
    log: list[str] = []
    shared = _shared(log, gate=asyncio.Event())
    only = asyncio.create_task(shared.acquire())
    await asyncio.sleep(0)
    only.cancel()
    await asyncio.wait((only,))
    assert log == ["open", "close"] and shared.unused


async def test_a_failed_opening_is_raised_and_the_next_user_tries_again() -> None:
    log: list[str] = []
    errors: list[Exception | None] = [ValueError("no"), None]
    shared = _shared(log, error=lambda: errors.pop(0))
    results = await asyncio.gather(shared.acquire(), shared.acquire(), return_exceptions=True)
    assert [str(result) for result in results] == ["no", "no"]
    await shared.acquire()
    assert log == ["open", "close", "open"]
    await shared.release()
