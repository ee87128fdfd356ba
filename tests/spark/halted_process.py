"""Queries that stand still, each at a step of its own, for ever: `halted_process FILE`, with a `Halted` in each line.

One SIGKILL of this process is a kill at all of these steps, for the price of one JVM.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

import broker_spark
from broker_spark.pipeline import CallSink, FileSink, Pipeline, Run, Source, TopicSink
from tests.servers.kafka_jars import jars_of
from tests.spark.conftest import CONNECTOR, SETTINGS
from tests.spark.halting import Halt, HaltingSource
from tests.spark.support import copying

__all__ = ["BATCH", "Halted"]

BATCH = 100
"""Rows of a batch."""
AT_ONCE = 1
"""Queries that are under way to their step at a time: Spark gives each start of Python 10 s."""

_LOOK_SECONDS = 0.1


@dataclass
class Order:
    number: int
    colour: str


@dataclass(frozen=True, kw_only=True)
class Halted:
    """A query, and where it stands still.

    :ivar kind: `log` copies a topic, `pipeline` has several sinks and dead letters.
    :ivar connector: of a pipeline's source.
    """

    kind: str
    backend: str
    url: str
    source: str
    target: str
    dead: str = ""
    directory: str = ""
    step: str
    batch: int
    connector: str = "never"

    @property
    def halt(self) -> str:
        return f"{self.step}:{self.batch}:{self.directory}/halted"

    @property
    def checkpoint(self) -> str:
        return f"{self.directory}/checkpoint"

    @property
    def halted(self) -> bool:
        """Whether it stands still."""
        with suppress(FileNotFoundError):
            return Path(self.directory, "halted").stat().st_size > 0
        return False

    def writer(self, spark: SparkSession, *, halts: bool = False) -> DataStreamWriter:
        """The copy, not started."""
        options: dict[str, Any] = {"maxRows": BATCH, "arrowRows": 10}
        if halts:
            options["halt"] = self.halt
        return copying(spark, self.url, self.source, self.target, Path(self.checkpoint), **options)

    def pipeline(self, halt: Halt = Halt(), trigger: str = "") -> Pipeline:  # noqa: B008 - it is frozen
        def gate(frame: DataFrame, batch: int) -> None:
            halt.at("between", batch)

        return Pipeline(
            # Those that run in one session have names of their own.
            name=f"halted-{self.backend}-{self.step}-{self.connector}",
            url=self.url,
            sources={"orders": Source(self.source, Order, options={"maxRows": BATCH, "connector": self.connector})},
            transform=lambda frame: frame.select("key", "payload.*"),
            sinks={
                "files": FileSink(f"{self.directory}/files"),
                "topic": TopicSink(self.target, key="number"),
                "gate": CallSink(gate),
                "more": FileSink(f"{self.directory}/more", partition_by=["colour"]),
            },
            dead_letters=TopicSink(self.dead),
            checkpoint=self.checkpoint,
            trigger=trigger,
        )


class _HaltingRun(Run):
    def __init__(self, case: Halted) -> None:
        self._halt = Halt.parse(case.halt)
        super().__init__(case.pipeline(self._halt))

    def _batch(self, frame: DataFrame, batch: int) -> None:
        self._halt.at("planned", batch)
        super()._batch(frame, batch)
        self._halt.at("written", batch)


def main(file: str) -> None:
    jars = ",".join(map(str, jars_of(CONNECTOR, "spark-connector")))
    spark = broker_spark.session("halted", master="local[8,3]", config={**SETTINGS, "spark.jars": jars})
    spark.dataSource.register(HaltingSource)
    cases = [Halted(**json.loads(line)) for line in Path(file).read_text().splitlines()]

    started: list[Halted] = []
    for case in cases:
        started.append(case)
        if case.kind == "pipeline":
            threading.Thread(target=_HaltingRun(case).execute, args=(spark,), daemon=True).start()
        else:
            # In this thread, whose session knows the source.
            case.writer(spark, halts=True).start()
        # A query starts Python four times, and many of them at once would be too slow for Spark.
        while sum(not each.halted for each in started) >= AT_ONCE:
            # Raises what ends a query: none of them is meant to end.
            spark.streams.awaitAnyTermination(_LOOK_SECONDS)  # pyright: ignore[reportArgumentType]
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
