"""Writes one batch into one sink. Writing a batch again replaces its files or partition, or publishes the same ids."""

from __future__ import annotations

from pyspark.sql import DataFrame, DataFrameWriter
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from broker.errors import ConfigurationError
from broker_spark.common.options import as_texts
from broker_spark.pipeline.definition import BATCH, CallSink, FileSink, Pipeline, Sink, TableSink, TopicSink
from broker_spark.pipeline.ownership import batch_path, claim_table, insert
from broker_spark.runtime.spark_errors import plan_errors_as

__all__ = ["as_messages", "check_table", "table_writer", "write", "write_files"]


def write(pipeline: Pipeline, name: str, sink: Sink, frame: DataFrame, batch: int, query: str) -> None:
    """Write a batch's rows; they are in the sink when it returns.

    :param name: of the sink in the pipeline.
    :param query: Spark's id of the query, which a checkpoint keeps.
    :raises ConfigurationError: an option, or the table, is not what Spark takes.
    """
    label = name if sink is pipeline.dead_letters else f"sinks.{name}"
    advice = "Fix its format or options" if isinstance(sink, FileSink) else "Fix its options, or its table"
    refused = plan_errors_as(f"{label}: The rows cannot be written", advice)
    match sink:
        case TopicSink():
            options = {**pipeline.sink_options(sink), "writeId": f"{query}-{name}-{batch}"}
            as_messages(frame, sink).write.format("broker").options(**options).mode("append").save()
        case FileSink():
            with refused:
                write_files(sink, frame, batch_path(sink, batch))
        case TableSink():
            with refused:
                _write_table(label, sink, frame, batch, query)
        case CallSink():
            sink.call(frame, batch)


def write_files(sink: FileSink, frame: DataFrame, directory: str) -> None:
    """Write rows as a sink has its files, in the place of all that is in the directory."""
    # In dynamic mode, partitions of a failed attempt without rows now would stay.
    options = {**as_texts(sink.options), "partitionOverwriteMode": "static"}
    writer = frame.write.format(sink.format).options(**options).mode("overwrite")
    (writer.partitionBy(*sink.partition_by) if sink.partition_by else writer).save(directory)


def as_messages(frame: DataFrame, sink: TopicSink) -> DataFrame:
    """The rows as messages: as they are where there is a column `value`, else as JSON.

    :raises ConfigurationError: `key` names no column, or the rows are messages, which have a key of their own.
    """
    if "value" in frame.columns:
        if sink.key is not None:
            raise ConfigurationError(
                f"key is {sink.key!r}, and rows with a column 'value' are messages already",
                advice="Leave key out, and let the transform make a column 'key'; or rename 'value'",
            )
        return frame
    columns = [F.to_json(F.struct("*"), {"ignoreNullFields": "false"}).alias("value")]
    if sink.key is not None:
        if sink.key not in frame.columns:
            raise ConfigurationError(
                f"There is no column {sink.key!r} for the key", advice=f"There are {', '.join(frame.columns)}"
            )
        columns.append(F.col(sink.key).cast("string").alias("key"))
    return frame.select(*columns)


def check_table(sink: TableSink, rows: DataFrame) -> list[str]:
    """The columns of a table that there is, in its order.

    :raises ConfigurationError: the rows have others, or it is not partitioned as a pipeline does it.
    """
    found = rows.sparkSession.catalog.listColumns(sink.table)
    if not any(each.name == BATCH and each.isPartition for each in found):
        raise ConfigurationError(
            f"Table {sink.table!r} is not partitioned by {BATCH!r}, by which a batch that is run again is known",
            advice=f"Let the pipeline make the table, or make it with PARTITIONED BY ({BATCH} BIGINT)",
        )
    columns = [each.name for each in found if each.name != BATCH]
    if sorted(columns) != sorted(rows.columns):
        raise ConfigurationError(
            f"Table {sink.table!r} has the columns {', '.join(columns)}, and the rows have {', '.join(rows.columns)}",
            advice="Let the transform give the table's columns, and leave batch to the pipeline",
        )
    return columns


def table_writer(sink: TableSink, rows: DataFrame) -> DataFrameWriter:
    """What writes rows as a new table of a sink has them; its partition is still to be named."""
    return rows.write.format(sink.format).options(**as_texts(sink.options))


def _write_table(name: str, sink: TableSink, frame: DataFrame, batch: int, query: str) -> None:
    spark = frame.sparkSession
    if not spark.catalog.tableExists(sink.table):
        # Empty: after a crash before the claim or the rows, the table may still be claimed.
        empty = frame.limit(0).withColumn(BATCH, F.lit(batch).cast("bigint"))
        table_writer(sink, empty).partitionBy(BATCH).saveAsTable(sink.table)
        claim_table(spark, name, sink.table, query)
    columns = check_table(sink, frame)
    insert(sink, frame.select(*columns), batch)
