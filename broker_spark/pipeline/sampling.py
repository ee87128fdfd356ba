"""What a pipeline makes of a few rows: decoded, transformed and counted for each sink.

Reads the logs in this process, with a reader that has no group, and gives Spark the rows as they are. Writes nothing,
commits nothing, and makes no checkpoint, subscription or spool. Blocking; driver only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, Final, cast

import pyarrow
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from broker.checks import check_count
from broker_spark.common.connections import bus_of
from broker_spark.common.options import Position
from broker_spark.common.schema import arrow_schema, spark_schema
from broker_spark.log.ranges import Range, offsets_count_rows
from broker_spark.log.reading import read_range
from broker_spark.pipeline.definition import Pipeline
from broker_spark.pipeline.frames import frames_of
from broker_spark.pipeline.log_ranges import SourceLogs, as_position, check_named, logs_of, ranges_of
from broker_spark.pipeline.preflight import check_rows
from broker_spark.pipeline.running import check_classic, session_for
from broker_spark.pipeline.tables import no_rows

__all__ = ["SAMPLED", "Sample", "sample"]

SAMPLED: Final = 20
"""Rows of each source by default."""
_EARLIEST: Final = Position("earliest")
_LATEST: Final = Position("latest")


@dataclass(frozen=True, slots=True)
class Sample:
    """A few rows of a pipeline.

    :ivar rows_in: how many rows were read, by source.
    :ivar rows_out: how many rows each sink would get, by name.
    :ivar columns: the columns of the rows for the sinks.
    :ivar rows: these rows, at most as many as were wanted of a source.
    :ivar dead: the rows that did not decode: every column of a source, and `reason`.
    """

    pipeline: str
    rows_in: Mapping[str, int]
    rows_out: Mapping[str, int]
    columns: Sequence[str]
    rows: Sequence[Row]
    dead: Sequence[Row]


def sample(pipeline: Pipeline, *, rows: int = SAMPLED, start: Any = None, spark: SparkSession | None = None) -> Sample:
    """Decode and transform a few rows of each source, as one batch without a watermark.

    The rows are the newest, on Pulsar the first. They come from all partitions in turn. A subscription is not touched:
    its rows are those of the topic's log.

    :param rows: the most rows of each source.
    :param start: read the first rows from here on: "earliest", a time or offsets, as option `start` takes it.
    :param spark: None uses the active session, or a new one.
    :raises ConfigurationError: a part of the pipeline or the start cannot be used, or Spark does not plan the transform
        for a batch.
    :raises Unsupported: a broker has no log, or the session is one of Spark Connect.
    :raises TopicNotFound: a topic does not exist.
    """
    check_count("rows", rows)
    spark = session_for(pipeline, spark)
    check_classic(spark)
    sources = logs_of(pipeline)
    begin = None if start is None else as_position("start", start)
    if begin is not None:
        check_named("start", begin, sources)
    tables = {each.source: _read(each, begin, rows) for each in sources}
    schemas = {each.source: spark_schema(each.options.columns) for each in sources}
    frames = {
        name: spark.createDataFrame(table, schemas[name]) if table.num_rows else no_rows(spark, schemas[name])
        for name, table in tables.items()
    }
    found = frames_of(pipeline, frames)
    check_rows(pipeline, found.out)
    return Sample(
        pipeline.name,
        {name: int(table.num_rows) for name, table in tables.items()},
        _count(pipeline, found.out),
        found.out.columns,
        found.out.take(rows),
        [] if found.dead is None else found.dead.collect(),
    )


def _count(pipeline: Pipeline, out: DataFrame) -> dict[str, int]:
    """The rows that each sink would get."""
    counts = [F.count_if(F.expr(sink.where)) if sink.where else F.count(F.lit(1)) for sink in pipeline.sinks.values()]
    (counted,) = out.agg(*counts).collect()
    return dict(zip(pipeline.sinks, map(int, counted), strict=True))


def _read(source: SourceLogs, start: Position | None, rows: int) -> Any:
    """The rows of a source as an Arrow table."""
    counts = offsets_count_rows(bus_of(source.options.url))
    found = ranges_of(source, start or _EARLIEST, _LATEST)
    newest = start is None and counts
    # Each partition has one row of the sample or more, so that more partitions are not read.
    parts = [_rows(source, each, rows, newest=newest) for each in found[:rows]]
    if newest:
        parts = [part[::-1] for part in parts]
    turns = chain.from_iterable(zip_longest(*parts))
    chosen = [each for each in turns if each is not None][:rows]
    table = cast("Any", pyarrow).Table.from_batches(
        chosen[::-1] if newest else chosen, schema=arrow_schema(source.options.columns)
    )
    return table.combine_chunks()


def _rows(source: SourceLogs, wanted: Range, rows: int, *, newest: bool) -> list[Any]:
    """The last or the first rows of a range, each a batch of its own."""
    if newest:
        wanted = replace(wanted, start=max(wanted.start, wanted.stop - rows))
    found: list[Any] = []
    for batch in read_range(replace(source.options, arrow_rows=rows), wanted):
        found += [batch.slice(number, 1) for number in range(batch.num_rows)]
        if len(found) >= rows and not newest:
            break
    return found[:rows]
