"""Uses the parts of Spark that tests use, so that its JVM loads their classes: `python -m tests.spark.use_much`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

import broker.blocking
import broker_spark
from broker_spark.pipeline import CallSink, FileSink, Pipeline, Source, TableSink, TopicSink, run
from tests.spark.conftest import SETTINGS


@dataclass
class Number:
    number: int


def counted(numbers: DataFrame) -> DataFrame:
    late = numbers.select("payload.*", "publish_time").withWatermark("publish_time", "1 minute")
    return late.groupBy(F.window("publish_time", "1 second"), "number").count().select("number", "count")


def main(directory: Path) -> None:
    config = {**SETTINGS, "spark.sql.warehouse.dir": str(directory / "warehouse")}
    spark = broker_spark.session("use-much", master="local[2]", config=config)
    url = f"embedded://{directory}/broker"
    with broker.blocking.connect(url) as bus:
        for name in ("numbers", "counts"):
            bus.admin.ensure_topic(name, partitions=1)
        bus.topic("numbers").publish_batch([b'{"number": %d}' % number for number in range(20)])
        pipeline = Pipeline(
            name="use-much",
            url=url,
            sources={"numbers": Source("numbers", decode=Number, options={"maxRows": 10})},
            transform=counted,
            sinks={
                "topic": TopicSink("counts"),
                "files": FileSink(str(directory / "files")),
                "table": TableSink("counts"),
                "call": CallSink(lambda frame, _: frame.collect()),
            },
            dead_letters=FileSink(str(directory / "dead")),
            checkpoint=str(directory / "checkpoint"),
            trigger="available-now",
            output_mode="update",
        )
        assert run(pipeline, spark=spark) == 2
        spark.read.format("broker").options(url=url, topic="counts").load().groupBy("key").count().collect()
    spark.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
