"""How many tasks a pipeline's batch has behind its reads. Blocking; driver only."""

from __future__ import annotations

import time
from typing import Any, Final

from pyspark.sql import SparkSession

from broker.hooks import logger

__all__ = ["tasks_of"]

_SET: Final = "spark.default.parallelism"
_STILL: Final = 2.0
"""Seconds in which no executor has come or gone, so that all are there."""
_LONGEST: Final = 30.0
"""Seconds for the first one, as Spark itself waits for resources."""
_LOOK: Final = 0.1


def tasks_of(spark: SparkSession) -> int:
    """As many as the session runs at once: on a cluster, once its executors are there.

    They come some seconds after a session is made, and until then Spark tells two. What `spark.default.parallelism`
    says goes first, and is the way where executors come as there is work.

    :param spark: a classic session.
    """
    context: Any = spark.sparkContext
    is_local = context.master == "local" or context.master.startswith("local[")
    if not is_local and not context.getConf().contains(_SET):
        _wait_for_executors(context)
    return int(context.defaultParallelism)


def _wait_for_executors(context: Any) -> None:
    def count() -> int:
        # The driver is one of them.
        return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1

    begun = since = time.monotonic()
    found = count()
    while (now := time.monotonic()) - begun < _LONGEST and (found == 0 or now - since < _STILL):
        time.sleep(_LOOK)
        if (found_now := count()) != found:
            found, since = found_now, time.monotonic()
    if found == 0:
        logger.warning("No executor has come in %g s; the pipeline is planned for two tasks a batch", _LONGEST)
