"""The fixtures for tests of pipelines, as an application uses them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker.outbound import OutboundMessage
from broker_spark.pipeline import FileSink, Pipeline, Source, TableSink, TopicSink
from broker_spark.testing import _moved, payloads, pipeline_session, run_pipeline

__all__ = ["pipeline_session", "run_pipeline"]


@dataclass
class Order:
    table: int
    coffees: int


def large(orders: DataFrame) -> DataFrame:
    return orders.select("payload.*").where("coffees >= 10")


PIPELINE = Pipeline(
    name="large_orders",
    url="nats://broker.example",
    sources={"orders": Source("orders", decode=Order)},
    transform=large,
    sinks={
        "topic": TopicSink("large-orders", key="table"),
        "archive": FileSink("archive"),
        "table": TableSink("large_orders"),
    },
    dead_letters=FileSink("dead"),
    checkpoint="checkpoint",
)


def test_the_transform(pipeline_session: SparkSession) -> None:
    frame = payloads(
        pipeline_session, Order, [Order(1, 9), Order(2, 10), b'{"table": 3, "coffees": 11}'], key=[b"a"] * 3
    )
    assert [row.table for row in large(frame).collect()] == [2, 3]
    assert [bytes(row.key) for row in frame.collect()] == [b"a"] * 3
    with pytest.raises(ValueError, match="A row does not decode: Object missing required field `coffees`"):
        payloads(pipeline_session, Order, [b'{"table": 3}'])


@pytest.mark.deep
def test_the_pipeline(run_pipeline: Any) -> None:
    letter = OutboundMessage(b"?", attributes={"from": "bar"})
    found = run_pipeline(PIPELINE, {"orders": [b'{"table": 1, "coffees": 12}', letter]})
    assert [report.dead for report in found.reports] == [1]
    assert [(row.reason, row.attributes) for row in found.dead.collect()] == [
        ("JSON is malformed: invalid character (byte 0)", {"from": "bar"})
    ]
    assert [(record.key, record.data) for record in found.records("large-orders")] == [
        (b"1", b'{"table":1,"coffees":12}')
    ]
    again = run_pipeline(found.pipeline, {"orders": [b'{"table": 2, "coffees": 15}']})
    assert again.rows("archive").count() == again.rows("topic").count() == again.rows("table").count() == 2
    assert [report.rows_in for report in again.reports] == [1]


def test_settings_of_the_application_stay(tmp_path: Path) -> None:
    options = {"subscription": "spark", "spool": "/var/spool/orders", "connector": "always"}
    queue = Source("orders", decode=Order, options=options)
    moved = _moved(dataclasses.replace(PIPELINE, sources={"orders": queue}), "nats://127.0.0.1:4222", tmp_path)
    assert moved.sources["orders"].options.keys() == {"subscription", "spool"}
    spool = moved.sources["orders"].options["spool"]
    assert all(Path(place).is_relative_to(tmp_path) for place in (moved.checkpoint, spool))
    assert moved.sinks["table"] == TableSink(f"large_orders_{tmp_path.name}")
