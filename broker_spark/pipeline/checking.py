"""Whether the rows of a pipeline fit into its sinks, before the first batch, which might reach some of them only.

Spark analyses, and brokers tell of topics; nothing runs and nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from broker.errors import ConfigurationError
from broker_spark.configured import is_exact
from broker_spark.connections import bus_of
from broker_spark.data_source import BrokerDataSource
from broker_spark.hadoop import find_place
from broker_spark.options import find_url, topic_name
from broker_spark.pipeline.definition import BATCH, FileSink, Pipeline, Sink, TableSink, TopicSink, part_of
from broker_spark.pipeline.frames import Frames
from broker_spark.pipeline.writing import as_messages, check_table
from broker_spark.schema import nearest
from broker_spark.sink import SinkOptions
from broker_spark.spark_errors import named_place, planned
from broker_spark.topics import identity_of

__all__ = ["check_rows", "check_topics"]


def check_topics(pipeline: Pipeline) -> None:
    """Make sure that the topics of the sinks are there, also that of letters which may be long in coming.

    Asks the brokers; one that does not tell is believed.

    :raises TopicNotFound: one is not.
    """
    for sink in pipeline.all_sinks().values():
        if isinstance(sink, TopicSink):
            identity_of(bus_of(find_url(sink.url or pipeline.url)), topic_name(sink.topic))


def check_rows(pipeline: Pipeline, frames: Frames) -> None:
    """Make sure that every sink can take these rows.

    :param frames: of a batch or a stream.
    :raises ConfigurationError: names the sink, and the condition, column or format that cannot be used.
    :raises Unsupported: a broker cannot do what a column asks for.
    """
    for name, sink in pipeline.all_sinks().items():
        letters = name == "dead_letters"
        if letters and (frames.dead is None or isinstance(sink, TopicSink)):
            continue
        rows = frames.dead if letters and frames.dead is not None else frames.out
        what = f"table is {sink.table!r}" if isinstance(sink, TableSink) else "The rows cannot be written"
        with part_of(name), planned(what, "Let the transform give what the sink can take, or name another"):
            _check(pipeline, sink, _chosen(sink, rows))


def _check(pipeline: Pipeline, sink: Sink, rows: DataFrame) -> None:
    match sink:
        case TopicSink():
            _check_twice(rows.columns, exact=True)
            SinkOptions.parse(pipeline.sink_options(sink), as_messages(rows, sink).schema)
        case FileSink(path=path, partition_by=partition_by):
            with named_place("path", path):
                find_place(rows.sparkSession, path)
            _check_columns(rows)
            _check_partitions(partition_by, rows)
            _check_format(rows.sparkSession, sink.format)
        case TableSink():
            _check_columns(rows)
            if rows.sparkSession.catalog.tableExists(sink.table):
                check_table(sink, rows)
            else:
                _check_format(rows.sparkSession, sink.format)
        case _:
            # What a function takes is not known here.
            pass


def _chosen(sink: Sink, rows: DataFrame) -> DataFrame:
    if not sink.where:
        return rows
    with planned(f"where is {sink.where!r}", f"It takes a condition of SQL on the columns {', '.join(rows.columns)}"):
        chosen = rows.where(sink.where)
        # A batch counts them before it writes them, and Spark filters by more than it counts by.
        rows.agg(F.count_if(F.expr(sink.where)))
        return chosen


def _check_columns(rows: DataFrame) -> None:
    for name in rows.columns:
        if name.lower() == BATCH:
            raise ConfigurationError(f"The rows have a column {name!r}, which is the pipeline's", advice="Rename it")
    _check_twice(rows.columns, exact=is_exact(rows.sparkSession))


def _check_twice(columns: Sequence[str], *, exact: bool) -> None:
    known = [name if exact else name.lower() for name in columns]
    for number, name in enumerate(known):
        if name in known[:number]:
            raise ConfigurationError(f"The rows have two columns {columns[number]!r}", advice="Rename one of them")


def _check_partitions(partition_by: Sequence[str], rows: DataFrame) -> None:
    exact = is_exact(rows.sparkSession)
    known = rows.columns if exact else [name.lower() for name in rows.columns]
    for name in partition_by:
        if (name if exact else name.lower()) not in known:
            raise ConfigurationError(
                f"partition_by has {name!r}, which is no column of the rows", advice=nearest(name, rows.columns)
            )
    if len(partition_by) >= len(known):
        raise ConfigurationError(
            f"partition_by has all columns, {', '.join(partition_by)}", advice="Leave one for the files themselves"
        )


def _check_format(spark: SparkSession, name: str) -> None:
    if name.lower() == BrokerDataSource.name():
        raise ConfigurationError(f"format is {name!r}, which has no files", advice="Write to topics with a TopicSink")
    session: Any = spark
    try:
        lookup = session._jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource
        lookup(name, session._jsparkSession.sessionState().conf())
    except (AnalysisException, Py4JJavaError) as error:
        raise ConfigurationError(
            f"format is {name!r}, which Spark does not find",
            advice="It takes parquet, orc, json or what Spark has jars of",
        ) from error
