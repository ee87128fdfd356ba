"""Expectations of a pipeline: what they count, drop and send to the dead letters, and conditions that are refused."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError
from broker_spark.pipeline import BatchReport, CallSink, Expect, FileSink, Pipeline, Source, TopicSink, run
from broker_spark.pipeline.frames import frames_of
from broker_spark.pipeline.running import build_stream
from tests.servers import nats
from tests.spark.conftest import MakeTopic, kafka_is_deep
from tests.spark.support import publish
from tests.spark.test_pipeline import forget_the_last_commit

RULES = {
    "some": Expect("payload.coffees > 0", "dead"),
    "in stock": Expect("payload.coffees < 90", "drop"),
    "has a note": Expect("payload.note is not null"),
    "small": Expect("payload.coffees\n   < 100", "dead"),
}
SOME, SMALL = "Expectation 'some' failed: payload.coffees > 0", "Expectation 'small' failed: payload.coffees < 100"


@dataclass
class Order:
    table: int
    coffees: int | None
    note: str | None = None


def order(table: int, coffees: int | None, note: str | None = None) -> bytes:
    return json.dumps({"table": table, "coffees": coffees, "note": note}).encode()


BODIES = [order(0, 1, "x"), order(1, 0), order(2, None), order(3, 95), order(4, 200), b"?", order(6, 5)]
"""Fine; dead; dead, since null fails; dropped; both, so dead; undecodable; counted."""


def make(url: str, topic: str, directory: Path, **changes: Any) -> Pipeline:
    fields: dict[str, Any] = {
        "name": "quality",
        "url": url,
        "sources": {"orders": Source(topic, Order, expect=RULES)},
        "transform": lambda orders: orders.select("payload.*"),
        "sinks": {"files": FileSink(str(directory / "files"))},
        "dead_letters": FileSink(str(directory / "dead")),
        "checkpoint": str(directory / "checkpoint"),
        "trigger": "available-now",
    }
    return Pipeline(**(fields | changes))


def test_frames_have_the_rows_that_pass_and_the_letters(spark: SparkSession, tmp_path: Path) -> None:
    pipeline = make("nats://127.0.0.1:4222", "orders", tmp_path)
    values = spark.createDataFrame(
        [(body, number) for number, body in enumerate(BODIES)], "value binary, offset bigint"
    )
    found = frames_of(pipeline, {"orders": values})
    assert [(row.table, row.coffees) for row in found.out.orderBy("table").collect()] == [(0, 1), (6, 5)]
    assert found.dead is not None
    assert {row.offset: row.reason for row in found.dead.collect()} == {
        1: SOME,
        2: SOME,
        4: SMALL,
        5: "JSON is malformed: invalid character (byte 0)",
    }


def test_rows_that_are_not_decoded_are_judged_too(spark: SparkSession, tmp_path: Path) -> None:
    rules = {"short": Expect("length(value) < 3", "dead"), "keyed": Expect("key is not null")}
    pipeline = make(
        "nats://127.0.0.1:4222", "orders", tmp_path, sources={"raw": Source("raw", expect=rules)}, transform=None
    )
    rows = spark.createDataFrame([(b"long", None), (b"ok", None)], "value binary, key binary")
    found = frames_of(pipeline, {"raw": rows})
    assert [(bytes(row.value), row.key) for row in found.out.collect()] == [(b"ok", None)]
    assert found.out.columns == ["value", "key"]
    assert found.dead is not None
    [letter] = found.dead.collect()
    assert (bytes(letter.value), letter.topic, letter.reason) == (
        b"long",
        "raw",
        "Expectation 'short' failed: length(value) < 3",
    )


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("payload.cofees > 0", "condition is 'payload.cofees > 0': [FIELD_NOT_FOUND]"),
        ("value is not null", "condition is 'value is not null': [UNRESOLVED_COLUMN"),
        ("reason is null", "condition is 'reason is null': [UNRESOLVED_COLUMN"),
        ("payload.coffees >", "condition is 'payload.coffees >': [PARSE_SYNTAX_ERROR]"),
        ("payload.coffees", "condition is 'payload.coffees', of type bigint instead of boolean"),
        ("null", "condition is 'null', of type void instead of boolean"),
        ("rand() < 0.5", "condition is 'rand() < 0.5': ["),
        ("payload.table in (select 1)", "condition is 'payload.table in (select 1)': ["),
        ("count(*) > 1", "condition is 'count(*) > 1': ["),
    ],
)
def test_a_condition_that_cannot_be_used_raises_before_the_first_batch(
    spark: SparkSession, tmp_path: Path, condition: str, expected: str
) -> None:
    sources = {"orders": Source("orders", Order, expect={"fine": Expect("true"), "bad one": Expect(condition)})}
    pipeline = make("nats://127.0.0.1:4222", "orders", tmp_path, sources=sources)
    with pytest.raises(ConfigurationError) as caught:
        build_stream(pipeline, spark)
    assert str(caught.value).startswith(f"sources.orders.expect.bad one: {expected}")
    assert "payload.table, payload.coffees, payload.note" in str(caught.value)


def letters_in(spark: SparkSession, directory: Path) -> Counter[tuple[bytes, str]]:
    return Counter((bytes(row.value), row.reason) for row in spark.read.parquet(str(directory / "dead")).collect())


@pytest.mark.deep
@kafka_is_deep
def test_failures_are_counted_and_letters_written_once(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic()
    publish(bus, topic, [*BODIES, *(order(table, 3, "x") for table in range(10, 20))])
    reports: list[BatchReport] = []
    # Without the columns that tell the place of a row.
    source = Source(topic, Order, options={"columns": "value,topic"}, expect=RULES)
    pipeline = make(url, topic, tmp_path, sources={"orders": source})
    assert run(pipeline, spark=spark, on_batch=reports.append) == 1
    [report] = reports
    assert (report.rows_in, report.rows_out, report.dead) == (17, {"files": 12}, 4)
    assert report.failed == {"orders.some": 2, "orders.in stock": 3, "orders.has a note": 5, "orders.small": 2}
    assert ", 4 dead, 2 failed orders.some, 3 failed orders.in stock, " in str(report)
    assert spark.read.parquet(str(tmp_path / "files" / "batch=0")).columns == ["table", "coffees", "note"]
    expected = Counter(
        {
            (BODIES[1], SOME): 1,
            (BODIES[2], SOME): 1,
            (BODIES[4], SMALL): 1,
            (b"?", "JSON is malformed: invalid character (byte 0)"): 1,
        }
    )
    assert letters_in(spark, tmp_path) == expected
    # Rows of the next batch must not become letters of the one before, nor the other way.
    publish(bus, topic, [order(50, 0), order(51, 3, "x")])
    assert run(pipeline, spark=spark, on_batch=reports.append) == 1
    expected[order(50, 0), SOME] = 1
    assert letters_in(spark, tmp_path) == expected
    forget_the_last_commit(pipeline.checkpoint)
    publish(bus, topic, [order(60, 0)])
    assert run(pipeline, spark=spark, on_batch=reports.append) == 2
    expected[order(60, 0), SOME] = 1
    assert letters_in(spark, tmp_path) == expected
    assert [(each.rows_in, each.dead) for each in reports[1:]] == [(2, 1), (2, 1), (1, 1)]


@pytest.mark.deep
def test_letters_of_a_queue_and_of_several_sinks(spark: SparkSession, tmp_path: Path) -> None:
    url = nats.shared_server().url
    topic, dead = (f"quality.{uuid.uuid4().hex[:12]}" for _ in range(2))
    seen: list[int] = []

    def take(frame: DataFrame, batch: int) -> None:
        seen.extend(row.table for row in frame.collect())

    options = {"subscription": "quality", "spool": str(tmp_path / "spool")}
    pipeline = make(
        url,
        topic,
        tmp_path,
        sources={"jobs": Source(topic, Order, options=options, expect=RULES)},
        sinks={"files": FileSink(str(tmp_path / "files")), "calls": CallSink(take)},
        dead_letters=TopicSink(dead),
    )
    reports: list[BatchReport] = []
    with connect(url) as bus:
        for each in (topic, dead):
            bus.admin.ensure_topic(each)
        bus.admin.ensure_subscription(topic, "quality")
        for bodies in (BODIES[:3], BODIES[3:]):
            publish(bus, topic, bodies)
            run(pipeline, spark=spark, on_batch=reports.append)
        letters = bus.admin.list_dead(dead)
    assert sorted((letter.data, letter.reason) for letter in letters) == sorted(
        [
            (BODIES[1], SOME),
            (BODIES[2], SOME),
            (BODIES[4], SMALL),
            (b"?", "JSON is malformed: invalid character (byte 0)"),
        ]
    )
    assert sorted(seen) == [0, 6]
    assert sum(report.dead for report in reports) == 4
    assert sum(report.failed["jobs.in stock"] for report in reports) == 3


@pytest.mark.deep
def test_a_retried_task_loses_no_letters_and_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    url, topic = nats.shared_server().url, f"quality.{uuid.uuid4().hex[:12]}"

    def only_again(table: int) -> bool:
        context = TaskContext.get()
        assert context is not None
        assert context.attemptNumber() > 0, "the first attempt of the task fails, after its rows were judged"
        return True

    # Spark would take hints for those of a vectorized function.
    only_again.__annotations__.clear()

    def fine(orders: DataFrame) -> DataFrame:
        return orders.select("payload.*").where(F.udf(only_again, "boolean")("table"))

    reports: list[BatchReport] = []
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, BODIES)
        run(make(url, topic, tmp_path, transform=fine), spark=spark, on_batch=reports.append)
    assert [(report.rows_in, report.rows_out, report.dead) for report in reports] == [(7, {"files": 2}, 4)]
    assert reports[0].failed["orders.some"] == 2
    assert letters_in(spark, tmp_path).total() == 4
