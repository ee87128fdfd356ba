"""Pipelines on real brokers: dead letters, several sinks, replays, stops."""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.blocking import Bus, connect
from broker.outbound import OutboundMessage
from broker_spark.pipeline import BatchReport, CallSink, FileSink, Pipeline, Run, Source, TableSink, TopicSink, run
from broker_spark.pipeline.inspecting import status
from tests.servers import nats
from tests.spark.conftest import MakeTopic
from tests.spark.support import log, publish

pytestmark = pytest.mark.usefixtures("compiled")


@dataclass
class Order:
    number: int
    colour: str


def orders(count: int, start: int = 0) -> list[bytes]:
    return [
        json.dumps({"number": number, "colour": "red" if number % 2 else "blue"}).encode()
        for number in range(start, start + count)
    ]


def numbers(frame: DataFrame) -> DataFrame:
    return frame.select("key", "payload.*")


def make(url: str, source: str, directory: Path, **changes: Any) -> Pipeline:
    fields: dict[str, Any] = {
        "name": "orders",
        "sources": {"orders": Source(source, Order, options={"maxRows": 50})},
        "sinks": {"files": FileSink(str(directory / "files"))},
        "checkpoint": str(directory / "checkpoint"),
        "transform": numbers,
        "dead_letters": FileSink(str(directory / "dead")),
        "url": url,
        "trigger": "available-now",
    }
    return Pipeline(**(fields | changes))


def forget_the_last_commit(checkpoint: str) -> None:
    """As after a crash between the write and its commit: the last batch runs again."""
    last = max((Path(checkpoint) / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (last, last.with_name(f".{last.name}.crc")):
        path.unlink(missing_ok=True)


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_every_row_is_once_in_every_sink(
    spark: SparkSession,
    url: str,
    bus: Bus,
    make_topic: MakeTopic,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target, dead = make_topic(), make_topic(), make_topic()
    bad = [b"{", b'{"number": 1}', b'{"number": "x", "colour": "red"}']
    publish(bus, source, [*orders(97), *bad])
    bus.topic(source).publish_batch([OutboundMessage(None, b"gone", {"table": "3"}, id="mine")])
    seen: list[tuple[int, int]] = []
    table = "orders"
    pipeline = make(
        url,
        source,
        tmp_path,
        sinks={
            "topic": TopicSink(target, key="number"),
            "files": FileSink(str(tmp_path / "files"), partition_by=["colour"]),
            "red": TableSink(table, where="colour = 'red'"),
            "calls": CallSink(lambda frame, batch: seen.append((batch, frame.count()))),
        },
        dead_letters=TopicSink(dead),
    )
    reports: list[BatchReport] = []
    spark.sql(f"drop table if exists {table}")
    try:
        for again in (False, True):
            if again:
                forget_the_last_commit(pipeline.checkpoint)
                # As on a machine with more cores.
                monkeypatch.setattr(SparkContext, "defaultParallelism", 3)
                assert run(pipeline, spark=spark) == 1
            else:
                assert run(pipeline, spark=spark, on_batch=reports.append) == 3
                assert sum(report.rows_in for report in reports) == 101
                assert sum(report.dead for report in reports) == 4
                assert sum(report.rows_out["topic"] for report in reports) == 97
                assert sum(report.rows_out["red"] for report in reports) == 48
                assert [report.lag > 0 for report in reports] == [True, True, False]
                assert sum(count for _, count in seen) == 97
            files = spark.read.parquet(str(tmp_path / "files"))
            assert files.count() == files.select("number").distinct().count() == 97
            assert spark.table(table).count() == 48
            written, letters = log(bus, target), log(bus, dead)
            assert (len(written), len(letters)) == (97, 4)
    finally:
        spark.sql(f"drop table if exists {table}")
    found = [record for part in bus.log.partitions(dead) for batch in bus.log.read(dead, part) for record in batch]
    by_body = {record.data: record for record in found}
    assert by_body.keys() == {*bad, None}
    assert by_body[b'{"number": 1}'].attributes["dead-letter-reason"] == "Object missing required field `colour`"
    gone = by_body[None]
    assert (gone.key, gone.attributes["table"], gone.attributes["dead-letter-id"]) == (b"gone", "3", "mine")
    assert gone.attributes["dead-letter-topic"] == source
    places = {
        record.data: (record.partition, record.offset)
        for part in bus.log.partitions(source)
        for batch in bus.log.read(source, part)
        for record in batch
    }
    letters = {letter.data: (letter.partition, letter.offset) for letter in bus.admin.list_dead(dead)}
    assert letters == {body: places[body] for body in (*bad, None)}


@pytest.mark.deep
def test_aggregates_in_windows_and_several_sources(spark: SparkSession, tmp_path: Path) -> None:
    url = nats.shared_server().url
    one, two = (f"spark.{uuid.uuid4().hex[:12]}" for _ in range(2))
    with connect(url) as bus:
        for topic in (one, two):
            bus.admin.ensure_topic(topic, partitions=2)
        publish(bus, one, [*orders(30), b"?"])
        publish(bus, two, [*orders(10, start=20), b"!"])

    def both(first: DataFrame, second: DataFrame) -> DataFrame:
        rows = first.select("payload.*").union(second.select("payload.*"))
        return rows.groupBy("colour").agg(F.count("*").alias("orders"))

    reports: list[BatchReport] = []
    pipeline = make(
        url,
        one,
        tmp_path,
        sources={"first": Source(one, Order), "second": Source(two, Order)},
        transform=both,
        output_mode="update",
    )
    run(pipeline, spark=spark, on_batch=reports.append)
    rows = spark.read.parquet(str(tmp_path / "files")).collect()
    assert {row.colour: row.orders for row in rows} == {"red": 20, "blue": 20}
    assert (sum(report.rows_in for report in reports), sum(report.dead for report in reports)) == (42, 2)
    assert {row.topic for row in spark.read.parquet(str(tmp_path / "dead")).collect()} == {one, two}


@pytest.mark.deep
def test_the_second_stop_cancels_the_running_batch(spark: SparkSession, tmp_path: Path) -> None:
    url = nats.shared_server().url
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        publish(bus, topic, orders(5))
    started = threading.Event()

    def endless(frame: DataFrame, batch: int) -> None:
        started.set()
        # A batch may start further jobs after the cancelled one.
        for _ in range(2):
            with suppress(Exception):
                frame.sparkSession.range(10**15).agg(F.sum(F.sin("id"))).collect()
        raise RuntimeError("cancelled")

    pipeline = make(url, topic, tmp_path, sinks={"endless": CallSink(endless)}, trigger="")
    under_way = Run(pipeline)

    def stop() -> None:
        started.wait()
        under_way.stop()
        under_way.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    assert under_way.execute(spark) == 0
    thread.join()
    found = status(pipeline)
    assert (found.committed, found.planned) == (None, 0)
