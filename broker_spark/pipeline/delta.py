"""Writes batches into tables of Delta Lake, each once. Blocking.

A commit of Delta names an application and a version: here the query with the sink, and the batch. Delta writes nothing
if the table has that version already. So several queries may write to one table, and no batch is in it twice.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pyspark.sql import DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import StructType

from broker.errors import ConfigurationError
from broker_spark.common.options import as_texts
from broker_spark.pipeline.definition import DELTA, TableSink
from broker_spark.pipeline.tables import braced, missing_columns, no_rows, path_of, quoted
from broker_spark.runtime.hadoop import find_path, path_errors_as

__all__ = ["DELTA_CATALOG", "check_delta", "replace_delta", "write_delta"]

DELTA_CATALOG: Final = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
_SETTINGS: Final = {"spark.sql.extensions": _EXTENSION, "spark.sql.catalog.spark_catalog": DELTA_CATALOG}
_TRANSACTION: Final = "spark.databricks.delta.write.txn"
"""The beginning of the settings that name the application and the version of a commit."""
_RANK: Final = "_anybroker_rank"


def check_delta(sink: TableSink, rows: DataFrame) -> None:
    """Check that this session can write such rows into the table.

    :raises ConfigurationError: Delta's jars or settings are missing, the table is no Delta table, or a column cannot
        take the rows.
    """
    spark = rows.sparkSession
    _check_session(spark)
    table = _schema(spark, sink)
    if table is None:
        return
    keys = [name.lower() for name in sink.merge_by]
    for column in missing_columns(sink.table, table, rows, grows=True):
        if column.name.lower() in keys:
            raise ConfigurationError(
                f"merge_by has {column.name!r}, which table {sink.table!r} lacks",
                advice="Add the column to the table and fill it, or merge by other columns",
            )


def write_delta(sink: TableSink, rows: DataFrame, application: str, batch: int, *, again: bool) -> int:
    """Write a batch's rows, unless the table has them. Returns how many they are.

    :param rows: read twice with `merge_by` or `again`.
    :param application: names the query and the sink.
    :param again: whether an earlier run may have written this batch.
    :raises ConfigurationError: two rows have the same key.
    """
    _create(sink, rows)
    if sink.merge_by:
        return _merge(sink, rows, application, batch)
    writer = rows
    written = None
    if not again:
        written = Observation()
        writer = rows.observe(written, F.count(F.lit(1)).alias("rows"))
    with _transaction(rows.sparkSession, application, batch):
        writer.write.format(DELTA).option("mergeSchema", True).mode("append").saveAsTable(sink.table)
    # Nothing is observed of a batch that Delta does not write.
    return rows.count() if written is None else int(written.get["rows"])


def replace_delta(sink: TableSink, rows: DataFrame, batch: int) -> int:
    """Replace all rows of the table by those of a batch. Returns how many these are.

    :param rows: read more than once.
    :raises ConfigurationError: two rows have the same key.
    """
    _create(sink, rows)
    count = rows.count()
    kept = _one_of_each_key(sink, rows, batch) if sink.merge_by else rows
    kept.write.format(DELTA).option("overwriteSchema", True).mode("overwrite").saveAsTable(sink.table)
    return count


def _merge(sink: TableSink, rows: DataFrame, application: str, batch: int) -> int:
    count = rows.count()
    if not count:
        return 0
    spark = rows.sparkSession
    rows = _one_of_each_key(sink, rows, batch)
    same = " AND ".join(f"old.{key} <=> new.{key}" for key in map(quoted, sink.merge_by))
    with _transaction(spark, application, batch):
        spark.sql(
            f"MERGE WITH SCHEMA EVOLUTION INTO IDENTIFIER({{name}}) AS old USING {{rows}} AS new ON {braced(same)} "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *",
            name=sink.table,
            rows=rows,
        )
    return count


def _one_of_each_key(sink: TableSink, rows: DataFrame, batch: int) -> DataFrame:
    """:raises ConfigurationError: two rows have the same key, and there is no `order_by`."""
    if not sink.order_by:
        _check_keys(sink.merge_by, rows, batch)
        return rows
    keys = map(quoted, sink.merge_by)
    order = Window.partitionBy(*keys).orderBy(*(F.col(quoted(name)).desc() for name in sink.order_by))
    return rows.withColumn(_RANK, F.row_number().over(order)).where(F.col(_RANK) == 1).drop(_RANK)


def _check_keys(names: Sequence[str], rows: DataFrame, batch: int) -> None:
    """:raises ConfigurationError: two rows have the same key."""
    keys = [F.col(quoted(name)) for name in names]
    twice = rows.groupBy(*keys).agg(F.count(F.lit(1)).alias(_RANK)).where(F.col(_RANK) > 1).first()
    if twice is not None:
        key = ", ".join(f"{name}={twice[index]!r}" for index, name in enumerate(names))
        raise ConfigurationError(
            f"{twice[_RANK]} rows of batch {batch} have the same key, {key}",
            advice="Give order_by the columns that tell the newest row, or return one row of each key",
        )


def _create(sink: TableSink, rows: DataFrame) -> None:
    """Make the table, or name the one that is in its path, if it is not in the catalog."""
    spark = rows.sparkSession
    if spark.catalog.tableExists(sink.table):
        return
    path = path_of(sink)
    if path is not None and _is_table(spark, path):
        statement = f"CREATE TABLE IF NOT EXISTS IDENTIFIER({{name}}) USING {DELTA} LOCATION {{path}}"
        spark.sql(statement, name=sink.table, path=path)
        return
    empty = no_rows(spark, rows.schema)
    empty.write.format(DELTA).options(**as_texts(sink.options)).mode("ignore").saveAsTable(sink.table)


def _schema(spark: SparkSession, sink: TableSink) -> StructType | None:
    """The columns of the table; None if there is none.

    :raises ConfigurationError: it has another format.
    """
    if spark.catalog.tableExists(sink.table):
        rows = spark.sql("DESCRIBE TABLE EXTENDED IDENTIFIER({name})", name=sink.table).collect()
        found = next((row["data_type"] for row in rows if row["col_name"] == "Provider"), "unknown")
        if found.lower() != DELTA:
            raise ConfigurationError(
                f"Table {sink.table!r} has the format {found}, and the sink has {sink.format}",
                advice="Give the sink the format of its table, or name another table",
            )
        return spark.table(sink.table).schema
    path = path_of(sink)
    if path is None or not _is_table(spark, path):
        return None
    return spark.read.format(DELTA).load(path).schema


def _is_table(spark: SparkSession, path: str) -> bool:
    """Whether a directory has a Delta table."""
    with path_errors_as("options.path", path):
        place, files = find_path(spark, f"{path.rstrip('/')}/_delta_log")
        return bool(files.exists(place))


def _check_session(spark: SparkSession) -> None:
    missing = [
        f"{name} to {value}"
        for name, value in _SETTINGS.items()
        if value not in [each.strip() for each in (spark.conf.get(name, "") or "").split(",")]
    ]
    session: Any = spark
    loader = session._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    if loader.getResource(f"{_EXTENSION.replace('.', '/')}.class") is None:
        version = ".".join(spark.version.split(".")[:2])
        missing.insert(0, f"spark.jars to the jars of Delta Lake for Spark {version}")
    if missing:
        raise ConfigurationError(
            "format is 'delta', and this session is not one of Delta Lake",
            advice=f"Set {', '.join(missing)}, in `config` or spark-defaults.conf, before the session starts",
        )


@contextmanager
def _transaction(spark: SparkSession, application: str, batch: int) -> Generator[None]:
    """Name the commits of Delta within the block."""
    names = {f"{_TRANSACTION}AppId": application, f"{_TRANSACTION}Version": str(batch)}
    for name, value in names.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in names:
            spark.conf.unset(name)
