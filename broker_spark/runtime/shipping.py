"""A clear error where Spark's processes for streaming sources do not find this package.

Tasks and batch reads find what `--py-files`, `spark.submit.pyFiles` and `addPyFile` ship. The process of a streaming
source does not, and fails with "No module named 'broker_spark'". If the package is shipped like this, a source is
registered that Spark can unpickle without the package and that explains the failure.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from pyspark import SparkFiles
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

__all__ = ["python_path", "sent_files", "shipped_source"]


def shipped_source(
    source: type[DataSource], package: Path, found_in: Sequence[str], sent: Sequence[Path] = ()
) -> type[DataSource] | None:
    """A source that explains the failure; None if streaming sources find the package.

    :param source: the real source, importable where batch reads are planned.
    :param package: the directory of the package, perhaps within an archive.
    :param found_in: the Python path of streaming sources, besides installed packages.
    :param sent: the files that the session sends to its executors.
    """
    archives = [each for each in package.parents if each.is_file()]
    archives += [each for each in sent if _holds(each, package.name)]
    # Spark starts that process on its own machine, so the paths mean the same.
    if not archives or archives[0].resolve() in {Path(each).resolve() for each in found_in}:
        return None
    return _explaining(source.name(), source.__module__, source.__qualname__, archives[0].name)


def sent_files(spark: SparkSession) -> list[Path]:
    """The local paths of files that `addPyFile`, `addFile` and their settings send to executors."""
    if not hasattr(spark, "_jvm"):
        return []
    return [Path(SparkFiles.get(Path(each).name)) for each in spark.sparkContext.listFiles]


def _holds(archive: Path, package: str) -> bool:
    """Whether a package can be imported from a file."""
    try:
        with ZipFile(archive) as file:
            return f"{package}/__init__.py" in file.namelist()
    except (OSError, BadZipFile):
        return False


def python_path(spark: SparkSession) -> list[str]:
    """The Python path of streaming sources: that of Spark's own process and the setting for executors.

    `spark-submit` extends the path of the driver's Python only.
    """
    machine: Any = getattr(spark, "_jvm", None)
    given = os.environ.get("PYTHONPATH") if machine is None else machine.System.getenv("PYTHONPATH")
    setting = spark.conf.get("spark.executorEnv.PYTHONPATH", "")
    return [part for text in (given, setting) if text for part in text.split(os.pathsep)]


def _explaining(called: str, module: str, qualified: str, archive: str) -> type[DataSource]:
    message = (
        f"A streaming source of broker_spark cannot be read from {archive}: Spark runs it in a process that does not "
        "find what --py-files, spark.submit.pyFiles or addPyFile ship. Install anybroker on all nodes, or set "
        "PYTHONPATH in the environment of the driver and spark.executorEnv.PYTHONPATH to a path that all nodes have"
    )

    ours = (module, module.partition(".")[0])

    def load(options: MutableMapping[str, str]) -> Any:
        from importlib import import_module

        return getattr(import_module(module), qualified)(options)

    class Shipped(DataSource):
        """Delegates everything to the real source."""

        @classmethod
        def name(cls) -> str:
            return called

        def __init__(self, options: MutableMapping[str, str]) -> None:
            super().__init__(options)
            self._given = dict(options)

        def schema(self) -> Any:
            return load(self._given).schema()

        def reader(self, schema: Any) -> Any:
            return load(self._given).reader(schema)

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return load(self._given).writer(schema, overwrite)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return load(self._given).streamWriter(schema, overwrite)

        def streamReader(self, schema: Any) -> Any:
            try:
                source = load(self._given)
            except ModuleNotFoundError as error:
                if error.name not in ours:
                    raise
                raise RuntimeError(message) from None
            return source.streamReader(schema)

    return Shipped
