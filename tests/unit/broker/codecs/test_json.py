"""Codecs: values round-trip, and undecodable bytes are a DecodeError with the reason."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple, TypedDict, assert_type

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from broker.codecs import Bytes, Json, Text
from broker.codecs import json as codecs
from broker.errors import ConfigurationError, DecodeError, InvalidMessage
from broker.protocols import Codec


class Order(msgspec.Struct, tag=True):
    id: int
    note: str = ""


class Refund(msgspec.Struct, tag=True):
    id: int


class Bare(msgspec.Struct):
    id: int


class Other(msgspec.Struct):
    id: int


@dataclass
class Point:
    x: int
    y: float


class Row(TypedDict):
    name: str


class Model(BaseModel):
    id: int
    full_name: str = Field(alias="fullName")


class Second(BaseModel):
    other: int


class Measure(msgspec.Struct):
    value: float | None
    more: Any = None


class MeasureModel(BaseModel):
    value: float | None
    more: Any = None


class Named(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    value: float
    note: str | None = None


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    value: float


ROUND_TRIPS: list[tuple[Any, Any]] = [
    (Json(Order), Order(1, "x")),
    (Json(Order | Refund), Refund(2)),
    (Json(list[Order]), [Order(1)]),
    (Json(Point), Point(1, 2.5)),
    (Json(Row), {"name": "n"}),
    (Json(Model), Model(id=1, fullName="Ann")),
    (Json(list[Model]), [Model(id=1, fullName="Ann")]),
    (Json(Model | Second), Second(other=3)),
    (Json(Model | None), None),
    (Json(Order | None), None),
    (Json(), {"any": [1, None, "x"]}),
    (Json(), [2**64 - 1, -(2**63), 1e308, -0.0, 5e-324, 1e22, "\u2028\x00"]),
    (Json(Measure), Measure(None, {"null": ["null", None]})),
    (Json(MeasureModel), MeasureModel(value=None, more={"null": ["null", None, 1e22]})),
    (Json(dict[int, str]), {1: "a", -1: "b"}),
    (Json(Named), Named(value=float("inf"), note=None)),
    (Json(Order, validate=True), Order(1, "x")),
    (Json(Model, validate=True), Model(id=1, fullName="Ann")),
    (Json(Order | None, validate=True), None),
    (Text(), "grüß\x00"),
    (Bytes(), b"\x00\xff"),
    (Bytes(), b""),
    (Text(), ""),
]


@pytest.mark.parametrize(("codec", "payload"), ROUND_TRIPS, ids=repr)
def test_values_round_trip(codec: Codec[Any], payload: Any):
    assert codec.decode(codec.encode(payload)) == payload


@given(st.text())
def test_text_round_trips(text: str):
    assert Text().decode(Text().encode(text)) == text


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


@given(JSON_VALUES)
def test_every_json_value_is_written_and_read(value: Any):
    assert Json().decode(Json().encode([value])) == [value]
    model = MeasureModel(value=None, more=value)
    assert Json(MeasureModel).decode(Json(MeasureModel).encode(model)) == model


def test_raw_json_is_written_as_it_stands():
    raw = msgspec.Raw(b'{"a": [1.50, "\\u00e9"], "b": null}')
    assert Json(msgspec.Raw).encode(raw) == bytes(raw)
    with pytest.raises(InvalidMessage, match="'a' is given twice"):
        Json(msgspec.Raw).encode(msgspec.Raw(b'{"a": 1, "a": 1}'))


@pytest.mark.parametrize(
    ("codec", "data", "reason"),
    [
        (Text(), b"\xff", "invalid start byte"),
        (Json(Order), b"{", "truncated"),
        (Json(Order), b"", "truncated"),
        (Json(Order), b'{"type": "Order", "id": "x"}', r"Expected `int`, got `str` - at `\$.id`"),
        (Json(Order), b"\xff", "malformed"),
        (Json(Model), b'{"id": "x", "fullName": "n"}', "valid integer"),
        (Json(Model), b"\xff", "Invalid JSON"),
        (Json(), b"[" * 100_000, "recursion"),
    ],
    ids=reprlib.repr,
)
def test_a_decode_error_has_the_reason(codec: Codec[Any], data: bytes, reason: str):
    with pytest.raises(DecodeError, match=reason) as caught:
        codec.decode(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("codec", [Bytes(), Text(), Json(int), Json(Model)], ids=repr)
def test_a_tombstone_is_refused_if_the_type_excludes_none(codec: Codec[Any]):
    with pytest.raises(DecodeError, match="cannot decode a tombstone"):
        codec.decode(None)


def test_a_tombstone_is_none_if_the_type_allows_it():
    codec = Json(int | None)
    assert codec.encode(None) is None
    assert codec.decode(None) is None
    assert codec.decode(b"null") is None


@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        (Bytes(), "text"),
        (Text(), b"bytes"),
        (Text(), "\ud800"),
        (Json(int), object),
        (Json(Model), 5),
        (Json(), float),
    ],
    ids=reprlib.repr,
)
def test_an_unencodable_payload_is_an_invalid_message(codec: Codec[Any], payload: Any):
    with pytest.raises(InvalidMessage, match="cannot encode a payload of type"):
        codec.encode(payload)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "nan is no JSON number"),
        (float("inf"), "inf is no JSON number"),
        (float("-inf"), "-inf is no JSON number"),
        (2**64, "beyond 64 bits"),
        (-(2**63) - 1, "beyond 64 bits"),
        (10**5000, "digits|range"),
        ("\ud800", "surrogates"),
        ({1: "a", "1": "b"}, "'1' is given twice"),
        (nested(5000), "depth|recursion"),
    ],
    ids=["nan", "inf", "-inf", "2**64", "-2**63-1", "5001 digits", "surrogate", "names", "depth"],
)
@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        (Json(), lambda value: value),
        (Json(), lambda value: {"null": None, "deep": [value, None]}),
        (Json(Measure), lambda value: Measure(value)),
        (Json(Measure), lambda value: Measure(None, (value, None))),
        (Json(MeasureModel), lambda value: MeasureModel.model_construct(value=1.0, more=value)),
        (Json(list[MeasureModel]), lambda value: [MeasureModel.model_construct(value=None, more={"a": value})]),
    ],
    ids=["any", "any nested", "struct", "struct nested", "model", "model nested"],
)
def test_what_json_cannot_carry_is_refused_and_not_written_as_something_else(codec, payload, value, says):
    with pytest.raises(InvalidMessage, match=says):
        codec.encode(payload(value))


@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        (Json(MeasureModel), MeasureModel(value=float("nan"))),
        (Json(Constants), Constants(value=float("inf"))),
        (Json(MeasureModel), MeasureModel(value=1.0, more=nested(210))),
    ],
    ids=["null", "Infinity", "deeper than pydantic reads"],
)
def test_what_pydantic_writes_and_cannot_read_is_refused(codec, payload):
    with pytest.raises(InvalidMessage, match="cannot encode"):
        codec.encode(payload)


class Alike(msgspec.Struct):
    """Equal to all others."""

    more: Any

    def __eq__(self, other: object) -> bool:
        return True


@dataclass
class Partly:
    name: str
    more: Any = field(compare=False)


class AlikeTuple(NamedTuple):
    more: Any

    def __eq__(self, other: object) -> bool:
        return True


class Typed(msgspec.Struct):
    number: int
    rows: dict[str, int]
    next: Typed | None = None


HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30])
    | st.sampled_from([0.0, -0.0, 1e22, 2.0**64, float("nan"), float("inf"), float("-inf")])
    | st.sampled_from(["", "null", "1", "NaN", "\ud800", "\u2028"]),
    lambda values: (
        st.lists(values, max_size=3)
        | st.tuples(values)
        | st.dictionaries(st.sampled_from(["1", "2", "null", 1, 2, 3]), values, max_size=4)
    ),
    max_leaves=8,
)


def is_carried(value: Any) -> bool:
    """Whether every reader of JSON gets this value."""
    if isinstance(value, dict):
        return len({str(name) for name in value}) == len(value) and all(map(is_carried, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_carried, value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return isfinite(value) if isinstance(value, float) else value != "\ud800"


@pytest.mark.parametrize(
    ("type", "payload"),
    [
        (Any, lambda value: value),
        (list[Any], lambda value: [value, None]),
        (dict[str, Any], lambda value: {"null": value}),
        (Measure, lambda value: Measure(value)),
        (Measure, lambda value: Measure(1.5, value)),
        (Typed, lambda value: Typed(1, {}, Typed(value, {}))),
        (Typed, lambda value: Typed(1, value)),
        (Typed, lambda value: Typed(1, {"a": value})),
        (Typed, lambda value: Typed(1, {}, value)),
        (Alike, Alike),
        (list[Alike], lambda value: [Alike(value)]),
        (Partly, lambda value: Partly("x", value)),
        (AlikeTuple, AlikeTuple),
    ],
)
@given(value=HOSTILE)
def test_what_is_refused_does_not_depend_on_the_type(type: Any, payload: Callable[[Any], Any], value: Any):
    written = payload(value)
    if written is None:
        return
    if is_carried(value):
        assert Json(type).encode(written) == msgspec.json.encode(written)
    else:
        with pytest.raises(InvalidMessage):
            Json(type).encode(written)


@pytest.mark.parametrize("raw", [b'{"a":1,"a":1}', b"18446744073709551616", b"{", b"\xff"])
def test_raw_json_is_examined(raw: bytes):
    class Holder(msgspec.Struct):
        raw: msgspec.Raw

    payloads: list[Any] = [Holder(msgspec.Raw(raw)), [Holder(msgspec.Raw(raw))], {"raw": msgspec.Raw(raw)}]
    for payload in payloads:
        for codec in (Json(Holder), Json(list[Holder]), Json()):
            with pytest.raises(InvalidMessage):
                codec.encode(payload)


@pytest.mark.parametrize(
    ("type", "payload"),
    [
        (int, 5),
        (Any, {"a": [1, None, 2.5]}),
        (Order | Refund, Refund(2)),
        (list[Order], [Order(1)]),
        (Measure, Measure(None, {"null": None})),
        (Row, {"name": "n"}),
        (Typed, Typed(1, {"a": 2}, Typed(2, {}))),
    ],
)
def test_what_reads_back_as_it_was_is_not_examined_further(type: Any, payload: Any, monkeypatch: pytest.MonkeyPatch):
    def examine(*arguments: object) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(codecs, "_refuse_unreadable", examine)
    for validate in (False, True):
        assert Json(type, validate=validate).encode(payload) == msgspec.json.encode(payload)


WRONG = [
    (Order, {"foo": 1}, "`id`"),
    (Order, "text", "Expected `object`"),
    (Model, Model.model_construct(id="x", full_name="Ann"), "id"),
    (Point, Point("x", 2.0), "Expected `int`"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.parametrize(("type", "payload", "says"), WRONG, ids=repr)
def test_validate_refuses_a_payload_that_is_not_of_the_type(type, payload, says):
    with pytest.raises(InvalidMessage, match=says):
        Json(type, validate=True).encode(payload)


def test_codecs_that_validate_are_other_codecs():
    assert Json(Order, validate=True) == Json(Order, validate=True)
    assert Json(Order, validate=True) != Json(Order)
    assert len({Json(Order), Json(Order), Json(Order, validate=True)}) == 2
    assert repr(Json(Order, validate=True)) == "Json(Order, validate=True)"


def test_bytes_like_payloads_are_copied():
    payload: Any = bytearray(b"abc")
    written = Bytes().encode(payload)
    payload[0] = 0
    assert written == b"abc"


def test_models_are_written_by_alias():
    assert Json(Model).encode(Model(id=1, fullName="Ann")) == b'{"id":1,"fullName":"Ann"}'


def test_an_ambiguous_union_is_refused_at_once():
    with pytest.raises(ConfigurationError, match="Tag the Structs"):
        Json(Bare | Other)


def test_codecs_are_typed():
    assert_type(Json(Order), Json[Order])
    assert_type(Json(Order, validate=True), Json[Order])
    assert_type(Json(Order | Refund).decode(b'{"type":"Refund","id":1}'), Order | Refund)
    assert_type(Json(list[int]).decode(b"[1]"), list[int])
    assert_type(Json(), Json[Any])
    codec: Codec[Order | None] = Json(Order | None)
    assert isinstance(codec, Codec)
