"""Which messages of a queue a stream reads, from which start, and how many bytes at once."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import broker_spark
from broker.blocking import Bus
from broker.errors import ConfigurationError, TopicNotFound
from broker.outbound import OutboundMessage
from tests.servers import kafka, nats
from tests.spark.conftest import MakeTopic
from tests.spark.spool_query import SECONDS, MakeQuery, Query, settled
from tests.spark.support import log, numbered, publish

BODY = 10_000
"""Bytes of a large message."""

on_jetstream = pytest.mark.parametrize("url", ["jetstream"], indirect=True)


@pytest.fixture(params=["jetstream", "markers"])
def url(request: pytest.FixtureRequest) -> str:
    """Queues that settle each message by itself."""
    if request.param == "jetstream":
        return f"{nats.shared_server().url}?lease_seconds=2"
    return f"{kafka.shared_server().url}?queue=markers"


def matching(query: Query, pattern: str) -> Query:
    """The query, over a pattern instead of a named topic."""
    query.options = replace(query.options, topics=(), pattern=pattern)
    return query


def sources(query: Query, rows: int) -> dict[str, list[bytes]]:
    """The next rows, by topic."""
    found: dict[str, list[bytes]] = {}
    while sum(map(len, found.values())) < rows:
        before = query.at
        query.until(1)
        for table in query.tables(before, query.at):
            for topic, value in zip(table["topic"], table["value"], strict=True):
                found.setdefault(topic, []).append(value)
    return {topic: sorted(values) for topic, values in found.items()}


def behind(query: Query) -> dict[str, dict[int, int]]:
    return broker_spark.lag({"sources": [{"endOffset": query.at, "latestOffset": query.reader.reportLatestOffset()}]})


def large(bus: Bus, topic: str, count: int) -> list[bytes]:
    """Large messages that were published to a topic."""
    bodies = [b"%0*d" % (BODY, number) for number in range(count)]
    bus.topic(topic).publish_batch([OutboundMessage(body) for body in bodies])
    return bodies


def sizes(batches: Sequence[Sequence[bytes]]) -> list[int]:
    return [sum(map(len, batch)) for batch in batches]


@pytest.mark.parametrize("url", ["jetstream", pytest.param("markers", marks=pytest.mark.deep)], indirect=True)
def test_a_pattern_takes_the_topics_whose_whole_names_match(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    base = make_topic(partitions=1)
    one, longer = f"{base}.a", f"{base}.ab"
    for number, topic in enumerate((one, base, longer)):
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(10, 10 + 10 * number))
    pattern = re.escape(base) + "[.]."
    query = matching(make_query(base), pattern).begin()
    assert sources(query, 10) == {one: numbered(10, 10)}
    assert list(behind(query)) == [pattern]
    for topic in (base, longer):
        assert bus.admin.subscriptions(topic) == []


@on_jetstream
def test_a_new_topic_of_a_pattern_joins_when_the_query_restarts(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    first = make_topic()
    second, later = f"{first}.b", f"{first}.c"
    bus.admin.ensure_topic(second)
    query = matching(make_query(first), re.escape(first) + ".*").begin()
    bus.admin.ensure_topic(later)
    publish(bus, later, numbered(5))
    publish(bus, first, numbered(5, 5))
    publish(bus, second, numbered(5, 10))
    assert sources(query, 10) == {first: numbered(5, 5), second: numbered(5, 10)}
    assert query.batch() is None
    assert bus.admin.subscriptions(later) == []
    query.reader.stop()
    assert sources(query.begin(), 5) == {later: numbered(5)}


@on_jetstream
def test_a_pattern_without_a_topic_is_refused_until_one_exists(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery
) -> None:
    topic = make_topic()
    query = matching(make_query(topic), f"{topic}[.]later")
    expected = re.escape(f"Option topicPattern {query.options.pattern!r} matches no topic. Create one first")
    with pytest.raises(ConfigurationError, match=expected):
        query.begin()
    bus.admin.ensure_topic(f"{topic}.later")
    publish(bus, f"{topic}.later", numbered(5))
    assert sorted(query.begin().until(5)) == numbered(5)


@pytest.mark.deep
@pytest.mark.parametrize("url", ["markers"], indirect=True)
def test_a_pattern_leaves_out_the_markers_of_its_queue_and_of_others(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic = make_topic(partitions=1)
    query = matching(make_query(topic, subscription=f"{topic}.billing"), f"{topic}.*")
    query.begin()
    publish(bus, topic, numbered(5))
    assert sorted(query.until(5)) == numbered(5)
    query.reader.stop()
    # The first run has created it.
    assert f"{topic}.billing.markers" in bus.admin.topics()
    publish(bus, topic, numbered(3, 5))
    assert sorted(query.begin().until(3)) == numbered(3, 5)
    other = matching(make_query(topic, tmp_path / "other", subscription=f"{topic}.shipping"), f"{topic}.*")
    assert sources(other.begin(), 8) == {topic: sorted(numbered(8))}


@on_jetstream
def test_a_spool_belongs_to_its_topics_in_any_order(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    one, two = sorted((make_topic(), make_topic()))
    query = make_query(f"{one},{two}").begin()
    publish(bus, one, numbered(5))
    publish(bus, two, numbered(5, 5))
    assert sources(query, 10) == {one: numbered(5), two: numbered(5, 5)}
    assert list(behind(query)) == [f"{one},{two}"]
    query.reader.stop()
    for given, expected in (
        (one, f"for topics {one}, {two}, and this query is for {one}."),
        (f"{one},{two},x.y.z", "x.y.z"),
    ):
        with pytest.raises(ConfigurationError, match=expected):
            make_query(given).begin()
    with pytest.raises(ConfigurationError, match="Give this query a spool of its own"):
        matching(make_query(one), ".*").begin()
    turned = make_query(f"{two}, {one}")
    turned.at = query.at
    publish(bus, two, numbered(5, 10))
    assert sources(turned.begin(), 5) == {two: numbered(5, 10)}


@on_jetstream
def test_no_topic_is_subscribed_while_one_is_missing(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    topic = make_topic()
    query = make_query(f"{topic},{topic}.later")
    with pytest.raises(TopicNotFound, match=f"{topic}.later"):
        query.begin()
    assert bus.admin.subscriptions(topic) == []
    bus.admin.ensure_topic(f"{topic}.later")
    publish(bus, f"{topic}.later", numbered(5))
    assert sources(query.begin(), 5) == {f"{topic}.later": numbered(5)}


def test_a_new_subscription_begins_where_start_says(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path
) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(2))
    # Brokers store times in milliseconds, so wait for the next one.
    before = datetime.now(UTC) + timedelta(milliseconds=1)
    while (middle := datetime.now(UTC)) <= before:
        time.sleep(0.001)
    publish(bus, topic, numbered(2, 2))
    expected = {"earliest": numbered(4), "latest": [], middle.isoformat(timespec="milliseconds"): numbered(2, 2)}
    opened: list[Query] = []
    for number, start in enumerate(expected):
        name = f"from-{number}"
        opened.append(make_query(topic, tmp_path / name, subscription=name, start=start).begin())
    publish(bus, topic, [b"after"])
    for query, rows in zip(opened, expected.values(), strict=True):
        assert sorted(query.until(len(rows) + 1)) == [*rows, b"after"]


@on_jetstream
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_an_existing_subscription_ignores_start(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, tmp_path: Path, start: str
) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(5))
    query = make_query(topic).begin()
    assert sorted(query.until(5)) == numbered(5)
    assert settled(bus, topic)
    query.reader.stop()
    publish(bus, topic, numbered(5, 5))
    another = make_query(topic, tmp_path / "another", start=start).begin()
    assert sorted(another.until(5)) == numbered(5, 5)


def test_a_batch_is_bounded_in_bytes(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    topic = make_topic(partitions=1)
    bus.admin.ensure_subscription(topic, "spark")
    bodies = large(bus, topic, 60)
    query = make_query(topic, maxBytes="100k").begin()
    found: list[list[bytes]] = []
    while sum(map(len, found)) < 60:
        found.append(query.until(1))
    assert max(sizes(found)) <= 120_000
    assert max(map(len, found)) > 1
    assert sorted(row for batch in found for row in batch) == bodies
    # A larger message is a batch of its own.
    bus.topic(topic).publish_batch([OutboundMessage(bytes(300_000)) for _ in range(2)])
    assert sizes([query.until(1), query.until(1)]) == [300_000, 300_000]


@on_jetstream
def test_a_batch_of_a_spool_is_bounded_in_bytes(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    topic = make_topic(partitions=1)
    query = make_query(topic, maxRows=3, aheadRows=100).begin()
    bodies = large(bus, topic, 30)
    assert settled(bus, topic)
    query.reader.stop()
    found = list(make_query(topic, maxBytes="100k").begin(drain=True).batches())
    # Several of its files fit, with three rows each at most.
    assert max(map(len, found)) > 3
    assert max(sizes(found)) <= 100 << 10
    assert sorted(row for batch in found for row in batch) == bodies


@on_jetstream
def test_bytes_received_ahead_are_bounded(bus: Bus, make_topic: MakeTopic, make_query: MakeQuery) -> None:
    topic = make_topic(partitions=1)
    bus.admin.ensure_subscription(topic, "spark")
    bodies = large(bus, topic, 200)
    query = make_query(topic, aheadBytes="400k").begin()
    spool, receiver = query.reader._spool, query.reader._receiver
    assert spool is not None
    assert receiver is not None
    with spool.changed:
        assert spool.changed.wait_for(lambda: not receiver.has_room, SECONDS)
        while spool.changed.wait(0.5):
            pass
    # First, since rows written between the two are no longer at the broker.
    lag = bus.admin.lag(topic, "spark")
    rows, size = spool.ahead()
    assert 400 << 10 <= size < 1000 << 10
    assert lag.waiting + (lag.unsettled or 0) >= 200 - rows > 0
    assert sorted(query.until(200)) == bodies
    assert settled(bus, topic)


@on_jetstream
@pytest.mark.parametrize("ahead", [1, 30_000])
def test_a_batch_does_not_wait_for_rows_beyond_the_limit_ahead(
    bus: Bus, make_topic: MakeTopic, make_query: MakeQuery, ahead: int
) -> None:
    topic = make_topic(partitions=1)
    bus.admin.ensure_subscription(topic, "spark")
    bodies = large(bus, topic, 20)
    query = make_query(topic, aheadBytes=ahead, minRows=1000, maxDelay=3600).begin()
    # The last rows may wait for more, if they stay below the limit.
    found = query.until(20 - ahead // BODY)
    query.reader.stop()
    found += [row for batch in query.begin(drain=True).batches() for row in batch]
    assert sorted(found) == bodies
    assert settled(bus, topic)


@on_jetstream
def test_spark_reads_the_topics_of_a_pattern_in_bounded_batches(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    base, target = make_topic(), make_topic()
    topics = (base, f"{base}.more")
    bus.admin.ensure_topic(topics[1])
    expected = [b"%s:%s" % (topic.encode(), body) for topic in topics for body in large(bus, topic, 20)]
    options = {"topicPattern": f"{base}([.]more)?", "start": "earliest", "maxBytes": "100k", "aheadBytes": "400k"}
    frame = (
        spark.readStream.format("broker")
        .options(url=url, subscription="spark", spool=str(tmp_path / "spool"), columns="topic,value", **options)
        .load()
    )
    query = (
        frame.selectExpr("concat(topic, ':', decode(value, 'utf-8')) as value")
        .writeStream.format("broker")
        .options(url=url, topic=target, checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    rows = [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]
    assert sum(rows) == 40
    assert max(rows) <= 12
    assert list(broker_spark.lag(query.lastProgress)) == [options["topicPattern"]]
    assert sorted(body for _, body in log(bus, target)) == sorted(expected)
