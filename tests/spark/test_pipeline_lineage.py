"""Lineage beside the files of a pipeline, and late rows in its reports."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError
from broker_spark.checkpoint.checkpoint_log import CheckpointLog
from broker_spark.pipeline import BatchReport, FileSink, Pipeline, Source, run
from broker_spark.pipeline.batch_ranges import BatchRanges, OffsetRange
from broker_spark.pipeline.lineage import write_lineage
from broker_spark.pipeline.writing import claim, clear, write
from tests.servers import kafka, nats
from tests.spark.conftest import MakeTopic, kafka_is_deep
from tests.spark.support import numbered, publish
from tests.spark.test_pipeline import forget_the_last_commit


def make(url: str, directory: Path, source: Source, **changes: Any) -> Pipeline:
    fields: dict[str, Any] = {
        "name": "traced",
        "url": url,
        "sources": {"numbers": source},
        "sinks": {"files": FileSink(str(directory / "files"))},
        "checkpoint": str(directory / "checkpoint"),
        "trigger": "available-now",
    }
    return Pipeline(**(fields | changes))


def lineage(directory: Path) -> dict[int, dict[str, Any]]:
    """What is in each file, by its name."""
    place = directory / "_anybroker" / "lineage"
    return {int(file.stem): json.loads(file.read_text()) for file in place.glob("*.json")}


@pytest.mark.parametrize("path", ["HERE/files", "file:HERE/files/", "file://HERE/files"])
def test_lineage_lies_beside_the_data_and_goes_with_it(spark: SparkSession, tmp_path: Path, path: str) -> None:
    sink = FileSink(path.replace("HERE", str(tmp_path)), partition_by=["colour"])
    pipeline = make(
        "nats://127.0.0.1:4222", tmp_path, Source("numbers"), sinks={"files": sink}, transform=lambda rows: rows
    )
    rows = spark.createDataFrame([(1, "red"), (2, "blue")], "number bigint, colour string")
    ranges = BatchRanges([OffsetRange("numbers", "numbers", 0, 3, 5), OffsetRange("numbers", "numbers", 1, 7, 7)], [])
    claim(pipeline, spark, "query")
    for batch in (0, 1):
        written = write(pipeline, "files", sink, rows, batch, "query")
        write_lineage(sink, spark, batch, ranges, pipeline="traced", query="query", rows=written)
    found = lineage(tmp_path / "files")
    assert found.keys() == {0, 1}
    assert found[1]["offsets"] == [{"source": "numbers", "topic": "numbers", "partition": 0, "first": 3, "end": 5}]
    assert {name: found[1][name] for name in ("pipeline", "query", "batch", "rows", "segments")} == {
        "pipeline": "traced",
        "query": "query",
        "batch": 1,
        "rows": 2,
        "segments": [],
    }
    assert datetime.fromisoformat(found[1]["time"]).utcoffset() is not None
    assert {each["path"]: each["bytes"] for each in found[1]["files"]} == {
        str(file.relative_to(tmp_path / "files")): file.stat().st_size
        for file in (tmp_path / "files" / "batch=1").rglob("*.parquet")
    }
    assert len(found[1]["files"]) == 2
    # Spark's readers skip it, unless they are given its directory.
    assert spark.read.parquet(sink.path).count() == 4
    read = spark.read.json(f"{sink.path}/_anybroker/lineage").select("batch", F.explode("offsets").alias("of"))
    assert read.where("of.partition = 0 and 4 between of.first and of.end - 1").count() == 2
    # It is no mark of another query.
    claim(pipeline, spark, "query")
    clear(sink, spark, 1)
    assert lineage(tmp_path / "files").keys() == {0}


@pytest.mark.deep
@kafka_is_deep
def test_lineage_tells_what_each_batch_read(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(10))
    ends = {partition: bounds.next for partition, bounds in bus.log.bounds(topic).items()}
    pipeline = make(url, tmp_path, Source(topic))
    assert run(pipeline, spark=spark) == 1
    publish(bus, topic, numbered(4))
    assert run(pipeline, spark=spark) == 1
    found = lineage(tmp_path / "files")
    offsets = {
        batch: {each["partition"]: (each["first"], each["end"]) for each in of["offsets"]}
        for batch, of in found.items()
    }
    firsts = {partition: bounds.first for partition, bounds in bus.log.bounds(topic).items()}
    for partition, (first, end) in offsets[0].items():
        assert first == firsts[partition]
        assert end >= ends[partition]
    for batch, of in found.items():
        rows = spark.read.parquet(*(str(tmp_path / "files" / each["path"]) for each in of["files"]))
        assert of["rows"] == rows.count() == (10, 4)[batch]
        assert all(
            offsets[batch][row.partition][0] <= row.offset < offsets[batch][row.partition][1] for row in rows.collect()
        )
    # A batch that runs again has the same offsets and other files.
    forget_the_last_commit(pipeline.checkpoint)
    assert run(pipeline, spark=spark) == 1
    again = lineage(tmp_path / "files")[1]
    assert (again["offsets"], again["rows"]) == (found[1]["offsets"], 4)
    assert {each["path"] for each in again["files"]}.isdisjoint(each["path"] for each in found[1]["files"])


@pytest.mark.deep
@pytest.mark.parametrize("connector", ["always", "never"])
def test_lineage_of_the_first_batch_begins_at_option_start(spark: SparkSession, tmp_path: Path, connector: str) -> None:
    url, topic = kafka.shared_server().url, f"traced.{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(10))
        source = Source(topic, options={"connector": connector, "start": {"0": 4}})
        pipeline = make(url, tmp_path, source)
        assert run(pipeline, spark=spark) == 1
        publish(bus, topic, numbered(3))
        assert run(pipeline, spark=spark) == 1
    offsets = [lineage(tmp_path / "files")[batch]["offsets"] for batch in (0, 1)]
    place = {"source": "numbers", "topic": topic, "partition": 0}
    assert offsets == [[{**place, "first": 4, "end": 10}], [{**place, "first": 10, "end": 13}]]


def test_incomplete_first_positions_of_the_connector_are_named(spark: SparkSession, tmp_path: Path) -> None:
    log = CheckpointLog(spark, str(tmp_path))
    assert log.initial(0) == {}
    (tmp_path / "sources" / "0").mkdir(parents=True)
    file = tmp_path / "sources" / "0" / "0"
    file.write_bytes(b'\0v1\n{"orders":{"0":4}}')
    assert log.initial(0) == {"orders": {"0": 4}}
    for content in (b'\0v1\n{"orders":{"0"', b""):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"sources/0/0 of the checkpoint is incomplete: it .* Restore the"):
            log.initial(0)


@pytest.mark.deep
def test_lineage_of_a_queue_names_segments(spark: SparkSession, tmp_path: Path) -> None:
    url, topic = nats.shared_server().url, f"traced.{uuid.uuid4().hex[:12]}"
    source = Source(topic, options={"subscription": "traced", "spool": str(tmp_path / "spool")})
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        bus.admin.ensure_subscription(topic, "traced")
        for _ in range(2):
            publish(bus, topic, numbered(5))
            run(make(url, tmp_path, source), spark=spark)
    found = lineage(tmp_path / "files")
    segments = [each for batch in sorted(found) for each in found[batch]["segments"]]
    assert {(each["source"], each["subscription"]) for each in segments} == {("numbers", "traced")}
    assert segments[0]["first"] == 0
    assert [each["end"] for each in segments[:-1]] == [each["first"] for each in segments[1:]]
    assert all(each["offsets"] == [] for each in found.values())


@dataclass
class Reading:
    at: datetime
    degrees: int


def means(readings: DataFrame) -> DataFrame:
    rows = readings.select("payload.*").withWatermark("at", "10 minutes")
    return rows.groupBy(F.window("at", "1 minute")).agg(F.avg("degrees").alias("degrees"))


@pytest.mark.deep
def test_late_rows_are_reported(spark: SparkSession, tmp_path: Path) -> None:
    url, topic = nats.shared_server().url, f"late.{uuid.uuid4().hex[:12]}"
    dead = FileSink(str(tmp_path / "dead"))
    pipeline = make(url, tmp_path, Source(topic, Reading), transform=means, dead_letters=dead)
    reports: list[BatchReport] = []
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        for hour in (12, 10):
            publish(bus, topic, [b'{"at": "2026-01-31T%d:00:00Z", "degrees": 3}' % hour])
            run(pipeline, spark=spark, on_batch=reports.append)
    assert [report.late for report in reports if report.rows_in] == [0, 1]
    [with_late] = [report for report in reports if report.late]
    assert ", 0 dead, 1 late, 0 behind, " in str(with_late)
    assert "late" not in str(reports[0])
