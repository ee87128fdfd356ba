"""A table of a catalog that outlives the session, which is Hive's in a directory: `test_table_outlives FILE`.

A pipeline is killed while a batch is in its table and not committed; the same program in another process, with another
JVM, continues in the same table.
"""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import functions as F  # noqa: N812

import broker_spark
from broker.blocking import connect
from broker_spark.pipeline import CallSink, Pipeline, Source, TableSink, run
from broker_spark.pipeline.definition import AVAILABLE_NOW
from tests.fault_matrix import Books
from tests.servers import nats
from tests.spark.conftest import SETTINGS
from tests.spark.halted_process import BATCH, Halted
from tests.spark.halting import Halt
from tests.spark.support import numbered, publish
from tests.spark.test_kills import kill_when_halted

PROGRAM = "tests.spark.test_table_outlives"
END = "end"
"""A step after all batches."""
ROWS = 2 * BATCH
KILLED = 1
"""The batch at which it is killed; the one before it is committed."""


def pipeline(case: Halted) -> Pipeline:
    halt = Halt.parse(case.halt)
    kept = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": f"{case.directory}/warehouse",
        # The directory of the catalog's database.
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={case.directory}",
    }
    return Pipeline(
        name="outlives",
        url=case.url,
        sources={"numbers": Source(case.source, options={"maxRows": BATCH})},
        transform=lambda frame: frame.select(F.col("value").cast("string").alias("number")),
        sinks={"table": TableSink(case.target), "gate": CallSink(lambda _, batch: halt.at("between", batch))},
        checkpoint=case.checkpoint,
        trigger=AVAILABLE_NOW,
        master="local[2,3]",
        config={**SETTINGS, **kept},
    )


def main(file: str) -> None:
    case = Halted(**json.loads(Path(file).read_text()))
    batches = run(pipeline(case))
    rows = [row.number for row in broker_spark.session().table(case.target).collect()]
    Path(case.directory, "found").write_text(json.dumps([batches, rows]))
    # Its session would take seconds to end.
    Halt.parse(case.halt).at(END, case.batch)


def files_of(case: Halted) -> dict[str, set[str]]:
    """The rows of the table, by batch."""
    parts = Path(case.directory, "warehouse", case.target).glob("batch=*")
    return {part.name: {path.name for path in part.glob("*.parquet")} for part in parts}


@pytest.mark.deep
def test_a_table_has_each_row_once_when_another_process_continues(tmp_path: Path, books: Books) -> None:
    url, topic = nats.shared_server().url, f"spark.{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=2)
        publish(bus, topic, numbered(ROWS))
    case = Halted(
        kind="table",
        backend="jetstream",
        url=url,
        source=topic,
        target="numbers",
        directory=str(tmp_path),
        step="between",
        batch=KILLED,
    )
    kill_when_halted(PROGRAM, [case], tmp_path)
    before = files_of(case)
    assert before.keys() == {"batch=0", "batch=1"}
    assert all(before.values())
    assert not Path(case.checkpoint, "commits", str(KILLED)).exists()
    Path(case.directory, "halted").unlink()
    kill_when_halted(PROGRAM, [replace(case, step=END)], tmp_path)
    batches, rows = json.loads((tmp_path / "found").read_text())
    fault = "SIGKILL of a pipeline: between; a table, resumed by another process"
    books.balance(fault, case.backend, numbered(ROWS), [row.encode() for row in rows])
    assert batches == ROWS // BATCH - KILLED
    after = files_of(case)
    assert after.keys() == before.keys()
    assert after["batch=0"] == before["batch=0"]
    assert after["batch=1"].isdisjoint(before["batch=1"])


if __name__ == "__main__":
    main(*sys.argv[1:])
