"""Keeps two warnings out of the log of Spark's driver that say nothing about the program. Classic sessions only.

| Spark's warning | when |
|---|---|
| The data source … replaced a statically registered data source | a session registers ours, which Spark also finds |
| Failed to cancel job group … | a query is stopped between two of its jobs |

*Failure.* Where Spark logs by something else than log4j, the warnings stay.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import SparkSession

__all__ = ["WARNINGS", "leave_out_warnings"]

WARNINGS: Final = "The data source .* replaced a .* registered data source.*|Failed to cancel job group .*"
"""The pattern of a whole message."""
_DONE: Final = "anybroker.log"
"""A property of Spark's JVM, once its log leaves the warnings out."""


def leave_out_warnings(spark: SparkSession) -> None:
    """Leave the warnings out of the log of the session's JVM. May be repeated."""
    session: Any = spark
    machine = getattr(session, "_jvm", None)
    if machine is None:
        return
    # A log4j of another version, or a logging library of the application's.
    with suppress(Py4JError, TypeError):
        if machine.java.lang.System.getProperty(_DONE) is not None:
            return
        machine.java.lang.System.setProperty(_DONE, "set")
        log4j = machine.org.apache.logging.log4j
        context = log4j.LogManager.getContext(False)
        results = log4j.core.Filter.Result
        unwanted = log4j.core.filter.RegexFilter.createFilter(WARNINGS, None, False, results.DENY, results.NEUTRAL)
        # Loggers of their own would show INFO too: Spark's filter for consoles spares loggers that are configured.
        context.getConfiguration().getRootLogger().addFilter(unwanted)
        context.updateLoggers()
