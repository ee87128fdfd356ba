"""How Spark ends the process of a streaming source: by SIGTERM, at which Python would end without a word.

What a reader holds is given back before. *Concurrency.* In the main thread, in which Spark calls the reader. Nothing
happens in other processes, as where somebody calls a reader himself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Final

__all__ = ["Ending"]

_PROCESS: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_LONGEST: Final = 8.0
"""Seconds for what is given back: storage that does not answer is not to keep a process that Spark has given up."""


class Ending:
    """Has SIGTERM leave what the process does, so that Spark's runner calls the reader's `stop` on the way out."""

    def __init__(self) -> None:
        self._watching = False
        self._leaving = False
        self._asked = False

    def watch(self) -> None:
        """From now on; only in the process of a streaming source."""
        running = getattr(sys.modules.get("__main__"), "__spec__", None)
        if running is not None and running.name == _PROCESS and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._leave)
            self._watching = True

    def begin(self) -> None:
        """What is held is being given back, which no signal is to break off."""
        self._leaving = True
        if self._asked:
            _start_bound()

    def end(self) -> None:
        """End the process, if it was asked to: after that Spark's runner would only tell that nobody listens."""
        if self._watching:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._asked:
            os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        # Spark sends it twice, and perhaps when its runner is on the way out already.
        is_first, self._asked = not self._asked, True
        if not self._leaving:
            self._leaving = True
            raise SystemExit(128 + number)
        if is_first:
            _start_bound()


def _start_bound() -> None:
    bound = threading.Timer(_LONGEST, os._exit, (128 + signal.SIGTERM,))
    bound.daemon = True
    bound.start()
