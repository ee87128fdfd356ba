"""JSON to Arrow columns by classes, as Spark's workers do it: which values decode, and why others do not."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, tzinfo
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pyarrow
import pydantic
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import DecimalType

from broker.codecs import Json
from broker.errors import ConfigurationError, DecodeError
from broker_spark.decode.decoding import PayloadColumn, payload_schema
from tests.decoding_cases import BASE, HOSTILE, UNHELD, Everything, Model, Part, Struct


def judged(type: Any, *values: bytes | None, zone: tzinfo = UTC) -> list[tuple[Any, str | None]]:
    """Payloads and reasons, by what a worker unpickles."""
    column = pickle.loads(cloudpickle.dumps(PayloadColumn(type, zone)))  # noqa: S301
    found = column(pyarrow.array(values, pyarrow.binary()))
    found.validate(full=True)
    return [(each["payload"], each["reason"]) for each in found.to_pylist()]


def payloads(type: Any, *values: bytes, zone: tzinfo = UTC) -> list[Any]:
    found = judged(type, *values, zone=zone)
    assert [reason for _, reason in found] == [None] * len(values)
    return [payload for payload, _ in found]


def reason(type: Any, value: bytes | None) -> str | None:
    [(payload, found)] = judged(type, value)
    assert payload is None
    return found


@pytest.mark.parametrize(("value", "expected"), [*HOSTILE, *UNHELD])
def test_what_does_not_decode_has_a_reason(value: bytes | None, expected: str) -> None:
    assert reason(Everything, value) == expected


@pytest.mark.parametrize(("value", "expected"), HOSTILE)
def test_a_consumer_gives_the_same_reason(value: bytes, expected: str) -> None:
    with pytest.raises(DecodeError) as raised:
        Json(Everything).decode(value)
    assert str(raised.value) == f"Json(Everything) cannot decode the payload: {expected}"


def test_a_value_that_does_not_fit_leaves_its_batch_alone() -> None:
    rows = [{**BASE, "number": n if n % 100 else 2**63 + n} for n in range(1001)]
    found = judged(Everything, *(json.dumps(each).encode() for each in rows))
    assert [payload["number"] if payload else None for payload, _ in found] == [
        n if n % 100 else None for n in range(1001)
    ]
    assert [why for _, why in found if why] == [
        f"A column of bigint cannot hold {2**63 + n} - at `$.number`" for n in range(0, 1001, 100)
    ]


def test_a_batch_may_be_empty() -> None:
    assert judged(Everything) == []


def test_the_columns_of_a_class() -> None:
    assert payload_schema(Everything).simpleString() == (
        "struct<text:string,number:bigint,colour:string,share:double,price:decimal(38,18),moment:timestamp,day:date,"
        "part:struct<name:string,count:bigint>,names:array<string>,parts:map<string,struct<name:string,count:bigint>>,"
        "uuid:string,body:binary,numbers:array<bigint>,size:bigint,small:int,shares:array<float>>"
    )
    assert payload_schema(Struct)["model"].dataType == payload_schema(Model)
    assert payload_schema(Model)["number"].dataType == DecimalType(6, 2)


def test_values_that_decode() -> None:
    full = {
        "share": 2, "price": "1.25", "moment": "2026-01-01T00:00:00Z", "day": "2026-02-03", "part": {"name": "a"},
        "names": ["q"], "parts": {"k": {"name": "r", "count": 3}}, "uuid": "12345678-1234-1234-1234-123456789ABC",
        "body": "YWI=", "numbers": [1, 2], "size": 2, "small": 7, "shares": [1, -2.5], "unknown": {"a": 1},
    }  # fmt: skip
    one, two = payloads(Everything, *(json.dumps({**BASE, **more}).encode() for more in ({}, full)))
    assert one == {
        **dict.fromkeys(payload_schema(Everything).names), **BASE, "share": 1.5, "names": [],
    }  # fmt: skip
    assert two == {
        **BASE, "share": 2.0, "price": Decimal("1.25"), "moment": datetime(2026, 1, 1, tzinfo=UTC),
        "day": date(2026, 2, 3), "part": {"name": "a", "count": None}, "names": ["q"],
        "parts": [("k", {"name": "r", "count": 3})], "uuid": "12345678-1234-1234-1234-123456789abc", "body": b"ab",
        "numbers": [1, 2], "size": 2, "small": 7, "shares": [1, -2.5],
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "5", "null", 'a "quoted" one', "\\", "\\u0041", "a\tb\nc\x00d", "{}", "über", "\U0001f600"]
)
def test_strings_are_those_of_json(text: str) -> None:
    [found] = payloads(Part, json.dumps({"name": text}).encode())
    assert found["name"] == text


def test_the_last_field_of_a_name_counts() -> None:
    assert payloads(Part, b'{"name": "a", "name": "b"}') == [{"name": "b", "count": None}]


def test_names_are_those_of_python_and_of_json() -> None:
    [row] = payloads(Struct, b'{"model": {"number": 1.5, "other-name": "x"}, "longName": [1]}')
    assert row == {"model": {"number": Decimal("1.50"), "other": "x"}, "long_name": [1]}
    [row] = payloads(Struct, Json(Struct).encode(Struct(Model(number=Decimal(2), **{"other-name": "y"}))) or b"")
    assert row == {"model": {"number": Decimal(2), "other": "y"}, "long_name": []}


@dataclass
class Priced:
    price: Decimal


EXACT = [
    "12345678901234567890.123456789012345678", "0.12345678901234567", "1234567890123456789", "1e3", "1E-7", "-1.0E-18",
    "0.0000001", "1.25e+2", "123456789012345E-15", "-0", "12.50000000000000000000", "12345e3", "-1.5E-3",
    "0e0", "1234567891234567891e-15", "9999999999999999e0",
]  # fmt: skip
ROUNDED = [
    "0.1234567890123456789012345678901234567890", "1.000000000000000000000000000000000000000001", "1e-19", "1.5e-18",
    "1e20", "0.1234567890123456785", "123456789012345678901", "12345678901234567890123456789012.000001", "1e-400",
    "-0.01E-350",
]  # fmt: skip


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_decimal_is_the_number_that_was_written_or_none(quote: str) -> None:
    values = [f'{{"price": {quote}{each}{quote}}}'.encode() for each in [*EXACT, *ROUNDED]]
    found = judged(Priced, *values)
    assert [payload and payload["price"] for payload, _ in found] == [*map(Decimal, EXACT), *[None] * len(ROUNDED)]
    assert all("A column of decimal(38,18) cannot hold" in (why or "") for _, why in found[len(EXACT) :])


@dataclass
class Timed:
    at: datetime


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-07-01T12:00:00", datetime(2026, 7, 1, 10, tzinfo=UTC)),
        ("2026-07-01T12:00:00+05:00", datetime(2026, 7, 1, 7, tzinfo=UTC)),
        # The clock skips this hour, and repeats that one; Spark's own cast does the same.
        ("2026-03-29T02:30:00", datetime(2026, 3, 29, 1, 30, tzinfo=UTC)),
        ("2026-10-25T02:30:00", datetime(2026, 10, 25, 0, 30, tzinfo=UTC)),
    ],
)
def test_times_without_a_zone_are_in_the_zone_of_the_session(text: str, expected: datetime) -> None:
    [found] = payloads(Timed, json.dumps({"at": text}).encode(), zone=ZoneInfo("Europe/Berlin"))
    assert found["at"] == expected


class Lean(msgspec.Struct, omit_defaults=True, frozen=True):
    number: int = 3
    text: str = "x"
    inner: Part | None = None


@dataclass(frozen=True)
class Frozen:
    name: str = "part"
    lean: Lean = Lean(number=7)  # noqa: RUF009 - it is frozen


@dataclass
class Defaults:
    required: int
    aware: datetime = datetime(2026, 3, 1, 12, tzinfo=UTC)
    naive: datetime = datetime(2026, 3, 1, 12)  # noqa: DTZ001
    lean: Lean = field(default_factory=Lean)
    frozen: Frozen = Frozen()
    fuller: Lean = field(default_factory=lambda: Lean(number=4, inner=Part("other")))
    leans: list[Lean] = field(default_factory=lambda: [Lean(), Lean(text="y")])
    by_name: dict[str, Lean] = field(default_factory=lambda: {"k": Lean(number=5)})


def test_defaults_are_those_of_the_class() -> None:
    [found] = payloads(Defaults, b'{"required": 1, "lean": {"text": "z"}}')
    lean = {"number": 3, "text": "x", "inner": None}
    assert found == {
        "required": 1,
        "aware": datetime(2026, 3, 1, 12, tzinfo=UTC),
        "naive": datetime(2026, 3, 1, 12, tzinfo=UTC),
        "lean": {**lean, "text": "z"},
        "frozen": {"name": "part", "lean": {**lean, "number": 7}},
        "fuller": {**lean, "number": 4, "inner": {"name": "other", "count": None}},
        "leans": [lean, {**lean, "text": "y"}],
        "by_name": [("k", {**lean, "number": 5})],
    }
    assert reason(Defaults, b'{"required": 1, "naive": null}') == "Expected `datetime`, got `null` - at `$.naive`"


@dataclass
class Drawn:
    id: UUID = field(default_factory=uuid4)


def test_a_factory_runs_for_each_row() -> None:
    assert len({each["id"] for each in payloads(Drawn, *[b"{}"] * 100)}) == 100


@dataclass
class Loose:
    number: int = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    "type",
    [
        Loose,
        pydantic.create_model("LooseModel", number=(int, None)),
        msgspec.defstruct("LooseStruct", [("number", int, None)]),
        msgspec.defstruct("Made", [("number", int, msgspec.field(default_factory=lambda: None))]),
    ],
)
def test_a_default_may_be_none_whatever_the_type_says(type: Any) -> None:
    assert payloads(type, b"{}") == [{"number": None}]
    assert payload_schema(type)["number"].nullable
    assert str(reason(type, b'{"number": "x"}')).endswith("- at `$.number`")


class Tagged(msgspec.Struct, tag="kind-a"):
    number: int


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class Listed(msgspec.Struct, array_like=True):
    number: int
    names: set[str]


class Bounded(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=3)]
    names: Annotated[list[str], msgspec.Meta(max_length=1)] = []


@dataclass(kw_only=True)
class Keyword:
    first: int = 1
    number: int


def test_what_a_class_declares_for_msgspec_counts() -> None:
    assert payloads(Tagged, b'{"type": "kind-a", "number": 1}') == [{"number": 1}]
    assert reason(Tagged, b'{"type": "kind-b", "number": 1}') == "Invalid value 'kind-b' - at `$.type`"
    assert reason(Strict, b'{"number": 1, "more": 2}') == "Object contains unknown field `more`"
    assert payloads(Listed, b'[5, ["a", "a"]]') == [{"number": 5, "names": ["a"]}]
    assert reason(Bounded, b'{"number": 2}') == "Expected `int` >= 3 - at `$.number`"
    assert reason(Bounded, b'{"number": 3, "names": ["a", "b"]}') == "Expected `array` of length <= 1 - at `$.names`"
    assert payloads(Keyword, b'{"number": 2}') == [{"first": 1, "number": 2}]


@attrs.define
class Attrs:
    number: int
    names: list[str] = attrs.Factory(list)


@attrs.define
class Checked:
    number: int = attrs.field(validator=attrs.validators.gt(2))


def test_attrs_classes() -> None:
    assert payloads(Attrs, b'{"number": 1}') == [{"number": 1, "names": []}]
    assert payloads(Checked, b'{"number": 3}') == [{"number": 3}]
    assert reason(Checked, b'{"number": 1}') == "'number' must be > 2: 1"


@dataclass
class Hooked:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("it is below 0")
        if self.number > 9:
            raise KeyError(self.number)
        made: Any = str(self.number) if self.number == 5 else -self.number
        self.number = made


def test_hooks_run_and_cannot_fail_a_batch() -> None:
    assert judged(Hooked, b'{"number": 1}', b'{"number": -1}', b'{"number": 10}', b'{"number": 5}') == [
        ({"number": -1}, None),
        (None, "it is below 0"),
        (None, "KeyError: 10"),
        (None, "A column of bigint cannot hold 5 - at `$.number`"),
    ]


@dataclass
class Twisted:
    names: list[str]

    def __post_init__(self) -> None:
        made: Any = 5
        self.names = self.names and made


def test_whatever_hooks_make_of_a_field_cannot_fail_a_batch() -> None:
    assert judged(Twisted, b'{"names": []}', b'{"names": ["a"]}', b'{"names": []}') == [
        ({"names": []}, None),
        (None, "TypeError: 'int' object is not iterable"),
        ({"names": []}, None),
    ]


class Validated(pydantic.BaseModel):
    number: int = pydantic.Field(ge=3, alias="NUM")
    names: list[Annotated[str, pydantic.Field(pattern="^a")]] = []
    inner: Part | None = None

    @pydantic.field_validator("number")
    @classmethod
    def no_five(cls, value: int) -> int:
        if value == 5:
            raise ValueError("it is five")
        return value


def test_models_are_validated_by_pydantic() -> None:
    good = b'{"NUM": "4", "names": ["a"], "inner": {"name": "x"}}'
    assert payloads(Validated, good) == [{"number": 4, "names": ["a"], "inner": {"name": "x", "count": None}}]
    bad = {
        b'{"NUM": 2}': "Input should be greater than or equal to 3 - at `$.NUM`",
        b'{"NUM": 5}': "Value error, it is five - at `$.NUM`",
        b'{"number": 4}': "Field required - at `$.NUM`",
        b'{"NUM": 4, "names": ["a", "b"]}': "String should match pattern '^a' - at `$.names[1]`",
        b'{"NUM": 1, "names": 2}': "Input should be greater than or equal to 3 - at `$.NUM`, and 1 more",
        b'{"NUM": 9223372036854775808}': "A column of bigint cannot hold 9223372036854775808 - at `$.NUM`",
    }
    assert {value: reason(Validated, value) for value in bad} == bad
    assert str(reason(Validated, b"")).startswith("Invalid JSON: EOF while parsing")


class Exact(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", populate_by_name=True)
    number: int = pydantic.Field(alias="NUM")
    at: datetime | None = None


def test_the_config_of_a_model_counts() -> None:
    assert reason(Exact, b'{"NUM": "4"}') == "Input should be a valid integer - at `$.NUM`"
    assert reason(Exact, b'{"NUM": 4, "more": 1}') == "Extra inputs are not permitted - at `$.more`"
    assert payloads(Exact, b'{"NUM": 4}', b'{"number": 5}') == [{"number": 4, "at": None}, {"number": 5, "at": None}]
    assert payloads(Exact, b'{"NUM": 4, "at": "2026-01-01T00:00:00Z"}')[0]["at"] == datetime(2026, 1, 1, tzinfo=UTC)


class Digits(pydantic.BaseModel):
    all: Annotated[Decimal, pydantic.Field(max_digits=4)]
    behind: Annotated[Decimal, pydantic.Field(decimal_places=2)]
    both: Decimal = pydantic.Field(max_digits=6, decimal_places=2)
    many: Annotated[Decimal, pydantic.Field(max_digits=30)]


def test_digits_of_pydantic_choose_columns_that_hold_every_valid_value() -> None:
    assert [each.dataType for each in payload_schema(Digits)] == [
        DecimalType(8, 4),
        DecimalType(38, 2),
        DecimalType(6, 2),
        DecimalType(38, 18),
    ]
    text = b'{"all": 1.5, "behind": 12345678.25, "both": 1234.56, "many": 12345678901234567890}'
    assert payloads(Digits, text) == [Digits.model_validate_json(text).model_dump()]


@pytest.mark.parametrize(("digits", "places"), [(40, None), (2, 4), (None, 39)])
def test_digits_that_no_column_has_are_refused(digits: int | None, places: int | None) -> None:
    kind = Annotated[Decimal, pydantic.Field(max_digits=digits, decimal_places=places)]
    with pytest.raises(ConfigurationError, match=rf"price.* has max_digits={digits} and decimal_places={places}"):
        payload_schema(pydantic.create_model("Priced", price=(kind, ...)))


@dataclass
class Union:
    good: int
    bad: int | str


@dataclass
class Deep:
    parts: list[dict[int, str]]


@dataclass
class Loop:
    inner: Loop | None = None


class Failing(msgspec.Struct):
    share: float = msgspec.field(default_factory=lambda: 1 / 0)


@dataclass
class Wrong:
    number: Annotated[int, DecimalType(3, 1)]


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        (int, "int is no dataclass, attrs class, pydantic model or msgspec struct"),
        (Union, r"Union.bad: int \| str is a union"),
        (Deep, r"Deep.parts\[\]: dict\[int, str\] has keys other than str"),
        (Loop, "Loop.inner: Loop holds itself"),
        (Failing, "Failing.share: the default of float cannot be made: ZeroDivisionError: division by zero"),
        (Wrong, r"Wrong.number: int is annotated with decimal\(3,1\)"),
        (
            msgspec.defstruct("Huge", [("count", int, 2**70)]),
            "Huge.count: int has the default 1180591620717411303424, which a column of bigint cannot hold",
        ),
        (msgspec.defstruct("Text", [("count", int, "x")]), "Text.count: int has the default 'x'"),
        (msgspec.defstruct("Price", [("price", Decimal, Decimal("1e30"))]), r"of decimal\(38,18\) cannot hold"),
        (msgspec.defstruct("Nothing", [("price", Decimal, Decimal("NaN"))]), "Nothing.price: Decimal has the default"),
        (msgspec.defstruct("Texts", [("names", list[str], msgspec.field(default_factory=lambda: [1]))]), "Texts.names"),
        (msgspec.defstruct("Surrogate", [("text", str, "\ud800")]), "which a column of string cannot hold"),
        (msgspec.defstruct("Any_", [("thing", Any)]), "Any_.thing: Any cannot be read from JSON into a column"),
        (
            msgspec.defstruct("Set_", [("e", Enum("E", {"A": 1, "B": "x"}))]),
            "Enums must contain either all str or all int",
        ),
    ],
)
def test_a_class_that_cannot_be_read_names_the_field(type: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        payload_schema(type)


SCRIPT = """
from __future__ import annotations
import msgspec, pydantic, sys
from dataclasses import dataclass
from enum import Enum
from pyspark import cloudpickle
from broker_spark.decode.decoding import PayloadColumn

