"""Builds the frames of a pipeline: transformed rows, and rows that did not decode. Batch and streaming; runs nothing.

A stream has only the rows for the sinks, and notes the places of dead rows; `letters` reads these again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Final, cast

from pyspark import Accumulator
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import StructType

from broker.errors import ConfigurationError
from broker_spark.decode.decoding import PAYLOAD, REASON, decode, judge
from broker_spark.pipeline.definition import Pipeline, errors_of
from broker_spark.pipeline.letters import complete, note_dead, origin_of
from broker_spark.runtime.spark_errors import plan_errors_as

__all__ = ["Frames", "counts_of", "counts_of_batch", "frames_of", "stream_of"]

_METRICS: Final = "rows_of_"
"""Prefix of the metrics of each source."""
_ROWS: Final = "rows"
_DEAD: Final = "dead"


@dataclass(frozen=True, slots=True)
class Frames:
    """The rows that a pipeline produces.

    :ivar out: the rows for the sinks.
    :ivar dead: the rows that did not decode: every column of a source, and `reason`; None if no source has `decode`.
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
        frames[name] = sources[name]
        if source.decode is not None:
            with errors_of(f"sources.{name}"):
                halves = decode(sources[name], source.decode)
            frames[name] = halves.rows
            dead.append(complete(halves.dead, pipeline.parsed_options(name).topics))
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
        metric = f"{_METRICS}{name}" if counts is None else counts[name]
        rows = F.count(F.lit(1)).alias(_ROWS)
        if source.decode is None:
            frames[name] = sources[name].observe(metric, rows)
            continue
        options = pipeline.parsed_options(name)
        with errors_of(f"sources.{name}"):
            judged = judge(sources[name], source.decode, origin_of(options), partial(note_dead, places=places[name]))
        is_dead = F.col(REASON).isNotNull()
        # Spark does not move a filter of the transform below an observed frame.
        counted = judged.observe(metric, rows, F.count_if(is_dead).alias(_DEAD))
        frames[name] = counted.where(~is_dead).select(*(each for each in options.columns if each != "value"), PAYLOAD)
    return _transformed(pipeline, frames)


def counts_of(progress: Any) -> tuple[int, int]:
    """The rows that a batch has read, and those of them that did not decode, by the progress of its query."""
    observed: Mapping[str, Any] = progress["observedMetrics"] or {}
    rows = [row for name, row in observed.items() if name.startswith(_METRICS)]
    return sum(int(row[_ROWS]) for row in rows), sum(int(row[_DEAD]) for row in rows if _DEAD in row)


def counts_of_batch(spark: SparkSession, counts: Iterable[Observation]) -> tuple[int, int]:
    """The same of a batch that was written. A source that the transform does not use was not read."""
    # Spark reports counts by events, which are in order: after those of a last job, all others have arrived.
    last = Observation()
    spark.range(1).observe(last, F.count(F.lit(1)).alias(_ROWS)).collect()
    assert last.get
    read: list[Any] = [cast("Any", each) for each in counts]
    rows = [each.get for each in read if each._jo.future().isCompleted()]
    return sum(int(row[_ROWS]) for row in rows), sum(int(row[_DEAD]) for row in rows if _DEAD in row)


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
