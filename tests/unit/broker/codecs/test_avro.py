"""`Avro`: values of a schema as payloads of a class."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codecs import Avro
from broker.errors import ConfigurationError, DecodeError, InvalidMessage


class Line(msgspec.Struct):
    name: str
    count: int = 1


@dataclass
class Order:
    id: int
    price: Decimal
    at: datetime
    day: date
    key: UUID
    lines: list[Line]
    labels: dict[str, str]
    note: str | None = None


class Checked(pydantic.BaseModel):
    id: Annotated[int, pydantic.Field(ge=1)]


def record(title: str, /, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": title, "fields": [{"name": each, "type": kind} for each, kind in fields.items()]}


LINE = record("Line", name="string", count="int")
SCHEMA = record(
    "Order",
    id="long",
    price={"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
    at={"type": "long", "logicalType": "timestamp-micros"},
    day={"type": "int", "logicalType": "date"},
    key={"type": "string", "logicalType": "uuid"},
    lines={"type": "array", "items": LINE},
    labels={"type": "map", "values": "string"},
    note=["null", "string"],
)
ORDER = Order(
    7,
    Decimal("12.50"),
    datetime(2026, 11, 30, 12, 0, 0, 5, tzinfo=UTC),
    date(2026, 11, 30),
    UUID(int=5),
    [Line("tea", 2)],
    {"a": "b"},
)


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_payloads_round_trip(schema: Any) -> None:
    codec = Avro(Order, schema)
    assert codec.decode(codec.encode(ORDER)) == ORDER
    copy = pickle.loads(pickle.dumps(codec))  # noqa: S301
    assert copy == codec
    assert copy.decode(codec.encode(ORDER)) == ORDER


@given(st.builds(Line, st.text(), st.integers(-(2**31), 2**31 - 1)))
def test_every_value_of_the_schema_round_trips(line: Line) -> None:
    codec = Avro(Line, LINE)
    assert codec.decode(codec.encode(line)) == line


def test_fields_that_the_class_lacks_are_left_out() -> None:
    written = Avro(Line, LINE).encode(Line("tea", 2))

    class Name(msgspec.Struct):
        name: str

    assert Avro(Name, LINE).decode(written) == Name("tea")


def test_registered_schemas_are_known_by_their_id() -> None:
    older = record("Line", name="string")
    codec = Avro(Line, registered={7: LINE, 3: older})
    written = codec.encode(Line("tea", 2))
    assert written[:5] == b"\x00\x00\x00\x00\x07"
    assert codec.decode(written) == Line("tea", 2)
    assert codec.decode(b"\x00\x00\x00\x00\x03" + Avro(Line, LINE).encode(Line("milk", 0))[:-1]) == Line("milk", 1)
    assert codec == pickle.loads(pickle.dumps(codec))  # noqa: S301


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00\x00\x00\x00\x04\x02x\x02", "The value was written with schema 4, which is not among those registered"),
        (b"\x02x\x02", "The value does not begin with the id of a registered schema"),
        (b"", "The value does not begin with the id of a registered schema"),
    ],
)
def test_what_no_registered_schema_wrote_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        Avro(Line, registered={7: LINE}).decode(data)


WRITTEN = Avro(Line, LINE).encode(Line("tea", 2))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "The value is not of the schema: (EOFError|IndexError)"),
        (WRITTEN[:-1], "The value is not of the schema: (EOFError|IndexError)"),
        (b"\x06te", "The value is not of the schema: "),
        (b"\x04\xff\xfe\x02", "The value is not of the schema: .*utf-8"),
        (WRITTEN + b"x", "The value has 1 bytes behind its end"),
    ],
)
def test_other_bytes_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=rf"Avro\(Line\) cannot decode the payload: {reason}"):
        Avro(Line, LINE).decode(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_decode_error(data: bytes) -> None:
    codec = Avro(Order, SCHEMA)
    with suppress(DecodeError):
        codec.decode(data)


def test_the_class_has_the_last_word() -> None:
    with pytest.raises(DecodeError, match=r"Expected `int`, got `str` - at `\$.id`"):
        Avro(Order, record("Order", id="string")).decode(b"\x02x")
    with pytest.raises(DecodeError, match=r"greater than or equal to 1 - at `\$.id`"):
        Avro(Checked, record("Checked", id="long")).decode(b"\x00")
    assert Avro(Checked, record("Checked", id="long")).decode(b"\x02") == Checked(id=1)
    assert Avro(Checked, record("Checked", id="long")).encode(Checked(id=1)) == b"\x02"


def test_a_tombstone_is_refused() -> None:
    with pytest.raises(DecodeError, match="tombstone"):
        Avro(Line, LINE).decode(None)


def test_payloads_that_the_schema_cannot_hold_are_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"Avro\(Line\) cannot encode a payload of type Order"):
        Avro(Line, LINE).encode(ORDER)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("schema", ["no JSON", {"type": "recor"}])
def test_a_schema_that_is_none_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigurationError, match="This is no Avro schema"):
        Avro(Line, schema)


def test_one_of_the_two_is_needed() -> None:
    for given_schema, registered in ((None, None), (None, {}), (LINE, {1: LINE})):
        with pytest.raises(ConfigurationError, match="Avro needs a schema"):
            Avro(Line, given_schema, registered=registered)


def test_equal_codecs_are_one() -> None:
    assert {Avro(Line, LINE), Avro(Line, json.dumps(LINE))} != {Avro(Line, SCHEMA)}
    assert Avro(Line, LINE) == Avro(Line, dict(LINE))
    assert Avro(Line, LINE) != Avro(Line, registered={1: LINE})
    assert repr(Avro(Line, LINE)) == "Avro(Line)"
