"""The source that stores topic ids beside Spark's Kafka connector."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from broker.blocking import Bus
from broker.errors import ConfigurationError, TopicNotFound
from broker_spark import read_stream, spark_schema
from broker_spark.checkpoint.topics_source import (
    TopicsDataSource,
    TopicsStreamReader,
    check_planned,
    was_read_by_connector,
)
from broker_spark.common.options import SourceOptions
from tests.servers import kafka, nats
from tests.spark.conftest import MakeTopic
from tests.spark.support import numbered, publish


@pytest.fixture
def url() -> str:
    return kafka.shared_server().url


def reader_of(url: str, **options: str) -> TopicsStreamReader:
    return TopicsStreamReader(SourceOptions.parse({"url": url, **options}))


def latest(reader: TopicsStreamReader, known: dict[str, Any]) -> dict[str, Any]:
    """As Spark calls it: with offsets that went through JSON."""
    return reader.latestOffset(json.loads(json.dumps(known)), ReadAllAvailable())


def test_new_topics_of_a_pattern_are_stored(url: str, bus: Bus) -> None:
    stem = f"spark.{uuid4().hex[:12]}"
    first, second = f"{stem}.a", f"{stem}.b"
    reader = reader_of(url, topicPattern=rf"{stem}\..*")
    none = reader.initialOffset()
    assert none["ids"] == {}
    bus.admin.ensure_topic(second)
    one = latest(reader, none)
    bus.admin.ensure_topic(first)
    both = latest(reader, one)
    assert list(both["ids"]) == [first, second]
    assert both["ids"][second] == one["ids"][second] == bus.admin.topic_identity(second)
    assert latest(reader, both) == both
    assert reader.partitions(one, both) == []

    bus.admin.delete_topic(second)
    with pytest.raises(ConfigurationError, match=f"'{second}' of the checkpoint does not exist any more"):
        latest(reader, both)
    bus.admin.ensure_topic(second)
    with pytest.raises(ConfigurationError, match=f"'{second}' was deleted and recreated"):
        latest(reader, both)
    assert latest(reader, none)["ids"].keys() == both["ids"].keys()


def test_a_recreated_topic_is_refused(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic, other = make_topic(), make_topic()
    reader = reader_of(url, topic=topic)
    known = reader.initialOffset()
    with pytest.raises(ConfigurationError, match=f"is of a query on topic '{topic}', and this one reads {other}"):
        latest(reader_of(url, topic=other), known)
    with pytest.raises(ConfigurationError, match="is of a query on jetstream, and this one reads kafka"):
        latest(reader, {**known, "backend": "jetstream"})
    bus.admin.delete_topic(topic)
    with pytest.raises(TopicNotFound, match="give this query a checkpointLocation of its own"):
        latest(reader, known)
    with pytest.raises(TopicNotFound):
        reader.initialOffset()


def test_a_topic_deleted_during_a_pattern_lookup_is_left_out(
    url: str, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic()
    listed = [topic, f"{topic}.gone"]
    monkeypatch.setattr("broker_spark.common.topics.chosen_topics", lambda bus, options: listed)
    reader = reader_of(url, topicPattern=f"{topic}.*")
    known = reader.initialOffset()
    assert list(known["ids"]) == [topic]
    assert latest(reader, known) == known
    with pytest.raises(TopicNotFound):
        latest(reader, {**known, "ids": {**known["ids"], f"{topic}.gone": "it was"}})


def test_a_topic_whose_id_is_unreadable_keeps_the_stored_id(
    url: str, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(url, topic=make_topic())
    known = reader.initialOffset()
    monkeypatch.setattr("broker_spark.common.topics.identity_of", lambda bus, topic: None)
    assert latest(reader, known) == known


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"source": "broker-log", "version": 1}, "another kind of source: of source 'broker-log'"),
        ({"source": "broker-topics", "version": 2}, "another version of broker_spark: 2"),
        ({"source": "broker-topics", "version": 1, "ids": {}}, "incomplete: 'backend'"),
        ({"source": "broker-topics", "version": 1, "backend": "kafka", "ids": []}, "incomplete"),
        ({"source": "broker-topics", "version": 1, "backend": "kafka"}, "incomplete: 'ids'"),
    ],
)
def test_positions_of_other_sources_are_refused(
    url: str, make_topic: MakeTopic, given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        latest(reader_of(url, topic=make_topic()), given)


def test_the_topics_source_has_the_columns_of_a_source(spark: SparkSession, url: str, make_topic: MakeTopic) -> None:
    options = {"url": url, "topic": make_topic(), "columns": "value,id"}
    beside = TopicsDataSource(options)
    assert beside.schema() == spark_schema(["value", "id"])
    frame = read_stream(spark, connector="always", **options)
    assert frame.columns == ["value", "id"]
    assert frame.schema.simpleString() == beside.schema().simpleString()


@pytest.mark.deep
def test_a_recreated_topic_is_noticed_without_a_checkpoint_in_read_stream(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(10))

    def start() -> Any:
        frame = read_stream(spark, connector="always", url=url, topic=topic, maxRows=5)
        return frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()

    query = start()
    query.processAllAvailable()
    # The topics source adds no rows to a batch.
    assert [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]] == [5, 5]
    assert "Union" not in query._jsq.explainInternal(False)
    query.stop()
    bus.admin.delete_topic(topic)
    bus.admin.ensure_topic(topic, partitions=1)
    publish(bus, topic, numbered(50))
    query = start()
    with pytest.raises(StreamingQueryException, match=f"'{topic}' was deleted and recreated"):
        query.awaitTermination(60)
    assert not any(each["numInputRows"] for each in query.recentProgress)


@pytest.mark.deep
def test_a_checkpoint_belongs_to_the_source_that_wrote_it(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(10))

    def read(connector: str, writer: str) -> tuple[int, bool]:
        """The rows of a run, and whether the connector reads them."""
        checkpoint = str(tmp_path / writer)
        frame = read_stream(spark, connector=connector, checkpoint=checkpoint, url=url, topic=topic)
        query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = query.trigger(availableNow=True).start()
        query.awaitTermination()
        rows = sum(each["numInputRows"] for each in query.recentProgress)
        return rows, len(query.recentProgress[-1]["sources"]) == 2

    assert read("always", "connector") == (10, True)
    assert read("never", "python") == (10, False)
    with pytest.raises(ConfigurationError, match="on the Python source, and this query uses Spark's Kafka connector"):
        read("always", "python")
    with pytest.raises(ConfigurationError, match="on Spark's Kafka connector, and this query uses the Python source"):
        read("never", "connector")
    # Nor does the checkpoint continue on another broker.
    with pytest.raises(ConfigurationError, match=f"another kind of source: Spark's own of Kafka, of '{topic}'"):
        other = {"url": nats.shared_server().url, "topic": topic}
        read_stream(spark, checkpoint=str(tmp_path / "connector"), **other)
    publish(bus, topic, numbered(3))
    assert read("auto", "connector") == (3, True)
    assert read("auto", "python") == (3, False)


THERE = {"orders": "1", "refunds": "2"}
"""The topics of a broker, and their ids."""


@pytest.fixture
def broker_with_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(bus: Bus, options: SourceOptions) -> list[str]:
        pattern = options.pattern
        return [*options.topics] if pattern is None else [topic for topic in THERE if re.fullmatch(pattern, topic)]

    for module in ("common.topics", "checkpoint.topics_source"):
        monkeypatch.setattr(f"broker_spark.{module}.chosen_topics", chosen)
    monkeypatch.setattr("broker_spark.common.topics.identity_of", lambda bus, topic: THERE[topic])


def kept_by(source: str, ids: dict[str, str | None], backend: str = "kafka") -> dict[str, Any]:
    kept: dict[str, Any] = {"source": source, "version": 1, "backend": backend}
    topics = {topic: {"identity": identity, "next": {"0": 4}} for topic, identity in ids.items()}
    return {**kept, "ids": ids} if source == "broker-topics" else {**kept, "topics": topics}


@pytest.mark.parametrize(
    ("kept", "now", "expected"),
    [
        ([], {"topic": "orders"}, ""),
        ([{}, {"orders": "1"}], {"topic": "orders"}, ""),
        ([{}, {"orders": "9"}], {"topic": "orders"}, "'orders' was deleted and recreated"),
        # The two branches of a join of two streams, for the one and the other.
        ([{"orders": "1"}, {}, {"refunds": "2"}], {"topic": "refunds"}, ""),
        ([{"orders": "1"}, {"refunds": "2"}], {"topic": "refunds,orders"}, ""),
        ([{"orders": "1"}, {"refunds": "3"}], {"topic": "refunds"}, "'refunds' was deleted and recreated"),
        # Topics of one name in two clusters.
        ([{"orders": "7"}, {"orders": "1"}], {"topic": "orders"}, ""),
        ([{"orders": "1"}], {"topic": "refunds"}, "is of a query on topic 'orders', and this one reads refunds"),
        ([{"orders": None}], {"topic": "orders"}, ""),
        ([{"orders": "1"}], {"topicPattern": "none.*"}, "'orders' of the checkpoint does not exist any more"),
        ([{"orders": "1", "gone": "5"}], {"topicPattern": ".*"}, "'gone' of the checkpoint does not exist any more"),
        ([{"orders": "1"}, {}], {"topicPattern": "none.*"}, ""),
        ([None], {"topic": "orders"}, "another kind of source: Spark's own of Kafka, of 'orders'"),
    ],
)
@pytest.mark.usefixtures("broker_with_topics")
def test_a_planned_batch_is_refused_if_a_topic_was_recreated(
    url: str, kept: list[dict[str, str | None] | None], now: dict[str, str], expected: str
) -> None:
    positions = [{"orders": {"0": 4}} if ids is None else kept_by("broker-topics", ids) for ids in kept]
    options = SourceOptions.parse({"url": url, **now})
    with pytest.raises(ConfigurationError, match=expected) if expected else nullcontext():
        check_planned(positions, options)


@pytest.mark.parametrize(
    ("positions", "now", "found"),
    [
        ([], {"topic": "orders"}, None),
        ([{}], {"topic": "orders"}, None),
        ([kept_by("broker-topics", {"orders": "1"})], {"topic": "orders"}, True),
        ([kept_by("broker-log", {"orders": "1"})], {"topic": "orders"}, False),
        ([kept_by("broker-log", {"orders": "1"})], {"topicPattern": "o.*"}, False),
        # Beside a stream of another broker, and of other topics by the other source.
        ([kept_by("broker-topics", {"orders": "1"}, "jetstream")], {"topic": "orders"}, None),
        (
            [kept_by("broker-topics", {"orders": "1"}), kept_by("broker-log", {"refunds": "2"})],
            {"topic": "refunds"},
            False,
        ),
        (
            [kept_by("broker-topics", {"orders": "1"}), kept_by("broker-log", {"refunds": "2"})],
            {"topic": "orders"},
            True,
        ),
        # Both ways at once.
        (
            [kept_by("broker-topics", {"orders": "1"}), kept_by("broker-log", {"orders": "1"})],
            {"topic": "orders"},
            None,
        ),
        (
            [kept_by("broker-topics", {"orders": "1"})],
            {"topic": "orders", "subscription": "spark", "spool": "/tmp/spool"},
            None,
        ),
    ],
)
@pytest.mark.usefixtures("broker_with_topics")
def test_the_reader_of_a_checkpoint_is_found_by_its_topics(
    url: str, positions: list[dict[str, Any]], now: dict[str, str], found: bool | None
) -> None:
    assert was_read_by_connector(positions, SourceOptions.parse({"url": url, **now})) is found
