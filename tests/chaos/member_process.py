"""A member in a process of its own, which the chaos tests start, freeze, kill and stop."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from typing import IO, Any

__all__ = ["MemberProcess"]


class MemberProcess:
    """Runs a module with these arguments.

    :param errors: where its standard error goes; by default to that of the test.
    :ivar heard: the JSON lines that it has printed.
    """

    def __init__(self, module: str, *arguments: str, errors: IO[bytes] | None = None) -> None:
        self.heard: list[dict[str, Any]] = []
        self.frozen = False
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=errors
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    self.heard.append(json.loads(line))

    def freeze(self) -> None:
        self._child.send_signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self._child.send_signal(signal.SIGCONT)
        self.frozen = False

    async def kill(self) -> None:
        self._child.kill()
        await asyncio.to_thread(self._child.wait)
        await asyncio.to_thread(self._listener.join)

    def stop(self) -> None:
        self._child.terminate()

    @property
    def over(self) -> bool:
        return self._child.poll() is not None
