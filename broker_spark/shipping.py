"""How this package reaches the processes of Spark, and the error for the one way that fails.

What `--py-files`, `spark.submit.pyFiles` and `addPyFile` ship is found by tasks and by a batch read, and not by the
process in which Spark runs a streaming source: it looks elsewhere, and all it can say is "No module named
'broker_spark'". So where the package came that way, a source is registered that Spark can unpickle there without it,
and that says more.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

__all__ = ["python_path", "shipped_source"]


def shipped_source(source: type[DataSource], package: Path, found_in: Sequence[str]) -> type[DataSource] | None:
    """A source that explains itself, in place of one whose package streaming sources would not find; None if they do.

    :param source: what Spark calls, importable where batch reads are planned.
    :param package: the directory of the package as Python found it, perhaps within an archive.
    :param found_in: where the process of a streaming source looks for packages, besides what is installed.
    """
    archive = next((each for each in package.parents if each.is_file()), None)
    # Spark starts that process where it runs itself, so that paths from there mean the same.
    if archive is None or archive.resolve() in {Path(each).resolve() for each in found_in}:
        return None
    return _explaining(source.name(), source.__module__, source.__qualname__, archive.name)


def python_path(spark: SparkSession) -> list[str]:
    """Where the process of a streaming source looks: what Spark's own process was given, and the setting for executors.

    `spark-submit` lengthens the path of the driver's Python only.
    """
    machine: Any = getattr(spark, "_jvm", None)
    given = os.environ.get("PYTHONPATH") if machine is None else machine.System.getenv("PYTHONPATH")
    setting = spark.conf.get("spark.executorEnv.PYTHONPATH", "")
    return [part for text in (given, setting) if text for part in text.split(os.pathsep)]


def _explaining(called: str, module: str, qualified: str, archive: str) -> type[DataSource]:
    message = (
        f'A streaming source of format("{called}") cannot be read from {archive}: Spark runs it in a process that does '
        "not find what --py-files, spark.submit.pyFiles or addPyFile ship. Install anybroker on all nodes, or set "
        "PYTHONPATH in the environment of the driver and spark.executorEnv.PYTHONPATH to a path that all nodes have"
    )

    def load(options: MutableMapping[str, str]) -> Any:
        from importlib import import_module

        return getattr(import_module(module), qualified)(options)

    class Shipped(DataSource):
        """Everything but a streaming read is the real source's."""

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
            raise RuntimeError(message)

    return Shipped
