"""Dead letters of a pipeline: notes where rows of a batch are dead, and reads those places again.

The stream carries only rows for the transform, so a batch without dead rows pays nothing for letters. The tasks that
decode tell the driver by an accumulator that there are some, and the first and the last of their offsets in each
partition. What lies between these, or all segments of the batch in a spool, is read and decoded a second time; what
does not decode are the letters. Spark evaluates expectations, and reports only the partitions of rows that failed: what
the batch has of these is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import pyarrow
from pyspark import Accumulator
from pyspark.accumulators import AccumulatorParam
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import StringType, StructField, StructType

from broker.envelopes import DEAD_LETTER_PREFIX
from broker.urls import mask_within
from broker_spark.common.connections import bus_of
from broker_spark.common.files import open_files
from broker_spark.common.options import SourceOptions
from broker_spark.common.schema import COLUMNS, spark_schema
from broker_spark.common.topics import chosen_topics, identity_of
from broker_spark.decode.decoding import REASON, judge
from broker_spark.log.ranges import Range
from broker_spark.log.reading import read_range
from broker_spark.pipeline.batch_ranges import BatchRanges
from broker_spark.pipeline.definition import Pipeline
from broker_spark.pipeline.expectations import judge_expectations
from broker_spark.spool import segments
from broker_spark.spool.segments import Segment

__all__ = [
    "LETTER_SCHEMA",
    "DeadPlaces",
    "Places",
    "as_dead_letters",
    "complete",
    "note_dead",
    "origin_of",
    "read_in_tasks",
    "read_letters",
]

Places = dict[tuple[str, int], tuple[int, int]]
"""By topic and partition, the first and the last offset of dead rows. Of a spool, only that it is not empty."""

LETTER_SCHEMA: Final = StructType([*spark_schema(COLUMNS), StructField(REASON, StringType())])
"""The columns of a dead row: every column of a source, and the reason."""
_LONGEST_REASON: Final = 256
"""Characters; in UTF-8 they are no more than the 1024 bytes that each broker takes as an attribute."""


class DeadPlaces(AccumulatorParam[Places]):
    """Adds places of dead rows."""

    def zero(self, value: Places) -> Places:
        return {}

    def addInPlace(self, value1: Places, value2: Places) -> Places:
        for place, (first, last) in value2.items():
            known = value1.get(place, (first, last))
            value1[place] = min(known[0], first), max(known[1], last)
        return value1


def origin_of(options: SourceOptions) -> tuple[str, ...]:
    """The columns that tell the place of a row; empty for a subscription."""
    return () if options.subscription is not None else ("topic", "partition", "offset")


def note_dead(dead: pyarrow.Array[Any], origin: Sequence[pyarrow.Array[Any]], places: Accumulator[Places]) -> None:
    """Tell the driver the places of dead rows; called in a task.

    :param dead: which rows are dead.
    :param origin: the columns of `origin_of`.
    """
    if not origin:
        places.add({("", 0): (0, 0)})
        return
    table: Any = cast("Any", pyarrow).table(list(origin), names=["topic", "partition", "offset"])
    found = table.filter(dead).group_by(["topic", "partition"]).aggregate([("offset", "min"), ("offset", "max")])
    columns = (found.column(name).to_pylist() for name in ("topic", "partition", "offset_min", "offset_max"))
    places.add({(topic, partition): (first, last) for topic, partition, first, last in zip(*columns, strict=True)})


def read_letters(
    pipeline: Pipeline, spark: SparkSession, name: str, places: Places, ranges: Callable[[], BatchRanges]
) -> DataFrame:
    """The dead rows of a source in a batch that runs, in the columns of `LETTER_SCHEMA`.

    :param places: those of the dead rows.
    :param ranges: returns what the batch reads.
    """
    options = pipeline.parsed_options(name)
    if options.subscription is not None:
        parts: Sequence[Any] = _segments(options, name, ranges())
        read: Callable[[Any], Iterator[pyarrow.RecordBatch]] = partial(_read_segment, options)
    else:
        options = replace(options, columns=COLUMNS)
        parts = _ranges(options, places)
        read = partial(read_range, options)
    frame = read_in_tasks(spark, parts, read, spark_schema(options.columns))
    source = pipeline.sources[name]
    decoded = source.decode is not None
    judged = judge_expectations(judge(frame, source.decode) if decoded else frame, source.expect, decoded=decoded)
    return complete(judged.where(F.col(REASON).isNotNull()), options.topics)


def _ranges(options: SourceOptions, places: Places) -> list[Range]:
    bus = bus_of(options.url)
    dead = {topic for topic, _ in places}
    # The column of a topic has the broker's name.
    names = {str(topic): topic for topic in chosen_topics(bus, options) if str(topic) in dead}
    identities = {name: identity_of(bus, topic) for name, topic in names.items()}
    return [
        Range(names[topic], identities[topic], partition, first, last + 1)
        for (topic, partition), (first, last) in sorted(places.items())
    ]


def _segments(options: SourceOptions, name: str, ranges: BatchRanges) -> list[Segment]:
    """The segments of a batch."""
    (wanted,) = (range(each.first, each.end) for each in ranges.segments if each.source == name)
    return [each for each in segments.listed(open_files(options.spool)) if each.number in wanted]


def _read_segment(options: SourceOptions, segment: Segment) -> Iterator[pyarrow.RecordBatch]:
    return segments.read(open_files(options.spool), mask_within(options.spool), segment, options.columns)


def read_in_tasks(
    spark: SparkSession, parts: Sequence[Any], read: Callable[[Any], Iterator[pyarrow.RecordBatch]], schema: StructType
) -> DataFrame:
    """The rows of each part, read in a task of its own."""

    def in_task(numbers: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in numbers:
            for number in cast("Any", batch).column(0).to_pylist():
                yield from read(parts[number])

    # Without parts there is one task without rows.
    return spark.range(0, len(parts), 1, max(1, len(parts))).mapInArrow(cast("Any", in_task), schema)


def complete(dead: DataFrame, topics: Sequence[str]) -> DataFrame:
    """The rows with every column of a source, including those that option `columns` left out.

    :param topics: the topics of the source: a redrive needs the origin of a letter.
    """
    only = str(topics[0]) if len(topics) == 1 else None
    missing = {each: F.lit(only if each == "topic" else None) for each in COLUMNS if each not in dead.columns}
    return dead.select(
        *(missing.get(each.name, F.col(each.name)).cast(each.dataType).alias(each.name) for each in LETTER_SCHEMA)
    )


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
