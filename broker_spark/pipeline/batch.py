"""Writes a batch of a pipeline: its rows into all sinks, its dead rows into the dead letters. Blocking.

Writing the same batch of a query again replaces what it wrote, or publishes the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import DataFrame, SparkSession

from broker_spark.pipeline.definition import CallSink, Pipeline, TopicSink
from broker_spark.pipeline.letters import Places, as_dead_letters, read_letters
from broker_spark.pipeline.writing import clear, write

__all__ = ["write_letters", "write_rows"]


def write_rows(pipeline: Pipeline, frame: DataFrame, batch: int, query: str) -> dict[str, int]:
    """Write the rows into all sinks; how many, by sink. A batch for one sink is read by the job that writes it."""
    # A function may read its rows several times.
    keeps = len(pipeline.sinks) > 1 or any(isinstance(sink, CallSink) for sink in pipeline.sinks.values())
    kept = frame.persist() if keeps else frame
    written: dict[str, int] = {}
    try:
        for name, sink in pipeline.sinks.items():
            rows = kept.where(sink.where) if sink.where else kept
            written[name] = write(pipeline, name, sink, rows, batch, query)
    finally:
        if keeps:
            kept.unpersist()
    return written


def write_letters(
    pipeline: Pipeline, spark: SparkSession, places: Mapping[str, Places], batch: int, query: str, *, again: bool
) -> None:
    """Write the rows that did not decode.

    :param places: where they are, by source.
    :param again: an earlier attempt may have written letters of this batch.
    """
    sink = pipeline.dead_letters
    if sink is None:
        return
    found = [read_letters(pipeline, spark, name, each, batch) for name, each in places.items() if each]
    if not found:
        if again:
            clear(sink, spark, batch)
        return
    dead = reduce(DataFrame.unionByName, found)
    letters = as_dead_letters(dead, pipeline.name) if isinstance(sink, TopicSink) else dead
    write(pipeline, "dead_letters", sink, letters, batch, query)
