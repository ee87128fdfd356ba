"""Builds the frames of a pipeline: transformed rows, and rows that did not decode. Batch and streaming; runs nothing.

Both go through one stream, so that one checkpoint and one batch hold them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import StringType, StructField, StructType

from broker.envelopes import DEAD_LETTER_PREFIX
from broker.errors import ConfigurationError
from broker_spark.common.schema import COLUMNS, spark_schema
from broker_spark.decode.decoding import PAYLOAD, REASON, Decoded, decode, judge
from broker_spark.pipeline.definition import Pipeline, errors_of
from broker_spark.runtime.spark_errors import plan_errors_as

__all__ = ["DEAD", "OUT", "ROWS", "Frames", "as_dead_letters", "counted_frames_of", "frames_of", "joined"]

OUT: Final = "out"
DEAD: Final = "dead"
ROWS: Final = "rows_of_"
"""Prefix of the metrics with the number of rows of each source."""
_SEEN: Final = "seen_of_"
_LONGEST_REASON: Final = 256
"""Characters; in UTF-8 they are no more than the 1024 bytes that each broker takes as an attribute."""
_ROW: Final = "__row"
_TASK: Final = "__task"


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
    return _frames(pipeline, sources, lambda frame, _: frame, lambda frame, _, kind: decode(frame, kind))


def counted_frames_of(pipeline: Pipeline, sources: Mapping[str, DataFrame], tasks: int) -> Frames:
    """`frames_of` for a stream: each source is read and decoded once for both frames, and its rows are counted.

    :param tasks: the number of tasks after the reads of a batch.
    """
    return _frames(
        pipeline, sources, _counted, lambda frame, name, kind: _decoded_once(_judged_once(frame, kind, tasks), name)
    )


def _frames(
    pipeline: Pipeline,
    sources: Mapping[str, DataFrame],
    plain: Callable[[DataFrame, str], DataFrame],
    decoded: Callable[[DataFrame, str, Any], Decoded],
) -> Frames:
    missing = [name for name in pipeline.sources if name not in sources]
    if missing:
        raise ConfigurationError(f"There is no frame for {', '.join(missing)}", advice="Give one for each source")
    frames: dict[str, DataFrame] = {}
    dead: list[DataFrame] = []
    for name, source in pipeline.sources.items():
        if source.decode is None:
            frames[name] = plain(sources[name], name)
        else:
            with errors_of(f"sources.{name}"):
                halves = decoded(sources[name], name, source.decode)
            frames[name] = halves.rows
            dead.append(_complete(halves.dead, pipeline.parsed_options(name).topics))
    return Frames(_transformed(pipeline, frames), reduce(DataFrame.unionByName, dead) if dead else None)


def _counted(frame: DataFrame, name: str, what: str = ROWS) -> DataFrame:
    return frame.observe(f"{what}{name}", F.count(F.lit(1)).alias("rows"))


def _judged_once(frame: DataFrame, type: Any, tasks: int) -> DataFrame:
    """Judged rows after an exchange, which Spark runs once for all its readers.

    Rows of a partition stay together and in order. They are packed into one column: otherwise Spark would prune the
    columns below the exchange for each reader, and run an exchange for each.
    """
    judged = judge(frame, type)
    is_dead = F.col(REASON).isNotNull()
    # Decoded rows do not need their bytes any more.
    columns = [F.when(is_dead, F.col(name)).alias(name) if name == "value" else name for name in judged.columns]
    packed = judged.select(F.struct(*columns).alias(_ROW), _task_of(judged, tasks).alias(_TASK))
    return packed.repartitionById(tasks, _TASK)


def _task_of(frame: DataFrame, tasks: int) -> Column:
    """The task of a row. The same when its batch runs again, since message ids contain it."""
    read = F.spark_partition_id()
    if "partition" in frame.columns:
        # A batch that runs again may read its partitions in another order.
        read = F.coalesce(F.col("partition"), read)
    if "topic" in frame.columns:
        read = F.pmod(read, F.lit(tasks)) + F.pmod(F.hash("topic"), F.lit(tasks))
    return F.pmod(read, F.lit(tasks))


def _decoded_once(judged: DataFrame, name: str) -> Decoded:
    columns = [each.name for each in cast("StructType", judged.schema[_ROW].dataType)]
    is_dead = F.col(f"{_ROW}.{REASON}").isNotNull()

    def only(columns: Sequence[str]) -> list[Column]:
        return [F.col(f"{_ROW}.{each}").alias(each) for each in columns]

    # Spark does not move a filter below an observed frame, and so not below the exchange.
    rows = _counted(judged, name, _SEEN).where(~is_dead)
    return Decoded(
        rows.select(*only([each for each in columns if each not in ("value", REASON)])),
        _counted(judged, name).where(is_dead).select(*only([each for each in columns if each != PAYLOAD])),
    )


def joined(frames: Frames) -> DataFrame:
    """Rows of both kinds as one frame: column `out` or `dead` is null."""
    out = frames.out.select(F.struct("*").alias(OUT))
    if frames.dead is None:
        return out.withColumn(DEAD, F.lit(None).cast(_DEAD_SCHEMA))
    dead = frames.dead.select(F.lit(None).cast(out.schema[OUT].dataType).alias(OUT), F.struct("*").alias(DEAD))
    return out.select(OUT, F.lit(None).cast(_DEAD_SCHEMA).alias(DEAD)).union(dead)


def as_dead_letters(dead: DataFrame, pipeline: str) -> DataFrame:
    """Dead rows as the messages that `broker dead` lists and redrives."""
    reason = F.col(REASON)
    # A longer reason might exceed a broker's limit, and then the batch could never be written.
    short = F.concat(F.substring(reason, 1, _LONGEST_REASON - 1), F.lit("…"))
    details = {
        "topic": F.col("topic"),
        "reason": F.when(F.length(reason) > _LONGEST_REASON, short).otherwise(reason),
        "subscription": F.lit(pipeline),
        "id": F.col("id"),
        "partition": F.col("partition").cast("string"),
        "offset": F.col("offset").cast("string"),
    }
    added = F.map_filter(
        F.create_map(*(each for name, text in details.items() for each in (F.lit(DEAD_LETTER_PREFIX + name), text))),
        lambda _, text: text != "",
    )
    # A row from a dead-letter topic has such attributes already.
    own = F.map_filter(
        F.coalesce(F.col("attributes"), F.create_map().cast("map<string,string>")),
        lambda name, _: ~name.startswith(DEAD_LETTER_PREFIX),
    )
    return dead.select("key", "value", F.map_concat(own, added).alias("attributes"))


_DEAD_SCHEMA: Final = StructType([*spark_schema(COLUMNS), StructField(REASON, StringType())])


def _complete(dead: DataFrame, topics: Sequence[str]) -> DataFrame:
    """The rows with every column of a source, including those that option `columns` left out.

    :param topics: the topics of the source: a redrive needs the origin of a letter.
    """
    only = str(topics[0]) if len(topics) == 1 else None
    missing = {each: F.lit(only if each == "topic" else None) for each in COLUMNS if each not in dead.columns}
    return dead.select(
        *(missing.get(each.name, F.col(each.name)).cast(each.dataType).alias(each.name) for each in _DEAD_SCHEMA)
    )


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
