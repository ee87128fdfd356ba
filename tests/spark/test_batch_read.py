"""Batch reads of every broker with a log: rows, ranges, splits and losses.

Broker-specific code is called here as a task calls it; Spark itself reads from one broker per case.
`test_kafka_connector` has the same for Kafka.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pkgutil import resolve_name
from typing import Any, cast

import pyarrow
import pytest
from pyspark.sql import SparkSession

from broker.blocking import Bus
from broker.errors import ConfigurationError, OffsetOutOfRange
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually
from broker_spark.common.options import SourceOptions
from broker_spark.log.ranges import Range
from broker_spark.log.reading import read_range
from broker_spark.log.source import LogBatchReader, LogStreamReader
from tests.spark.conftest import MakeTopic, kafka_is_deep
from tests.spark.support import numbered, publish, read, rows_of, values


def planned(options: SourceOptions) -> list[Range]:
    return [each for each in LogBatchReader(options).partitions() if isinstance(each, Range)]


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_rows_are_the_records(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    before = datetime.now(UTC)
    bus.topic(topic).publish_batch(
        [
            OutboundMessage(b"one", "k", {"colour": "red", "größe": "s"}, id="first"),
            OutboundMessage(b"", b"\xff"),
            OutboundMessage(None, "gone"),
        ]
    )
    expected = [record for batch in bus.log.read(topic, 0) for record in batch]
    rows = read(spark, url, topic).orderBy("offset").collect()
    assert [
        (row.topic, row.partition, row.offset, row.id, row.key, row.value, row.attributes, row.delivery_attempt)
        for row in rows
    ] == [(topic, 0, each.offset, each.id, each.key, each.data, dict(each.attributes), None) for each in expected]
    assert rows[0].id == "first"
    assert rows[0].attributes == {"colour": "red", "größe": "s"}
    assert [row.value for row in rows] == [b"one", b"", None]
    for row, record in zip(rows, expected, strict=True):
        time = record.publish_time or record.broker_time
        assert time is not None
        # Spark returns times without a zone, in that of the session.
        assert (row.publish_time or row.broker_time).replace(tzinfo=UTC) == time
        assert abs((time - before).total_seconds()) < 120


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_splits_columns_and_bounds(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(1000))
    chosen = read(spark, url, topic, columns="value,delivery_attempt,partition", tasksPerPartition=3, arrowRows=70)
    assert chosen.columns == ["value", "delivery_attempt", "partition"]
    assert sorted(values(chosen)) == sorted(numbered(1000))
    assert {row.partition for row in chosen.select("partition").distinct().collect()} == {0, 1}
    assert read(spark, url, topic, columns="delivery_attempt").count() == 1000
    bounds = bus.log.bounds(topic)
    middle = {each: (found.first + found.next) // 2 for each, found in bounds.items()}
    text = json.dumps({str(each): place for each, place in middle.items()})
    lower = values(read(spark, url, topic, end=text))
    upper = values(read(spark, url, topic, start=text))
    assert len(lower) not in {0, 1000}
    assert sorted(lower + upper) == sorted(numbered(1000))
    # Nothing was published after now.
    assert values(read(spark, url, topic, start=datetime.now(UTC).isoformat())) == []
    assert values(read(spark, url, topic, start="latest")) == []


@pytest.mark.parametrize("tasks", [1, 2, 7])
def test_every_split_reads_each_offset_once(url: str, bus: Bus, make_topic: MakeTopic, tasks: int) -> None:
    topic = make_topic(partitions=3)
    publish(bus, topic, numbered(500))
    options = SourceOptions.parse({"url": url, "topic": topic, "tasksPerPartition": str(tasks), "arrowRows": "50"})
    found = [row for wanted in planned(options) for row in rows_of(options, wanted)]
    assert sorted(found) == sorted(numbered(500))


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_several_topics_and_patterns(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    one, two = make_topic(), make_topic()
    publish(bus, one, [b"1"])
    publish(bus, two, [b"2", b"3"])
    assert sorted(values(read(spark, url, f"{one}, {two}"))) == [b"1", b"2", b"3"]
    pattern = spark.read.format("broker").options(url=url, topicPattern=f"{one}|{two}")
    assert sorted((row.topic, row.value) for row in pattern.load().collect()) == sorted(
        [(one, b"1"), (two, b"2"), (two, b"3")]
    )
    nothing = spark.read.format("broker").options(url=url, topicPattern="spark.nothing")
    assert nothing.load().collect() == []


@kafka_is_deep
def test_offsets_of_a_topic_outside_the_pattern(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(4))
    both = {"url": url, "topicPattern": f"{topic}|spark[.]gone.*"}
    for name in ("start", "end"):
        there = SourceOptions.parse({**both, name: json.dumps({topic: {"0": "latest"}})}).for_batch()
        assert planned(there)
        gone = {**both, name: json.dumps({topic: {"0": 0}, "spark.gone": {"0": 7}, "spark.gone-2": {"0": 7}})}
        with pytest.raises(ConfigurationError, match=f"{name} has offsets of 'spark.gone', 'spark.gone-2', and topicP"):
            planned(SourceOptions.parse(gone).for_batch())
    gone = SourceOptions.parse({**both, "start": json.dumps({"spark.gone": {"0": 7}})}).for_stream()
    advice = f"topicPattern finds no such topic. It finds '{topic}'; create the topic first"
    with pytest.raises(ConfigurationError, match=advice):
        LogStreamReader(gone).initialOffset()


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_an_empty_topic(spark: SparkSession, url: str, make_topic: MakeTopic) -> None:
    assert read(spark, url, make_topic()).collect() == []


def test_data_loss_by_retention_fails_the_read(
    url: str, bus: Bus, make_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(10))
    first = bus.log.bounds(topic)[0].first
    bus.admin.purge(topic)
    publish(bus, topic, numbered(5, start=10))
    options = {"url": url, "topic": topic, "start": json.dumps({"0": first})}

    def rows(**more: str) -> list[bytes]:
        found = SourceOptions.parse({**options, **more})
        (wanted,) = planned(found)
        return rows_of(found, wanted)

    with pytest.raises(OffsetOutOfRange, match=r"(?s)Retention removed .* onDataLoss to skip"):
        rows()
    assert rows(onDataLoss="skip") == numbered(5, start=10)
    assert "Data lost: retention removed offsets" in caplog.text
    assert "10 at most" in caplog.text


def test_a_range_that_the_log_does_not_reach_raises(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(10))
    options = SourceOptions.parse({"url": url, "topic": topic, "onDataLoss": "skip"})
    (wanted,) = planned(options)
    bus.admin.delete_topic(topic)
    bus.admin.ensure_topic(topic, partitions=1)
    publish(bus, topic, numbered(2))
    with pytest.raises(Exception, match=r"recreated|end of this log was lost"):
        rows_of(options, wanted)
    # Even if the new topic reaches the old offsets.
    publish(bus, topic, numbered(20))
    with pytest.raises(Exception, match="was deleted and recreated while it was read"):
        rows_of(options, wanted)


@kafka_is_deep
def test_the_largest_value(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    source, target = make_topic(partitions=1), make_topic(partitions=1)
    most = bus.capabilities.publish.limits.body
    assert most is not None
    bus.topic(source).publish_batch([b"x" * most, b"small", b"y" * most])
    rows = read(spark, url, source).select("value")
    rows.write.format("broker").options(url=url, topic=target).mode("append").save()
    assert [(len(value), value[:1]) for value in values(read(spark, url, target))] == [
        (most, b"x"),
        (5, b"s"),
        (most, b"y"),
    ]


def small_batches(url: str, bus: Bus, topic: str, count: int, **options: str) -> tuple[SourceOptions, Range]:
    """Numbers in the only partition of the topic, and the range of all of them."""
    publish(bus, topic, numbered(count))
    found = SourceOptions.parse({"url": url, "topic": topic, **options})
    (wanted,) = planned(found)
    return found, wanted


class Tables:
    """Counts the batches made from a log, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> None:
        place = "broker_spark.log.reading._Columns.table"
        make: Callable[..., Any] = resolve_name(place)
        self.made = 0

        def table(*arguments: Any) -> Any:
            self.made += 1
            if self.made == fail_at:
                raise ZeroDivisionError
            return make(*arguments)

        monkeypatch.setattr(place, table)


