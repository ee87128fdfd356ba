"""Starts, kills and stops a worker process, and receives its reports."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from examples.flights.lives import LifeEnded
from examples.flights_queue.worker import Report

__all__ = ["WorkerLife"]


class WorkerLife:
    """One life of a worker.

    :param work_seconds: duration of a job.
    :ivar report: its last report.
    :ivar ready: set after its first report.
    :ivar killed_at: when it was killed, or None.
    """

    def __init__(self, url: str, name: str, work_seconds: float) -> None:
        self.name = name
        self.report = Report()
        self.ready = asyncio.Event()
        self.killed_at: datetime | None = None
        self._url = url
        self._work_seconds = work_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def state(self) -> str:
        """The state, for display."""
        if self.killed_at is not None:
            return "killed"
        if not self.ready.is_set():
            return "starts"
        return "works" if self._started().returncode is None else "ended"

    @asynccontextmanager
    async def alive(self) -> AsyncGenerator[None]:
        """Start the worker. Kills it at the end of the block."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "examples.flights_queue.worker",
            self.name,
            str(self._work_seconds),
            cwd=Path(__file__).parents[2],
            env={**os.environ, "BROKER_URL": self._url},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            yield
        finally:
            await self._end()

    async def hear(self) -> None:
        """Receive its reports until it ends.

        :raises LifeEnded: the worker ended on its own.
        """
        process = self._started()
        assert process.stdout is not None, "it is a pipe"
        async for line in process.stdout:
            # The last line of a killed worker may be incomplete.
            if line.endswith(b"\n"):
                self.report = msgspec.json.decode(line, type=Report)
                self.ready.set()
        status = await process.wait()
        if not self._ending:
            raise LifeEnded(f"{self.name} ended by itself, with status {status}")

    async def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.killed_at = datetime.now(UTC)
        await self._end()

    async def stop(self) -> None:
        """Let it finish its jobs and stop.

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
