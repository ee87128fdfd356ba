"""Spark's errors as those of this package: they name what they are of, without the plans and stacks of Spark."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.logger import PySparkLogger

from broker.errors import ConfigurationError
from broker.urls import mask_within

__all__ = ["named_place", "planned", "said"]

_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Where PySpark writes each error with its plan and stack as JSON, before it raises it."""


def said(error: Exception) -> str:
    """The first line of what Spark says; of an error of Java its message."""
    java: Any = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage() or java.toString())
    return text.strip().partition("\n")[0].rstrip(";. ")


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