def reading() -> bool:
    return any(thread.name.startswith("broker-spark-read") for thread in threading.enumerate())


@pytest.mark.parametrize("columns", ["value,offset", "value,offset,attributes"])
async def test_batches_prepared_ahead_keep_the_order_of_the_log(
    url: str, bus: Bus, make_topic: MakeTopic, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread prepares expensive columns one batch ahead; it also ends when the read is abandoned."""
    options, wanted = small_batches(url, bus, make_topic(partitions=1), 300, columns=columns, arrowRows="50")
    assert rows_of(options, wanted) == numbered(300)
    tables = Tables(monkeypatch)
    broken = cast("Generator[pyarrow.RecordBatch]", read_range(options, wanted))
    assert next(broken).num_rows <= 50
    if "attributes" in columns:
        await eventually(lambda: tables.made == 2, 15, "the batch ahead")
    assert reading() is ("attributes" in columns)
    broken.close()
    await eventually(lambda: not reading(), 15, "the end of the thread")
    assert tables.made == 1 + ("attributes" in columns)


@pytest.mark.parametrize("columns", ["value", "value,id"])
def test_an_error_follows_the_rows_read_before_it(
    url: str, bus: Bus, make_topic: MakeTopic, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, wanted = small_batches(url, bus, make_topic(partitions=1), 100, columns=columns, arrowRows="10")
    Tables(monkeypatch, fail_at=3)
    found: list[bytes | None] = []
    with pytest.raises(ZeroDivisionError):
        for batch in read_range(options, wanted):
            found += batch.column("value").to_pylist()
    assert 2 <= len(found) <= 20
    assert found == numbered(len(found))
