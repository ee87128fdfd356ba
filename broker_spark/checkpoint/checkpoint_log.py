"""Reads Spark's own files in a checkpoint: the numbers of the batches, and their positions.

Blocking. *Failure.* Incomplete files raise ConfigurationError instead of Spark's stack trace.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import SparkSession

from broker.errors import ConfigurationError
from broker.urls import mask_within
from broker_spark.common.json_state import parse_object
from broker_spark.runtime.hadoop import find_path, hadoop_path, path_errors_as, read_bytes
from broker_spark.runtime.spark_errors import first_line

__all__ = ["CheckpointLog"]

_ADVICE: Final = "Restore the checkpoint from a copy, or begin a new one, and with it new files and tables"


class CheckpointLog:
    """The logs of one checkpoint, as they are at each call.

    :param spark: a classic session, whose file system has the checkpoint.
    """

    def __init__(self, spark: SparkSession, checkpoint: str) -> None:
        self._spark = spark
        self._checkpoint = checkpoint.rstrip("/")

    @cached_property
    def _files(self) -> Any:
        return find_path(self._spark, self._checkpoint)[1]

    def batches(self, log: str) -> list[int]:
        """The numbers of the planned batches (log `offsets`) or of the committed ones (`commits`)."""
        with path_errors_as("checkpoint", self._checkpoint):
            path, files = find_path(self._spark, f"{self._checkpoint}/{log}")
            found: list[Any] = list(files.listStatus(path)) if files.exists(path) else []
        names = [str(each.getPath().getName()) for each in found]
        return [int(name) for name in names if name.isdecimal()]

    def positions(self, batch: int | None = None) -> list[dict[str, Any]]:
        """The positions of each source at the end of a batch; empty if the batch was not planned.

        A source that stores no JSON object has an empty one here.

        :param batch: its number; None for the last planned one, before the query starts: checks its metadata too.
        :raises ConfigurationError: the query's metadata or a position is incomplete, or cannot be read.
        """
        if batch is None:
            identity = self._read_file("metadata")
            if identity is not None:
                parse_object(identity[1], identity[0], _ADVICE)
            batch = max(self.batches("offsets"), default=-1)
        positions = self._read_file(f"offsets/{batch}")
        if positions is None:
            return []
        what, text = positions
        # A version, Spark's metadata, and a line for each source; some sources store a number, or nothing yet.
        lines = enumerate(text.decode(errors="replace").splitlines()[2:], 3)
        return [
            parse_object(line, f"Line {number} of {what}", _ADVICE) if line.startswith("{") else {}
            for number, line in lines
        ]

    def initial(self, index: int) -> dict[str, Any]:
        """The positions at which Spark's own source with this number in the plan began; empty for other sources.

        :raises ConfigurationError: they are incomplete, or cannot be read.
        """
        found = self._read_file(f"sources/{index}/0")
        if found is None:
            return {}
        what, content = found
        # A zero byte, a version, and the positions.
        return parse_object(content[max(0, content.find(b"{")) :], what, _ADVICE)

    def _read_file(self, name: str) -> tuple[str, bytes] | None:
        """A file's name for errors and its contents; None if it does not exist.

        :raises ConfigurationError: it cannot be read.
        """
        file = f"{self._checkpoint}/{name}"
        what = f"{mask_within(file)} of the checkpoint"
        try:
            path = hadoop_path(self._spark, file)
            return (what, read_bytes(path, self._files)) if self._files.exists(path) else None
        except Py4JJavaError as error:
            raise ConfigurationError(f"{what} cannot be read: {first_line(error)}", advice=_ADVICE) from error
