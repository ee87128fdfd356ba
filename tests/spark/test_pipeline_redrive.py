"""Dead letters of a pipeline: listed, fixed, redriven by `broker dead`, and decoded by the next run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker.blocking import Bus
from broker.cli import main
from broker.outbound import OutboundMessage
from broker_spark.pipeline import Source, TopicSink, run
from broker_spark.pipeline.frames import frames_of
from broker_spark.pipeline.letters import as_dead_letters
from tests.spark.conftest import MakeTopic
from tests.spark.test_pipeline import Order, make, orders

pytestmark = pytest.mark.usefixtures("compiled")

DEAD = (
    "key binary, value binary, topic string, partition int, offset bigint, id string, "
    "attributes map<string,string>, reason string"
)


@dataclass
class Coloured(Order):
    """The fixed class: rows without a colour are grey."""

    colour: str = "grey"


def row(
    reason: str = "?",
    *,
    partition: int | None = None,
    offset: int | None = None,
    attributes: dict[str, str] | None = None,
) -> tuple[Any, ...]:
    return None, b"?", "orders", partition, offset, None, attributes, reason


def test_a_letter_fits_the_limits_of_every_broker(spark: SparkSession) -> None:
    letters = as_dead_letters(spark.createDataFrame([row("ä" * 256), row("ä" * 257)], DEAD), "shop").collect()
    reasons = {letter.attributes["dead-letter-reason"] for letter in letters}
    assert reasons == {"ä" * 256, f"{'ä' * 255}…"}


def test_a_letter_has_the_origin_of_its_row_as_far_as_known(spark: SparkSession) -> None:
    before = {"dead-letter-offset": "7", "table": "3"}
    rows = [row(partition=2, offset=71), row(offset=71), row(attributes=before)]
    letters = as_dead_letters(spark.createDataFrame(rows, DEAD), "shop").collect()
    attributes = {"dead-letter-topic": "orders", "dead-letter-reason": "?", "dead-letter-subscription": "shop"}
    assert [letter.attributes for letter in letters] == [
        {**attributes, "dead-letter-partition": "2", "dead-letter-offset": "71"},
        {**attributes, "dead-letter-offset": "71"},
        {**attributes, "table": "3"},
    ]


@pytest.mark.parametrize(("topic", "expected"), [("orders", "orders"), ("native:orders", "orders"), ("one,two", None)])
def test_a_dead_row_has_the_only_topic_of_its_source(spark: SparkSession, topic: str, expected: str | None) -> None:
    source = Source(topic, Order, options={"columns": "value"})
    pipeline = make("kafka://127.0.0.1:9092", topic, Path("/nowhere"), transform=None, sources={"orders": source})
    found = frames_of(pipeline, {"orders": spark.createDataFrame([(b"?",)], "value binary")})
    assert found.dead is not None
    assert [row.topic for row in found.dead.collect()] == [expected]


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_redriven_letters_are_decoded_by_the_next_run(
    spark: SparkSession,
    url: str,
    bus: Bus,
    make_topic: MakeTopic,
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    source, dead = make_topic(), make_topic(partitions=1)
    bus.topic(source).publish_batch(
        [
            *(OutboundMessage(body) for body in orders(3)),
            OutboundMessage(b'{"number": 10}', "ten", {"table": "3"}, id="mine"),
            OutboundMessage(b"?"),
        ]
    )
    # A redrive needs the origin even of rows whose column topic is not read.
    pipeline = make(
        url,
        source,
        tmp_path,
        sources={"orders": Source(source, Order, options={"columns": "key,value,id,attributes"})},
        dead_letters=TopicSink(dead),
    )
    run(pipeline, spark=spark)

    def call(*arguments: str) -> bytes:
        assert main(["--url", url, "dead", *arguments]) == 0
        return capsysbinary.readouterr().out

    listed = {line["data"]: line for line in map(json.loads, call("list", dead, "--json").splitlines())}
    assert listed.keys() == {'{"number": 10}', "?"}
    ten = listed['{"number": 10}']
    assert (ten["topic"], ten["subscription"], ten["id"]) == (source, "orders", "mine")
    assert (ten["reason"], ten["key"], ten["attributes"]) == (
        "Object missing required field `colour`",
        "ten",
        {"table": "3"},
    )
    assert f"2 moved to '{source}'".encode() in call("redrive", dead, "--to", source)
    reports = []
    fixed = replace(pipeline, sources={"orders": replace(pipeline.sources["orders"], decode=Coloured)})
    run(fixed, spark=spark, on_batch=reports.append)
    assert [(report.rows_in, report.rows_out, report.dead) for report in reports] == [(2, {"files": 1}, 1)]
    rows = spark.read.parquet(str(tmp_path / "files")).collect()
    assert sorted((row.number, row.colour, row.key and bytes(row.key)) for row in rows) == [
        (0, "blue", None),
        (1, "red", None),
        (2, "blue", None),
        (10, "grey", b"ten"),
    ]
    # Only rows that still do not decode are letters again.
    [letter] = map(json.loads, call("list", dead, "--json").splitlines())
    assert (letter["data"], letter["reason"], letter["topic"]) == (
        "?",
        "JSON is malformed: invalid character (byte 0)",
        source,
    )
