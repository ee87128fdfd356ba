"""Pipelines into Delta tables that are killed by SIGKILL at each step of a batch: `test_delta_kills FILE`.

As in `test_kills`, all of them run in one process, each halted at its step; it is killed once, and the session of the
tests resumes them.
"""

from __future__ import annotations

import json
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import broker_spark
from broker.blocking import connect
from broker_spark.pipeline import CallSink, Pipeline, Run, Source, TableSink, run
from broker_spark.pipeline.definition import AVAILABLE_NOW
from tests.fault_matrix import Books
from tests.servers import nats
from tests.spark.conftest import SETTINGS, jar_settings, shared_session
from tests.spark.halted_process import AT_ONCE, BATCH, Halted
from tests.spark.halting import Halt
from tests.spark.support import numbered, publish
from tests.spark.test_kills import kill_when_halted

ROWS = 3 * BATCH
KILLED = 1
"""The batch at which they are killed; earlier ones are committed."""
KEYS = 30
STEPS = ("planned", "half", "between", "written")
"""Before the batch; within the tasks of its first table; when one of its tables has it; when both have it."""
WRITTEN = {"planned": (1, 1), "half": (1, 1), "between": (2, 1), "written": (2, 2)}
"""How many batches each table has at the kill."""
_LOOK_SECONDS = 0.1


def pipeline(case: Halted, halt: Halt = Halt()) -> Pipeline:  # noqa: B008 - it is frozen
    def standing(number: int) -> int:
        # A batch of Spark's stream has the number of the property.
        task = TaskContext.get()
        assert task is not None
        halt.at("half", int(task.getLocalProperty("streaming.sql.batchId") or 0))
        return number

    def rows(frame: DataFrame) -> DataFrame:
        number = F.col("value").cast("string").cast("bigint")
        if halt.step == "half":
            number = F.udf(standing, "bigint")(number)
        return frame.select(number.alias("number")).withColumn("key", F.col("number") % KEYS)

    def table(name: str) -> TableSink:
        return TableSink(f"{case.target}_{name}", format="delta", options={"path": f"{case.directory}/{name}"})

    return Pipeline(
        name=case.target,
        url=case.url,
        sources={"numbers": Source(case.source, options={"maxRows": BATCH})},
        transform=rows,
        sinks={
            "all": table("all"),
            "gate": CallSink(lambda _, batch: halt.at("between", batch)),
            "latest": replace(table("latest"), merge_by=["key"], order_by=["number"]),
        },
        checkpoint=case.checkpoint,
        trigger=AVAILABLE_NOW,
    )


class _HaltingRun(Run):
    def __init__(self, case: Halted) -> None:
        self._halt = Halt.parse(case.halt)
        super().__init__(pipeline(case, self._halt))

    def _batch(self, frame: DataFrame, batch: int) -> None:
        self._halt.at("planned", batch)
        super()._batch(frame, batch)
        self._halt.at("written", batch)


def main(file: str) -> None:
    spark = broker_spark.session("halted", master="local[8,3]", config={**SETTINGS, **jar_settings()})
    cases = [Halted(**json.loads(line)) for line in Path(file).read_text().splitlines()]
    started: list[Halted] = []
    for case in cases:
        started.append(case)
        threading.Thread(target=_HaltingRun(case).execute, args=(spark,), daemon=True).start()
        while sum(not each.halted for each in started) >= AT_ONCE:
            # Raises the error of a query that ended: none should end.
            spark.streams.awaitAnyTermination(_LOOK_SECONDS)  # pyright: ignore[reportArgumentType]
    spark.streams.awaitAnyTermination()


def count(spark: SparkSession, case: Halted, name: str) -> int:
    return spark.read.format("delta").load(f"{case.directory}/{name}").count()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Halted]]:
    """The pipelines after the kill, by step."""
    directory, url = tmp_path_factory.mktemp("killed"), nats.shared_server().url
    topic = f"delta_{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        # In order, so that the last row of a key is known.
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(ROWS))
    cases = {
        step: Halted(
            kind="delta",
            backend="jetstream",
            url=url,
            source=topic,
            target=f"delta_{step}",
            directory=str(directory / step),
            step=step,
            batch=KILLED,
        )
        for step in STEPS
    }
    for case in cases.values():
        Path(case.directory).mkdir()
    kill_when_halted("tests.spark.test_delta_kills", list(cases.values()), directory)
    yield cases
    for case in cases.values():
        for name in ("all", "latest"):
            shared_session().sql(f"DROP TABLE IF EXISTS {case.target}_{name}")


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_pipeline_has_each_row_once_in_its_tables(
    killed: dict[str, Halted], spark: SparkSession, books: Books, step: str
) -> None:
    case = killed[step]
    appended, merged = WRITTEN[step]
    assert count(spark, case, "all") == appended * BATCH
    assert not Path(case.checkpoint, "commits", str(KILLED)).exists()
    versions = spark.sql(f"DESCRIBE HISTORY delta.`{case.directory}/latest`").where("operation = 'MERGE'").count()
    assert versions == merged
    assert run(pipeline(case), spark=spark) == ROWS // BATCH - KILLED
    rows = spark.read.format("delta").load(f"{case.directory}/all").collect()
    fault = f"SIGKILL of a pipeline into Delta tables: {step}"
    books.balance(fault, case.backend, numbered(ROWS), [b"%d" % row.number for row in rows])
    latest = spark.read.format("delta").load(f"{case.directory}/latest").collect()
    due = [(number, number % KEYS) for number in range(ROWS - KEYS, ROWS)]
    assert sorted((row.number, row.key) for row in latest) == due
    versions = spark.sql(f"DESCRIBE HISTORY delta.`{case.directory}/latest`").where("operation = 'MERGE'").count()
    assert versions == ROWS // BATCH


if __name__ == "__main__":
    main(*sys.argv[1:])
