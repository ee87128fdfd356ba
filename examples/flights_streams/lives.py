"""Starts, kills and stops a process of the demo, and receives its reports."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from examples.flights.lives import LifeEnded

__all__ = ["Life"]

R = TypeVar("R")

_ROOT = Path(__file__).parents[2]


class Life(Generic[R]):
    """One life of a process.

    :param module: with the program; `arguments` are given to it.
    :param kind: of its reports.
    :param heard: called after each report.
    :ivar report: the last one; None before the first.
    :ivar killed: whether it was killed by `kill`.
    """

    def __init__(
        self, url: str, name: str, module: str, *arguments: str, kind: type[R], heard: Callable[[], object]
    ) -> None:
        self.name = name
        self.report: R | None = None
        self.killed = False
        self._url = url
        self._command = ("-m", module, *arguments)
        self._decoder = msgspec.json.Decoder(kind)
        self._heard = heard
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @asynccontextmanager
    async def alive(self) -> AsyncGenerator[None]:
        """Start the process. Kills it at the end of the block."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command,
            cwd=_ROOT,
            env={**os.environ, "BROKER_URL": self._url},
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        try:
            yield
        finally:
            await self._end()

    async def hear(self) -> None:
        """Receive its reports until it ends.

        :raises LifeEnded: the process ended on its own.
        """
        process = self._started()
        assert process.stdout is not None, "it is a pipe"
        async for line in process.stdout:
            # The last line of a killed process may be incomplete.
            if line.endswith(b"\n"):
                self.report = self._decoder.decode(line)
                self._heard()
        status = await process.wait()
        if not self._ending:
            raise LifeEnded(f"{self.name} ended by itself, with status {status}")

    async def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.killed = True
        await self._end()

    async def stop(self) -> None:
        """Send SIGTERM and wait.

        :raises LifeEnded: its exit status is not 0.
        """
        process = self._started()
        self._ending = True
        if process.returncode is None:
            process.terminate()
        if await process.wait() != 0:
            raise LifeEnded(f"{self.name} ended with status {process.returncode}")

    async def _end(self) -> None:
        process = self._started()
        self._ending = True
        if process.returncode is None:
            process.kill()
        await process.wait()

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise LifeEnded(f"{self.name} was not started")
        return self._process
