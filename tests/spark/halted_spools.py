"""Queries over spools that halt, each at its own step: `halted_spools FILE`, with a `HaltedSpool` in each
line.

One SIGKILL of this process ends the owners of all of these spools, with their JVM: planners as Spark starts them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

import broker_spark
from broker_spark.spool.source import SpoolStreamReader
from tests.spark import spool_steps
from tests.spark.conftest import SETTINGS
from tests.spark.halted_process import BATCH, Halted
from tests.spark.halting import HaltingSource, stand
from tests.spark.support import copying

__all__ = ["SPOOL", "HaltedSpool"]

SPOOL = "spool-"
"""The prefix of a step of `spool_steps`; its number counts calls instead of batches."""

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class HaltedSpool(Halted):
    """A copy of a queue into a topic.

    :ivar target_url: the broker of that topic.
    """

    target_url: str

    @property
    def spool(self) -> Path:
        return Path(self.directory, "spool")

    def writer(self, spark: SparkSession, *, halts: bool = False) -> DataStreamWriter:
        """The copy, not started."""
        options: dict[str, Any] = {"subscription": "spark", "spool": self.spool, "maxRows": BATCH}
        halt = self.halt if halts else ""
        copied = copying(spark, self.url, self.source, self.target, Path(self.checkpoint), halt=halt, **options)
        return copied.options(url=self.target_url)


class _HaltingQueue(HaltingSource):
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        # Called in the process that will own this spool only, and in those of tasks, which never reach such a step.
        step = self._halt.step.removeprefix(SPOOL)
        if step != self._halt.step:
            halt = self._halt
            spool_steps._kill = lambda: stand(halt.file)
            spool_steps.STEPS[step](halt.batch)
        return SpoolStreamReader(self._source(schema).for_stream())


def main(file: str) -> None:
    spark = broker_spark.session("halted", master="local[8,3]", config=SETTINGS)
    spark.dataSource.register(_HaltingQueue)
    for line in Path(file).read_text().splitlines():
        case = HaltedSpool(**json.loads(line))
        case.writer(spark, halts=True).start()
        # One at a time, since Spark gives each start of Python 10 s.
        while not case.halted:
            # Raises the error of a query that ended: none should end.
            spark.streams.awaitAnyTermination(_LOOK_SECONDS)  # pyright: ignore[reportArgumentType]
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
