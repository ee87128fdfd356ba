"""What a worker process of Spark keeps over its tasks, and over what it plans and commits."""

from __future__ import annotations

import gc
import sys
from functools import cache

from pyspark import TaskContext

__all__ = ["keep_what_is_loaded"]


@cache
def keep_what_is_loaded() -> None:
    """Have what is in memory now passed over by garbage collection, once per process, and only in Spark's own.

    Spark's workers collect garbage after every task, and those of the driver after each plan and commit, which costs
    tens of milliseconds for the modules alone. What is kept is still freed when nothing refers to it any more. Call it
    when everything is imported and connected.
    """
    if TaskContext.get() is not None or _forked_by_spark():
        gc.collect()
        gc.freeze()


def _forked_by_spark() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "pyspark.daemon"
