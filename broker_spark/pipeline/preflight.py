"""Checks before the first batch that all sinks can take the rows: a batch must not reach some of them only.

`check_topics` asks the brokers, `check_rows` lets Spark analyse the frames; neither writes. Spark refuses some options,
formats and columns only when it writes, so `try_sinks` writes no rows into a temporary directory beside each path and
each new table. It tries only tables of Spark's own catalog in a file format that Spark includes: the effects of other
catalogs could not be undone.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from broker.errors import ConfigurationError
from broker.hooks import logger
from broker.urls import mask_within
from broker_spark.common.connections import bus_of
from broker_spark.common.options import find_url, topic_name
from broker_spark.common.schema import is_case_sensitive, nearest
from broker_spark.common.topics import identity_of
from broker_spark.data_source import BrokerDataSource
from broker_spark.pipeline.definition import (
    BATCH,
    FileSink,
    Pipeline,
    Sink,
    TableSink,
    TopicSink,
    errors_of,
    named_columns,
)
from broker_spark.pipeline.delta import DELTA_CATALOG, check_delta
from broker_spark.pipeline.letters import LETTER_SCHEMA
from broker_spark.pipeline.tables import check_table, no_rows, path_of
from broker_spark.pipeline.writing import as_messages, table_writer, write_files
from broker_spark.runtime.hadoop import find_path, path_errors_as
from broker_spark.runtime.spark_errors import first_line, plan_errors_as
from broker_spark.sink.sink import SinkOptions

__all__ = ["check_rows", "check_topics", "try_sinks"]


def check_topics(pipeline: Pipeline) -> None:
    """Check that the topics of all sinks exist, as far as the brokers permit this.

    :raises TopicNotFound: a topic is missing.
    """
    for sink in pipeline.all_sinks().values():
        if isinstance(sink, TopicSink):
            identity_of(bus_of(find_url(sink.url or pipeline.url)), topic_name(sink.topic))


def check_rows(pipeline: Pipeline, rows: DataFrame) -> None:
    """Check that every sink can take its rows.

    :param rows: those of the stream.
    :raises ConfigurationError: names the sink, and the condition, column or format that cannot be used.
    :raises Unsupported: a broker does not support a column.
    """
    letters = no_rows(rows.sparkSession, LETTER_SCHEMA)
    for name, sink in pipeline.all_sinks().items():
        is_letters = name == "dead_letters"
        if is_letters and isinstance(sink, TopicSink):
            continue
        what = f"table is {sink.table!r}" if isinstance(sink, TableSink) else "The rows cannot be written"
        with errors_of(name), plan_errors_as(what, "Let the transform give what the sink can take, or name another"):
            _check(pipeline, sink, _chosen(sink, letters if is_letters else rows))


def _check(pipeline: Pipeline, sink: Sink, rows: DataFrame) -> None:
    match sink:
        case TopicSink():
            _check_distinct(rows.columns, exact=True)
            SinkOptions.parse(pipeline.sink_options(sink), as_messages(rows, sink).schema)
        case FileSink(path=path, partition_by=partition_by):
            with path_errors_as("path", path):
                find_path(rows.sparkSession, path)
            _check_columns(rows)
            _check_named(sink, rows)
            if len(partition_by) >= len(rows.columns):
                raise ConfigurationError(
                    f"partition_by has all columns, {', '.join(partition_by)}",
                    advice="Leave one for the files themselves",
                )
            _check_format(rows.sparkSession, sink.format)
        case TableSink(is_delta=True):
            _check_distinct(rows.columns, exact=is_case_sensitive(rows.sparkSession))
            _check_named(sink, rows)
            check_delta(sink, rows)
        case TableSink():
            _check_columns(rows)
            if rows.sparkSession.catalog.tableExists(sink.table):
                check_table(sink, rows)
            else:
                _check_format(rows.sparkSession, sink.format)
        case _:
            # A function may take any rows.
            pass


def _chosen(sink: Sink, rows: DataFrame) -> DataFrame:
    if not sink.where:
        return rows
    with plan_errors_as(
        f"where is {sink.where!r}", f"It takes a condition of SQL on the columns {', '.join(rows.columns)}"
    ):
        chosen = rows.where(sink.where)
        # A batch counts the rows by this condition too; Spark accepts more in a filter than in a count.
        rows.agg(F.count_if(F.expr(sink.where)))
        return chosen


def _check_columns(rows: DataFrame) -> None:
    for name in rows.columns:
        if name.lower() == BATCH:
            raise ConfigurationError(f"The rows have a column {name!r}, which the pipeline adds", advice="Rename it")
    _check_distinct(rows.columns, exact=is_case_sensitive(rows.sparkSession))


def _check_distinct(columns: Sequence[str], *, exact: bool) -> None:
    known = [name if exact else name.lower() for name in columns]
    for number, name in enumerate(known):
        if name in known[:number]:
            raise ConfigurationError(f"The rows have two columns {columns[number]!r}", advice="Rename one of them")


def _check_named(sink: FileSink | TableSink, rows: DataFrame) -> None:
    exact = is_case_sensitive(rows.sparkSession)
    known = rows.columns if exact else [name.lower() for name in rows.columns]
    for setting, names in named_columns(sink).items():
        for name in names:
            if (name if exact else name.lower()) not in known:
                raise ConfigurationError(
                    f"{setting} has {name!r}, which is not a column of the rows", advice=nearest(name, rows.columns)
                )


def _check_format(spark: SparkSession, name: str) -> None:
    if name.lower() == BrokerDataSource.name():
        raise ConfigurationError(
            f"format is {name!r}, which writes no files", advice="Write to topics with a TopicSink"
        )
    session: Any = spark
    try:
        lookup = session._jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource
        lookup(name, session._jsparkSession.sessionState().conf())
    except (AnalysisException, Py4JJavaError) as error:
        raise ConfigurationError(
            f"format is {name!r}, which Spark does not find",
            advice="It takes parquet, orc, json or a format that Spark has the jars for",
        ) from error


_FORMATS: Final = frozenset({"parquet", "orc", "json", "csv", "avro", "text"})
"""Formats of tables that are plain files in a directory."""
_CATALOG: Final = "spark_catalog"
_KEPT_CATALOG: Final = (
    "Set spark.sql.catalogImplementation to hive in `config` or spark-defaults.conf, or name a table of a catalog of "
    "your own"
)
_ADVICE: Final = "Fix its format or options, or let the transform give what they take"


def try_sinks(pipeline: Pipeline, frame: DataFrame) -> None:
    """Check that Spark can write rows of this schema into the files and new tables of a pipeline, leaving nothing.

    :param frame: the rows of the stream.
    :raises ConfigurationError: names the sink whose format, option, column or directory Spark refuses.
    """
    spark = frame.sparkSession
    for name, sink in pipeline.all_sinks().items():
        if not isinstance(sink, FileSink | TableSink):
            continue
        rows = no_rows(spark, LETTER_SCHEMA if name == "dead_letters" else frame.schema)
        with errors_of(name):
            _try_files(sink, rows) if isinstance(sink, FileSink) else _try_table(sink, rows)


def _try_files(sink: FileSink, rows: DataFrame) -> None:
    with (
        path_errors_as("path", sink.path),
        _temporary_directory(rows.sparkSession, sink.path) as directory,
        plan_errors_as("The rows cannot be written", _ADVICE),
    ):
        write_files(sink, rows, directory)
        if sink.partition_by:
            # Without rows Spark opens no file of a partition, and would not check the other columns.
            rest = rows.drop(*sink.partition_by)
            write_files(replace(sink, partition_by=()), rest, directory)


def _try_table(sink: TableSink, rows: DataFrame) -> None:
    spark = rows.sparkSession
    if not _in_spark_catalog(spark, sink.table) or spark.catalog.tableExists(sink.table):
        return
    # The files of a Delta table are the table: a name for their path is all that a catalog has.
    found = sink.is_delta and path_of(sink) is not None
    if (
        spark.conf.get("spark.sql.catalogImplementation") == "in-memory"
        and spark.conf.get(f"spark.sql.catalog.{_CATALOG}", "") in ("", DELTA_CATALOG)
        and not found
    ):
        with _write_errors():
            _check_leftover_files(spark, sink)
    if sink.format.lower() not in _FORMATS and not sink.is_delta:
        return
    # The path of a new table must stay empty, so this writes beside it.
    plain = {name: value for name, value in sink.options.items() if name.lower() != "path"}
    with _write_errors():
        place = _parent_of(spark, sink)
        if place is not None:
            with _temporary_directory(spark, place) as directory:
                table_writer(replace(sink, options=plain), rows).save(directory)


@contextlib.contextmanager
def _write_errors() -> Generator[None]:
    with plan_errors_as("The rows cannot be written", _ADVICE):
        try:
            yield
        except Py4JJavaError as error:
            raise ConfigurationError(f"The rows cannot be written: {first_line(error)}", advice=_ADVICE) from error


def _check_leftover_files(spark: SparkSession, sink: TableSink) -> None:
    """Refuse a table whose files an earlier run left; else warn that the table ends with the session."""
    where = path_of(sink)
    if where is None and (above := _parent_of(spark, sink)) is not None:
        where = f"{above.rstrip('/')}/{sink.table.replace('`', '').rpartition('.')[2].lower()}"
    if where is not None:
        place, files = find_path(spark, where)
        if files.exists(place) and len(files.listStatus(place)):
            raise ConfigurationError(
                f"Table {sink.table!r} is not in the catalog, but {mask_within(where)} already has files: an in-memory "
                "catalog ends with its session and does not know the tables of earlier runs",
                advice=f"{_KEPT_CATALOG}; and move the files away, or name another table",
            )
    logger.warning(
        "Table %s will be in an in-memory catalog, which ends with this session: the next run will not find it. %s",
        sink.table,
        _KEPT_CATALOG,
    )


def _in_spark_catalog(spark: SparkSession, table: str) -> bool:
    """Whether a table is in Spark's own catalog."""
    first, *rest = table.replace("`", "").split(".")
    if len(rest) == 2:
        return first == _CATALOG
    return spark.catalog.currentCatalog() == _CATALOG and spark.conf.get(f"spark.sql.catalog.{first}", "") == ""


def _parent_of(spark: SparkSession, sink: TableSink) -> str | None:
    """The parent of the directory of a new table."""
    given = path_of(sink)
    if given is not None:
        above = find_path(spark, given)[0].getParent()
        return None if above is None else str(above.toString())
    name = sink.table.replace("`", "").removeprefix(f"{_CATALOG}.")
    return spark.catalog.getDatabase(name.rpartition(".")[0] or spark.catalog.currentDatabase()).locationUri


@contextlib.contextmanager
def _temporary_directory(spark: SparkSession, path: str) -> Generator[str]:
    """A temporary subdirectory that Spark's readers skip. Removed at the end, with the parents made for it."""
    made = f"{path.rstrip('/')}/_check-{uuid.uuid4().hex}"
    place, files = find_path(spark, made)
    missing: list[Any] = []
    above = place.getParent()
    while above is not None and not files.exists(above):
        missing.append(above)
        above = above.getParent()
    try:
        yield made
    finally:
        # Keeps directories that got other files, and does not hide why the write failed.
        with contextlib.suppress(Py4JJavaError):
            files.delete(place, True)
            for each in missing:
                files.delete(each, False)
