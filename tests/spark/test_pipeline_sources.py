"""Pipelines over Spark's own Kafka connector and over queues: their lag, `broker pipeline status` and `explain`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker.blocking import connect
from broker.cli import main
from broker.errors import ConfigurationError
from broker_spark.pipeline import BatchReport, CallSink, Pipeline, Source, run
from broker_spark.pipeline.toml_file import read_pipeline
from tests.servers import kafka, nats
from tests.spark.support import numbered, publish

FILE = """
name = "both"
checkpoint = "checkpoint"
sql = "select value from log union all select value from jobs"
trigger = "available-now"

[sources.log]
url = "{kafka}"
topic = "{topic}"
connector = "always"
maxRows = 60

[sources.jobs]
url = "{nats}"
topic = "{topic}"
subscription = "billing"
spool = "{spool}"
maxRows = 70

[sinks.files]
path = "files"
"""


@pytest.mark.deep
def test_lag_status_and_plan_of_a_connector_and_a_queue(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    urls = {"kafka": kafka.shared_server().url, "nats": nats.shared_server().url}
    file = tmp_path / "both.toml"
    file.write_text(FILE.format(topic=topic, spool=tmp_path / "spool", **urls))

    def call(*arguments: str) -> str:
        assert main(["pipeline", *arguments, str(file)]) == 0
        return capsys.readouterr().out

    def fill(count: int) -> None:
        publish(log, topic, [b"log %d" % number for number in range(count)])
        publish(queue, topic, [b"job %d" % number for number in range(count)])

    with connect(urls["kafka"]) as log, connect(urls["nats"]) as queue:
        log.admin.ensure_topic(topic, partitions=1)
        queue.admin.ensure_topic(topic)
        queue.admin.ensure_subscription(topic, "billing")
        fill(100)
        reports: list[BatchReport] = []
        run(read_pipeline(file), spark=spark, on_batch=reports.append)
        assert sum(report.rows_in for report in reports) == 200
        # Of the log 40 rows are not in the first batch, of the queue 30.
        assert (reports[0].lag, reports[-1].lag) == (70, 0)
        assert spark.read.parquet(str(tmp_path / "files")).distinct().count() == 200
        said = json.loads(call("status", "--json"))
        assert (said["lag"], said["problem"]) == (0, None)
        assert said["partitions"] == [{"topic": topic, "partition": 0, "next": 100, "end": 100}]
        [jobs] = said["queues"]
        assert jobs == {
            "source": "jobs",
            "subscription": "billing",
            "segment": jobs["segment"],
            "spooled": 0,
            "waiting": 0,
        }
        fill(7)
        said = json.loads(call("status", "--json"))
        assert (said["lag"], said["queues"][0]["waiting"]) == (14, 7)
        shown = call("status")
        assert "14 behind" in shown
        assert f"jobs/billing  segment {jobs['segment']}" in " ".join(shown.split()).replace(" segment", "  segment")
        plan = call("explain")
        assert "connector=always" in plan
        assert "subscription=billing" in plan
        assert "kafka" in plan.lower().partition("physical")[2]
    (tmp_path / "spool").rename(tmp_path / "elsewhere")
    said = json.loads(call("status", "--json"))
    assert said["lag"] is None, "what waits in the other queue is not known"
    assert said["problem"] == f"sources.jobs: {tmp_path / 'spool'} is not the spool of the checkpoint"


def over_connector(topic: str, directory: Path, take: Callable[[DataFrame, int], object], **options: Any) -> Pipeline:
    return Pipeline(
        name="connected",
        url=kafka.shared_server().url,
        sources={"log": Source(topic, options={"connector": "always", **options})},
        sinks={"rows": CallSink(take)},
        checkpoint=str(directory / "checkpoint"),
        trigger="available-now",
    )


@pytest.mark.deep
def test_a_recreated_topic_raises_over_the_connector(spark: SparkSession, tmp_path: Path) -> None:
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    rows: list[int] = []
    pipeline = over_connector(topic, tmp_path, lambda frame, _: rows.append(frame.count()))
    with connect(kafka.shared_server().url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(3))
        for _ in range(2):
            run(pipeline, spark=spark)
        bus.admin.delete_topic(topic)
        bus.admin.ensure_topic(topic, partitions=1)
        # More than before, so that the old offsets would exist.
        publish(bus, topic, numbered(9))
        with pytest.raises(ConfigurationError, match=rf"sources\.log: Topic '{topic}' was deleted and recreated"):
            run(pipeline, spark=spark)
    assert rows == [3]


@pytest.mark.deep
def test_a_recreated_topic_ends_a_running_query_of_the_connector(spark: SparkSession, tmp_path: Path) -> None:
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    rows: list[int] = []
    with connect(kafka.shared_server().url) as bus:

        def take(frame: DataFrame, batch: int) -> None:
            rows.append(frame.count())
            if batch == 0:
                bus.admin.delete_topic(topic)
                bus.admin.ensure_topic(topic, partitions=1)
                publish(bus, topic, numbered(40))

        pipeline = over_connector(topic, tmp_path, take, maxRows=10)
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(30))
        with pytest.raises(ConfigurationError, match=rf"Topic '{topic}' was deleted and recreated"):
            run(pipeline, spark=spark)
    assert rows == [10]


@pytest.mark.deep
def test_a_checkpoint_of_another_topic_is_refused_over_the_connector_too(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "broker")
    first, second = (f"spark.{uuid.uuid4().hex[:12]}" for _ in range(2))
    pipeline = over_connector(first, tmp_path, lambda frame, _: frame.count())
    with connect(kafka.shared_server().url) as bus:
        for topic in (first, second):
            bus.admin.ensure_topic(topic, partitions=1)
            publish(bus, topic, numbered(3))
        assert run(pipeline, spark=spark) == 1
        assert "connected: batch 0: 3 rows in, 3 to rows, 0 dead, 0 behind, " in caplog.text
        other = replace(pipeline, sources={"log": Source(second, options={"connector": "always"})})
        with pytest.raises(ConfigurationError, match=rf"of a query on topic '{first}', and this one reads {second}"):
            run(other, spark=spark)


@pytest.mark.deep
def test_incomplete_positions_are_reported_in_a_sentence(spark: SparkSession, tmp_path: Path) -> None:
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    pipeline = Pipeline(
        name="broken",
        url=nats.shared_server().url,
        sources={"log": Source(topic)},
        sinks={"rows": CallSink(lambda frame, _: frame.count())},
        checkpoint=str(tmp_path / "checkpoint"),
        trigger="available-now",
    )
    with connect(pipeline.url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(3))
        assert run(pipeline, spark=spark) == 1
    file = tmp_path / "checkpoint" / "offsets" / "0"
    text = file.read_text()
    file.write_text(text[:-10])
    with pytest.raises(ConfigurationError) as caught:
        run(pipeline, spark=spark)
    error = str(caught.value)
    assert "checkpoint/offsets/0 of the checkpoint cannot be read: " in error
    assert "Restore the checkpoint from a copy" in error
    # As on a file system without checksums.
    (file.parent / ".0.crc").unlink()
    with pytest.raises(
        ConfigurationError, match=r"Line 3 of .*/offsets/0 of the checkpoint is incomplete: it ends after"
    ):
        run(pipeline, spark=spark)
    file.write_text(text)
    # So is the query's id.
    identity = tmp_path / "checkpoint" / "metadata"
    whole = identity.read_text()
    identity.write_text(whole[:-10])
    (identity.parent / ".metadata.crc").unlink()
    with pytest.raises(ConfigurationError, match="checkpoint/metadata of the checkpoint is incomplete: it ends after"):
        run(pipeline, spark=spark)
    identity.write_text(whole)
    assert run(pipeline, spark=spark) == 0
