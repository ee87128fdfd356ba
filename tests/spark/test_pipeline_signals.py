"""Interruptions of a pipeline: Ctrl-C to a program, and functions that end it."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError
from broker_spark.pipeline import BatchReport, CallSink, Pipeline, Source, run
from broker_spark.pipeline.inspecting import status
from tests.servers import nats
from tests.servers.spark_python import quick_python
from tests.spark.conftest import SETTINGS, MakeTopic
from tests.spark.support import numbered, publish

PROGRAM = """
import json, os, signal, sys
from broker_spark.pipeline import CallSink, Pipeline, Source, run

url, topic, directory, settings = sys.argv[1:]

def interrupted(frame, batch):
    os.kill(os.getpid(), signal.SIGINT)
    assert frame.count() == 5

print(run(Pipeline(
    name="interrupted", url=url, sources={"numbers": Source(topic)}, sinks={"rows": CallSink(interrupted)},
    checkpoint=directory, master="local[2]", config=json.loads(settings),
)))
"""
"""A program in which `run` creates the session, and a batch in the middle of which Ctrl-C comes."""


@pytest.mark.deep
def test_ctrl_c_lets_the_batch_of_a_program_end(tmp_path: Path) -> None:
    url, topic = nats.shared_server().url, f"spark.{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        publish(bus, topic, numbered(5))
    command = [sys.executable, "-c", PROGRAM, url, topic, str(tmp_path / "checkpoint"), json.dumps(SETTINGS)]
    with quick_python():
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
@pytest.mark.parametrize("ends", [SystemExit(3), KeyboardInterrupt()])
def test_a_function_that_ends_the_program_ends_the_run(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, ends: BaseException
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(3))

    def exits(frame: DataFrame, batch: int) -> None:
        raise ends

    pipeline = Pipeline(
        name="ending",
        url=url,
        sources={"numbers": Source(topic)},
        sinks={"rows": CallSink(exits)},
        checkpoint=str(tmp_path / "checkpoint"),
        trigger="available-now",
    )
    with pytest.raises(type(ends)):
        run(pipeline, spark=spark)
    assert status(pipeline).committed is None


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
@pytest.mark.parametrize("another_run", [True, False])
def test_a_query_stopped_from_outside_raises(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, another_run: bool
) -> None:
    topic = make_topic(1)
    # One by one they take longer than until the first report.
    publish(bus, topic, numbered(60))
    whole = Pipeline(
        name="whole",
        url=url,
        sources={"numbers": Source(topic)},
        sinks={"rows": CallSink(lambda frame, batch: None)},
        checkpoint=str(tmp_path / "checkpoint"),
        trigger="available-now",
    )

    def disturb(report: BatchReport) -> None:
        if report.batch > 0:
            return
        with pytest.raises(ConfigurationError, match="name is 'disturbed', and a query of this name runs in this sess"):
            run(disturbed, spark=spark)
        if another_run:
            run(whole, spark=spark)
        else:
            [query] = [each for each in spark.streams.active if each.name == "disturbed"]
            query.stop()

    disturbed = replace(
        whole,
        name="disturbed",
        sources={"numbers": Source(topic, options={"maxRows": 1})},
        trigger="" if another_run else "available-now",
        on_batch=disturb,
    )
    with pytest.raises(ConfigurationError, match=r"^The query was stopped from outside, or by another run"):
        run(disturbed, spark=spark)
    if not another_run:
        # A normal end is no error.
        assert run(whole, spark=spark) > 0
    assert status(whole).lag == 0
