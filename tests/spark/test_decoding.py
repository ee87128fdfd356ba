"""`decode` through Spark, on plain frames without a broker. The values are tested in tests/unit/broker_spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.codecs import Avro, Debezium
from broker.envelopes import Envelope
from broker.errors import ConfigurationError
from broker.outbound import OutboundMessage
from broker_spark.common.schema import RECORD_COLUMNS, spark_schema
from broker_spark.decode.decoding import decode, judge, payload_schema
from tests.decoding_cases import BASE, HOSTILE, UNHELD, Everything, Part, Struct
from tests.spark.support import plan_of
from tests.unit.broker.codecs.messages import Order as MessageOrder

CASES = [(json.dumps(BASE).encode(), None), *HOSTILE, *UNHELD, (json.dumps({**BASE, "number": 2}).encode(), None)]


def frame_of(spark: SparkSession, *values: str) -> DataFrame:
    return spark.createDataFrame([(each, n) for n, each in enumerate(values)], "value string, n int")


def test_every_row_is_in_one_half(spark: SparkSession) -> None:
    rows = [(value, n) for n, (value, _) in enumerate(CASES)]
    decoded = decode(spark.createDataFrame(rows, "value binary, n int"), Everything)
    assert (decoded.rows.columns, decoded.dead.columns) == (["n", "payload"], ["value", "n", "reason"])
    assert decoded.rows.schema["payload"].dataType == payload_schema(Everything)
    good = decoded.rows.collect()
    assert [(row.n, row.payload.number) for row in good] == [(0, 1), (len(CASES) - 1, 2)]
    assert good[0].payload.asDict(recursive=True) == {
        **dict.fromkeys(payload_schema(Everything).names), **BASE, "share": 1.5, "names": [],
    }  # fmt: skip
    assert [(row.value and bytes(row.value), row.reason) for row in decoded.dead.collect()] == CASES[1:-1]


def test_codecs_reach_the_workers(spark: SparkSession) -> None:
    schema = {"type": "record", "name": "Part", "fields": [{"name": "name", "type": "string"}]}
    cases: list[tuple[Any, bytes]] = [
        (Avro(Part, schema), b"\x02a"),
        (Avro(Part, registered={7: schema}), b"\x00\x00\x00\x00\x07\x02a"),
        (Debezium(Part), b'{"op": "c", "after": {"name": "a"}}'),
        (MessageOrder, MessageOrder(lines=[{"name": "a"}]).SerializeToString()),
    ]
    for what, value in cases:
        decoded = decode(spark.createDataFrame([(value, 1), (b"\xff", 2)], "value binary, n int"), what)
        [row] = decoded.rows.collect()
        assert '"a"' in json.dumps(row.payload.asDict(recursive=True), default=str)
        [dead] = decoded.dead.collect()
        assert dead.n == 2


class Labelled:
    """The text of a message as a part's name, and its attribute as the count."""

    type = Part

    def pack(self, payload: Part, message: OutboundMessage, topic: str) -> OutboundMessage:
        return message.replace(data=payload.name.encode(), attributes={"count": str(payload.count)})

    def unpack(self, envelope: Envelope) -> Part:
        return Part((envelope.data or b"").decode(), int(envelope.attributes["count"]))


def test_a_codec_sees_attributes(spark: SparkSession) -> None:
    rows = [("t", 0, n, None, b"k", b"a", attributes, None, None) for n, attributes in enumerate(({"count": "3"}, {}))]
    frame = spark.createDataFrame(rows, spark_schema(tuple(RECORD_COLUMNS)))
    decoded = decode(frame, Labelled())
    [row] = decoded.rows.collect()
    assert row.payload.asDict() == {"name": "a", "count": 3}
    [dead] = decoded.dead.collect()
    assert (dead.offset, dead.reason) == (1, "KeyError: 'count'")
    with pytest.raises(ConfigurationError, match="There is no column 'attributes', which an envelope codec reads"):
        decode(frame.drop("attributes"), Labelled())


def test_both_halves_can_be_read_at_once(spark: SparkSession) -> None:
    found = judge(frame_of(spark, '{"name": "a"}', "{"), Part)
    assert found.columns == ["value", "n", "payload", "reason"]
    assert [(row.payload and row.payload.name, row.reason) for row in found.collect()] == [
        ("a", None),
        (None, "Input data was truncated"),
    ]


