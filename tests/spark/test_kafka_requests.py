"""Requests to Kafka while a read is planned and run: each is a round trip of every micro-batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

import broker_spark
from broker.blocking import Bus
from broker_kafka.cluster.connection import Connection
from broker_spark.checkpoint.topics_source import TopicsStreamReader
from broker_spark.common.options import SourceOptions
from broker_spark.log.ranges import Range
from broker_spark.log.source import LogBatchReader, LogStreamReader
from tests.servers import kafka
from tests.spark.conftest import MakeTopic
from tests.spark.support import numbered, publish, rows_of


@pytest.fixture
def url() -> str:
    return kafka.shared_server().url


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The requests of this process's admin clients, by the first word of each."""
    found = Counter[str]()
    for name in ("call", "outcomes", "coordinator_outcomes"):
        before = getattr(Connection, name)

        async def counted(self: Any, start: Any, what: str, *rest: Any, before: Any = before) -> Any:
            found[what.split()[0]] += 1
            return await before(self, start, what, *rest)

        monkeypatch.setattr(Connection, name, counted)
    return found


def new_requests(found: Counter[str]) -> dict[str, int]:
    """The requests since the last call."""
    since = dict(found)
    found.clear()
    return since


def test_a_micro_batch_sends_only_the_requests_it_needs(
    url: str, bus: Bus, make_topic: MakeTopic, requests: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the rows may arrive after the reader would check whether they exist.
    monkeypatch.setattr("broker_kafka.log_reader._SOON", 10.0)
    topic = make_topic(partitions=3)
    publish(bus, topic, numbered(9))
    options = SourceOptions.parse({"url": url, "topic": topic, "group": "spark.questions"})
    reader = LogStreamReader(options)
    start = reader.initialOffset()
    new_requests(requests)
    end = reader.latestOffset(start, ReadAllAvailable())
    # Its id, its partitions, and their bounds.
    assert new_requests(requests) == {"Topic": 2, "Positions": 2}
    parts = reader.partitions(start, end)
    reader.reportLatestOffset()
    assert new_requests(requests) == {}
    read: list[bytes] = []
    for part in parts:
        assert isinstance(part, Range)
        read += rows_of(options, part)
        # At the end, its id.
        assert new_requests(requests) == {"Topic": 1}
    assert sorted(read) == numbered(9)
    reader.commit(end)
    assert new_requests(requests)
    # A position that did not move is reported to the group once.
    reader.commit(end)
    assert new_requests(requests) == {}
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert new_requests(requests) == {"Topic": 2, "Positions": 2}


def test_a_batch_read_sends_only_the_requests_it_needs(
    url: str, bus: Bus, make_topic: MakeTopic, requests: Counter[str]
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(5))
    options = SourceOptions.parse({"url": url, "topic": topic})
    new_requests(requests)
    assert len(LogBatchReader(options).partitions()) == 2
    assert new_requests(requests) == {"Topic": 2, "Positions": 2}


@pytest.mark.deep
def test_reads_by_sparks_connector_repeat_no_request(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, requests: Counter[str], tmp_path: Path
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(40))
    of_topic = {"url": url, "topic": topic}

    def rows(**options: Any) -> list[tuple[Any, ...]]:
        frame = broker_spark.read(spark, **of_topic, **options)
        return sorted(tuple(row) for row in frame.select("partition", "offset", "value").collect())

    new_requests(requests)
    found = rows(connector="always")
    assert new_requests(requests) == {"Topic": 1, "Positions": 2}
    assert found == rows(connector="never")
    assert len(found) == 40
    time = "2026-01-31T12:00:00+00:00"
    new_requests(requests)
    found = rows(connector="always", start=time, end="latest")
    # The bounds, and then the time in the same partitions.
    assert new_requests(requests) == {"Topic": 2, "Positions": 3}
    assert found == rows(connector="never", start=time, end="latest")

    new_requests(requests)
    broker_spark.read_stream(spark, connector="always", **of_topic)
    # The connector requests the bounds itself.
    assert new_requests(requests) == {"Topic": 1}
    beside = TopicsStreamReader(SourceOptions.parse({"url": url, "topic": topic}))
    known = beside.initialOffset()
    assert new_requests(requests) == {"Topic": 1}
    assert beside.latestOffset(known, ReadAllAvailable()) == known
    assert new_requests(requests) == {"Topic": 1}
    start = {"0": 1}
    broker_spark.read_stream(spark, connector="always", checkpoint=str(tmp_path), start=start, **of_topic)
    assert new_requests(requests) == {"Topic": 1, "Positions": 2}


def test_a_query_that_catches_up_fetches_the_ends_once_a_second(
    url: str, bus: Bus, make_topic: MakeTopic, requests: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(100))
    options = SourceOptions.parse({"url": url, "topic": topic, "maxRows": "30"})
    now = 0.0
    monkeypatch.setattr("broker_spark.log.source.time.monotonic", lambda: now)
    reader = LogStreamReader(options)
    start = reader.initialOffset()
    new_requests(requests)
    batches: list[list[bytes]] = []
    questions: list[dict[str, int]] = []
    # 100 and 70 rows wait, and batches have 30; then a second has passed, and the last 10 are not a full batch.
    for number in range(4):
        now += 1.5 if number == 2 else 0.1
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        questions.append(new_requests(requests))
        parts = reader.partitions(start, end)
        batches.append([row for part in parts if isinstance(part, Range) for row in rows_of(options, part)])
        new_requests(requests)
        start = end
        if number == 2:
            publish(bus, topic, numbered(5, start=100))
            new_requests(requests)
    look = {"Topic": 2, "Positions": 2}
    assert questions == [look, {}, look, look]
    assert [len(batch) for batch in batches] == [30, 30, 30, 15]
    assert sorted(row for batch in batches for row in batch) == sorted(numbered(105))
