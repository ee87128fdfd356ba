"""Claims the files and tables of a pipeline, and writes one batch into one sink. Blocking.

Writing a batch again replaces its files or partition, publishes the same ids, or leaves a Delta table as it is. Every
query numbers its batches from 0, so a directory or table, unless of Delta, belongs to one query. A directory has the
marker `_anybroker/<id of the query>`, which Spark's readers skip; a table has the property `anybroker.query`. Markers
are written before the first batch: data without a marker belongs to something else.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from pyspark.sql import DataFrame, DataFrameWriter, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from broker.errors import ConfigurationError
from broker.urls import mask_within
from broker_spark.common.options import as_texts
from broker_spark.pipeline.definition import (
    BATCH,
    CallSink,
    FileSink,
    Pipeline,
    Sink,
    TableSink,
    TopicSink,
    check_key,
    errors_of,
)
from broker_spark.pipeline.delta import replace_delta, write_delta
from broker_spark.pipeline.lineage import OWN_DIRECTORY, batch_directory, remove_lineage
from broker_spark.pipeline.tables import add_columns, check_table, no_rows, widen
from broker_spark.runtime.hadoop import find_path, path_errors_as
from broker_spark.runtime.spark_errors import plan_errors_as

__all__ = [
    "as_messages",
    "claim",
    "clear",
    "reads_twice",
    "table_writer",
    "write",
    "write_files",
]

_PROPERTY: Final = "anybroker.query"


def reads_twice(sink: Sink, *, again: bool) -> bool:
    """Whether writing a batch may read its rows more than once.

    :param again: whether an earlier run may have written this batch.
    """
    if isinstance(sink, TableSink):
        return sink.is_delta and (again or bool(sink.merge_by))
    return isinstance(sink, CallSink)


def write(
    pipeline: Pipeline,
    name: str,
    sink: Sink,
    frame: DataFrame,
    batch: int,
    query: str,
    *,
    again: bool = True,
    replaces: bool = False,
) -> int:
    """Write a batch's rows. Returns how many, when they are in the sink.

    :param name: the name of the sink.
    :param query: Spark's id of the query, which the checkpoint keeps.
    :param again: whether an earlier run may have written this batch.
    :param replaces: the batch is all that a Delta table has, as that of a replay.
    :raises ConfigurationError: Spark refuses an option or the table.
    """
    label = name if sink is pipeline.dead_letters else f"sinks.{name}"
    advice = "Fix its format or options" if isinstance(sink, FileSink) else "Fix its options, or its table"
    refused = plan_errors_as(f"{label}: The rows cannot be written", advice)
    if isinstance(sink, CallSink):
        if rows := frame.count():
            sink.call(frame, batch)
        return rows
    if isinstance(sink, TableSink) and sink.is_delta:
        with errors_of(label), plan_errors_as("The rows cannot be written", advice):
            if replaces:
                return replace_delta(sink, frame, batch)
            return write_delta(sink, frame, f"{query}-{label}", batch, again=again)
    written = Observation()
    counted = frame.observe(written, F.count(F.lit(1)).alias("rows"))
    match sink:
        case TopicSink():
            options = {**pipeline.sink_options(sink), "writeId": f"{query}-{name}-{batch}"}
            as_messages(counted, sink).write.format("broker").options(**options).mode("append").save()
        case FileSink():
            with refused:
                write_files(sink, counted, batch_directory(sink, batch))
        case TableSink():
            with refused:
                _write_table(label, sink, counted, batch, query)
    rows = int(written.get["rows"])
    if not rows and isinstance(sink, FileSink):
        # Spark writes a file without rows.
        clear(sink, frame.sparkSession, batch)
    return rows


def write_files(sink: FileSink, frame: DataFrame, directory: str) -> None:
    """Write the files of a sink, replacing all contents of the directory."""
    # In dynamic mode, partitions of a failed attempt without rows now would stay.
    options = {**as_texts(sink.options), "partitionOverwriteMode": "static"}
    writer = frame.write.format(sink.format).options(**options).mode("overwrite")
    (writer.partitionBy(*sink.partition_by) if sink.partition_by else writer).save(directory)


def as_messages(frame: DataFrame, sink: TopicSink) -> DataFrame:
    """The rows as messages: unchanged if they have a column `value`, else as JSON.

    :raises ConfigurationError: `key` names no column, or the rows are messages, which have a key of their own.
    """
    check_key(sink, frame.columns)
    if "value" in frame.columns:
        return frame
    columns = [F.to_json(F.struct("*"), {"ignoreNullFields": "false"}).alias("value")]
    if sink.key is not None:
        columns.append(F.col(sink.key).cast("string").alias("key"))
    return frame.select(*columns)


def table_writer(sink: TableSink, rows: DataFrame) -> DataFrameWriter:
    """The writer for a new table of a sink, without its partition."""
    return rows.write.format(sink.format).options(**as_texts(sink.options))


def _write_table(name: str, sink: TableSink, frame: DataFrame, batch: int, query: str) -> None:
    spark = frame.sparkSession
    if not spark.catalog.tableExists(sink.table):
        # Empty: after a crash before the claim or the rows, the table may still be claimed.
        empty = no_rows(spark, frame.schema).withColumn(BATCH, F.lit(batch).cast("bigint"))
        table_writer(sink, empty).partitionBy(BATCH).saveAsTable(sink.table)
        _claim_table(spark, name, sink.table, query)
    add_columns(spark, sink.table, check_table(sink, frame))
    _insert(sink, widen(frame, sink.table), batch)


def claim(pipeline: Pipeline, spark: SparkSession, query: str) -> None:
    """Claim the files and tables of a pipeline for a query.

    :param query: Spark's id of the query, which the checkpoint keeps.
    :raises ConfigurationError: another query owns one.
    """
    for name, sink in pipeline.all_sinks().items():
        if isinstance(sink, FileSink):
            with path_errors_as(f"{name}: path", sink.path):
                _claim_directory(spark, name, sink.path, query)
        elif isinstance(sink, TableSink) and not sink.is_delta and spark.catalog.tableExists(sink.table):
            _claim_table(spark, name, sink.table, query)


def _claim_table(spark: SparkSession, name: str, table: str, query: str) -> None:
    """Claim an existing table for a query.

    :param name: the sink, for errors.
    :raises ConfigurationError: another query owns it, or it has rows of no pipeline.
    """
    found = {row["key"]: row["value"] for row in spark.sql("SHOW TBLPROPERTIES IDENTIFIER({t})", t=table).collect()}
    owner = found.get(_PROPERTY)
    if owner == query:
        return
    if owner is not None or not spark.table(table).isEmpty():
        _refuse(name, f"Table {table!r}", owner, "table")
    spark.sql(f"ALTER TABLE IDENTIFIER({{t}}) SET TBLPROPERTIES ('{_PROPERTY}' = '{query}')", t=table)


def clear(sink: Sink, spark: SparkSession, batch: int) -> None:
    """Remove from files and tables what a batch without rows has there."""
    if isinstance(sink, FileSink):
        path, files = find_path(spark, batch_directory(sink, batch))
        files.delete(path, True)
        remove_lineage(sink, spark, batch)
    elif isinstance(sink, TableSink) and not sink.is_delta and spark.catalog.tableExists(sink.table):
        columns = [each for each in spark.table(sink.table).schema if each.name != BATCH]
        _insert(sink, no_rows(spark, columns), batch)


def _insert(sink: TableSink, rows: DataFrame, batch: int) -> None:
    """Replace the rows of a batch."""
    rows.sparkSession.sql(
        f"INSERT OVERWRITE TABLE IDENTIFIER({{name}}) PARTITION ({BATCH} = {batch}) SELECT * FROM {{rows}}",  # noqa: S608
        name=sink.table,
        rows=rows,
    )


def _claim_directory(spark: SparkSession, name: str, directory: str, query: str) -> None:
    root, files = find_path(spark, directory)
    marks, _ = find_path(spark, f"{directory.rstrip('/')}/{OWN_DIRECTORY}")
    mine, _ = find_path(spark, f"{directory.rstrip('/')}/{OWN_DIRECTORY}/{query}")

    def names(path: Any, *, directories: bool) -> list[str]:
        found: Any = files.listStatus(path) if files.exists(path) else ()
        return [str(each.getPath().getName()) for each in found if bool(each.isDirectory()) is directories]

    def check(found: list[str]) -> None:
        others = [each for each in found if each != query and not each.startswith(".")]
        if others:
            _refuse(name, mask_within(directory), others[0], "path")

    # The directories beside the marks are of lineage.
    found = names(marks, directories=False)
    check(found)
    if query in found:
        return
    if not found and any(each.startswith(f"{BATCH}=") for each in names(root, directories=True)):
        _refuse(name, mask_within(directory), None, "path")
    files.create(mine, True).close()
    try:
        # Two queries that claim at the same time both see both markers.
        check(names(marks, directories=False))
    except ConfigurationError:
        files.delete(mine, False)
        raise


def _refuse(name: str, what: str, owner: str | None, kind: str) -> NoReturn:
    whose = "of no known pipeline" if owner is None else f"of another query, {owner}"
    raise ConfigurationError(
        f"{name}: {what} has batches {whose}: this one would overwrite them, since each counts from 0",
        advice=f"Give this sink another {kind}, or rename or remove that one; a new checkpoint is a new query",
    )
