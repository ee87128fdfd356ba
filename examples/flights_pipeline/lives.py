"""Starts Spark in a process, receives its batch reports, and kills it with all its children.

Spark is a Python process, its JVM, and the JVM's Python workers, which form process groups of their own. All belong to
the POSIX session of the first process, which is how they are found.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import psutil

from broker_spark.pipeline import BatchReport
from examples.flights.lives import LifeEnded, during

__all__ = ["SparkLife"]

T = TypeVar("T")

_ROOT: Final = Path(__file__).parents[2]
_GONE_SECONDS: Final = 20.0
_LAST_WORDS: Final = 2000


class SparkLife:
    """One life of the three pipelines.

    :ivar reports: of committed batches, as far as they were received.
    """

    def __init__(
        self, url: str, directory: Path, rows: int, trigger: str, on_batch: Callable[[BatchReport], object]
    ) -> None:
        self._arguments = (url, str(directory), str(rows), trigger)
        self._directory = directory
        self._words = directory / "spark.log"
        self._on_batch = on_batch
        self._failure = ""
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._dead = False
        self.reports: list[BatchReport] = []

    @property
    def pid(self) -> int:
        """Of the first process, and of their session."""
        return self._started().pid

    @asynccontextmanager
    async def alive(self) -> AsyncGenerator[None]:
        """Start Spark. Kills its processes at the end of the block."""
        # What a killed Spark leaves there is deleted with the directory.
        temporary = self._directory / "tmp"
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        with self._words.open("ab") as words:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "examples.flights_pipeline.spark_process",
                *self._arguments,
                cwd=self._directory,
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=words,
                start_new_session=True,
            )
        self._reading = asyncio.create_task(self._read_reports())
        try:
            yield
        finally:
            await self.kill()
            await self._reading

    async def ready(self) -> None:
        """Wait until the Spark session exists.

        :raises LifeEnded: the process ended first.
        """
        await self.outlive(self._ready.wait())

    async def outlive(self, work: Awaitable[T]) -> T:
        """Wait for something while Spark runs.

        :raises LifeEnded: the process ended first.
        """
        try:
            return await during(work, self._started().wait())
        except LifeEnded:
            raise LifeEnded(f"Spark ended by itself: {await self._why()}") from None

    async def end(self) -> None:
        """Wait until the pipelines have read everything.

        :raises LifeEnded: Spark failed.
        """
        if await self._started().wait() != 0:
            raise LifeEnded(f"Spark failed: {await self._why()}")

    async def kill(self) -> list[str]:
        """Send SIGKILL to every process of the session and wait. Returns their names, the leader first.

        :raises LifeEnded: a process survived.
        """
        found: dict[int, str] = {}
        if self._dead:
            return []
        async with asyncio.timeout(_GONE_SECONDS):
            # Again, for processes started meanwhile.
            while living := _session(self.pid):
                for process in living:
                    with suppress(psutil.NoSuchProcess):
                        found[process.pid] = process.name()
                        process.kill()
                await asyncio.sleep(0.02)
        await self._started().wait()
        self._dead = True
        return list(found.values())

    async def _read_reports(self) -> None:
        stream = self._started().stdout
        assert stream is not None, "it is a pipe"
        async for line in stream:
            fields = _parse(line)
            if "ready" in fields:
                self._ready.set()
            elif "batch" in fields:
                report = msgspec.convert(fields, BatchReport)
                self.reports.append(report)
                self._on_batch(report)
            elif "failed" in fields:
                self._failure = str(fields["failed"])

    async def _why(self) -> str:
        """Why it ended: its last report, else the end of its log."""
        if self._reading is not None:
            await self._reading
        return self._failure[:_LAST_WORDS] or self._words.read_text(errors="replace")[-_LAST_WORDS:].strip()

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise LifeEnded("Spark was not started")
        return self._process


def _parse(line: bytes) -> dict[str, Any]:
    """Parse a line. Returns nothing for a foreign one: the JVM may write here too."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _session(leader: int) -> list[psutil.Process]:
    """The running processes of a session, the leader first."""
    found: list[psutil.Process] = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader:
                process = psutil.Process(pid)
                # A zombie stays in the table until its parent reaps it.
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return sorted(found, key=lambda process: process.pid)