def test_python_gets_the_value_only_and_once(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("{}", 1, 2)], "value string, n int, unread int")
    steps = plan_of(decode(frame, Part).rows.where("payload.count > 1").select("n", "payload.name"))
    assert [step.split("#")[0] for step in steps if "EvalPython" in step] == ["ArrowEvalPython [decoded(cast(value"]
    assert not any("unread" in step for step in steps if "Scan" not in step)


def test_classes_of_the_caller_reach_the_workers(spark: SparkSession) -> None:
    @dataclass
    class Local:
        parts: dict[str, Part]

    [row] = decode(frame_of(spark, '{"parts": {"a": {"name": "x"}}}'), Local).rows.collect()
    assert row.payload.parts["a"].asDict() == {"name": "x", "count": None}
    [row] = decode(
        frame_of(spark, '{"model": {"number": 2, "other-name": "x"}, "longName": [1]}'), Struct
    ).rows.collect()
    assert (row.payload.model.other, row.payload.long_name) == ("x", [1])


@dataclass
class Timed:
    at: datetime


@pytest.fixture(params=["Europe/Berlin", "+02:00", "UTC"])
def zone(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[str]:
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.set("spark.sql.session.timeZone", before)


def test_times_without_a_zone_are_in_that_of_the_session(spark: SparkSession, zone: str) -> None:
    texts = ["2026-07-01T12:00:00", "2026-03-29T02:30:00", "2026-10-25T02:30:00", "2026-07-01T12:00:00Z"]
    frame = frame_of(spark, *(json.dumps({"at": each}) for each in texts))
    its = F.get_json_object("value", "$.at").cast("timestamp")
    rows = decode(frame.withColumn("its", its), Timed).rows
    found = rows.select(F.col("payload.at").cast("double").alias("ours"), F.col("its").cast("double").alias("its"))
    assert all(row.ours == row.its for row in found.collect())
    assert found.collect()[3].ours == datetime(2026, 7, 1, 12, tzinfo=UTC).timestamp()


def test_a_frame_may_have_any_names(spark: SparkSession) -> None:
    frame = spark.createDataFrame([('{"name": "a"}', 2, 3), ("?", 4, 5)], ["my.value", "a.b", "`odd`"])
    decoded = decode(frame, Part, column="my.value")
    assert [tuple(row) for row in decoded.rows.collect()] == [(2, 3, ("a", None))]
    reason = "JSON is malformed: invalid character (byte 0)"
    assert [tuple(row) for row in decoded.dead.collect()] == [("?", 4, 5, reason)]


def test_a_frame_that_cannot_be_decoded_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="already has a column 'payload'"):
        decode(spark.createDataFrame([("x", "y")], "value string, payload string"), Part)
    with pytest.raises(ConfigurationError, match="no column 'value' to decode"):
        decode(spark.createDataFrame([("x",)], "v string"), Part)
    with pytest.raises(ConfigurationError, match="The frame has two columns 'a'"):
        decode(spark.createDataFrame([("", 1, 2)], ["value", "a", "a"]), Part)
    with pytest.raises(ConfigurationError, match="Column 'value' is bigint, expected binary or string"):
        decode(spark.createDataFrame([(1,)], ["value"]), Part)


@pytest.mark.parametrize("column", ["Payload", "__judged"])
def test_columns_that_conflict_but_for_their_case_are_named(spark: SparkSession, column: str) -> None:
    with pytest.raises(ConfigurationError, match=f"already has a column '{column}'"):
        decode(spark.createDataFrame([("x", "y")], f"value string, {column} string"), Part)


@dataclass
class Twins:
    name: str
    Name: str


@dataclass
class Nested:
    twins: list[Twins]


class Aliased(msgspec.Struct):
    first: int = msgspec.field(name="number")
    second: int = msgspec.field(name="Number")


@pytest.mark.parametrize("type", [Twins, Nested])
def test_fields_that_are_one_to_spark_are_named(spark: SparkSession, type: Any) -> None:
    frame = frame_of(spark, json.dumps({"name": "a", "Name": "b", "twins": [{"name": "a", "Name": "b"}]}))
    with pytest.raises(ConfigurationError, match=f"Fields 'name' and 'Name' of {type.__name__} have the same name"):
        decode(frame, type)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        [row] = decode(frame, type).rows.collect()
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert tuple(row.payload) == {Twins: ("a", "b"), Nested: ([("a", "b")],)}[type]


def test_names_in_json_may_differ_in_nothing_but_case(spark: SparkSession) -> None:
    [row] = decode(frame_of(spark, '{"number": 1, "Number": 2}'), Aliased).rows.collect()
    assert tuple(row.payload) == (1, 2)
