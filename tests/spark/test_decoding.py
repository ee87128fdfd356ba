"""JSON by classes: which values decode, and why others do not. On plain frames, without a broker."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

import msgspec
import pydantic
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DecimalType, FloatType, IntegerType

from broker.errors import ConfigurationError
from broker_spark.decode.decoding import decode, payload_schema
from tests.spark.support import plan_of

pytestmark = pytest.mark.usefixtures("compiled")


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


@dataclass
class Priced:
    price: Decimal


class Model(pydantic.BaseModel):
    number: Annotated[Decimal, pydantic.Field(max_digits=6, decimal_places=2)]
    other: str = pydantic.Field(alias="other-name")


class Struct(msgspec.Struct, rename="camel"):
    model: Model
    long_name: tuple[int, ...] = ()


BASE: dict[str, Any] = {"text": "x", "number": 1, "colour": "red"}


def test_the_columns_of_a_class() -> None:
    assert payload_schema(Everything).simpleString() == (
        "struct<text:string,number:bigint,colour:string,share:double,price:decimal(38,18),moment:timestamp,day:date,"
        "part:struct<name:string,count:bigint>,names:array<string>,parts:map<string,struct<name:string,count:bigint>>,"
        "uuid:string,body:binary,numbers:array<bigint>,size:bigint,small:int,shares:array<float>>"
    )
    assert payload_schema(Struct)["model"].dataType == payload_schema(Model)
    assert payload_schema(Model)["number"].dataType == DecimalType(6, 2)


@pytest.mark.deep
def test_values_that_decode(spark: SparkSession) -> None:
    full = {
        "share": 2, "price": "1.25", "moment": "2026-01-01T00:00:00Z", "day": "2026-02-03", "part": {"name": "a"},
        "names": ["q"], "parts": {"k": {"name": "r", "count": 3}}, "uuid": "12345678-1234-1234-1234-123456789abc",
        "body": "YWI=", "numbers": [1, 2], "size": 2, "small": 7, "shares": [1, -2.5], "unknown": {"a": 1},
    }  # fmt: skip
    rows = [json.dumps({**BASE, **more}) for more in ({}, full)]
    decoded = decode(
        spark.createDataFrame([(each, n) for n, each in enumerate(rows)], "value string, n int"), Everything
    )
    assert decoded.dead.count() == 0
    assert decoded.rows.columns == ["n", "payload"]
    assert decoded.rows.schema["payload"].dataType.simpleString() == payload_schema(Everything).simpleString()
    one, two = (row.payload.asDict(recursive=True) for row in decoded.rows.orderBy("n").collect())
    assert (one["share"], one["names"], one["part"]) == (1.5, [], None)
    assert two["moment"].astimezone(UTC) == datetime(2026, 1, 1, tzinfo=UTC)
    assert (two["price"], two["day"], two["body"]) == (Decimal("1.25"), date(2026, 2, 3), b"ab")
    assert two["parts"] == {"k": {"name": "r", "count": 3}}
    assert two["shares"] == [1, -2.5]
    assert (two["numbers"], two["size"], two["small"], two["part"]) == ([1, 2], 2, 7, {"name": "a", "count": None})


def test_names_are_those_of_python_and_of_json(spark: SparkSession) -> None:
    frame = spark.createDataFrame([('{"model": {"number": 1.5, "other-name": "x"}, "longName": [1]}',)], "value string")
    (row,) = decode(frame, Struct).rows.select("payload.*").collect()
    assert row.asDict(recursive=True) == {"model": {"number": Decimal("1.50"), "other": "x"}, "long_name": [1]}


NUMBERS = [
    "12345678901234567890.123456789012345678", "0.12345678901234567", "1234567890123456789", "1e3", "1E-7", "-1.0E-18",
    "0.0000001", "1.25e+2", "123456789012345E-15", "-0", "12.50000000000000000000", "12345e3", "-1.5E-3",
    "0e0",
]  # fmt: skip
ROUNDED = [
    # More digits than a decimal has, or a double of those with an exponent; and behind the scale, and before it.
    "0.1234567890123456789012345678901234567890", "1.000000000000000000000000000000000000000001",
    "1234567891234567891e-15", "9999999999999999e0", "1.0000000000000000000001e2", "1e-19", "1.5e-18", "1e20",
    "0.1234567890123456785", "123456789012345678901", "12345678901234567890123456789012.000001",
    # A double would be 0.
    "1e-400", "-0.01E-350",
]  # fmt: skip


def test_a_decimal_is_the_number_that_was_written_or_none(spark: SparkSession) -> None:
    texts = [*NUMBERS, *ROUNDED]
    both = [*((f'{{"price": {each}}}', each) for each in texts), *((f'{{"price": "{each}"}}', each) for each in texts)]
    frame = spark.createDataFrame(both, "value string, text string")
    decoded = decode(frame, Priced)
    rows = decoded.rows.collect()
    assert [row.payload.price for row in rows] == [Decimal(row.text) for row in rows]
    # As text all digits are there; two of these are in range, and were only too long for what JSON's numbers become.
    texts_only = {"1234567891234567891e-15", "9999999999999999e0"}
    assert sorted(row.text for row in rows) == sorted([*NUMBERS, *NUMBERS, *texts_only])
    assert decoded.dead.where("reason not like '%and decimal(38,18) is due'").count() == 0
    # The output of to_json decodes again.
    again = decode(decoded.rows.select(F.to_json(F.struct("payload.*")).alias("value"), "text"), Priced).rows.collect()
    assert sorted((row.text, row.payload.price) for row in again) == sorted(
        (row.text, row.payload.price) for row in rows
    )


BAD: list[tuple[Any, str]] = [
    ({"text": 5}, "text is 5, and string is due"),
    ({"text": None}, "text is missing or null"),
    ({"number": None}, "number is missing or null"),
    ({"number": "5"}, 'number is "5", and bigint is due'),
    ({"number": 1.5}, "number is 1.5, and bigint is due"),
    ({"number": 10**20}, "number is 100000000000000000000, and bigint is due"),
    ({"small": 2**40}, "small is 1099511627776, and int is due"),
    ({"colour": "green"}, 'colour is "green", and one of "red", "blue" is due'),
    ({"size": 3}, "size is 3, and one of 1, 2 is due"),
    ({"share": "NaN"}, 'share is "NaN", and double is due'),
    (b'{"text": "x", "number": 1, "colour": "red", "share": -1e400}', "share is -Infinity, and double is due"),
    (b'{"text": "x", "number": 1, "colour": "red", "shares": [1, 1e39]}', "shares[] is Infinity, and float is due"),
    ({"part": {"name": 7}}, "part.name is 7, and string is due"),
    ({"part": {}}, "part.name is missing or null"),
    ({"part": 5}, "part is 5, and struct<name:string,count:bigint> is due"),
    ({"part": {"name": "x", "count": "y"}}, 'part.count is "y", and bigint is due'),
    ({"names": [1]}, "names[] is 1, and string is due"),
    ({"names": [None]}, "names[] is missing or null"),
    ({"numbers": [1, "x"]}, 'numbers is [1,"x"], and array<bigint> is due'),
    ({"numbers": [None]}, "numbers[] is missing or null"),
    ({"parts": {"k": {"name": 1}}}, "parts[].name is 1, and string is due"),
    ({"parts": {"k": None}}, "parts[] is missing or null"),
    ({"price": "1.23456789012345678901"}, 'price is "1.23456789012345678901", and decimal(38,18) is due'),
    ({"price": "x"}, 'price is "x", and decimal(38,18) is due'),
    ({"moment": 17}, "moment is 17, and timestamp is due"),
    ({"moment": "2026"}, 'moment is "2026", and timestamp is due'),
    ({"moment": "2026-01-01T99:00:00"}, 'moment is "2026-01-01T99:00:00", and timestamp is due'),
    ({"day": "2026-13-01"}, 'day is "2026-13-01", and date is due'),
    # Spark has these values, but Python, which receives the rows, does not.
    ({"day": "0000-12-31"}, 'day is "0000-12-31", and date is due'),
    ({"moment": "0000-12-31T00:00:00Z"}, 'moment is "0000-12-31T00:00:00Z", and timestamp is due'),
    ({"moment": "9999-12-31T23:00:00-02:00"}, 'moment is "9999-12-31T23:00:00-02:00", and timestamp is due'),
    ({"uuid": "zz"}, 'uuid is "zz", and uuid is due'),
    ({"body": "!!"}, 'body is "!!", and binary is due'),
    ({"body": "aGk"}, 'body is "aGk", and binary is due'),
    ({"body": "a\nb="}, 'body is "a\\nb=", and binary is due'),
    ({"body": "aGl="}, 'body is "aGl=", and binary is due'),
    ({"day": "2026-02-03\n"}, 'day is "2026-02-03\\n", and date is due'),
    ({"moment": "2026-02-03T04:05:06Z\n"}, 'moment is "2026-02-03T04:05:06Z\\n", and timestamp is due'),
    ({"uuid": f"{UUID(int=1)}\n"}, f'uuid is "{UUID(int=1)}\\n", and uuid is due'),
    ({"uuid": "z" * 100}, f'uuid is "{"z" * 59}…, and uuid is due'),
    (None, "The value is null"),
    (b"", "The value is not JSON"),
    (b" ", "The value is not JSON"),
    (b"{", "The value is not JSON"),
    (b'{"number": 1, "number": "x"}', "The value has a name twice, or is not JSON"),
    (b"null", "The value is another JSON than the class has"),
    (b"[]", "The value is another JSON than the class has"),
    (b"5", "The value is another JSON than the class has"),
    (b'{"text": "\xff", "number": 1, "colour": "red"}', "The value is no text in UTF-8"),
    (b'{"text": "x", "number": 1, "colour": "red"} x', "The value is another JSON than the class has"),
    (json.dumps(BASE).encode() * 2, "The value is another JSON than the class has"),
    (json.dumps(BASE).encode() + b"," + json.dumps(BASE).encode(), "The value is another JSON than the class has"),
    # What would end, and what would go on with, that which a reader may put around a value.
    *(
        (json.dumps(BASE).encode() + more, "The value is another JSON than the class has")
        for more in (
            b"]} junk",
            b'],"w":[1',
            b'],"t":{"text":"y"',
            b'],"v":[' + json.dumps(BASE).encode(),
            b"] junk",
            b"}",
            b",",
            b', {"mark": 1}',
        )
    ),
]


@pytest.mark.deep
def test_strings_are_those_of_json(spark: SparkSession) -> None:
    texts = ["", "5", "null", 'a "quoted" one', "\\", "\\u0041", "a\tb\nc\x00d", "{}", "über", "\U0001f600", '"],"t":1']
    values = [json.dumps({**BASE, "text": text, "part": {"name": text}, "names": [text]}) for text in texts]
    # Of several fields with one name the last one counts, also for its type.
    values += ['{"text": 5, "text": "last", "number": 1, "colour": "red", "part": {"name": 5, "name": "last"}}']
    frame = spark.createDataFrame([(value, n) for n, value in enumerate(values)], "value string, n int")
    found = decode(frame, Everything).rows.orderBy("n").collect()
    assert [row.payload.text for row in found] == [row.payload.part.name for row in found] == [*texts, "last"]
    assert [row.payload.names for row in found[:-1]] == [[text] for text in texts]


@pytest.mark.deep
@pytest.mark.parametrize("half", ["rows", "dead"])
def test_generated_methods_are_small_enough_to_be_compiled(spark: SparkSession, half: str) -> None:
    frame = spark.createDataFrame([(json.dumps(BASE),)], "value string")
    steps = plan_of(getattr(decode(frame, Everything), half))
    assert [step.split(" ")[0] for step in steps if "AS __made" in step or "Filter" in step] == ["Filter", "Project"]


@pytest.mark.deep
def test_every_row_that_does_not_decode_has_its_reason(spark: SparkSession) -> None:
    values = [json.dumps({**BASE, **bad}).encode() if isinstance(bad, dict) else bad for bad, _ in BAD]
    frame = spark.createDataFrame([(value, n) for n, value in enumerate(values)], "value binary, n int")
    decoded = decode(frame, Everything)
    assert decoded.dead.columns == ["value", "n", "reason"]
    found = {row.n: (row.value and bytes(row.value), row.reason) for row in decoded.dead.collect()}
    assert found == {n: (value, expected) for n, (value, (_, expected)) in enumerate(zip(values, BAD, strict=True))}
    assert decoded.rows.count() == 0


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
def test_a_default_may_be_none_whatever_the_type_says(spark: SparkSession, type: Any) -> None:
    decoded = decode(
        spark.createDataFrame([("{}",), ('{"number": null}',), ('{"number": "x"}',)], "value string"), type
    )
    assert [row.payload.number for row in decoded.rows.collect()] == [None, None]
    assert [row.reason for row in decoded.dead.collect()] == ['number is "x", and bigint is due']


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


class Tagged(msgspec.Struct, tag=True):
    number: int


class Digits(pydantic.BaseModel):
    price: Decimal = pydantic.Field(max_digits=6, decimal_places=2)
    discount: Decimal | None = pydantic.Field(None, max_digits=4, decimal_places=1)


def test_digits_of_a_field_that_is_not_annotated_count_too(spark: SparkSession) -> None:
    types = {each.name: each.dataType for each in payload_schema(Digits)}
    assert types == {"price": DecimalType(6, 2), "discount": DecimalType(4, 1)}
    frame = spark.createDataFrame([('{"price": 1234.5}',), ('{"price": 12345.6}',)], "value string")
    decoded = decode(frame, Digits)
    assert decoded.rows.select("payload.*").collect() == [(Decimal("1234.50"), None)]
    assert [row.reason for row in decoded.dead.collect()] == ["price is 12345.6, and decimal(6,2) is due"]


class Strict(pydantic.BaseModel, extra="forbid"):
    number: int


@dataclass
class Clocked:
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


class Drawn(pydantic.BaseModel):
    id: UUID = pydantic.Field(default_factory=uuid4)


class Failing(msgspec.Struct):
    share: float = msgspec.field(default_factory=lambda: 1 / 0)


@dataclass
class Wrong:
    number: Annotated[int, DecimalType(3, 1)]


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        (int, "int is no dataclass, pydantic model or msgspec struct"),
        (Union, "Union.bad: int | str is a union"),
        (Deep, r"Deep.parts\[\]: dict\[int, str\] has keys other than str"),
        (Loop, "Loop.inner: Loop holds itself"),
        (Tagged, "Tagged: Tagged is tagged"),
        (Strict, "Strict: Strict forbids unknown fields"),
        (Clocked, r"Clocked.at: the default of datetime changes with each call, .* Make it None, and fill it"),
        (Drawn, "Drawn.id: the default of UUID changes with each call"),
        (Failing, "Failing.share: the default of float cannot be made: ZeroDivisionError: division by zero"),
        (Wrong, r"Wrong.number: int is annotated with decimal\(3,1\)"),
        (
            msgspec.defstruct("Huge", [("count", int, 2**70)]),
            "Huge.count: int has the default 1180591620717411303424, which a column of bigint cannot hold",
        ),
        (msgspec.defstruct("Text", [("count", int, "x")]), "Text.count: int has the default 'x'"),
        (msgspec.defstruct("Price", [("price", Decimal, Decimal("1e30"))]), r"of decimal\(38,18\) cannot hold"),
        (msgspec.defstruct("Nothing", [("price", Decimal, Decimal("NaN"))]), "Nothing.price: Decimal has the default"),
        (msgspec.defstruct("Word", [("names", list[str], "ada")]), "Word.names"),
        (msgspec.defstruct("Texts", [("names", list[str], msgspec.field(default_factory=lambda: [1]))]), "Texts.names"),
        (msgspec.defstruct("Any_", [("thing", Any)]), "Any_.thing: Any cannot be read from JSON into a column"),
        (msgspec.defstruct("Set_", [("e", Enum("E", {"A": 1, "B": "x"}))]), "neither all str nor all int"),
    ],
)
def test_a_class_that_cannot_be_read_names_the_field(type: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        payload_schema(type)


def test_conflicting_columns_are_named(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="already has a column 'payload'"):
        decode(spark.createDataFrame([("x", "y")], "value string, payload string"), Part)
    with pytest.raises(ConfigurationError, match="no column 'value' to decode"):
        decode(spark.createDataFrame([("x",)], "v string"), Part)


@pytest.mark.parametrize("column", ["Payload", "__read"])
def test_columns_that_conflict_but_for_their_case_are_named(spark: SparkSession, column: str) -> None:
    with pytest.raises(ConfigurationError, match=f"already has a column '{column}'"):
        decode(spark.createDataFrame([("x", "y")], f"value string, {column} string"), Part)


@dataclass
class Twins:
    name: str
    Name: str


class Aliased(msgspec.Struct):
    first: int = msgspec.field(name="number")
    second: int = msgspec.field(name="Number")


@dataclass
class Nested:
    twins: list[Twins]


@pytest.mark.parametrize(
    ("type", "names"), [(Twins, "'name' and 'Name'"), (Nested, "'name' and 'Name'"), (Aliased, "'number' and 'Number'")]
)
def test_fields_that_are_one_to_spark_are_named(spark: SparkSession, type: Any, names: str) -> None:
    text = json.dumps({"name": "a", "Name": "b", "number": 1, "Number": 2, "twins": [{"name": "a", "Name": "b"}]})
    frame = spark.createDataFrame([(text,)], "value string")
    with pytest.raises(ConfigurationError, match=f"Fields {names} of {type.__name__} have the same name for Spark"):
        decode(frame, type)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        [row] = decode(frame, type).rows.collect()
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    expected = {Twins: ("a", "b"), Aliased: (1, 2), Nested: ([("a", "b")],)}
    assert tuple(row.payload) == expected[type]
