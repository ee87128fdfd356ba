"""The source that keeps, beside Spark's Kafka connector, which topics a checkpoint is of."""

from __future__ import annotations

import json
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
from broker_spark.options import SourceOptions
from broker_spark.topics_source import TopicsDataSource, TopicsStreamReader
from tests.servers import kafka
from tests.spark.conftest import MakeTopic
from tests.spark.support import numbered, publish


@pytest.fixture
def url() -> str:
    return kafka.shared_server().url


def reader_of(url: str, **options: str) -> TopicsStreamReader:
    return TopicsStreamReader(SourceOptions.parse({"url": url, **options}))


def latest(reader: TopicsStreamReader, known: dict[str, Any]) -> dict[str, Any]:
    """As Spark asks: what it kept went through JSON."""
    return reader.latestOffset(json.loads(json.dumps(known)), ReadAllAvailable())


def test_topics_of_a_pattern_come_and_are_known_from_then_on(url: str, bus: Bus) -> None:
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
    with pytest.raises(ConfigurationError, match=f"'{second}' was deleted and made anew"):
        latest(reader, both)
    assert latest(reader, none)["ids"].keys() == both["ids"].keys()


def test_a_named_topic_is_the_one_it_was(url: str, bus: Bus, make_topic: MakeTopic) -> None:
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


def test_one_that_nobody_may_ask_about_keeps_what_it_was(
    url: str, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(url, topic=make_topic())
    known = reader.initialOffset()
    monkeypatch.setattr("broker_spark.topics_source.identity_of", lambda bus, topic: None)
    assert latest(reader, known) == known


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"source": "broker-log", "version": 1}, "another kind of source: of source 'broker-log'"),
        ({"source": "broker-topics", "version": 2}, "another version of broker_spark: 2"),
        ({"source": "broker-topics", "version": 1, "ids": {}}, "not whole: 'backend'"),
        ({"source": "broker-topics", "version": 1, "backend": "kafka", "ids": []}, "not whole"),
        ({"source": "broker-topics", "version": 1, "backend": "kafka"}, "not whole: 'ids'"),
    ],
)
def test_what_it_did_not_write_is_refused(url: str, make_topic: MakeTopic, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        latest(reader_of(url, topic=make_topic()), given)


def test_it_has_the_columns_of_the_rows_beside_it(spark: SparkSession, url: str, make_topic: MakeTopic) -> None:
    options = {"url": url, "topic": make_topic(), "columns": "value,id"}
    beside = TopicsDataSource(options)
    assert beside.schema() == spark_schema(["value", "id"])
    frame = read_stream(spark, connector="always", **options)
    assert frame.columns == ["value", "id"]
    assert frame.schema.simpleString() == beside.schema().simpleString()


def test_a_query_that_names_no_checkpoint_to_read_stream_is_told_when_it_goes_on(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(10))

    def start() -> Any:
        frame = read_stream(spark, connector="always", url=url, topic=topic, maxRows=5)
        return frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()

    query = start()
    query.processAllAvailable()
    # What goes along takes nothing of a batch.
    assert [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]] == [5, 5]
    assert "Union" not in query._jsq.explainInternal(False)
    query.stop()
    bus.admin.delete_topic(topic)
    bus.admin.ensure_topic(topic, partitions=1)
    publish(bus, topic, numbered(50))
    query = start()
    with pytest.raises(StreamingQueryException, match=f"'{topic}' was deleted and made anew"):
        query.awaitTermination(60)
    assert not any(each["numInputRows"] for each in query.recentProgress)
