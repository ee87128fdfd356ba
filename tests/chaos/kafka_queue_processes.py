"""The processes of a queue's chaos run: workers, and trackers that run alone, each with what is known of its life.

Blocking. Whoever starts one ends it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.chaos.kafka_queue_records import Life

__all__ = ["Alone", "Ran", "Worker"]

_BROKER: Final = str(Path(sys.executable).with_name("broker"))
_TRACKS: Final = "broker: tracks "


class Ran(ABC):
    """:ivar errors: what it wrote to standard error.
    :ivar free: nothing is being done to it.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        self.name = name
        self.errors = directory / f"{name}.err"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors)
        self.free = True

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it does what it is there for."""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def last_words(self) -> str:
        return self.errors.read_text()[-3000:]


class Worker(Ran):
    """:param arguments: of `kafka_queue_process`, the URL first and without its file."""

    def __init__(self, name: str, arguments: Sequence[str], directory: Path) -> None:
        self.life = Life(name, directory / name)
        self.life.path.touch()
        url, *rest = arguments
        command = [sys.executable, "-m", "tests.chaos.kafka_queue_process", f"{url}&client_id={name}", *rest]
        super().__init__(name, [*command, str(self.life.path)], directory)

    @property
    def ready(self) -> bool:
        return self.life.path.stat().st_size > 0

    def kill(self) -> None:
        super().kill()
        self.life.died = time.time()


class Alone(Ran):
    """`broker tracker`, which handles no message."""

    def __init__(self, name: str, url: str, topic: str, subscription: str, directory: Path) -> None:
        where = ["--url", f"{url}&client_id={name}"]
        super().__init__(name, [_BROKER, *where, "tracker", subscription, "--topic", topic], directory)

    @property
    def ready(self) -> bool:
        """Whether it has said that it tracks partitions; else nothing is lost with it."""
        lines = [line for line in self.errors.read_text().splitlines() if line.startswith(_TRACKS)]
        return bool(lines) and lines[-1] != f"{_TRACKS}no partition"
