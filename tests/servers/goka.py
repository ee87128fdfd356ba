"""Programs of goka, the Go library whose tables and topics `broker_streams` shares; `goka/main.go` has their commands.

Where they cannot be built, their tests are skipped. `python -m tests.servers.goka` only builds them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from tempfile import TemporaryFile
from typing import IO, Any, Final

import pytest

from tests.servers.go_program import GoProgram

__all__ = ["Goka", "running_goka"]

PROGRAM: Final = GoProgram("goka", "goka")
ANSWER_SECONDS: Final = 120.0
_LONGEST_LINE: Final = 1 << 24


class Goka:
    """A running program."""

    def __init__(self, process: Process, log: IO[bytes]) -> None:
        self._process = process
        self._log = log

    async def ask(self, **command: str) -> Any:
        """Send a command; return the answer.

        :raises RuntimeError: the program has ended, or does not answer; the error has its log.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self._process.stdin.write(json.dumps(command).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except (OSError, TimeoutError) as error:
            raise self._failed(f"does not answer {command}") from error
        if not line:
            raise self._failed(f"has ended instead of answering {command}")
        return json.loads(line)

    async def stop(self) -> None:
        """End it in its own way: a processor commits its positions, an emitter flushes.

        :raises RuntimeError: it does not end, or fails.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                code = await self._process.wait()
        except TimeoutError as error:
            raise self._failed("does not end") from error
        if code:
            raise self._failed(f"has ended with status {code}")

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _failed(self, what: str) -> RuntimeError:
        self._log.seek(0)
        return RuntimeError(f"goka {what}: {self._log.read()[-3000:].decode(errors='replace')}")


@asynccontextmanager
async def running_goka(bootstrap: str, *arguments: str) -> AsyncGenerator[Goka]:
    """A program of goka, stopped at the end of the block; skips the test if it cannot run.

    It ends with this process, too: then its input ends.

    :param arguments: options, the command and its arguments.
    """
    if (reason := PROGRAM.missing) is not None:
        pytest.skip(reason)
    with TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            str(PROGRAM.path()),
            f"-brokers={bootstrap}",
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            limit=_LONGEST_LINE,
        )
        goka = Goka(process, log)
        try:
            yield goka
            await goka.stop()
        finally:
            await goka.kill()


if __name__ == "__main__" and PROGRAM.missing is not None:
    sys.stderr.write(f"{PROGRAM.missing}\n")
