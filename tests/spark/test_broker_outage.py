"""A broker that is killed while queries read from it and write to it: it comes back, or stays away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from broker.blocking import Bus, connect
from tests.fault_matrix import Books
from tests.servers.kafka import KafkaServer
from tests.servers.nats import NatsServer
from tests.spark.support import copy, copying, log, numbered, publish

pytestmark = pytest.mark.deep

ROWS = 800
BATCH = 100
SECONDS = 150.0
PATIENCE = 45
"""Seconds until a broker comes back."""
LOOK = 0.1

Server = NatsServer | KafkaServer


@pytest.fixture(scope="module", params=["jetstream", "kafka"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of its own, since it is killed."""
    with NatsServer() if request.param == "jetstream" else KafkaServer() as server:
        yield server


def until(bus: Bus, topic: str, rows: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(log(bus, topic)) < rows:
        assert time.monotonic() < deadline
        time.sleep(LOOK)


def wait_for(query: StreamingQuery, batches: int) -> None:
    """Wait until this many are written."""
    deadline = time.monotonic() + SECONDS
    while (query.lastProgress or {"batchId": -1})["batchId"] < batches - 1:
        assert time.monotonic() < deadline
        assert not query.awaitTermination(LOOK)  # pyright: ignore[reportArgumentType]


def twice(bus: Bus) -> dict[str, Any]:
    """Rows that may be there twice."""
    return {} if bus.capabilities.publish.deduplication else {"twice": BATCH, "why": "the batch is run again"}


def fill(bus: Bus, name: str) -> tuple[str, str]:
    """A topic with rows, and one for their copy."""
    topics = f"{name}.source", f"{name}.target"
    for topic in topics:
        bus.admin.ensure_topic(topic, partitions=2)
    publish(bus, topics[0], numbered(ROWS))
    return topics


def test_a_broker_that_is_killed_and_comes_back(
    spark: SparkSession, server: Server, tmp_path: Path, books: Books
) -> None:
    """The log of Kafka, and a queue of JetStream."""
    url = f"{server.url}?request_timeout={PATIENCE}"
    options: dict[str, Any] = {"maxRows": BATCH}
    with connect(url) as bus:
        kind = "log" if bus.capabilities.backend == "kafka" else "queue"
        if kind == "queue":
            options |= {"subscription": "spark", "spool": str(tmp_path / "spool")}
        source, target = fill(bus, kind)
        query = copying(spark, url, source, target, tmp_path / "checkpoint", **options).start()
        try:
            wait_for(query, 3)
            server.kill()
            server.start()
            assert len(log(bus, target)) < ROWS
            query.processAllAvailable()
            assert query.isActive
            until(bus, target, ROWS)
        finally:
            query.stop()
        ids, rows = zip(*log(bus, target), strict=True)
        fault = f"SIGKILL of the broker, which comes back; {kind}"
        books.balance(fault, bus.capabilities.backend, numbered(ROWS), rows, ids=ids, **twice(bus))


@pytest.mark.deep
def test_a_broker_that_is_killed(spark: SparkSession, server: Server, tmp_path: Path, books: Books) -> None:
    # The query should give up soon; the test itself has time, however busy the machine is.
    url = f"{server.url}?request_timeout=8"
    with connect(server.url) as bus:
        source, target = fill(bus, "away")
        query = copying(spark, url, source, target, tmp_path, maxRows=BATCH).start()
        wait_for(query, 3)
    server.kill()
    with pytest.raises(StreamingQueryException, match=r"broker\.errors\.\w+"):
        query.awaitTermination()
    server.start()
    copy(spark, url, source, target, tmp_path, maxRows=BATCH)
    with connect(server.url) as bus:
        ids, rows = zip(*log(bus, target), strict=True)
        fault = "SIGKILL of the broker, which stays away"
        books.balance(fault, bus.capabilities.backend, numbered(ROWS), rows, ids=ids, **twice(bus))
