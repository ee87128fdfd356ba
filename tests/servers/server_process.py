"""The common part of the test servers: a child process with a directory, that can be stopped, frozen and restarted.

Blocking, for fixtures and threads; every call returns when it is done. The server ends with this process, however that
ends; the directories of owners that were killed are removed by the next ones.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, Self

from tests.servers.process import ChildProcess

__all__ = ["ServerProcess", "Servers", "hold_port", "sweep"]


class Servers(ABC):
    """One or several servers for a `with` block, closed at its end, and if the start fails."""

    @abstractmethod
    def start(self) -> Self:
        """Start and wait until clients are served.

        :raises RuntimeError: the server ends or is not ready in time; the error has the end of its log.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop it and remove its data."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


class ServerProcess(Servers):
    """Successive runs of a server with one directory.

    :cvar stop_seconds: seconds that a graceful stop may take.
    """

    stop_seconds: ClassVar[float] = 10.0

    def __init__(self, kind: str) -> None:
        prefix = f"anybroker-test-{kind}-"
        sweep(prefix)
        self.directory = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
        self.kind = kind
        self._child: ChildProcess | None = None
        self._held: dict[str, socket.socket] = {}

    def _hold_ports(self, *names: str) -> dict[str, int]:
        """Free ports by name, which stay this server's, also between its runs, until it is closed."""
        self._held = {name: hold_port() for name in names}
        return {name: held.getsockname()[1] for name, held in self._held.items()}

    def _release_ports(self) -> None:
        for held in self._held.values():
            held.close()

    def __getstate__(self) -> dict[str, object]:
        """A copy in another process knows where the server is; the process and held ports stay with the owner."""
        return {**vars(self), "_child": None, "_held": {}}

    @property
    def log(self) -> str:
        """The log of all its runs."""
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.return_code is None

    @property
    def process_id(self) -> int:
        return self._running_child().pid

    def stop(self) -> None:
        """Stop it gracefully."""
        self.end(signal.SIGTERM)

    def kill(self) -> None:
        """End it without notice."""
        self.end(signal.SIGKILL)

    def end(self, how: signal.Signals, seconds: float | None = None) -> None:
        """End it by a signal, within `stop_seconds` by default. Does nothing if it is not running."""
        child, self._child = self._child, None
        if child is not None:
            child.end(how, self.stop_seconds if seconds is None else seconds)

    def restart(self) -> None:
        """Restart it, also if it had to be killed: other tests may share it.

        :raises RuntimeError: it had to be killed, or does not start.
        """
        try:
            self.stop()
        finally:
            self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open without traffic."""
        self._running_child().pause()

    def resume(self) -> None:
        self._running_child().resume()

    def close(self) -> None:
        """Kill it, release its ports and remove its data."""
        self.kill()
        self._release_ports()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _launch(self, command: Sequence[str], said: str = "log") -> ChildProcess:
        """Start the process; its output goes to this file of the directory."""
        assert not self.running, f"this server ({self.kind}) runs already"
        self._child = ChildProcess(command, self.directory / said)
        return self._child

    def _running_child(self) -> ChildProcess:
        assert self._child is not None, f"this server ({self.kind}) does not run"
        return self._child


def hold_port() -> socket.socket:
    """A free port, bound but not listening: no other process gets it, and the server can still bind and listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@cache
def sweep(prefix: str) -> None:
    """Remove directories with this prefix of servers whose owners were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = path.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
