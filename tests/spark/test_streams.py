"""Structured Streaming from topic to topic on every broker with a log."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import broker_spark
from broker.blocking import Bus
from tests.fault_matrix import Books
from tests.spark.conftest import MakeTopic
from tests.spark.support import copy, log, numbered, publish


@pytest.mark.deep
def test_a_copy_resumes_and_replays(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, books: Books
) -> None:
    source, target = make_topic(), make_topic()
    backend = bus.capabilities.backend
    copy(spark, url, source, target, tmp_path / "copy", maxRows=200)
    books.balance("an empty topic", backend, [], [body for _, body in log(bus, target)])
    publish(bus, source, numbered(500))
    first = copy(spark, url, source, target, tmp_path / "copy", maxRows=200)
    progress = [each for each in first.recentProgress if each["numInputRows"]]
    assert [each["numInputRows"] for each in progress] == [200, 200, 100]
    behind = [sum(each) for each in (broker_spark.lag(p)[source].values() for p in progress)]
    assert behind[0] > behind[1] > behind[2] == 0
    copied = log(bus, target)
    books.balance("an empty topic that is filled", backend, numbered(500), [body for _, body in copied])

    # As after a crash between the write and its commit: the last batch runs again, before later rows.
    last = max((tmp_path / "copy" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (last, last.with_name(f".{last.name}.crc")):
        path.unlink(missing_ok=True)
    publish(bus, source, numbered(50, start=500))
    copy(spark, url, source, target, tmp_path / "copy", maxRows=200)
    again = log(bus, target)
    assert sorted({body for _, body in again}) == sorted(numbered(550))
    # At least once: a duplicate has the same id.
    assert len({each for each, _ in again}) == len(set(again)) == 550
    assert set(copied) <= set(again)
    assert len(again) == (550 if bus.capabilities.publish.deduplication else 650)


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_runs_from_latest_miss_nothing_in_between(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source, target = make_topic(), make_topic()
    publish(bus, source, numbered(5))
    copy(spark, url, source, target, tmp_path, start="latest")
    publish(bus, source, numbered(20, start=5))
    copy(spark, url, source, target, tmp_path, start="latest")
    assert sorted(body for _, body in log(bus, target)) == sorted(numbered(20, start=5))
