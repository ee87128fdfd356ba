"""The file systems in which Spark has its checkpoints and files, by their own names. Blocking; driver only."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

__all__ = ["bytes_of", "find_place"]


def find_place(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """A path of Hadoop and its file system, as Spark's own writers find it.

    :param spark: a classic session.
    """
    session: Any = spark
    found = session._jvm.org.apache.hadoop.fs.Path(path)
    return found, found.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())


def bytes_of(path: Any, files: Any) -> bytes:
    """All that is in a file of `find_place`."""
    stream = files.open(path)
    try:
        return bytes(stream.readAllBytes())
    finally:
        stream.close()
