"""Codecs: values round-trip, and undecodable bytes are a DecodeError with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from broker.codecs import Bytes, Json, Text
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
    ids=repr,
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
    ids=repr,
)
def test_an_unencodable_payload_is_an_invalid_message(codec: Codec[Any], payload: Any):
    with pytest.raises(InvalidMessage, match="cannot encode a payload of type"):
        codec.encode(payload)


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
    assert_type(Json(Order | Refund).decode(b'{"type":"Refund","id":1}'), Order | Refund)
    assert_type(Json(list[int]).decode(b"[1]"), list[int])
    assert_type(Json(), Json[Any])
    codec: Codec[Order | None] = Json(Order | None)
    assert isinstance(codec, Codec)
