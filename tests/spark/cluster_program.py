"""A program for a cluster: `cluster_program MASTER URL SOURCE TARGET ORDERS DEAD DIRECTORY STEP`; it prints JSON.

A batch read, a stream that copies the source into the target, a second run of the stream that finds nothing new, a
pipeline of typed orders, and a queue over the source whose spool all executors read. A task of the first stream halts
at `STEP` (see `halting`) until its executor is killed; an empty `STEP` halts nowhere.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import functions as F  # noqa: N812

import broker_spark
from broker_spark.pipeline import BatchReport, FileSink, Pipeline, Source, TopicSink, run
from tests.spark.conftest import SETTINGS
from tests.spark.halting import HaltingSource
from tests.spark.support import copy, read


@dataclass
class Order:
    number: int


def main(master: str, url: str, source: str, target: str, orders: str, dead: str, directory: str, step: str) -> None:
    settings = {**SETTINGS, "spark.executor.memory": "512m", "spark.cores.max": 2, "spark.executor.cores": 1}
    # To import the module of the step; the package itself is installed.
    settings["spark.executorEnv.PYTHONPATH"] = str(Path(__file__).parents[2])
    spark = broker_spark.session("cluster", master=master, config=settings)
    spark.dataSource.register(HaltingSource)
    frame = read(spark, url, source, tasksPerPartition=2)
    counts = [row["count"] for row in frame.groupBy(F.spark_partition_id()).count().collect()]
    checkpoint = Path(directory) / "checkpoint"
    halt = f"{step}:0:{directory}/halted" if step else ""
    runs = [copy(spark, url, source, target, checkpoint, halt=halt, arrowRows=10) for _ in range(2)]
    copied = [sum(progress["numInputRows"] for progress in run.recentProgress) for run in runs]
    reports: list[BatchReport] = []
    pipeline = Pipeline(
        name="orders",
        url=url,
        sources={"orders": Source(orders, Order, options={"maxRows": 40})},
        transform=lambda frame: frame.select("payload.*").where("number % 2 = 0"),
        sinks={"files": FileSink(f"{directory}/files")},
        dead_letters=TopicSink(dead),
        checkpoint=f"{directory}/pipeline",
        trigger="available-now",
    )
    run(pipeline, spark=spark, on_batch=reports.append)
    queue = {"url": url, "topic": source, "subscription": "cluster", "spool": f"{directory}/spool", "maxRows": 50}
    spooled = spark.readStream.format("broker").options(**queue, columns="value").load()
    writer = spooled.writeStream.format("parquet").option("checkpointLocation", f"{directory}/queue")
    writer.trigger(availableNow=True).start(f"{directory}/spooled").awaitTermination()
    result = {
        "rows": sum(counts),
        "tasks": len(counts),
        "copied": copied,
        "orders": sum(report.rows_in for report in reports),
        "files": spark.read.parquet(f"{directory}/files").distinct().count(),
        "spooled": sorted(int(row["value"]) for row in spark.read.parquet(f"{directory}/spooled").collect()),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
