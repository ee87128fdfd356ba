"""Releases a spool when Spark ends the process of a streaming source by SIGTERM.

*Concurrency.* Main thread, in which Spark calls the reader. Does nothing in other processes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Final

__all__ = ["Shutdown"]

_PROCESS: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_RELEASE_SECONDS: Final = 8.0
"""The most that releasing may take: unresponsive storage must not keep a process that Spark has given up."""


class Shutdown:
    """Turns SIGTERM into SystemExit, so that Spark's runner calls the reader's `stop` before the process ends."""

    def __init__(self) -> None:
        self._installed = False
        self._releasing = False
        self._requested = False

    def install(self) -> None:
        """Handle SIGTERM from now on, in the process of a streaming source only."""
        running = getattr(sys.modules.get("__main__"), "__spec__", None)
        if running is not None and running.name == _PROCESS and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def begin_release(self) -> None:
        """From now on no signal interrupts the caller, who releases the spool."""
        self._releasing = True
        if self._requested:
            _start_deadline()

    def finish(self) -> None:
        """End the process if a signal came. Spark's runner would only log that its peer is gone."""
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._requested:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Spark sends the signal twice, perhaps after its runner began to exit.
        is_first, self._requested = not self._requested, True
        if not self._releasing:
            self._releasing = True
            raise SystemExit(128 + number)
        if is_first:
            _start_deadline()


def _start_deadline() -> None:
    deadline = threading.Timer(_RELEASE_SECONDS, os._exit, (128 + signal.SIGTERM,))
    deadline.daemon = True
    deadline.start()
