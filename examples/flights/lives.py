"""Starts, kills and stops the message consumer, as a process or as a task.

| broker | the consumer is | killing it |
|---|---|---|
| shared by several processes | a process | SIGKILL |
| in memory | a task of this process | cuts its connection: it settles and gives back nothing more |

Either way its unsettled messages stay leased until their leases end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import broker
from broker_inmem.backend import InmemBackend
from examples.flights.consumer import DelayConsumer

__all__ = ["Life", "LifeEnded", "during", "new_life"]

T = TypeVar("T")


class LifeEnded(Exception):
    """The consumer ended on its own."""


class Life(Protocol):
    """One life of the consumer. `kill` and `stop` return when it is over."""

    @property
    def name(self) -> str: ...
    @property
    def death(self) -> str:
        """How it dies, in words."""
        ...

    @property
    def lease_seconds(self) -> float:
        """Seconds for which the broker still leases messages to a dead consumer."""
        ...

    async def start(self) -> None: ...
    async def kill(self) -> None: ...
    async def stop(self) -> None: ...
    async def outlive(self, work: Awaitable[T]) -> T:
        """Wait for something while the consumer runs.

        :raises LifeEnded: the consumer ended first.
        """
        ...


def new_life(url: str, bus: broker.Bus) -> Life:
    """A consumer that has not started yet.

    :param url: the broker to consume from; `bus` is connected to it.
    """
    if bus.capabilities.shared:
        messages = bus.capabilities.messages
        return _ProcessLife(url, 0.0 if messages is None else messages.lease_seconds or 0.0)
    return _TaskLife(url)


class _ProcessLife:
    death = "killed with SIGKILL"

    def __init__(self, url: str, lease_seconds: float) -> None:
        self._url = url
        self._process: asyncio.subprocess.Process | None = None
        self.lease_seconds = lease_seconds

    @property
    def name(self) -> str:
        return f"process {self._started().pid}"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "examples.flights.consumer",
            cwd=Path(__file__).parents[2],
            env={**os.environ, "BROKER_URL": self._url},
            stdout=asyncio.subprocess.PIPE,
        )

    async def kill(self) -> None:
        process = self._started()
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def stop(self) -> None:
        process = self._started()
        assert process.stdout is not None
        # It may not handle SIGTERM yet: wait for its line, or for its end.
        await process.stdout.readline()
        if process.returncode is None:
            process.terminate()
        if await process.wait() != 0:
            raise LifeEnded(f"The consumer ended with status {process.returncode}")

    async def outlive(self, work: Awaitable[T]) -> T:
        return await during(work, self._started().wait())

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise LifeEnded("The consumer was not started")
        return self._process


class _TaskLife:
    name = "a task of this process"
    death = "cut off, its leases ended"
    lease_seconds = 0.0

    def __init__(self, url: str) -> None:
        self._bus = broker.connect(url)
        self._consumer: DelayConsumer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._bus.open()
        self._consumer = DelayConsumer(self._bus)
        self._task = asyncio.create_task(self._consumer.run())

    async def kill(self) -> None:
        backend = self._bus.backend
        if not isinstance(backend, InmemBackend):
            raise LifeEnded(f"{self._bus.capabilities.backend} cannot cut off a consumer of this process")
        with _silence():
            backend.broker.faults.kill(self._bus, drop_leases=True)
            if self._task is not None:
                self._task.cancel()
                with suppress(asyncio.CancelledError, broker.BrokerError):
                    await self._task
            with suppress(broker.BrokerError):
                await self._bus.close()

    async def stop(self) -> None:
        if self._consumer is not None and self._task is not None:
            self._consumer.inbox.stop()
            await self._task
        await self._bus.close()

    async def outlive(self, work: Awaitable[T]) -> T:
        if self._task is None:
            raise LifeEnded("The consumer was not started")
        return await during(work, asyncio.shield(self._task))


@contextmanager
def _silence() -> Generator[None]:
    """Drop the warnings about messages that a dead consumer can no longer settle."""
    log = logging.getLogger("broker")

    def say_nothing(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(say_nothing)
    try:
        yield
    finally:
        log.removeFilter(say_nothing)


async def during(work: Awaitable[T], life: Awaitable[object]) -> T:
    """Wait for something while a life goes on.

    :raises LifeEnded: the life ended first.
    """
    working, living = asyncio.ensure_future(work), asyncio.ensure_future(life)
    try:
        await asyncio.wait((working, living), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        living.result()
        raise LifeEnded("The consumer ended before it was stopped")
    finally:
        for future in (working, living):
            if not future.done():
                future.cancel()
        await asyncio.gather(working, living, return_exceptions=True)
