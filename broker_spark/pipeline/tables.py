"""The columns of tables: whether rows fit, and how a table gains a column. Blocking.

| | the table |
|---|---|
| the rows have a column that the table lacks | gains it, nullable |
| the table has a column that the rows lack | has null there |
| a column has another type | refused, unless the table's is a wider number |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructField,
    StructType,
)

from broker.errors import ConfigurationError
from broker.hooks import logger
from broker_spark.common.schema import is_case_sensitive
from broker_spark.pipeline.definition import BATCH, DELTA, TableSink

__all__ = ["add_columns", "braced", "check_table", "missing_columns", "no_rows", "path_of", "quoted", "widen"]

_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)


def check_table(sink: TableSink, rows: DataFrame) -> list[StructField]:
    """The columns of the rows that an existing table lacks.

    :raises ConfigurationError: a column cannot take the rows, or the table is not partitioned by `batch`.
    """
    spark = rows.sparkSession
    if not any(each.name == BATCH and each.isPartition for each in spark.catalog.listColumns(sink.table)):
        raise ConfigurationError(
            f"Table {sink.table!r} is not partitioned by {BATCH!r}, so a repeated batch cannot be replaced",
            advice=f"Let the pipeline make the table, or make it with PARTITIONED BY ({BATCH} BIGINT); "
            f'for a Delta table, set format to "{DELTA}"',
        )
    return missing_columns(sink.table, _schema(spark, sink.table), rows)


def missing_columns(name: str, table: StructType, rows: DataFrame, *, grows: bool = False) -> list[StructField]:
    """The columns of the rows that a table lacks.

    :param name: the table's, for errors.
    :param grows: whether the table can gain fields within its columns too.
    :raises ConfigurationError: a column has another type, or may not be null and is not in the rows.
    """
    exact = is_case_sensitive(rows.sparkSession)
    known = {_key(each.name, exact): each for each in table}
    given = {_key(each.name, exact): each for each in rows.schema}
    for key, column in known.items():
        if key not in given and not column.nullable:
            raise ConfigurationError(
                f"Table {name!r} has a column {column.name!r} that may not be null, and the rows lack it",
                advice="Return it from the transform, or let the column be null",
            )
        if key in given and not _fits(given[key].dataType, column.dataType, grows):
            raise ConfigurationError(
                f"Table {name!r} has {column.name!r} as {column.dataType.simpleString()}, and the rows have it as "
                f"{given[key].dataType.simpleString()}",
                advice="Cast it in the transform, give it another name, or write to another table",
            )
    return [column for key, column in given.items() if key not in known]


def add_columns(spark: SparkSession, table: str, columns: Iterable[StructField]) -> None:
    """Add nullable columns to a table."""
    for column in columns:
        definition = StructType([StructField(column.name, column.dataType)]).toDDL()
        spark.sql(f"ALTER TABLE IDENTIFIER({{table}}) ADD COLUMNS ({braced(definition)})", table=table)
        logger.info("Table %s has a new column: %s %s", table, column.name, column.dataType.simpleString())


def widen(rows: DataFrame, table: str) -> DataFrame:
    """The rows with exactly the columns of a table without `batch`, in its order and types."""
    exact = is_case_sensitive(rows.sparkSession)
    given = {_key(name, exact) for name in rows.columns}
    return rows.select(
        *(
            (F.col(quoted(each.name)) if _key(each.name, exact) in given else F.lit(None))
            .cast(each.dataType)
            .alias(each.name)
            for each in _schema(rows.sparkSession, table)
        )
    )


def no_rows(spark: SparkSession, columns: Iterable[StructField]) -> DataFrame:
    """A frame with these columns and without rows."""
    # One call of the JVM for all columns. PySpark's `createDataFrame` would make the session the active one.
    session: Any = spark
    nullable = StructType([StructField(each.name, each.dataType) for each in columns])
    schema = session._jsparkSession.parseDataType(nullable.json())
    return DataFrame(session._jsparkSession.createDataFrame(session._jvm.java.util.ArrayList(), schema), spark)


def path_of(sink: TableSink) -> str | None:
    """The directory that the options of a table name."""
    given = [str(value) for name, value in sink.options.items() if name.lower() == "path" and value is not None]
    return given[-1] if given else None


def quoted(name: str) -> str:
    """A column's name as SQL."""
    return f"`{name.replace('`', '``')}`"


def braced(sql: str) -> str:
    """SQL for `spark.sql` with names in braces. Delta's parser takes no parameters such as `:name` for a table."""
    return sql.replace("{", "{{").replace("}", "}}")


def _schema(spark: SparkSession, table: str) -> StructType:
    """The columns of a table, without `batch`."""
    return StructType([each for each in spark.table(table).schema if each.name != BATCH])


def _key(name: str, exact: bool) -> str:
    return name if exact else name.lower()


def _fits(given: DataType, column: DataType, grows: bool) -> bool:
    """Whether a column takes values of a type, each as it is."""
    if isinstance(given, _WHOLE) and isinstance(column, _WHOLE):
        return _WHOLE.index(type(given)) <= _WHOLE.index(type(column))
    if isinstance(given, DecimalType) and isinstance(column, DecimalType):
        whole = column.precision - column.scale >= given.precision - given.scale
        return whole and column.scale >= given.scale
    if isinstance(given, FloatType) and isinstance(column, DoubleType):
        return True
    if grows and isinstance(given, StructType) and isinstance(column, StructType):
        known = {each.name.lower(): each.dataType for each in column}
        return all(_fits(each.dataType, known.get(each.name.lower(), each.dataType), grows) for each in given)
    if grows and isinstance(given, ArrayType) and isinstance(column, ArrayType):
        return _fits(given.elementType, column.elementType, grows)
    return given.simpleString() == column.simpleString()
