"""`Int64` and `MsgPack` follow the conventions of `broker.codecs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import Codec, ConfigurationError, DecodeError, InvalidMessage
from broker_streams import Int64, MsgPack

LEAST, MOST = -(1 << 63), (1 << 63) - 1


@dataclass
class Row:
    count: int
    names: list[str]


class Tagged(msgspec.Struct, tag=True):
    count: int


class OtherTagged(msgspec.Struct, tag=True):
    name: str


class Model(pydantic.BaseModel):
    count: int


def test_both_are_codecs():
    assert isinstance(Int64(), Codec) and isinstance(MsgPack(int), Codec)


class TestInt64:
    @given(st.integers(LEAST, MOST))
    def test_it_is_decimal_text(self, number: int):
        data = Int64().encode(number)
        assert data == str(number).encode()
        assert Int64().decode(data) == number

    @pytest.mark.parametrize(
        ("data", "number"),
        [(b"0", 0), (b"-5", -5), (b"+5", 5), (b"007", 7), (b"-0", 0), (str(LEAST).encode(), LEAST), (b"0" * 99, 0)],
    )
    def test_it_reads_what_goka_reads(self, data: bytes, number: int):
        assert Int64().decode(data) == number

    @pytest.mark.parametrize(
        "data",
        [
            *(b"", b"-", b"+-1", b" 1", b"1 ", b"1\n", b"1_000", b"1.0", b"0x1", b"1e3", b"\xd9\xa1", "１".encode()),
            *(str(LEAST - 1).encode(), str(MOST + 1).encode(), b"9" * 10_000),
        ],
    )
    def test_it_refuses_other_bytes(self, data: bytes):
        with pytest.raises(DecodeError, match=r"^Int64\(\) cannot decode b'") as raised:
            Int64().decode(data)
        assert len(str(raised.value)) < 600

    def test_a_tombstone_is_no_number(self):
        with pytest.raises(DecodeError, match="tombstone"):
            Int64().decode(None)

    @pytest.mark.parametrize("payload", [MOST + 1, LEAST - 1, 1.0, "1", True, None, b"1"])
    def test_it_refuses_other_values(self, payload: Any):
        with pytest.raises(InvalidMessage, match=r"^Int64\(\) cannot encode a payload of type "):
            Int64().encode(payload)

    def test_all_are_equal(self):
        assert Int64() == Int64() and len({Int64(), Int64()}) == 1
        assert Int64() != MsgPack(int)
        assert repr(Int64()) == "Int64()"


class TestMsgPack:
    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (int, 5),
            (Row, Row(1, ["a", "ä"])),
            (Tagged | OtherTagged, OtherTagged("x")),
            (dict[str, list[float]], {"a": [1.5]}),
            (bytes, b"\0\xff"),
            (Any, {"a": [1, None, "b", b"c"]}),
            (int | None, 7),
        ],
    )
    def test_values_come_back(self, kind: Any, value: Any):
        codec: MsgPack[Any] = MsgPack(kind)
        data = codec.encode(value)
        assert isinstance(data, bytes)
        assert codec.decode(data) == value

    def test_a_number_is_one_byte(self):
        assert MsgPack(int).encode(5) == b"\x05"

    @pytest.mark.parametrize("codec", [MsgPack(int | None), MsgPack(), MsgPack(None)])
    def test_none_is_a_tombstone_where_the_type_has_it(self, codec: Any):
        assert codec.encode(None) is None
        assert codec.decode(None) is None
        assert codec.decode(b"\xc0") is None

    def test_elsewhere_a_tombstone_is_refused(self):
        with pytest.raises(DecodeError, match=r"^MsgPack\(int\) cannot decode a tombstone"):
            MsgPack(int).decode(None)

    @pytest.mark.parametrize("data", [b"", b"\xa1a", b"\x81", b"\x05\x05", b"\xc1", b"\xc0"])
    def test_other_bytes_are_refused(self, data: bytes):
        with pytest.raises(DecodeError, match=r"^MsgPack\(int\) cannot decode the payload: ") as raised:
            MsgPack(int).decode(data)
        assert raised.value.native is not None

    def test_text_that_is_not_utf8_is_refused(self):
        with pytest.raises(DecodeError):
            MsgPack(str).decode(b"\xa1\xff")

    def test_deep_nesting_is_refused(self):
        with pytest.raises(DecodeError):
            MsgPack().decode(b"\x91" * 100_000)

    @pytest.mark.parametrize("payload", [1 << 64, object(), "\ud800", {1: object()}])
    def test_what_has_no_form_is_refused(self, payload: Any):
        with pytest.raises(InvalidMessage, match=r"^MsgPack\(.*\) cannot encode a payload of type ") as raised:
            MsgPack().encode(payload)
        assert raised.value.native is not None

    @pytest.mark.parametrize("kind", [Model, list[Model], Model | None])
    def test_pydantic_is_refused_at_once(self, kind: Any):
        with pytest.raises(ConfigurationError, match="pydantic") as raised:
            MsgPack(kind)
        assert "Json" in raised.value.advice

    def test_a_union_that_cannot_be_told_apart_is_refused_at_once(self):
        with pytest.raises(ConfigurationError, match=r"^MsgPack does not support the type"):
            MsgPack(Row | Tagged)

    def test_equal_types_make_equal_codecs(self):
        assert MsgPack(list[int]) == MsgPack(list[int]) and len({MsgPack(int), MsgPack(int)}) == 1
        assert MsgPack(int) != MsgPack(str)
        assert MsgPack(int) != Int64()
        assert [repr(MsgPack(int)), repr(MsgPack(int | None)), repr(MsgPack(Row))] == [
            *("MsgPack(int)", "MsgPack(int | None)", "MsgPack(Row)")
        ]
