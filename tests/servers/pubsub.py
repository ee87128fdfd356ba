"""Google's Pub/Sub emulator as a small object: start, stop, kill, restart, pause, resume. Loopback only.

It keeps everything in memory: it restarts empty, at the same port. Blocking, for fixtures and threads;
every call returns when it is done. It ends with this process, however that ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

import pytest

from tests.servers.pubsub_jar import emulator
from tests.servers.server_process import ServerProcess
from tests.servers.shared import Shared

__all__ = ["PROJECT", "PubSubServer", "new_server", "shared_server"]

PROJECT = "anybroker-tests"
START_SECONDS = 180.0


class PubSubServer(ServerProcess):
    """One emulator, or another server with the same calls.

    :param command: the command that starts it on a port.
    :param started: the line of its log when it is ready.
    """

    def __init__(
        self, command: Callable[[int], list[str]] | None = None, started: str = "Server started, listening on"
    ) -> None:
        super().__init__("pubsub")
        self._command = command
        self._started = started
        self.port = self._hold_ports("grpc")["grpc"]
        self._log_read = 0

    @property
    def host(self) -> str:
        """host:port, as PUBSUB_EMULATOR_HOST takes it."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"pubsub://{PROJECT}?emulator_host={self.host}"

    def start(self) -> Self:
        """Start and wait until it serves.

        :raises RuntimeError: the server ends or is not ready in time; the error has the end of its log.
        """
        command = (self._command or emulator().command)(self.port)
        self._log_read = len(self.log)
        child = self._launch(command)
        deadline = time.monotonic() + START_SECONDS
        while self._started not in self.log[self._log_read :]:
            if child.return_code is not None or time.monotonic() > deadline:
                reported = self.log[-3000:]
                self.kill()
                raise RuntimeError(f"The server of Pub/Sub does not start: {reported}")
            time.sleep(0.02)
        return self


def new_server() -> PubSubServer:
    """A new emulator, not started; skips the test if there is none, naming what to install."""
    try:
        emulator()
    except RuntimeError as error:
        pytest.skip(str(error))
    return PubSubServer()


shared_server = Shared.by_all_workers(new_server)
"""The emulator of the run: not to be stopped or frozen."""
