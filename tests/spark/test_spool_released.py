"""A query over a queue that ends in order gives back what it holds, though Spark ends its process by a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker.blocking import connect
from broker.testing.waiting import eventually
from tests.servers import nats
from tests.spark.support import copying, log, numbered, publish

PATIENCE = 20.0


@pytest.mark.parametrize("ended", ["by a stop", "by its trigger"])
def test_a_query_that_ends_gives_its_spool_back(spark: SparkSession, ended: str, tmp_path: Path) -> None:
    url = nats.shared_server().url
    source, target = (f"spark.{uuid.uuid4().hex[:12]}" for _ in range(2))
    spool = tmp_path / "spool"
    with connect(url) as bus:
        for topic in (source, target):
            bus.admin.ensure_topic(topic, partitions=1)
        bus.admin.ensure_subscription(source, "spark")
        publish(bus, source, numbered(20))
        writer = copying(spark, url, source, target, tmp_path / "checkpoint", subscription="spark", spool=str(spool))
        if ended == "by a stop":
            query = writer.start()
            query.processAllAvailable()
            query.stop()
        else:
            writer.trigger(availableNow=True).start().awaitTermination(60)

        def released() -> list[bool]:
            """Of its owners, when all of them have said so."""
            found = [json.loads(path.read_text())["released"] for path in (spool / "owners").glob("*.json")]
            return found if all(found) else []

        asyncio.run(eventually(released, PATIENCE, "that the spool was given back"))
        assert sorted(value for _, value in log(bus, target)) == sorted(numbered(20))


PROCESS = """
import sys
from broker_spark.spool.ending import Ending
sys.modules["__main__"].__spec__ = type("Spec", (), {"name": sys.argv[1]})
ending = Ending()
ending.watch()
try:
    print("watching", flush=True)
    sys.stdin.read()
finally:
    print("given back", flush=True)
    ending.end()
    print("not ended", flush=True)
"""


@pytest.mark.parametrize(
    ("runs", "expected"),
    [("pyspark.sql.streaming.python_streaming_source_runner", "given back\n"), ("somebodys_program", "")],
)
def test_the_signal_ends_spark_s_process_in_order_and_no_other(runs: str, expected: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, runs], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.read() == expected
        assert process.wait(PATIENCE) == -signal.SIGTERM
