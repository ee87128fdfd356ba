"""Paths in the file systems of Spark's JVM, which hold checkpoints and files. Blocking; driver only."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession

from broker.driver import check_owner, check_unshared, make_private_directory, narrow_mode
from broker.errors import ConfigurationError
from broker.urls import mask_within
from broker_spark.runtime.spark_errors import first_line

__all__ = ["find_path", "hadoop_path", "path_errors_as", "protect_directory", "read_bytes"]


def find_path(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """Hadoop's `Path` and its `FileSystem`, as Spark's own writers find them. Copies the configuration of Hadoop.

    :param spark: a classic session.
    """
    session: Any = spark
    found = hadoop_path(spark, path)
    return found, found.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())


def hadoop_path(spark: SparkSession, path: str) -> Any:
    """Hadoop's `Path`, where its file system is known.

    :param spark: a classic session.
    """
    session: Any = spark
    return session._jvm.org.apache.hadoop.fs.Path(path)


def protect_directory(spark: SparkSession, path: str) -> None:
    """Create a directory of the local file system if it is missing, and keep other users out of it.

    :raises OSError: it cannot be created.
    :raises ConfigurationError: another user made it or something in it, or others can still write to it.
    """
    found, files = find_path(spark, path)
    if files.getScheme() != "file":
        return
    place = Path(found.toUri().getPath())
    if place.is_dir():
        narrow_mode(place)
    else:
        make_private_directory(place)
    check_unshared(place, "checkpoint")
    for each in place.iterdir():
        check_owner(each, "checkpoint")


def read_bytes(path: Any, files: Any) -> bytes:
    """The contents of a file.

    :param path, files: from `find_path`.
    """
    stream = files.open(path)
    try:
        return bytes(stream.readAllBytes())
    finally:
        stream.close()


@contextmanager
def path_errors_as(name: str, path: str) -> Generator[None]:
    """Turn errors of Java or the system about a directory within the block into errors that name it.

    :param name: the setting that holds the path.
    :raises ConfigurationError: instead of such an error.
    """
    try:
        yield
    except (Py4JJavaError, IllegalArgumentException, OSError) as error:
        shown = mask_within(path)
        raise ConfigurationError(
            f"{name} is {shown!r}: {first_line(error).replace(path, shown)}",
            advice="It takes a directory that Spark may write to, on a file system that Spark has the jars for",
        ) from error
