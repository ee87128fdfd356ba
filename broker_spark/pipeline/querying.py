"""The query of a pipeline beside others: whether it may begin, and who ended it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from broker.errors import ConfigurationError
from broker.urls import mask_within
from broker_spark.pipeline.definition import AVAILABLE_NOW, Pipeline

__all__ = ["LOOK_SECONDS", "check_ended", "check_name", "end"]

LOOK_SECONDS: Final = 0.2
"""How often a query is looked at."""


def check_name(spark: SparkSession, name: str) -> None:
    """Make sure that no query of this session has this name.

    :raises ConfigurationError: one has, and Spark starts none beside it.
    """
    if any(query.name == name for query in spark.streams.active):
        raise ConfigurationError(
            f"name is {name!r}, and a query of this name runs in this session",
            advice="Wait for its end, or stop it; another pipeline needs another name, and another checkpoint",
        )


def end(spark: SparkSession, query: StreamingQuery) -> None:
    """Stop a query. Spark cancels the jobs of its batch once and waits; what the batch begins then is cancelled too."""
    with ThreadPoolExecutor(1, "broker-pipeline-stop") as pool:
        stopping = pool.submit(query.stop)
        while wait((stopping,), LOOK_SECONDS).not_done:
            spark.sparkContext.cancelJobGroup(str(query.runId))
        stopping.result()


def check_ended(pipeline: Pipeline, query: StreamingQuery) -> None:
    """Make sure that a query that its run did not stop has read all that it was to read.

    :raises ConfigurationError: somebody else stopped it.
    """
    if pipeline.trigger == AVAILABLE_NOW and _found_no_more(query):
        return
    raise ConfigurationError(
        f"The query was stopped from outside, or by another run on checkpoint {mask_within(pipeline.checkpoint)!r}",
        advice="Let one run at a time have this checkpoint; the next one goes on from what is committed",
    )


def _found_no_more(query: StreamingQuery) -> bool:
    """Whether the last that it did was to look for a batch and find none. Its progress does not tell."""
    inner: Any = query
    try:
        return bool(inner._jsq.streamingQuery().noNewData())
    except Py4JError:
        # It is no public part of Spark. Where it is none at all, the end is believed.
        return True
