"""Workers of Spark keep their connection from task to task and from batch to batch."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from broker.blocking import connect
from tests.servers.nats import NatsServer
from tests.spark.support import copy, log, numbered, publish

BATCHES = 6


def test_batches_share_connections(spark: SparkSession, tmp_path: Path) -> None:
    with NatsServer('http: "127.0.0.1:-1"') as server, connect(server.url) as bus:
        for topic in ("source", "target"):
            bus.admin.ensure_topic(topic, partitions=2)
        publish(bus, "source", numbered(BATCHES * 10))
        query = copy(spark, server.url, "source", "target", tmp_path, maxRows=10)
        assert len([each for each in query.recentProgress if each["numInputRows"]]) == BATCHES
        assert sorted(body for _, body in log(bus, "target")) == sorted(numbered(BATCHES * 10))
        opened = int(server.monitoring("varz")["total_connections"])
    # Two planners, and one in each worker of a task that reads or writes; a connection per task would be 24.
    assert opened <= 2 * BATCHES
