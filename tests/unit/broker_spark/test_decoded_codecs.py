"""Avro, Protobuf, Debezium and codecs of one's own to Arrow columns, as Spark's workers do it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow
import pytest
from pyspark import cloudpickle

from broker.codecs import Avro, Debezium, Protobuf
from broker.envelopes import Envelope
from broker.errors import ConfigurationError, DecodeError
from broker.outbound import OutboundMessage
from broker_spark.common.schema import arrow_schema
from broker_spark.decode.decoding import PayloadColumn, payload_schema
from tests.unit.broker.codecs.messages import Node
from tests.unit.broker.codecs.messages import Order as OrderMessage


def judged(what: Any, *values: bytes | None) -> list[tuple[Any, str | None]]:
    """Payloads and reasons, by what a worker unpickles."""
    column = pickle.loads(cloudpickle.dumps(PayloadColumn(what)))  # noqa: S301
    found = column(pyarrow.array(values, pyarrow.binary()))
    found.validate(full=True)
    return [(each["payload"], each["reason"]) for each in found.to_pylist()]


@dataclass
class Line:
    name: str
    count: int = 1


LINE = {"type": "record", "name": "Line", "fields": [{"name": each, "type": kind} for each, kind in
                                                      (("name", "string"), ("count", "int"))]}  # fmt: skip


def test_avro() -> None:
    codec = Avro(Line, LINE)
    assert payload_schema(codec).simpleString() == "struct<name:string,count:bigint>"
    assert judged(codec, codec.encode(Line("tea", 2)), b"\x06te", None, codec.encode(Line("milk"))) == [
        ({"name": "tea", "count": 2}, None),
        (None, "The value is not of the schema: Expected 3 bytes, read 2"),
        (None, "The value is null"),
        ({"name": "milk", "count": 1}, None),
    ]


def test_avro_of_registered_schemas() -> None:
    codec = Avro(Line, registered={7: LINE})
    assert judged(codec, codec.encode(Line("tea", 2)), b"\x00\x00\x00\x00\x08x") == [
        ({"name": "tea", "count": 2}, None),
        (None, "The value was written with schema 8, which is not among those registered"),
    ]


class Stamped:
    """JSON whose key has to be prepared, with the number of its attributes as count."""

    type = Line

    def __init__(self) -> None:
        self.keys: set[bytes | None] = set()

    def pack(self, payload: Line, message: OutboundMessage, topic: str) -> OutboundMessage:
        raise NotImplementedError

    async def prepare(self, envelopes: Sequence[Envelope]) -> None:
        self.keys |= {each.key for each in envelopes}

    def unpack(self, envelope: Envelope) -> Line:
        if envelope.key not in self.keys:
            raise DecodeError("was not prepared")
        if not envelope.data:
            raise DecodeError("a tombstone")
        return Line(f"{envelope.topic} {envelope.data.decode()}", len(envelope.attributes))


def test_codecs_that_see_attributes() -> None:
    column = pickle.loads(cloudpickle.dumps(PayloadColumn(Stamped())))  # noqa: S301
    kinds = arrow_schema(("topic", "key", "value", "attributes", "publish_time", "broker_time"))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        {"topic": "orders", "key": b"k", "value": b"tea", "attributes": [("a", "1")], "publish_time": now},
        {"topic": "orders", "key": None, "value": None, "attributes": None},
    ]
    found = column(pyarrow.array(rows, pyarrow.struct(list(kinds))))
    found.validate(full=True)
    assert [(each["payload"], each["reason"]) for each in found.to_pylist()] == [
        ({"name": "orders tea", "count": 1}, None),
        (None, "a tombstone"),
    ]


def test_debezium() -> None:
    codec = Debezium(Line)
    assert payload_schema(codec).simpleString() == (
        "struct<op:string,before:struct<name:string,count:bigint>,after:struct<name:string,count:bigint>,ts_ms:bigint>"
    )
    tea = {"name": "tea", "count": 2}
    assert judged(
        codec,
        b'{"op": "c", "after": {"name": "tea", "count": 2}, "ts_ms": 5}',
        b'{"schema":{},"payload":{"op":"d","before":{"name":"tea","count":2},"after":null}}',
        None,
        b'{"op": "c", "after": {"name": 5}}',
    ) == [
        ({"op": "c", "ts_ms": 5, "before": None, "after": tea}, None),
        ({"op": "d", "ts_ms": None, "before": tea, "after": None}, None),
        ({"op": "tombstone", "ts_ms": None, "before": None, "after": None}, None),
        (None, "Expected `str`, got `int` - at `$.after.name`"),
    ]


@pytest.mark.parametrize("what", [OrderMessage, Protobuf(OrderMessage)], ids=["class", "codec"])
def test_protobuf(what: Any) -> None:
    assert payload_schema(what).simpleString() == (
        "struct<id:bigint,total:decimal(20,0),share:float,state:string,lines:array<struct<name:string,count:bigint>>,"
        "first:struct<name:string,count:bigint>,at:timestamp,note:string,labels:map<int,string>,states:array<string>,"
        "body:binary,maybe:boolean>"
    )
    full = OrderMessage(
        id=-5,
        total=2**64 - 1,
        share=float("inf"),
        state=1,
        lines=[{"name": "tea", "count": 2}, {"name": "milk"}],
        first={"name": "tea"},
        labels={3: 1, 4: 9},
        states=[0, 2],
        body=b"\xff",
        maybe=False,
    )
    full.at.FromJsonString("2026-11-30T12:00:00.000001999Z")
    full.note.value = ""
    empty = {"id": 0, "total": Decimal(0), "share": 0.0, "state": "UNKNOWN", "lines": [], "first": None, "at": None,
             "note": None, "labels": [], "states": [], "body": b"", "maybe": None}  # fmt: skip
    assert judged(what, full.SerializeToString(), b"", b"\x08", None) == [
        (
            {
                "id": -5,
                "total": Decimal(2**64 - 1),
                "share": float("inf"),
                "state": "PAID",
                "lines": [{"name": "tea", "count": 2}, {"name": "milk", "count": 0}],
                "first": {"name": "tea", "count": 0},
                "at": datetime(2026, 11, 30, 12, 0, 0, 1, tzinfo=UTC),
                "note": "",
                "labels": [(3, "PAID"), (4, "9")],
                "states": ["UNKNOWN", "SENT"],
                "body": b"\xff",
                "maybe": False,
            },
            None,
        ),
        (empty, None),
        (None, "Error parsing message with type 'shop.Order'"),
        (None, "The value is null"),
    ]


def test_a_time_that_no_column_holds_is_dead() -> None:
    order = OrderMessage()
    order.at.seconds = 2**60
    [(payload, reason)] = judged(OrderMessage, order.SerializeToString())
    assert payload is None
    assert reason is not None and reason.startswith("OverflowError")


def test_a_message_that_holds_itself_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Node.next: shop.Node holds itself"):
        payload_schema(Node)


class Reversed:
    """A codec of one's own."""

    type = Line

    def decode(self, data: bytes | None) -> Line:
        if data == b"":
            raise DecodeError("There is no name")
        assert data is not None
        return Line(data[::-1].decode())


def test_a_codec_of_ones_own() -> None:
    assert judged(Reversed(), b"aet", b"") == [({"name": "tea", "count": 1}, None), (None, "There is no name")]
