"""Spark Connect: sources, sinks, decode and the session helper, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from broker.blocking import connect
from tests.servers import kafka, nats
from tests.servers.kafka_jars import jars_of
from tests.servers.spark_python import quick_python
from tests.spark.conftest import CONNECTOR
from tests.spark.support import log, publish

NUMBERS = [b'{"number": %d}' % number for number in range(10)]
JOBS = [b"job %d" % number for number in range(10)]


class Found(NamedTuple):
    """The output and the rows of one process; a server of Spark Connect takes long to start."""

    said: dict[str, Any]
    log: str
    copies: dict[str, list[bytes]]
    waiting: int | None
    """In the queue."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    url, kafka_url = nats.shared_server().url, kafka.shared_server().url
    source, target, queue = (f"spark.{uuid4().hex[:12]}" for _ in range(3))
    with connect(url) as bus, connect(kafka_url) as other:
        for topic in (source, target, queue, f"{queue}.copy"):
            bus.admin.ensure_topic(topic, partitions=2)
        bus.admin.ensure_subscription(queue, "spark")
        for topic in (source, f"{source}.copy"):
            other.admin.ensure_topic(topic, partitions=1)
        publish(bus, source, NUMBERS)
        publish(bus, queue, JOBS)
        publish(other, source, [b"one", b"two", b"three"])
        jars = ",".join(map(str, jars_of(CONNECTOR, "spark-connector")))
        arguments = [jars, url, source, target, kafka_url, source, queue, str(tmp_path_factory.mktemp("connect"))]
        with quick_python():
            # The server takes a free port, which its client finds out.
            environment = {**os.environ, "SPARK_TESTING": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.connect_process", *arguments],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        topics = {"broker": (bus, target), "connector": (other, f"{source}.copy"), "spool": (bus, f"{queue}.copy")}
        copies = {name: sorted(body for _, body in log(on, topic)) for name, (on, topic) in topics.items()}
        waiting = bus.admin.lag(queue, "spark").waiting
    return Found(json.loads(done.stdout.splitlines()[-1]), done.stderr, copies, waiting)


@pytest.mark.deep
def test_sources_and_sinks_work_with_spark_connect(found: Found) -> None:
    said = dict(found.said)
    for name in ("connector", "spool", "ids"):
        del said[name]
    refusal = (
        "A pipeline runs in the driver of Spark, and this session is one of Spark Connect. Give it a classic session, "
        "for instance by spark-submit; sources, sinks and decode work with both"
    )
    kafka_rows = [["one", "three", "two"], ["topic", "partition", "offset"]]
    assert said.pop("lags")[-1] == 0
    assert said == {
        "mode": "pyspark.sql.connect.session",
        "the same": True,
        "state": "RocksDBStateStoreProvider",
        "batch": 10,
        "missing class": False,
        "always": kafka_rows,
        "never": kafka_rows,
        "auto": kafka_rows,
        "rows of batches": [4, 4, 2],
        "decoded": list(range(10)),
        "dead": ["JSON is malformed: invalid character (byte 0)"] * 2,
        "run": refusal,
        "explain": refusal,
    }
    # The question whether the connector is there is no error of the server.
    assert "no.such.Provider" not in found.log
    assert found.copies["broker"] == sorted([*NUMBERS, b"x0", b"x1"])


def test_streams_of_the_kafka_connector_work_with_spark_connect(found: Found) -> None:
    first, again = found.said["connector"]
    assert first["rows"] == [2, 1]
    assert again["rows"] == []
    # With one of our sources, which checks the topics.
    kafka, ours = first["sources"]
    assert kafka.startswith("KafkaV2[")
    assert ".PythonMicroBatchStream" in ours
    assert first["columns"][:3] == ["topic", "partition", "offset"]
    assert found.copies["connector"] == [b"one", b"three", b"two"]
    assert found.said["ids"].startswith("The topics of a checkpoint cannot be checked over Spark Connect")


def test_queues_work_with_spark_connect(found: Found) -> None:
    first, again = found.said["spool"]
    assert sum(first["rows"]) == len(JOBS)
    assert again["rows"] == []
    assert "delivery_attempt" in first["columns"]
    assert found.copies["spool"] == sorted(JOBS)
    assert found.waiting == 0
