"""Lineage of the files of a pipeline: what each batch read and wrote, as JSON beside its data. Blocking; driver only.

`path/_anybroker/lineage/<batch>.json` has one object on one line. Spark's readers of `path` skip it. It is written when
the files of the batch are, before the batch is committed, and replaced or removed with them when the batch runs again.
It costs a listing of the batch's directory and no job of Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import SparkSession

from broker_spark.common.spark_files import replace_bytes
from broker_spark.pipeline.batch_ranges import BatchRanges
from broker_spark.pipeline.definition import BATCH, FileSink
from broker_spark.runtime.hadoop import find_path, hadoop_path

__all__ = ["OWN_DIRECTORY", "batch_directory", "remove_lineage", "write_lineage"]

OWN_DIRECTORY: Final = "_anybroker"
"""The directory in that of a sink which is no data."""
_LINEAGE: Final = "lineage"


def batch_directory(sink: FileSink, batch: int) -> str:
    """The directory with the files of a batch."""
    return f"{sink.path.rstrip('/')}/{BATCH}={batch}"


def write_lineage(
    sink: FileSink, spark: SparkSession, batch: int, ranges: BatchRanges, *, pipeline: str, query: str, rows: int
) -> None:
    """Write what a batch read, and the files that it wrote into a sink.

    :param rows: how many rows the files have.
    """
    path, files = _place(sink, spark, batch)
    written = {
        "pipeline": pipeline,
        "query": query,
        "batch": batch,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "rows": rows,
        "offsets": [asdict(each) for each in ranges.offsets if each.first < each.end],
        "segments": [asdict(each) for each in ranges.segments if each.first < each.end],
        "files": list(_data_files(sink, spark, files, batch)),
    }
    replace_bytes(path, files, json.dumps(written).encode() + b"\n")


def remove_lineage(sink: FileSink, spark: SparkSession, batch: int) -> None:
    """Remove the lineage of a batch that has no files any more."""
    path, files = _place(sink, spark, batch)
    files.delete(path, False)


def _place(sink: FileSink, spark: SparkSession, batch: int) -> tuple[Any, Any]:
    return find_path(spark, f"{sink.path.rstrip('/')}/{OWN_DIRECTORY}/{_LINEAGE}/{batch}.json")


def _data_files(sink: FileSink, spark: SparkSession, files: Any, batch: int) -> Iterator[dict[str, Any]]:
    """The files of a batch, with their paths below that of the sink."""
    directory = hadoop_path(spark, batch_directory(sink, batch))
    above = len(str(files.makeQualified(directory).toString()).rpartition("/")[0]) + 1
    found: Any = files.listFiles(directory, True)
    while found.hasNext():
        each = found.next()
        path = str(each.getPath().toString())[above:]
        # As Spark's readers do.
        if not path.rpartition("/")[2].startswith(("_", ".")):
            yield {"path": path, "bytes": int(each.getLen())}
