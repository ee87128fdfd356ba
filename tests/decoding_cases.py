"""Classes, and values that none of them takes, for the tests of `broker_spark.decode` with Spark and without."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pydantic
from pyspark.sql.types import FloatType, IntegerType

__all__ = ["BASE", "HOSTILE", "UNHELD", "Everything", "Model", "Part", "Struct"]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Part:
    name: str
    count: int | None = None


@dataclass
class Everything:
    text: str
    number: int
    colour: Colour
    share: float = 1.5
    price: Decimal | None = None
    moment: datetime | None = None
    day: date | None = None
    part: Part | None = None
    names: list[str] = field(default_factory=list)
    parts: dict[str, Part] | None = None
    uuid: UUID | None = None
    body: bytes | None = None
    numbers: list[int] | None = None
    size: Literal[1, 2] | None = None
    small: Annotated[int, IntegerType()] | None = None
    shares: list[Annotated[float, FloatType()]] | None = None


class Model(pydantic.BaseModel):
    number: Annotated[Decimal, pydantic.Field(max_digits=6, decimal_places=2)]
    other: str = pydantic.Field(alias="other-name")


class Struct(msgspec.Struct, rename="camel"):
    model: Model
    long_name: tuple[int, ...] = ()


BASE: dict[str, Any] = {"text": "x", "number": 1, "colour": "red"}
_JSON = json.dumps(BASE).encode()


def _with(**more: Any) -> bytes:
    return json.dumps({**BASE, **more}).encode()


def _raw(more: bytes) -> bytes:
    return _JSON[:-1] + b", " + more + b"}"


HOSTILE: list[tuple[bytes | None, str]] = [
    (_with(text=5), "Expected `str`, got `int` - at `$.text`"),
    (_with(text=None), "Expected `str`, got `null` - at `$.text`"),
    (b'{"number": 1, "colour": "red"}', "Object missing required field `text`"),
    (_with(number=None), "Expected `int`, got `null` - at `$.number`"),
    (_with(number="5"), "Expected `int`, got `str` - at `$.number`"),
    (_with(number=True), "Expected `int`, got `bool` - at `$.number`"),
    (_with(number=1.5), "Expected `int`, got `float` - at `$.number`"),
    (_with(number=1.0), "Expected `int`, got `float` - at `$.number`"),
    (_with(share=None), "Expected `float`, got `null` - at `$.share`"),
    (_with(colour="green"), "Invalid enum value 'green' - at `$.colour`"),
    (_with(size=3), "Invalid enum value 3 - at `$.size`"),
    (_with(share="NaN"), "Expected `float`, got `str` - at `$.share`"),
    (_raw(b'"share": NaN'), "JSON is malformed: invalid character (byte 53)"),
    (_raw(b'"share": -1e400'), "Number out of range - at `$.share`"),
    (_raw(b'"share": ' + b"9" * 1000), "Number out of range - at `$.share`"),
    (_raw(b'"number": ' + b"9" * 5000), "Integer value out of range - at `$.number`"),
    (_with(part={"name": 7}), "Expected `str`, got `int` - at `$.part.name`"),
    (_with(part={}), "Object missing required field `name` - at `$.part`"),
    (_with(part=5), "Expected `object | null`, got `int` - at `$.part`"),
    (_with(part={"name": "x", "count": "y"}), "Expected `int | null`, got `str` - at `$.part.count`"),
    (_with(names=[1]), "Expected `str`, got `int` - at `$.names[0]`"),
    (_with(names=["a", None]), "Expected `str`, got `null` - at `$.names[1]`"),
    (_with(numbers=[1, "x"]), "Expected `int`, got `str` - at `$.numbers[1]`"),
    (_with(parts={"k": {"name": 1}}), "Expected `str`, got `int` - at `$.parts[...].name`"),
    (_with(parts={"k": None}), "Expected `object`, got `null` - at `$.parts[...]`"),
    (_with(price="x"), "Invalid decimal string - at `$.price`"),
    (_with(moment=17), "Expected `datetime | null`, got `int` - at `$.moment`"),
    (_with(moment="2026"), "Invalid RFC3339 encoded datetime - at `$.moment`"),
    (_with(moment="2026-01-01"), "Invalid RFC3339 encoded datetime - at `$.moment`"),
    (_with(moment="2026-01-01T99:00:00"), "Invalid RFC3339 encoded datetime - at `$.moment`"),
    (_with(moment="0000-12-31T00:00:00Z"), "Invalid RFC3339 encoded datetime - at `$.moment`"),
    (_with(moment="2026-02-03T04:05:06Z\n"), "Invalid RFC3339 encoded datetime - at `$.moment`"),
    (_with(day="2026-13-01"), "Invalid RFC3339 encoded date - at `$.day`"),
    (_with(day="0000-12-31"), "Invalid RFC3339 encoded date - at `$.day`"),
    (_with(day="2026-02-03\n"), "Invalid RFC3339 encoded date - at `$.day`"),
    (_with(uuid="zz"), "Invalid UUID - at `$.uuid`"),
    (_with(uuid=f"{UUID(int=1)}\n"), "Invalid UUID - at `$.uuid`"),
    (_with(body="!!"), "Invalid base64 encoded string - at `$.body`"),
    (_with(body="aGk"), "Invalid base64 encoded string - at `$.body`"),
    (_with(body="a\nb="), "Invalid base64 encoded string - at `$.body`"),
    (b"", "Input data was truncated"),
    (b" ", "Input data was truncated"),
    (b"{", "Input data was truncated"),
    (b'{"number": 1, "number": "x"}', "Expected `int`, got `str` - at `$.number`"),
    (b"null", "Expected `object`, got `null`"),
    (b"[]", "Expected `object`, got `array`"),
    (b"5", "Expected `object`, got `int`"),
    (b"{'text': 'x'}", "JSON is malformed: object keys must be strings (byte 1)"),
    (b"\xef\xbb\xbf" + _JSON, "JSON is malformed: invalid character (byte 0)"),
    (
        b'{"text": "\xff", "number": 1, "colour": "red"}',
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    (_raw(b'"text": "\\ud800"'), "Input data was truncated"),
    (b"[" * 100_000, "Expected `object`, got `array`"),
    (
        _raw(b'"other": ' + b"[" * 100_000 + b"]" * 100_000),
        "maximum recursion depth exceeded while deserializing an object",
    ),
    *(
        (
            _JSON + more,
            f"JSON is malformed: trailing characters (byte {len(_JSON) + 1 + len(more) - len(more.lstrip())})",
        )
        for more in (b" x", _JSON, b"," + _JSON, b"]} junk", b'],"w":[1', b"] junk", b"}", b",", b', {"mark": 1}')
    ),
]
"""Values that do not decode as `Everything`, and why: in a consumer and on Spark."""

UNHELD: list[tuple[bytes | None, str]] = [
    (None, "The value is null"),
    (_with(number=2**63), "A column of bigint cannot hold 9223372036854775808 - at `$.number`"),
    (_with(number=-(2**63) - 1), "A column of bigint cannot hold -9223372036854775809 - at `$.number`"),
    (_raw(b'"number": ' + b"9" * 1000), f"A column of bigint cannot hold {'9' * 60}… - at `$.number`"),
    (_with(numbers=[1, 2**63, 2]), "A column of bigint cannot hold 9223372036854775808 - at `$.numbers[...]`"),
    (
        _with(parts={"k": {"name": "x", "count": 10**19}}),
        "A column of bigint cannot hold 10000000000000000000 - at `$.parts[...].count`",
    ),
    (_with(small=2**40), "A column of int cannot hold 1099511627776 - at `$.small`"),
    (_with(shares=[1, 1e39]), "A column of float cannot hold 1e+39 - at `$.shares[...]`"),
    (
        _with(price="1.23456789012345678901"),
        "A column of decimal(38,18) cannot hold 1.23456789012345678901 - at `$.price`",
    ),
    (_with(price="NaN"), "A column of decimal(38,18) cannot hold NaN - at `$.price`"),
    (_raw(b'"price": 1e400'), "A column of decimal(38,18) cannot hold 1E+400 - at `$.price`"),
    (_raw(b'"price": 1e999999999'), "A column of decimal(38,18) cannot hold 1E+999999999 - at `$.price`"),
    (_raw(b'"price": ' + b"9" * 1000), f"A column of decimal(38,18) cannot hold {'9' * 60}… - at `$.price`"),
    (
        _with(moment="9999-12-31T23:00:00-02:00"),
        "A column of timestamp cannot hold 9999-12-31 23:00:00-02:00 - at `$.moment`",
    ),
    (
        _with(moment="0001-01-01T00:00:00+02:00"),
        "A column of timestamp cannot hold 0001-01-01 00:00:00+02:00 - at `$.moment`",
    ),
]
"""Values that decode as `Everything`, but no row of Spark holds them."""
