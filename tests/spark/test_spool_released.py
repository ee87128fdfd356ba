"""A query over a queue that ends normally releases its messages, although Spark ends its process by a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker.blocking import connect
from broker.testing.waiting import eventually
from tests.servers import nats
from tests.spark.support import copying, numbered, publish

PATIENCE = 60.0
LEASE = 600
"""Lease of messages that were not released, in seconds: longer than the tests wait for them."""
HELD = 60


@pytest.mark.parametrize("ended", ["by a stop", "by its trigger"])
def test_a_query_that_ends_releases_its_spool_and_its_messages(spark: SparkSession, ended: str, tmp_path: Path) -> None:
    url = f"{nats.shared_server().url}?lease_seconds={LEASE}"
    source, target = (f"spark.{uuid.uuid4().hex[:12]}" for _ in range(2))
    spool = tmp_path / "spool"
    with connect(url) as bus:
        for topic in (source, target):
            bus.admin.ensure_topic(topic, partitions=1)
        bus.admin.ensure_subscription(source, "spark")
        options: dict[str, Any] = {"subscription": "spark", "spool": str(spool), "maxRows": 10, "aheadRows": 10}
        writer = copying(spark, url, source, target, tmp_path / "checkpoint", **options)
        publish(bus, source, numbered(HELD))
        if ended == "by a stop":
            # After a batch it holds a full spool, and further received messages.
            query = writer.trigger(processingTime="3 seconds").start()
            deadline = time.monotonic() + 6 * PATIENCE
            while not any(progress["numInputRows"] for progress in query.recentProgress):
                assert time.monotonic() < deadline
                assert not query.awaitTermination(1)
            query.stop()
        else:
            query = writer.trigger(availableNow=True).start()
            assert query.awaitTermination(120)

        def released() -> list[bool]:
            """The owners, when all of them have released it."""
            found = [json.loads(path.read_text())["released"] for path in (spool / "owners").glob("*.json")]
            return found if all(found) else []

        asyncio.run(eventually(released, PATIENCE, "the release of the spool"))
        lag = bus.admin.lag(source, "spark")
        left = lag.waiting + (lag.unsettled or 0)
        assert (left > 0) is (ended == "by a stop")
        with bus.messages(source, subscription="spark") as consumer:
            for number in range(left):
                message = consumer.next_message(timeout=PATIENCE)
                assert message is not None, f"{number} of {lag} came before their lease was over"
                message.ack()


PROCESS = """
import signal, sys, threading, time
from broker_spark.spool.source import Shutdown
sys.modules["__main__"].__spec__ = type("Spec", (), {"name": sys.argv[1]})
shutdown, when = Shutdown(), sys.argv[2]
shutdown.install()
try:
    if when == "at once":
        print("ready", flush=True)
        sys.stdin.read()
finally:
    shutdown.begin_release()
    if when == "meanwhile":
        print("ready", flush=True)
        while not shutdown._requested:
            time.sleep(0.01)
    print("released", flush=True)
    shutdown.finish()
    if when == "after":
        print("ready", flush=True)
        signal.pause()
    print("not ended", flush=True)
"""
SPARKS = "pyspark.sql.streaming.python_streaming_source_runner"


@pytest.mark.parametrize(
    ("runs", "when", "expected"),
    [
        (SPARKS, "at once", ["ready", "released"]),
        (SPARKS, "meanwhile", ["ready", "released"]),
        (SPARKS, "after", ["released", "ready"]),
        ("another_program", "at once", ["ready"]),
    ],
)
def test_sigterm_releases_the_spool_in_sparks_process_only(runs: str, when: str, expected: list[str]) -> None:
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, runs, when], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "ready" not in said:
            said.append(process.stdout.readline().strip())
        os.kill(process.pid, signal.SIGTERM)
        said += process.stdout.read().split("\n")[:-1]
        assert said == expected
        assert process.wait(PATIENCE) == -signal.SIGTERM


def test_a_hanging_release_does_not_keep_the_process() -> None:
    bound = "import broker_spark.spool.source as own; own._RELEASE_SECONDS = 0.2\n"
    hanging = (bound + PROCESS).replace('print("released", flush=True)', "threading.Event().wait()")
    with subprocess.Popen(
        [sys.executable, "-c", hanging, SPARKS, "meanwhile"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(6 * PATIENCE) == 128 + signal.SIGTERM
