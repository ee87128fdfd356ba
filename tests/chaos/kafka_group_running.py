"""A member of a group as a process that can be stopped and killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import Any

from tests.kafka.group_members import options_of

__all__ = ["Process", "quick"]


class Process:
    """A member in a subprocess, and its output so far."""

    def __init__(self, *arguments: str) -> None:
        self.said: list[dict[str, Any]] = []
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.kafka_group_process", *arguments], stdout=subprocess.PIPE
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    self.said.append(json.loads(line))

    def all(self, word: str) -> list[dict[str, Any]]:
        return [said for said in tuple(self.said) if said["say"] == word]

    def send(self, how: signal.Signals) -> None:
        self._child.send_signal(how)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self._listener.join()


def quick(protocol: str) -> dict[str, Any]:
    """Options with a short session timeout."""
    options = {**options_of(protocol), "commit_interval": 0.1}
    return options if protocol == "consumer" else {**options, "session_timeout_ms": 3000}
