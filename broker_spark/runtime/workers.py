"""Tunes Python in Spark's worker processes: garbage collection, thread switching, and what the last moment prints."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from functools import cache
from typing import Any, Final, cast

from pyspark import TaskContext

__all__ = [
    "collect_less_often",
    "end_quietly",
    "freeze_loaded_objects",
    "leave_out_broken_pipes",
    "switch_threads_faster",
]

_TURN_SECONDS: Final = 0.001
_YOUNG: Final = 100_000
"""New objects that start a collection: some Arrow batches of messages, which are freed without it."""


def collect_less_often() -> None:
    """Collect garbage less often during tasks, in Spark's processes only.

    By default Python collects after 700 new objects and so visits each message up to three times. Spark's workers
    collect after every task anyway.
    """
    if _is_sparks():
        first, *others = gc.get_threshold()
        # Zero means that the collector is turned off.
        gc.set_threshold(max(first, _YOUNG) if first else 0, *others)


def switch_threads_faster() -> None:
    """Switch threads every millisecond, in Spark's processes only.

    By default the thread that writes to Spark waits 5 ms after each buffer for the thread that makes the next batch.
    """
    if _is_sparks():
        sys.setswitchinterval(min(sys.getswitchinterval(), _TURN_SECONDS))


@cache
def freeze_loaded_objects() -> None:
    """Exclude all present objects from garbage collection, once per process, in Spark's processes only.

    Spark's workers collect garbage after every task, and the planners after each plan and commit: tens of milliseconds
    for the modules alone. Reference counting still frees these objects. Call it when everything is imported.
    """
    if _is_sparks():
        gc.collect()
        gc.freeze()


def leave_out_broken_pipes() -> None:
    """Print no traceback for a connection that Spark closed before a task had sent its rows, in workers only.

    Spark does so behind a limit. PySpark's daemon sends what is left after the task, outside of all code that a task
    runs, and prints why it cannot before the worker ends.
    """
    main = sys.modules.get("__main__")
    if _forked_by_spark() and not isinstance(getattr(main, "traceback", None), _WithoutBrokenPipes):
        cast("Any", main).traceback = _WithoutBrokenPipes()


class _WithoutBrokenPipes:
    """The module `traceback` of PySpark's daemon: without the errors of its own flush of a closed connection."""

    def print_exc(self) -> None:
        error = sys.exception()
        *_, (frame, _) = traceback.walk_tb(error.__traceback__ if error is not None else None)
        is_flush = frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "worker"
        if not (is_flush and isinstance(error, ConnectionError)):
            traceback.print_exc()

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)


def end_quietly() -> None:
    """Print nothing more if Spark has ended the stream of this planner process; called by `stop` of a stream's reader.

    At each stop of a query Spark closes the connection to the process. PySpark takes the end of its input, or of what
    reads its answer, for an error, fails to report it on the closed connection, and prints two tracebacks of a
    `BrokenPipeError` before it exits.
    """
    if _forked_by_spark() and isinstance(sys.exception(), (EOFError, ConnectionError)):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def _is_sparks() -> bool:
    """Whether this is a worker or planner process of Spark."""
    return TaskContext.get() is not None or _forked_by_spark()


def _forked_by_spark() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "pyspark.daemon"
