"""What a worker process of Spark keeps over its tasks, and over what it plans and commits."""

from __future__ import annotations

import gc
import sys
from functools import cache
from typing import Final

from pyspark import TaskContext

__all__ = ["collect_less_often", "freeze_loaded_objects", "switch_threads_faster"]

_TURN_SECONDS: Final = 0.001
_YOUNG: Final = 100_000
"""New objects with which the collector begins: some Arrow batches of messages, which are soon freed without it."""


def collect_less_often() -> None:
    """Have garbage collected more seldom while tasks run, only in Spark's own processes.

    Python begins with every 700 new objects, and so looks at each message that is read up to three times. Spark's
    workers collect after every task in any case.
    """
    if _is_sparks():
        first, *others = gc.get_threshold()
        # Zero is a collector that somebody turned off.
        gc.set_threshold(max(first, _YOUNG) if first else 0, *others)


def switch_threads_faster() -> None:
    """Have threads take turns five times as often as Python has it, only in Spark's own processes.

    A thread that writes to Spark would wait for 5 ms, after each buffer of a batch, for the one that makes the next.
    """
    if _is_sparks():
        sys.setswitchinterval(min(sys.getswitchinterval(), _TURN_SECONDS))


@cache
def freeze_loaded_objects() -> None:
    """Have what is in memory now passed over by garbage collection, once per process, and only in Spark's own.

    Spark's workers collect garbage after every task, and those of the driver after each plan and commit, which costs
    tens of milliseconds for the modules alone. What is kept is still freed when nothing refers to it any more. Call it
    when everything is imported and connected.
    """
    if _is_sparks():
        gc.collect()
        gc.freeze()


def _is_sparks() -> bool:
    """Whether this is a process of Spark's: a worker, or one in which the driver has something planned."""
    return TaskContext.get() is not None or _forked_by_spark()


def _forked_by_spark() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "pyspark.daemon"
