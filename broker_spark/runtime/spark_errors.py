"""Turns Spark's errors into errors of this package, without Spark's plans and stack traces."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast

from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.logger import PySparkLogger

from broker import errors
from broker.errors import BackendError, BrokerError, ConfigurationError, PublishError

__all__ = ["as_batch_error", "broker_error_in", "first_line", "interrupted", "plan_errors_as"]

_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""PySpark logs each error here with its plan and stack as JSON before raising it."""
_OURS: Final = re.compile(r"^broker\.errors\.(\w+): (.+)$", re.MULTILINE)
_INTERRUPTION: Final = "java.lang.InterruptedException"
_INTERRUPTIONS: Final = (
    _INTERRUPTION,
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)
_CALLED: Final = "An error occurred while calling"
"""The beginning of a Java error in Python."""
_SHOWN: Final = 500
_ANOTHER: Final = re.compile(r"^(The above exception was the direct cause|During handling of the above)", re.MULTILINE)
"""The line between two chained errors of a traceback."""


def broker_error_in(error: BaseException) -> BrokerError | None:
    """The error of this package with which a Python process of Spark failed, parsed from its text; None if another."""
    text = str(error)
    found = list(_OURS.finditer(text))
    if not found or _ANOTHER.search(text, found[-1].end()):
        return None
    name, message = found[-1].groups()
    kind = getattr(errors, name, BackendError)
    # A PublishError needs the outcomes of its messages, which stayed in that process.
    return cast("BrokerError", (BackendError if kind is PublishError else kind)(message, advice=""))


def first_line(error: Exception) -> str:
    """The first line of a Spark or Java error message."""
    java: Any = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage() or java.toString())
    return text.strip().partition("\n")[0].rstrip(";. ")


def interrupted() -> InterruptedError:
    """An error that Spark takes for the interruption by which it stops a query."""
    return InterruptedError(f"py4j.protocol.Py4JJavaError: {_CALLED} sleep: {_INTERRUPTION}")


def as_batch_error(error: BaseException) -> Exception:
    """The error of a failed batch for Spark, with a short text.

    Spark searches the text for an interruption with a recursive pattern: a text as long as a Java stack trace overflows
    the stack, and the query hangs for ever. Py4J does not answer at all to an error that is no `Exception`.
    """
    text = str(error)
    if text.startswith(_CALLED) and any(each in text for each in _INTERRUPTIONS):
        return interrupted()
    return RuntimeError(f"The batch failed with {type(error).__name__}: {text[:_SHOWN]}")


@contextmanager
def plan_errors_as(what: str, advice: str) -> Generator[None]:
    """Turn Spark's analysis errors within the block into errors that start with `what`.

    :raises ConfigurationError: instead of an error of Spark's analysis.
    """
    loggers = [PySparkLogger.getLogger(name) for name in _LOGGERS]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    except (AnalysisException, IllegalArgumentException) as error:
        raise ConfigurationError(f"{what}: {first_line(error)}", advice=advice) from error
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
