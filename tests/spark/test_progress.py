"""The lag of queries and pipelines: each row counts once, even if topics share a name or partitions their offsets."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError
from broker_spark.common.offsets import Offsets, TopicOffsets
from broker_spark.common.options import SourceOptions
from broker_spark.log.source import LogStreamReader
from broker_spark.pipeline import BatchReport, CallSink, Pipeline, Run, Source, run
from broker_spark.pipeline.inspecting import Place, Status, status
from broker_spark.progress import behind, lag
from broker_spark.spool.source import SpoolPart
from tests.servers import kafka, nats
from tests.spark.conftest import MakeTopic
from tests.spark.spool_query import MakeQuery, settled
from tests.spark.support import numbered, publish

POSITION = json.dumps(Offsets("jetstream", {"TOPIC": TopicOffsets("another", {0: 3})}).to_json())


def offsets(place: int, *, shared: bool, identity: str | None = "one", began: bool = False) -> str:
    topic = TopicOffsets(identity, {0: place, 1: place, 2: place}, {0: 0, 1: 0, 2: 0} if began else {})
    return json.dumps(Offsets("any", {"orders": topic}, shared=shared).to_json())


def progress(*identities: str | None, shared: bool, places: Sequence[int] = (10, 10)) -> dict[str, Any]:
    return {
        "sources": [
            {
                "endOffset": offsets(place, shared=shared, identity=identity),
                "latestOffset": offsets(40, shared=shared, identity=identity, began=True),
            }
            for identity, place in zip(identities, places, strict=True)
        ]
    }


def test_shared_offsets_count_once() -> None:
    assert lag(progress("one", "two", shared=True)) == {"orders": {0: 60, 1: 60, 2: 60}}
    assert behind(progress("one", "two", shared=True)) == 60
    assert behind(progress("one", "two", shared=False)) == 180
    assert behind(None) == 0
    places = [Place("orders", partition, 10, 30 + partition, "0 orders") for partition in range(3)]
    assert Status("x", "y", 1, None, [*places, Place("refunds", 0, 1, 6)]).lag == 22 + 5
    assert Status("x", "y", 1, None, [*places, Place("refunds", 0, 1, None)]).lag is None


def test_a_topic_that_a_plan_has_twice_counts_once() -> None:
    # Its branches may be at different offsets for a moment.
    twice = progress("one", "one", shared=True, places=(10, 15))
    assert lag(twice) == {"orders": {0: 30, 1: 30, 2: 30}}
    assert behind(twice) == 30
    # Spark's connector stores no topic ids: the topic may be another broker's, unless the owner is known.
    unknown = progress(None, None, shared=False)
    assert behind(unknown) == 180
    assert behind(unknown, ["orders", "orders"]) == 90
    assert behind(unknown, ["orders", "refunds"]) == 180


def idle_pipeline(directory: Path) -> Pipeline:
    return Pipeline(
        name="idle",
        url="nats://127.0.0.1:4222",
        sources={"orders": Source("orders")},
        sinks={"nothing": CallSink(lambda *_: None)},
        checkpoint=str(directory),
    )


def test_a_batch_is_reported_only_after_its_commit(tmp_path: Path) -> None:
    # The progress of an idle query has the number of the next batch.
    idle: dict[str, Any] = {"batchId": 1, "durationMs": {"latestOffset": 3}, "observedMetrics": {}, "sources": []}
    idle["stateOperators"] = []
    metrics = {"rows_of_orders": {"rows": 5}}
    done = {**idle, "durationMs": {"addBatch": 7, "triggerExecution": 1500}, "observedMetrics": metrics}
    reports: list[BatchReport] = []
    under_way = Run(idle_pipeline(tmp_path), reports.append)
    under_way._written[1] = {"nothing": 5}
    query: Any = SimpleNamespace(lastProgress=idle, recentProgress=[idle])
    under_way._report_batches(query)
    assert not reports
    assert not under_way._may_end(query)
    query.lastProgress, query.recentProgress = done, [idle, done]
    under_way._report_batches(query)
    assert [(report.batch, report.rows_in, report.seconds) for report in reports] == [(1, 5, 1.5)]
    assert under_way._may_end(query)


def test_the_lag_behind_a_batch_of_an_earlier_run_is_fetched(bus: Bus, url: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(100))
    reader = LogStreamReader(SourceOptions.parse({"url": url, "topic": topic, "maxRows": "30"}))
    end = json.dumps(reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit()))
    pipeline = replace(idle_pipeline(Path("idle")), url=url, sources={"orders": Source(topic)})
    # Of a plan that has the source twice.
    planned = {"sources": [{"startOffset": None, "endOffset": end, "latestOffset": None}] * 2}
    assert Run(pipeline)._lag(planned) == 70
    bus.admin.delete_topic(topic)
    assert Run(pipeline)._lag(planned) == 0


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_the_lag_behind_a_repeated_batch_of_a_subscription_is_fetched(
    bus: Bus, url: str, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic = make_topic()
    query = make_query(topic, maxRows=30).begin()
    publish(bus, topic, numbered(50))
    start = query.at
    while (end := query.reader.latestOffset(start, query.reader.getDefaultReadLimit())) == start:
        pass
    [part] = query.reader.partitions(start, end)
    assert isinstance(part, SpoolPart)
    assert settled(bus, topic)
    query.reader.stop()
    publish(bus, topic, numbered(20))
    options = {"subscription": "spark", "spool": str(tmp_path / "spool"), "maxRows": 30}
    sources = {
        "another": Source(topic, options={**options, "spool": str(tmp_path)}),
        "jobs": Source(topic, options=options),
    }
    pipeline = replace(idle_pipeline(Path("idle")), url=url, sources=sources, sql="select * from jobs")
    source = {"startOffset": None, "endOffset": json.dumps(end), "latestOffset": None}
    # Of a plan that has the source twice.
    assert Run(pipeline)._lag({"sources": [source, source]}) == 70 - sum(each.rows for each in part.segments)
    bus.admin.delete_topic(topic)
    assert Run(pipeline)._lag({"sources": [source]}) == 0


def test_batches_committed_before_a_failure_are_reported(tmp_path: Path) -> None:
    reports: list[BatchReport] = []
    under_way = Run(idle_pipeline(tmp_path), reports.append)
    under_way._written[0] = {"nothing": 5}
    done = {"batchId": 0, "durationMs": {"addBatch": 7}, "observedMetrics": {}, "sources": [], "stateOperators": []}

    def fail(timeout: float) -> bool:
        raise StreamingQueryException("The topic is gone")

    query: Any = SimpleNamespace(awaitTermination=fail, lastProgress=done, recentProgress=[done])
    with pytest.raises(StreamingQueryException, match="The topic is gone"):
        under_way._watch(query)
    assert [report.batch for report in reports] == [0]


@pytest.mark.deep
def test_a_pipeline_that_joins_a_source_with_itself(spark: SparkSession, tmp_path: Path) -> None:
    topic, url = f"spark.{uuid.uuid4().hex[:12]}", kafka.shared_server().url
    pipeline = Pipeline(
        name="twice",
        url=url,
        sources={"orders": Source(topic, options={"connector": "always", "maxRows": 10})},
        sql="select a.value from orders a join orders b on a.id = b.id",
        sinks={"nothing": CallSink(lambda *_: None)},
        checkpoint=str(tmp_path),
        trigger="available-now",
    )
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(25))
        reports: list[BatchReport] = []
        run(pipeline, spark=spark, on_batch=reports.append)
    *_, first, second = (tmp_path / "offsets" / "0").read_text().splitlines()
    assert json.loads(first) == json.loads(second) == {topic: {"0": 10}}
    assert [report.lag for report in reports] == [15, 5, 0]
    assert sum(report.rows_out["nothing"] for report in reports) == 25


def test_topics_of_one_name_at_two_brokers_are_told_apart(tmp_path: Path) -> None:
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    urls = (nats.shared_server().url, kafka.shared_server().url)
    pipeline = Pipeline(
        name="both",
        sources={f"source{number}": Source(topic, url=url) for number, url in enumerate(urls)},
        sql="select value from source0 union all select value from source1",
        sinks={"nothing": CallSink(lambda *_: None)},
        checkpoint=str(tmp_path),
    )
    with connect(urls[0]) as queue, connect(urls[1]) as log:
        for bus, count in ((queue, 7), (log, 20)):
            bus.admin.ensure_topic(topic, partitions=1)
            publish(bus, topic, numbered(count))
        # As Spark stores them: in its own order, and twice for a source in two branches of the plan.
        lines = [json.dumps(placed(bus, topic, place)) for bus, place in ((log, 4), (log, 4), (queue, 3))]
    for name, text in (("commits", "v1\n{}"), ("offsets", "\n".join(["v1", "{}", *lines]))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0").write_text(text)
    found = status(pipeline)
    assert not found.problem
    assert [(place.next, place.end) for place in found.places] == [(4, 20), (3, 8)]
    assert found.lag == 16 + 5


def inspected(directory: Path, *lines: str) -> Status:
    """The status of a checkpoint with these positions, of a pipeline on another topic."""
    topic, url = f"spark.{uuid.uuid4().hex[:12]}", nats.shared_server().url
    pipeline = Pipeline(
        name="strange",
        url=url,
        sources={"orders": Source(topic)},
        sinks={"nothing": CallSink(lambda *_: None)},
        checkpoint=str(directory),
    )
    for name, text in (("commits", "v1\n{}"), ("offsets", "\n".join(["v1", "{}", *lines]))):
        (directory / name).mkdir()
        (directory / name / "0").write_text(text.replace("TOPIC", topic))
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
    return status(pipeline)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "sources.orders: The checkpoint has no position of it"),
        ("5", "sources.orders: The checkpoint has no position of it"),
        ('{"logOffset":3}', "sources.orders: The checkpoint has no position of it"),
        (POSITION, "was deleted and recreated, or is that of another broker"),
        (POSITION.replace("jetstream", "kafka"), "is of a query on kafka, and this one reads jetstream"),
    ],
)
def test_positions_of_other_sources_have_no_lag(tmp_path: Path, line: str, problem: str) -> None:
    found = inspected(tmp_path, line)
    assert (found.lag, found.committed) == (None, 0)
    assert problem in found.problem


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            POSITION[:50],
            "offsets/0, line 3 is incomplete: it ends after 50 characters, in the middle of its JSON. Restore",
        ),
        ('{"source":"broker-spool"', "offsets/0, line 3 is incomplete: it ends after 24 characters"),
        (
            POSITION.replace('"next": {"0": 3}', '"next": [3]'),
            "The positions in the checkpoint are incomplete: a value is not a number",
        ),
        (POSITION.replace('"version": 1', '"version": 2'), "by another version of broker_spark: 2"),
    ],
)
def test_an_incomplete_checkpoint_is_named(tmp_path: Path, line: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        inspected(tmp_path, line)


def placed(bus: Bus, topic: str, place: int) -> dict[str, Any]:
    identity = bus.admin.describe_topic(topic).identity
    return Offsets(bus.capabilities.backend, {topic: TopicOffsets(identity, {0: place})}).to_json()
