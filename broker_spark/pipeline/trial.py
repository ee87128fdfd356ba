"""Writes no rows as files and as new tables before the first batch, in which other sinks would have theirs already.

For Spark refuses some options, formats and columns only when it writes.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Generator
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import StructType

from broker_spark.hadoop import find_place
from broker_spark.pipeline.definition import BATCH, FileSink, Pipeline, TableSink, part_of
from broker_spark.pipeline.frames import DEAD, OUT
from broker_spark.pipeline.writing import new_table, write_files
from broker_spark.spark_errors import named_place, planned

__all__ = ["try_files"]

_FORMATS: Final = frozenset({"parquet", "orc", "json", "csv", "avro", "text"})
"""Of tables that are but files in a directory."""
_MEND: Final = "Mend its format or options, or let the transform give what they take"


def try_files(pipeline: Pipeline, frame: DataFrame) -> None:
    """Make sure that Spark writes rows such as these into the files and tables of a pipeline. It leaves nothing there.

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


def _try_table(sink: TableSink, rows: DataFrame) -> None:
    spark = rows.sparkSession
    if sink.format.lower() not in _FORMATS or spark.catalog.tableExists(sink.table):
        return
    # Beside where tables are: what lies where this one will be would pass for what another left. Who may not write
    # there may still make tables elsewhere.
    place = str(spark.conf.get("spark.sql.warehouse.dir"))
    with (
        contextlib.suppress(Py4JJavaError),
        _passing(spark, place) as directory,
        planned("The rows cannot be written", _MEND),
    ):
        new_table(sink, rows.withColumn(BATCH, F.lit(0))).save(directory)


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
