"""What classes declare for `decode`: defaults, names in JSON, digits; and frames with other columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DecimalType

from broker.errors import ConfigurationError
from broker_spark.decode.decoding import decode, payload_schema

AWARE = datetime(2026, 3, 1, 12, tzinfo=UTC)
NAIVE = AWARE.replace(tzinfo=None)
LEAN = {"number": 3, "text": "x", "inner": None}


pytestmark = pytest.mark.usefixtures("compiled")


class Lean(msgspec.Struct, omit_defaults=True, frozen=True):
    number: int = 3
    text: str = "x"
    inner: Part | None = None


@dataclass(frozen=True)
class Part:
    name: str = "part"


@dataclass
class Defaults:
    aware: datetime = AWARE
    naive: datetime = NAIVE
    times: list[datetime] = field(default_factory=lambda: [AWARE])
    naives: list[datetime] = field(default_factory=lambda: [NAIVE])
    lean: Lean = field(default_factory=Lean)
    fuller: Lean = field(default_factory=lambda: Lean(number=4, inner=Part("other")))
    leans: list[Lean] = field(default_factory=lambda: [Lean(), Lean(text="y")])
    by_name: dict[str, Lean] = field(default_factory=lambda: {"k": Lean(number=5)})


@dataclass
class Identified:
    id: UUID


def payloads(spark: SparkSession, type: Any, *texts: str) -> list[dict[str, Any]]:
    """The decoded rows; all of them must decode."""
    decoded = decode(spark.createDataFrame([(each,) for each in texts], "value string"), type)
    assert [row.reason for row in decoded.dead.collect()] == []
    return [row.payload.asDict(recursive=True) for row in decoded.rows.collect()]


def test_uuids_decode_with_and_without_hyphens(spark: SparkSession) -> None:
    name = UUID(int=0xABCDEF << 96)
    texts = [str(name), name.hex, name.hex.upper()]
    assert [each["id"] for each in payloads(spark, Identified, *(f'{{"id": "{text}"}}' for text in texts))] == texts
    (row,) = decode(
        spark.createDataFrame([(f'{{"id": "{name.hex[:8]}-{name.hex[8:]}"}}',)], "value string"), Identified
    ).dead.collect()
    assert row.reason.endswith("and uuid is due")


@pytest.mark.deep
def test_defaults_are_those_of_the_class(spark: SparkSession) -> None:
    missing, null = payloads(spark, Defaults, "{}", '{"lean": null, "aware": null}')
    assert missing == null
    parsed = spark.createDataFrame([(NAIVE.isoformat(), AWARE.isoformat())], "naive string, aware string")
    (times,) = parsed.selectExpr("cast(naive as timestamp) naive", "cast(aware as timestamp) aware").collect()
    assert (missing["aware"], missing["times"]) == (times.aware, [times.aware])
    assert (missing["naive"], missing["naives"]) == (times.naive, [times.naive])
    assert missing["lean"] == LEAN
    assert missing["fuller"] == {"number": 4, "text": "x", "inner": {"name": "other"}}
    assert missing["leans"] == [LEAN, {**LEAN, "text": "y"}]
    assert missing["by_name"] == {"k": {**LEAN, "number": 5}}
    (given,) = payloads(spark, Defaults, '{"lean": {"text": "z"}, "naive": "2026-03-01T12:00:00"}')
    assert given["lean"] == {**LEAN, "text": "z"}
    assert given["naive"] == times.naive


class Inner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    first: str = pydantic.Field(default="none", alias="eins")


class Named(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    number: int = pydantic.Field(default=1, alias="NUM")
    text: str = pydantic.Field(alias="txt")
    price: Decimal | None = pydantic.Field(default=None, alias="cost")
    inner: Inner | None = pydantic.Field(default=None, alias="inside")
    inners: list[Inner] = []
    by_key: dict[str, Inner] = {}


NAMED = [
    '{"NUM": 2, "txt": "a"}',
    '{"number": 3, "text": "b", "cost": 1.5}',
    '{"number": 3, "NUM": 4, "text": "b", "txt": "c", "price": "2.50"}',
    '{"txt": "a", "inner": {"first": "x"}, "inners": [{"eins": "y"}, {"first": "z"}], "by_key": {"k": {"first": "v"}}}',
    '{"txt": "a", "inside": {"eins": "x"}}',
    '{"txt": "a"}',
]


@pytest.mark.deep
def test_fields_are_read_by_alias_and_name_where_pydantic_accepts_both(spark: SparkSession) -> None:
    assert payloads(spark, Named, *NAMED) == [Named.model_validate_json(each).model_dump() for each in NAMED]
    decoded = decode(spark.createDataFrame([('{"text": 5}',), ('{"NUM": "x", "txt": "a"}',)], "value string"), Named)
    assert sorted(row.reason for row in decoded.dead.collect()) == [
        'NUM is "x", and bigint is due',
        "txt is 5, and string is due",
    ]


class ByName(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(validate_by_alias=False, validate_by_name=True)
    number: int = pydantic.Field(default=1, alias="NUM")


class Crossed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    one: int = pydantic.Field(alias="two")
    two: int = pydantic.Field(alias="one")


@pytest.mark.deep
def test_names_that_pydantic_ignores_are_ignored(spark: SparkSession) -> None:
    assert [each["number"] for each in payloads(spark, ByName, '{"NUM": 2}', '{"number": 2}')] == [1, 2]
    with pytest.raises(ConfigurationError, match=r"Crossed\.two: int is 'one' in JSON, and so is field 'one'"):
        payload_schema(Crossed)


class Digits(pydantic.BaseModel):
    all: Annotated[Decimal, pydantic.Field(max_digits=4)]
    behind: Annotated[Decimal, pydantic.Field(decimal_places=2)]
    both: Decimal = pydantic.Field(max_digits=6, decimal_places=2)
    many: Annotated[Decimal, pydantic.Field(max_digits=30)]


@pytest.mark.deep
def test_digits_of_pydantic_choose_columns_that_hold_every_valid_value(spark: SparkSession) -> None:
    assert [each.dataType for each in payload_schema(Digits)] == [
        DecimalType(8, 4),
        DecimalType(38, 2),
        DecimalType(6, 2),
        DecimalType(38, 18),
    ]
    text = '{"all": 1.5, "behind": 12345678.25, "both": 1234.56, "many": 12345678901234567890}'
    assert payloads(spark, Digits, text) == [Digits.model_validate_json(text).model_dump()]


@pytest.mark.parametrize(("digits", "places"), [(40, None), (2, 4), (None, 39)])
def test_digits_that_no_column_has_are_refused(digits: int | None, places: int | None) -> None:
    kind = Annotated[Decimal, pydantic.Field(max_digits=digits, decimal_places=places)]
    with pytest.raises(ConfigurationError, match=rf"price.* has max_digits={digits} and decimal_places={places}"):
        payload_schema(pydantic.create_model("Priced", price=(kind, ...)))


@dataclass
class Bought:
    price: Decimal
    card: str


def test_a_number_is_exact_whatever_text_is_beside_it(spark: SparkSession) -> None:
    found = payloads(
        spark,
        Bought,
        '{"price": 1e2, "card": "1234567890123456e"}',
        '{"card": "4111111111111111E5", "price": 1.5e0}',
        '{"card": "no. 12345678901234567890123456789012345678901234", "price": 2e-3}',
        '{"card": "1e-400", "price": 0e0}',
    )
    assert [each["price"] for each in found] == [100, Decimal("1.5"), Decimal("0.002"), 0]


@dataclass
class Number:
    n: int


def test_a_frame_may_have_any_names(spark: SparkSession) -> None:
    frame = spark.createDataFrame([('{"n": 1}', 2, 3), ("?", 4, 5)], ["my.value", "a.b", "`odd`"])
    decoded = decode(frame, Number, column="my.value")
    assert [tuple(row) for row in decoded.rows.collect()] == [(2, 3, (1,))]
    assert [tuple(row) for row in decoded.dead.collect()] == [("?", 4, 5, "The value is not JSON")]


def test_a_frame_that_cannot_be_decoded_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="The frame has two columns 'a'"):
        decode(spark.createDataFrame([("", 1, 2)], ["value", "a", "a"]), Number)
    with pytest.raises(ConfigurationError, match="Column 'value' is bigint, expected binary or string"):
        decode(spark.createDataFrame([(1,)], ["value"]), Number)


@dataclass
class Surrogate:
    text: str = "\ud800"


def test_a_default_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"has the default .* which a column of string cannot hold"):
        payload_schema(Surrogate)
