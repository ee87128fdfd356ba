"""Writes no rows as files before the first batch, in which other sinks would have theirs when Spark refuses these."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Generator
from typing import Any

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import StructType

from broker_spark.hadoop import find_place
from broker_spark.pipeline.definition import FileSink, Pipeline, part_of
from broker_spark.pipeline.frames import DEAD, OUT
from broker_spark.pipeline.writing import write_files
from broker_spark.spark_errors import named_place, planned

__all__ = ["try_files"]


def try_files(pipeline: Pipeline, frame: DataFrame) -> None:
    """Make sure that Spark writes rows such as these into the files of a pipeline. It leaves nothing there.

    :param frame: `out` and `dead` beside each other; only its schema is looked at.
    :raises ConfigurationError: it refuses a format, an option, a column or the directory; the error names the sink.
    """
    spark = frame.sparkSession
    for name, sink in pipeline.all_sinks().items():
        schema = frame.schema[DEAD if name == "dead_letters" else OUT].dataType
        if not isinstance(sink, FileSink) or not isinstance(schema, StructType):
            continue
        # `createDataFrame` would make this session the active one of the whole process.
        columns = [F.lit(None).cast(each.dataType).alias(each.name) for each in schema]
        advice = "Mend its format or options, or let the transform give what they take"
        with (
            part_of(name),
            named_place("path", sink.path),
            _passing(spark, sink.path) as directory,
            planned("The rows cannot be written", advice),
        ):
            write_files(sink, spark.range(0).coalesce(1).select(*columns), directory)


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
