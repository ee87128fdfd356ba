"""Queries that halt for ever, each at its own step: `halted_process FILE`, with a `Halted` in each line.

One SIGKILL of this process kills at all of these steps, for the cost of one JVM.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.readwriter import DataStreamWriter

import broker_spark
from broker_spark.pipeline import CallSink, Expect, FileSink, Pipeline, Run, Source, TopicSink
from tests.servers.kafka_jars import jars_of
from tests.spark.conftest import CONNECTOR, SETTINGS
from tests.spark.halting import Halt, HaltingSource
from tests.spark.support import copying

__all__ = ["BATCH", "LATE", "WINDOW", "Halted"]

BATCH = 100
"""Rows of a batch."""
WINDOW = 20
"""Orders per time window; the number of an order is its second."""
LATE = 40
"""How far the watermark is behind the highest number of earlier batches."""
AT_ONCE = 1
"""How many queries run towards their step at a time: Spark gives each start of Python 10 s."""

_LOOK_SECONDS = 0.1


@dataclass
class Order:
    number: int
    colour: str


@dataclass(frozen=True, kw_only=True)
class Halted:
    """A query, and where it halts.

    :ivar kind: `log` copies a topic, `pipeline` has several sinks and dead letters, and `windows` is one that keeps
        state.
    :ivar connector: whether Spark's own Kafka connector reads.
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
        """Whether it has halted."""
        with suppress(FileNotFoundError):
            return Path(self.directory, "halted").stat().st_size > 0
        return False

    def writer(self, spark: SparkSession, *, halts: bool = False) -> DataStreamWriter:
        """The copy, not started."""
        by_connector = self.connector == "always"
        options: dict[str, Any] = {"connector": self.connector} if by_connector else {"arrowRows": 10}
        if halts:
            options["halt"] = self.halt
        return copying(spark, self.url, self.source, self.target, Path(self.checkpoint), maxRows=BATCH, **options)

    def pipeline(self, halt: Halt = Halt(), trigger: str = "") -> Pipeline:  # noqa: B008 - it is frozen
        def gate(frame: DataFrame, batch: int) -> None:
            halt.at("between", batch)

        return Pipeline(
            # Names must be unique within a session.
            name=f"halted-{self.kind}-{self.backend}-{self.step}-{self.connector}",
            url=self.url,
            sources={
                "orders": Source(
                    self.source,
                    Order,
                    options={"maxRows": BATCH, "connector": self.connector},
                    expect={"coloured": Expect("payload.colour <> 'none'", "dead")},
                )
            },
            transform=_windows if self.kind == "windows" else lambda frame: frame.select("key", "payload.*"),
            sinks={
                "files": FileSink(f"{self.directory}/files"),
                "topic": TopicSink(self.target, key="colour"),
                "gate": CallSink(gate),
                "more": FileSink(f"{self.directory}/more", partition_by=["colour"]),
            },
            dead_letters=TopicSink(self.dead),
            checkpoint=self.checkpoint,
            trigger=trigger,
        )


def _windows(orders: DataFrame) -> DataFrame:
    """Orders in windows of their time, each when it is over."""
    timed = orders.select("payload.*", F.timestamp_seconds("payload.number").alias("time"))
    windows = F.window("time", f"{WINDOW} seconds")
    counted = timed.withWatermark("time", f"{LATE} seconds").groupBy(windows, "colour")
    totals = counted.agg(F.count("*").alias("orders"), F.sum("number").alias("total"))
    return totals.select(F.unix_timestamp("window.start").alias("start"), "colour", "orders", "total")


class _HaltingBroker(HaltingSource):
    """`format("broker")`: what pipelines read and write, whose options they check. Spark gets it with its `halts`.

    :cvar halts: by topic, which is one pipeline's.
    """

    halts: ClassVar[dict[str, str]] = {}

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__({**options, "halt": self.halts.get(options.get("topic", ""), "")})

    @classmethod
    def name(cls) -> str:
        return "broker"


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
    pipelines = [case for case in cases if case.kind != "log"]
    _HaltingBroker.halts.update({topic: case.halt for case in pipelines for topic in (case.source, case.target)})
    # A pipeline registers it for itself.
    registering: Any = import_module("broker_spark.session")
    registering.BrokerDataSource = _HaltingBroker

    started: list[Halted] = []
    for case in cases:
        started.append(case)
        if case in pipelines:
            threading.Thread(target=_HaltingRun(case).execute, args=(spark,), daemon=True).start()
        else:
            # In this thread, whose session has the source.
            case.writer(spark, halts=True).start()
        # A query starts Python four times, and many of them at once would be too slow for Spark.
        while sum(not each.halted for each in started) >= AT_ONCE:
            # Raises the error of a query that ended: none should end.
            spark.streams.awaitAnyTermination(_LOOK_SECONDS)  # pyright: ignore[reportArgumentType]
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
