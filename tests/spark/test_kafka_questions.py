"""How often Kafka is asked while a read is planned and run: each question is a round trip of every micro-batch."""

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
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the brokers were asked by the admin clients of this process: the first word of each question."""
    found = Counter[str]()
    for name in ("call", "outcomes", "coordinator_outcomes"):
        before = getattr(Connection, name)

        async def counted(self: Any, start: Any, what: str, *rest: Any, before: Any = before) -> Any:
            found[what.split()[0]] += 1
            return await before(self, start, what, *rest)

        monkeypatch.setattr(Connection, name, counted)
    return found


def told(found: Counter[str]) -> dict[str, int]:
    """What was asked since the last time."""
    told = dict(found)
    found.clear()
    return told


def test_a_micro_batch_asks_no_more_than_it_needs(
    url: str, bus: Bus, make_topic: MakeTopic, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the rows may be later than a reader waits before it asks whether they are there.
    monkeypatch.setattr("broker_kafka.log_reader._SOON", 10.0)
    topic = make_topic(partitions=3)
    publish(bus, topic, numbered(9))
    options = SourceOptions.parse({"url": url, "topic": topic, "group": "spark.questions"})
    reader = LogStreamReader(options)
    start = reader.initialOffset()
    told(asked)
    end = reader.latestOffset(start, ReadAllAvailable())
    # What it is, its partitions, and where these begin and end.
    assert told(asked) == {"Topic": 2, "Positions": 2}
    parts = reader.partitions(start, end)
    reader.reportLatestOffset()
    assert told(asked) == {}
    read: list[bytes] = []
    for part in parts:
        assert isinstance(part, Range)
        read += rows_of(options, part)
        # At the end, that it is still the same.
        assert told(asked) == {"Topic": 1}
    assert sorted(read) == numbered(9)
    reader.commit(end)
    assert told(asked)
    # Of a position that did not move the group is told once.
    reader.commit(end)
    assert told(asked) == {}
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert told(asked) == {"Topic": 2, "Positions": 2}


def test_a_batch_read_asks_no_more_than_it_needs(
    url: str, bus: Bus, make_topic: MakeTopic, asked: Counter[str]
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(5))
    options = SourceOptions.parse({"url": url, "topic": topic})
    told(asked)
    assert len(LogBatchReader(options).partitions()) == 2
    assert told(asked) == {"Topic": 2, "Positions": 2}


@pytest.mark.deep
def test_reads_by_sparks_connector_ask_for_nothing_twice(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, asked: Counter[str], tmp_path: Path
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(40))
    of_topic = {"url": url, "topic": topic}

    def rows(**options: Any) -> list[tuple[Any, ...]]:
        frame = broker_spark.read(spark, **of_topic, **options)
        return sorted(tuple(row) for row in frame.select("partition", "offset", "value").collect())

    told(asked)
    found = rows(connector="always")
    assert told(asked) == {"Topic": 1, "Positions": 2}
    assert found == rows(connector="never")
    assert len(found) == 40
    time = "2026-01-31T12:00:00+00:00"
    told(asked)
    found = rows(connector="always", start=time, end="latest")
    # The bounds, and then the time in the same partitions.
    assert told(asked) == {"Topic": 2, "Positions": 3}
    assert found == rows(connector="never", start=time, end="latest")

    told(asked)
    broker_spark.read_stream(spark, connector="always", **of_topic)
    # Where it begins and ends the connector asks itself.
    assert told(asked) == {"Topic": 1}
    beside = TopicsStreamReader(SourceOptions.parse({"url": url, "topic": topic}))
    known = beside.initialOffset()
    assert told(asked) == {"Topic": 1}
    assert beside.latestOffset(known, ReadAllAvailable()) == known
    assert told(asked) == {"Topic": 1}
    start = {"0": 1}
    broker_spark.read_stream(spark, connector="always", checkpoint=str(tmp_path), start=start, **of_topic)
    assert told(asked) == {"Topic": 1, "Positions": 2}


def test_who_catches_up_asks_where_the_logs_end_once_a_second(
    url: str, bus: Bus, make_topic: MakeTopic, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(100))
    options = SourceOptions.parse({"url": url, "topic": topic, "maxRows": "30"})
    now = 0.0
    monkeypatch.setattr("broker_spark.log.source.time.monotonic", lambda: now)
    reader = LogStreamReader(options)
    start = reader.initialOffset()
    told(asked)
    batches: list[list[bytes]] = []
    questions: list[dict[str, int]] = []
    # 100 and 70 rows wait where 30 are taken; of the next second nothing is known, and of the last 10 no others.
    for number in range(4):
        now += 1.5 if number == 2 else 0.1
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        questions.append(told(asked))
        parts = reader.partitions(start, end)
        batches.append([row for part in parts if isinstance(part, Range) for row in rows_of(options, part)])
        told(asked)
        start = end
        if number == 2:
            publish(bus, topic, numbered(5, start=100))
            told(asked)
    look = {"Topic": 2, "Positions": 2}
    assert questions == [look, {}, look, look]
    assert [len(batch) for batch in batches] == [30, 30, 30, 15]
    assert sorted(row for batch in batches for row in batch) == sorted(numbered(105))
