"""Builds the frames of a pipeline: transformed rows, and dead rows. Batch and streaming; runs nothing.

A stream has only the rows for the sinks, and notes the places of dead rows; `letters` reads these again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Final

from pyspark import Accumulator
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import StructType

from broker.errors import ConfigurationError
from broker_spark.common.options import SourceOptions
from broker_spark.decode.decoding import PAYLOAD, REASON, judge
from broker_spark.pipeline.definition import Pipeline, Source, errors_of
from broker_spark.pipeline.expectations import (
    check_condition,
    failure_metrics,
    failures_in,
    judge_expectations,
    partition_metrics,
    passed,
    without_judgement,
)
from broker_spark.pipeline.letters import complete, note_dead, origin_of
from broker_spark.runtime.spark_errors import plan_errors_as

__all__ = [
    "Counts",
    "Frames",
    "counts_of",
    "frames_of",
    "metrics_in_progress",
    "metrics_of_batch",
    "metrics_of_running_batch",
    "stream_of",
]

_METRICS: Final = "rows_of_"
"""Prefix of the metrics of each source."""
_ROWS: Final = "rows"
_DEAD: Final = "dead"


@dataclass(frozen=True, slots=True)
class Frames:
    """The rows that a pipeline produces.

    :ivar out: the rows for the sinks.
    :ivar dead: the rows that did not decode, or failed an expectation with the action "dead": every column of a source,
        and `reason`; None if no source can have such rows.
    """

    out: DataFrame
    dead: DataFrame | None


def frames_of(pipeline: Pipeline, sources: Mapping[str, DataFrame]) -> Frames:
    """Decode and transform.

    :param sources: by name, with the columns of `format("broker")`; in tests, with those that the transform needs.
    :raises ConfigurationError: a source is missing or cannot be decoded, Spark cannot plan the SQL or the transform, or
        the transform returns no DataFrame.
    """
    missing = [name for name in pipeline.sources if name not in sources]
    if missing:
        raise ConfigurationError(f"There is no frame for {', '.join(missing)}", advice="Give one for each source")
    frames: dict[str, DataFrame] = {}
    dead: list[DataFrame] = []
    for name, source in pipeline.sources.items():
        frame = sources[name]
        if source.decode is not None:
            with errors_of(f"sources.{name}"):
                frame = judge(frame, source.decode)
        judged = _judged(name, source, frame, _after_decode(source, frame))
        frames[name] = _after_decode(source, _passed(source, judged))
        if source.writes_letters:
            letters = judged.where(F.col(REASON).isNotNull())
            dead.append(complete(letters, pipeline.parsed_options(name).topics))
    return Frames(_transformed(pipeline, frames), reduce(DataFrame.unionByName, dead) if dead else None)


def stream_of(
    pipeline: Pipeline,
    sources: Mapping[str, DataFrame],
    places: Mapping[str, Accumulator[Any]],
    counts: Mapping[str, Observation] | None = None,
) -> DataFrame:
    """The rows for the sinks, read once; the rows of each source are counted.

    :param sources: by name, with the columns of `origin_of` besides their own.
    :param places: by name, for sources with `decode`: where the places of dead rows are noted.
    :param counts: by name: the counts of a batch; None for a stream, whose progress has them.
    """
    frames: dict[str, DataFrame] = {}
    for name, source in pipeline.sources.items():
        frame, options = sources[name], pipeline.parsed_options(name)
        columns: Sequence[str] = options.columns
        if source.decode is not None:
            with errors_of(f"sources.{name}"):
                frame = judge(frame, source.decode, origin_of(options), partial(note_dead, places=places[name]))
            columns = [*(each for each in columns if each != "value"), PAYLOAD]
        judged = _judged(name, source, frame, frame.select(*columns))
        metrics = [F.count(F.lit(1)).alias(_ROWS), *failure_metrics(source.expect)]
        if source.writes_letters:
            metrics.append(F.count_if(F.col(REASON).isNotNull()).alias(_DEAD))
            metrics += partition_metrics(source.expect, *_partition(options))
        # Spark does not move a filter of the transform below an observed frame.
        observed = judged.observe(_metrics_of(name) if counts is None else counts[name], *metrics)
        frames[name] = _passed(source, observed).select(*columns)
    return _transformed(pipeline, frames)


def _metrics_of(source: str) -> str:
    """The name of the observed metrics of a source."""
    return f"{_METRICS}{source}"


Metrics = Mapping[str, Any]
"""The observed metrics of one source, by name."""


def metrics_in_progress(pipeline: Pipeline, progress: Any) -> dict[str, Metrics]:
    """The metrics of each source in a batch, by the progress of its query."""
    observed: Mapping[str, Any] = progress["observedMetrics"] or {}
    return {name: observed[_metrics_of(name)] for name in pipeline.sources if _metrics_of(name) in observed}


def metrics_of_running_batch(pipeline: Pipeline, query: Any) -> dict[str, Metrics]:
    """The metrics of each source in the batch that the query has just read.

    :param query: a `StreamingQuery` of a classic session, in its `foreachBatch`.
    """
    # Spark reports them to Python after the commit, which is too late for letters.
    observed = query._jsq.streamingQuery().lastExecution().observedMetrics()
    found = {name: observed.get(_metrics_of(name)) for name in pipeline.sources}
    return {name: json.loads(each.get().json()) for name, each in found.items() if each.isDefined()}


def metrics_of_batch(spark: SparkSession, counts: Mapping[str, Observation]) -> dict[str, Metrics]:
    """The metrics of each source in a batch that was written. A source that the transform does not use has none.

    :param counts: those of `stream_of`.
    """
    # Spark reports counts by events, which are in order: after those of a last job, all others have arrived.
    last = Observation()
    spark.range(1).observe(last, F.count(F.lit(1)).alias(_ROWS)).collect()
    assert last.get
    read: dict[str, Any] = dict(counts)
    return {name: each.get for name, each in read.items() if each._jo.future().isCompleted()}


@dataclass(frozen=True, slots=True)
class Counts:
    """The rows of a batch.

    :ivar read: of all sources.
    :ivar dead: those that became dead letters.
    :ivar failed: those that failed each expectation, by `source.expectation`.
    """

    read: int
    dead: int
    failed: Mapping[str, int]


def counts_of(pipeline: Pipeline, metrics: Mapping[str, Metrics]) -> Counts:
    """The rows of a batch.

    :param metrics: by source.
    """
    return Counts(
        sum(int(each[_ROWS]) for each in metrics.values()),
        sum(int(each[_DEAD]) for each in metrics.values() if _DEAD in each),
        {
            f"{name}.{expectation}": count
            for name, each in metrics.items()
            for expectation, count in failures_in(pipeline.sources[name].expect, each).items()
        },
    )


def _judged(name: str, source: Source, frame: DataFrame, offered: DataFrame) -> DataFrame:
    """The frame with what its rows failed.

    :param frame: the rows of the source, judged by `decode` if it has one.
    :param offered: those columns of it that conditions may use.
    """
    for each, expect in source.expect.items():
        with errors_of(f"sources.{name}.expect.{each}"):
            check_condition(offered, expect.condition, _columns(offered))
    return judge_expectations(frame, source.expect, decoded=source.decode is not None)


def _passed(source: Source, judged: DataFrame) -> DataFrame:
    """The rows for the transform, with all columns of the source."""
    if source.decode is None and not source.expect:
        return judged
    decoded = source.decode is not None
    rows = judged.where(passed(source.expect, decoded=decoded))
    return without_judgement(rows, source.expect, decoded=decoded)


def _after_decode(source: Source, frame: DataFrame) -> DataFrame:
    """The columns for the transform."""
    return frame if source.decode is None else frame.drop("value", REASON)


def _partition(options: SourceOptions) -> tuple[Column, Column]:
    """The topic and partition of a row; the same for all rows of a subscription."""
    return (F.col("topic"), F.col("partition")) if origin_of(options) else (F.lit(""), F.lit(0))


def _transformed(pipeline: Pipeline, frames: Mapping[str, DataFrame]) -> DataFrame:
    found = _result(pipeline, frames)
    if any(frame.isStreaming for frame in frames.values()) and not found.isStreaming:
        raise ConfigurationError(
            f"{'transform' if pipeline.sql is None else 'sql'} returned a DataFrame that uses none of the sources",
            advice=f"Derive it from {', '.join(frames)}",
        )
    return found


def _result(pipeline: Pipeline, frames: Mapping[str, DataFrame]) -> DataFrame:
    first = next(iter(frames.values()))
    offered = ", ".join(f"{name} ({_columns(frame)})" for name, frame in frames.items())
    if pipeline.sql is not None:
        for name, frame in frames.items():
            frame.createOrReplaceTempView(name)
        with plan_errors_as(f"sql is {pipeline.sql!r}", f"It takes one query on {offered}"):
            return first.sparkSession.sql(pipeline.sql)
    if pipeline.transform is None:
        return first
    with plan_errors_as("transform cannot be planned", f"It gets {offered}"):
        found: object = pipeline.transform(first) if len(frames) == 1 else pipeline.transform(**frames)
    if not isinstance(found, DataFrame):
        raise ConfigurationError(
            f"transform returned {type(found).__name__} instead of a DataFrame",
            advice="Return the rows for the sinks",
        )
    if not found.columns:
        raise ConfigurationError(
            "transform returned rows without columns", advice="Keep the columns that the sinks need"
        )
    return found


def _columns(frame: DataFrame) -> str:
    """The names of a frame's columns, and of those in its payload."""
    found: list[str] = []
    for each in frame.schema:
        inner = each.dataType.names if each.name == PAYLOAD and isinstance(each.dataType, StructType) else ()
        found += [f"{PAYLOAD}.{name}" for name in inner] or [each.name]
    return ", ".join(found)
