"""Spark's errors as those of this package: they name what they are of, without the plans and stacks of Spark."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.logger import PySparkLogger

from broker import errors
from broker.errors import BackendError, BrokerError, ConfigurationError, PublishError
from broker.urls import mask_within

__all__ = ["in_short", "interrupted", "named_place", "ours", "planned", "said"]

_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Where PySpark writes each error with its plan and stack as JSON, before it raises it."""
_OURS: Final = re.compile(r"^broker\.errors\.(\w+): (.+)$", re.MULTILINE)
_INTERRUPTION: Final = "java.lang.InterruptedException"
_INTERRUPTIONS: Final = (
    _INTERRUPTION,
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)
_CALLED: Final = "An error occurred while calling"
"""How an error of Java begins that came to Python."""
_SHOWN: Final = 500
_ANOTHER: Final = re.compile(r"^(The above exception was the direct cause|During handling of the above)", re.MULTILINE)
"""What a traceback has between an error and the one that it became."""


def ours(error: BaseException) -> BrokerError | None:
    """The error of this package that a Python process of Spark ended with, told by its text; None if it was another."""
    text = str(error)
    found = list(_OURS.finditer(text))
    if not found or _ANOTHER.search(text, found[-1].end()):
        return None
    name, message = found[-1].groups()
    kind = getattr(errors, name, BackendError)
    # That one is made of the fates of messages, which stay where it was raised.
    return cast("BrokerError", (BackendError if kind is PublishError else kind)(message, advice=""))


def said(error: Exception) -> str:
    """The first line of what Spark says; of an error of Java its message."""
    java: Any = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage() or java.toString())
    return text.strip().partition("\n")[0].rstrip(";. ")


def interrupted() -> InterruptedError:
    """What Spark takes for the interruption with which it ends a query."""
    return InterruptedError(f"py4j.protocol.Py4JJavaError: {_CALLED} sleep: {_INTERRUPTION}")


def in_short(error: BaseException) -> Exception:
    """What a batch that failed tells Spark, which looks through the text for an interruption.

    Its pattern takes some of the stack for each character, and a text as long as a trace of Java takes all of it: then
    the query stands still for ever. Py4J gives it no answer at all to what is no `Exception`.
    """
    text = str(error)
    if text.startswith(_CALLED) and any(each in text for each in _INTERRUPTIONS):
        return interrupted()
    return RuntimeError(f"The batch ended with {type(error).__name__}: {text[:_SHOWN]}")


@contextmanager
def planned(what: str, advice: str) -> Generator[None]:
    """Have what Spark cannot plan name what gave it.

    :raises ConfigurationError: in place of an error of Spark's analysis.
    """
    loggers = [PySparkLogger.getLogger(name) for name in _LOGGERS]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    except (AnalysisException, IllegalArgumentException) as error:
        raise ConfigurationError(f"{what}: {said(error)}", advice=advice) from error
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


@contextmanager
def named_place(name: str, path: str) -> Generator[None]:
    """Have what the file system of a directory refuses name the directory.

    :param name: what gave it, for the error.
    :raises ConfigurationError: in place of an error of Java.
    """
    try:
        yield
    except (Py4JJavaError, IllegalArgumentException) as error:
        shown = mask_within(path)
        raise ConfigurationError(
            f"{name} is {shown!r}: {said(error).replace(path, shown)}",
            advice="It takes a directory that Spark may write to, of a file system that it has the jars of",
        ) from error
