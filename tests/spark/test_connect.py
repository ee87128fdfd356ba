"""Spark Connect: sources, sinks, decode and the session helper, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from broker.blocking import connect
from tests.servers import kafka, nats
from tests.servers.kafka_jars import jars_of
from tests.servers.spark_python import quick_python
from tests.spark.conftest import CONNECTOR
from tests.spark.support import log, publish


@pytest.mark.slow
def test_sources_and_sinks_work_with_spark_connect(tmp_path: Path) -> None:
    url, kafka_url = nats.shared_server().url, kafka.shared_server().url
    source, target = (f"spark.{uuid4().hex[:12]}" for _ in range(2))
    with connect(url) as bus, connect(kafka_url) as other:
        for topic in (source, target):
            bus.admin.ensure_topic(topic, partitions=2)
        other.admin.ensure_topic(source, partitions=1)
        publish(bus, source, [b'{"number": %d}' % number for number in range(10)])
        publish(other, source, [b"one", b"two"])
        jars = ",".join(map(str, jars_of(CONNECTOR, "spark-connector")))
        with quick_python():
            # Has the server take a free port, and its client find out which.
            environment = {**os.environ, "SPARK_TESTING": "1"}
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.spark.connect_process",
                jars,
                url,
                source,
                target,
                kafka_url,
                source,
                tmp_path,
            ],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        found = json.loads(done.stdout.splitlines()[-1])
        copied = sorted(body for _, body in log(bus, target))
    refusal = (
        "A pipeline runs in the driver of Spark, and this session is one of Spark Connect. Give it a classic session, "
        "for instance by spark-submit; sources, sinks and decode work with both"
    )
    kafka_rows = [["one", "two"], ["topic", "partition", "offset"]]
    assert found.pop("lags")[-1] == 0
    assert found == {
        "mode": "pyspark.sql.connect.session",
        "the same": True,
        "state": "RocksDBStateStoreProvider",
        "batch": 10,
        "always": kafka_rows,
        "never": kafka_rows,
        "auto": kafka_rows,
        "rows of batches": [4, 4, 2],
        "decoded": list(range(10)),
        "dead": ["The value is not JSON"] * 2,
        "run": refusal,
        "explain": refusal,
    }
    assert copied == sorted([*(b'{"number": %d}' % number for number in range(10)), b"x0", b"x1"])
