"""Writes no rows as files and as new tables before the first batch, in which other sinks would have theirs already.

For Spark refuses some options, formats and columns only when it writes. Of tables only those are tried that are files
of a format which Spark brings, in its own catalog: what others do on the way cannot be taken back.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import StructType

from broker.errors import ConfigurationError
from broker.hooks import logger
from broker.urls import mask_within
from broker_spark.hadoop import find_place
from broker_spark.pipeline.definition import FileSink, Pipeline, TableSink, part_of
from broker_spark.pipeline.frames import DEAD, OUT
from broker_spark.pipeline.writing import table_writer, write_files
from broker_spark.spark_errors import named_place, planned, said

__all__ = ["try_sinks"]

_FORMATS: Final = frozenset({"parquet", "orc", "json", "csv", "avro", "text"})
"""Of tables that are but files in a directory."""
_CATALOG: Final = "spark_catalog"
_KEPT_CATALOG: Final = (
    "Set spark.sql.catalogImplementation to hive in `config` or spark-defaults.conf, or name a table of a catalog of "
    "your own"
)
_MEND: Final = "Mend its format or options, or let the transform give what they take"


def try_sinks(pipeline: Pipeline, frame: DataFrame) -> None:
    """Make sure that Spark writes rows such as these into files of a pipeline, and into new tables that are but files.

    It leaves nothing there.

    :param frame: `out` and `dead` beside each other; only its schema is looked at.
    :raises ConfigurationError: it refuses a format, an option, a column or the directory; the error names the sink.
    """
    spark = frame.sparkSession
    for name, sink in pipeline.all_sinks().items():
        schema = frame.schema[DEAD if name == "dead_letters" else OUT].dataType
        if not isinstance(sink, FileSink | TableSink) or not isinstance(schema, StructType):
            continue
        # `createDataFrame` would make this session the active one of the whole process.
        columns = [F.lit(None).cast(each.dataType).alias(each.name) for each in schema]
        rows = spark.range(0).coalesce(1).select(*columns)
        with part_of(name):
            _try_files(sink, rows) if isinstance(sink, FileSink) else _try_table(sink, rows)


def _try_files(sink: FileSink, rows: DataFrame) -> None:
    with (
        named_place("path", sink.path),
        _passing(rows.sparkSession, sink.path) as directory,
        planned("The rows cannot be written", _MEND),
    ):
        write_files(sink, rows, directory)
        if sink.partition_by:
            # No row opens no file of a partition, and so does not show what only the writer of files refuses.
            rest = rows.drop(*sink.partition_by)
            write_files(replace(sink, partition_by=()), rest, directory)


def _try_table(sink: TableSink, rows: DataFrame) -> None:
    spark = rows.sparkSession
    if not _is_sparks(spark, sink.table) or spark.catalog.tableExists(sink.table):
        return
    if (
        spark.conf.get("spark.sql.catalogImplementation") == "in-memory"
        and spark.conf.get(f"spark.sql.catalog.{_CATALOG}", "") == ""
    ):
        with _told():
            _check_forgotten(spark, sink)
    if sink.format.lower() not in _FORMATS:
        return
    # Its path has to be empty, so that it is tried beside.
    plain = {name: value for name, value in sink.options.items() if name.lower() != "path"}
    with _told():
        place = _place_of(spark, sink)
        if place is not None:
            with _passing(spark, place) as directory:
                table_writer(replace(sink, options=plain), rows).save(directory)


@contextlib.contextmanager
def _told() -> Generator[None]:
    with planned("The rows cannot be written", _MEND):
        try:
            yield
        except Py4JJavaError as error:
            raise ConfigurationError(f"The rows cannot be written: {said(error)}", advice=_MEND) from error


def _check_forgotten(spark: SparkSession, sink: TableSink) -> None:
    """Refuse to make a table again of which a run before left the files, and say that this one will, too."""
    where = _path_of(sink)
    if where is None and (above := _place_of(spark, sink)) is not None:
        where = f"{above.rstrip('/')}/{sink.table.replace('`', '').rpartition('.')[2].lower()}"
    if where is not None:
        place, files = find_place(spark, where)
        if files.exists(place) and len(files.listStatus(place)):
            raise ConfigurationError(
                f"Table {sink.table!r} is not in the catalog, and {mask_within(where)} has files already: the catalog "
                "of a session is in its memory, and the table of a run before was forgotten",
                advice=f"{_KEPT_CATALOG}; and move the files away, or name another table",
            )
    logger.warning(
        "Table %s will be in a catalog in memory, which ends with this session, and the next run will not find it. %s",
        sink.table,
        _KEPT_CATALOG,
    )


def _is_sparks(spark: SparkSession, table: str) -> bool:
    """Whether a table is one of Spark's own catalog."""
    first, *rest = table.replace("`", "").split(".")
    if len(rest) == 2:
        return first == _CATALOG
    return spark.catalog.currentCatalog() == _CATALOG and spark.conf.get(f"spark.sql.catalog.{first}", "") == ""


def _path_of(sink: TableSink) -> str | None:
    """The directory that the options of a table name."""
    given = [str(value) for name, value in sink.options.items() if name.lower() == "path" and value is not None]
    return given[-1] if given else None


def _place_of(spark: SparkSession, sink: TableSink) -> str | None:
    """The directory in which that of a new table will be."""
    given = _path_of(sink)
    if given is not None:
        above = find_place(spark, given)[0].getParent()
        return None if above is None else str(above.toString())
    name = sink.table.replace("`", "").removeprefix(f"{_CATALOG}.")
    return spark.catalog.getDatabase(name.rpartition(".")[0] or spark.catalog.currentDatabase()).locationUri


@contextlib.contextmanager
def _passing(spark: SparkSession, path: str) -> Generator[str]:
    """A directory in this one that Spark's readers skip. It goes, as do those that were made for it."""
    made = f"{path.rstrip('/')}/_check-{uuid.uuid4().hex}"
    place, files = find_place(spark, made)
    missing: list[Any] = []
    above = place.getParent()
    while above is not None and not files.exists(above):
        missing.append(above)
        above = above.getParent()
    try:
        yield made
    finally:
        # Not what something else put something into meanwhile; nor does this hide why the write failed.
        with contextlib.suppress(Py4JJavaError):
            files.delete(place, True)
            for each in missing:
                files.delete(each, False)