class Colour(Enum):
    RED = "red"

class Inner(msgspec.Struct):
    colour: Colour

@dataclass
class Order:
    inner: Inner
    count: int = 1

@dataclass
class Point:
    x: int

class Model(pydantic.BaseModel):
    point: Point

@dataclass
class Hooked:
    number: int
    def __post_init__(self): pass

try:
    PayloadColumn(Hooked)
except Exception as error:
    sys.stderr.write(str(error))
sys.stdout.buffer.write(cloudpickle.dumps([PayloadColumn(Order), PayloadColumn(Model)]))
"""


def test_classes_of_a_script_reach_workers_that_cannot_import_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, check=False)
    assert b"cannot import Hooked of __main__" in done.stderr, done.stderr
    order, model = pickle.loads(done.stdout)  # noqa: S301
    good = b'{"inner": {"colour": "red"}}'
    assert order(pyarrow.array([good])).to_pylist() == [
        {"payload": {"inner": {"colour": "red"}, "count": 1}, "reason": None}
    ]
    assert model(pyarrow.array([b'{"point": {"x": 1}}'])).to_pylist() == [
        {"payload": {"point": {"x": 1}}, "reason": None}
    ]


def test_the_cases_are_distinct() -> None:
    assert [value for value, count in Counter(value for value, _ in [*HOSTILE, *UNHELD]).items() if count > 1] == []
