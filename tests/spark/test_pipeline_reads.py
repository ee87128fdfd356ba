"""A pipeline reads each row once in a batch, however many sinks it has; the places of dead rows a second time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.blocking import connect
from broker.outbound import OutboundMessage
from broker_spark.pipeline import BatchReport, FileSink, Source, run
from tests.servers.nats import NatsServer
from tests.spark.test_pipeline import Order, make, orders

COUNT = 4000


def rows(orders: DataFrame) -> DataFrame:
    return orders.where("payload.colour != 'green'").select("payload.*")


def totals(orders: DataFrame) -> DataFrame:
    return orders.groupBy("payload.colour").agg(F.count("*").alias("orders"), F.max("offset").alias("last"))


def delivered(server: NatsServer) -> int:
    """Messages that the server has sent to all its clients."""
    return int(server.monitoring("varz")["out_msgs"])


@pytest.mark.deep
@pytest.mark.parametrize("transform", [rows, totals])
def test_each_row_is_read_once(
    spark: SparkSession, tmp_path: Path, transform: Callable[[DataFrame], DataFrame]
) -> None:
    with NatsServer('http: "127.0.0.1:-1"') as server, connect(server.url) as bus:
        bus.admin.ensure_topic("orders", partitions=2)
        bus.topic("orders").publish_batch(
            [OutboundMessage(body, body) for body in [*orders(COUNT), *(b"bad %d" % number for number in range(100))]]
        )
        reports: list[BatchReport] = []
        pipeline = make(
            server.url,
            "orders",
            tmp_path,
            sources={"orders": Source("orders", Order, options={"maxRows": 10_000})},
            sinks={"one": FileSink(str(tmp_path / "one")), "two": FileSink(str(tmp_path / "two"))},
            transform=transform,
            output_mode="update",
        )
        before = delivered(server)
        for part in bus.log.partitions("orders"):
            assert sum(map(len, bus.log.read("orders", part))) > COUNT / 4
        once = delivered(server) - before
        run(pipeline, spark=spark, on_batch=reports.append)
        read = delivered(server) - before - once
    found = spark.read.parquet(str(tmp_path / "one"))
    if transform is totals:
        assert {row.colour: row.orders for row in found.collect()} == {"red": COUNT // 2, "blue": COUNT // 2}
    else:
        assert found.count() == found.select("number").distinct().count() == COUNT
    assert spark.read.parquet(str(tmp_path / "dead")).select("value").distinct().count() == 100
    assert [(report.rows_in, report.dead) for report in reports] == [(COUNT + 100, 100)]
    # The other messages of the server are a few replies to each task.
    assert read < once * 1.2
