"""Google's Pub/Sub emulator as a small object: start, stop, kill, restart, pause, resume. Loopback only.

It keeps all in memory: whatever ends it, it comes back empty, at the same port. Blocking, for fixtures and threads;
every call returns when it is done. It ends with this process, however that ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self

import pytest

from tests.servers.process import ChildProcess
from tests.servers.pubsub_jar import emulator

__all__ = ["PROJECT", "PubSubServer", "need_emulator", "shared_server"]

PROJECT = "anybroker-tests"
START_SECONDS = 45.0
STOP_SECONDS = 10.0
_PREFIX = "anybroker-test-pubsub-"


class PubSubServer:
    """One emulator, or another server that takes the same calls.

    :param command: how to start it on a port.
    :param started: what its log says when it serves.
    """

    def __init__(
        self, command: Callable[[int], list[str]] | None = None, started: str = "Server started, listening on"
    ) -> None:
        self._command = command
        self._started = started
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        self._child: ChildProcess | None = None
        self._log_read = 0

    @property
    def host(self) -> str:
        """host:port, as PUBSUB_EMULATOR_HOST takes it."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"pubsub://{PROJECT}?emulator_host={self.host}"

    @property
    def log(self) -> str:
        """All it has said, over all its runs."""
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        """Start and wait until it serves.

        :raises RuntimeError: it ends or is not ready in time; the end of its log is told.
        """
        assert self._child is None or self._child.return_code is not None, "this server runs already"
        command = (self._command or emulator().command)(self.port)
        self._log_read = len(self.log)
        self._child = child = ChildProcess(command, self.directory / "log")
        deadline = time.monotonic() + START_SECONDS
        while self._started not in self.log[self._log_read :]:
            if child.return_code is not None or time.monotonic() > deadline:
                told = self.log[-3000:]
                self.kill()
                raise RuntimeError(f"The server of Pub/Sub does not start: {told}")
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay and nothing moves."""
        assert self._child is not None, "this server does not run"
        self._child.pause()

    def resume(self) -> None:
        assert self._child is not None, "this server does not run"
        self._child.resume()

    def close(self) -> None:
        """Kill it and remove what it wrote."""
        self.kill()
        self._held.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, how: signal.Signals) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end(how, STOP_SECONDS)


def need_emulator() -> None:
    """Skip the test where the emulator cannot be had, telling what to install."""
    try:
        emulator()
    except RuntimeError as error:
        pytest.skip(str(error))


@cache
def shared_server() -> PubSubServer:
    """The emulator of this test process, started at the first call and ended with the process."""
    need_emulator()
    server = PubSubServer()
    atexit.register(server.close)
    return server.start()
