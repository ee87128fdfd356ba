"""Kills a process at one step of the spool: `STEPS["written"](3)` at the third written segment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker_spark.common import files
from broker_spark.spool import receiver, segments, source, spool

__all__ = ["STEPS"]


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killing(owner: Any, name: str, number: int, *, after: bool, when: Callable[..., bool] = lambda *_: True) -> None:
    """Kill the process after this call of a method."""
    original = getattr(owner, name)
    left = [number]

    def stepped(*arguments: Any, **options: Any) -> Any:
        if not when(*arguments):
            return original(*arguments, **options)
        left[0] -= 1
        if not left[0] and not after:
            _kill()
        found = original(*arguments, **options)
        if not left[0]:
            _kill()
        return found

    setattr(owner, name, stepped)


def _of_segments(*arguments: Any) -> bool:
    return any("segments/" in str(each) for each in arguments)


STEPS: dict[str, Callable[[int], None]] = {
    "received": lambda number: _killing(receiver.Receiver, "_write", number, after=False),
    "half": lambda number: _killing(Path, "replace", number, after=False, when=_of_segments),
    "unchecked": lambda number: _killing(segments, "write", number, after=True),
    "written": lambda number: _killing(spool.Spool, "add", number, after=True),
    "acked": lambda number: _killing(receiver.Receiver, "_record_acks", number, after=False),
    "planned": lambda number: _killing(source.SpoolStreamReader, "partitions", number, after=False),
    "committed": lambda number: _killing(source.SpoolStreamReader, "commit", number, after=False),
    "trimming": lambda number: _killing(files.LocalFiles, "delete", number, after=True, when=_of_segments),
}
