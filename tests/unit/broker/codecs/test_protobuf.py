"""`Protobuf`: messages of a class that protoc generated."""

from __future__ import annotations

import pytest

from broker.codecs import Protobuf
from broker.errors import ConfigurationError, DecodeError, InvalidMessage
from tests.unit.broker.codecs.messages import Node, Order


def test_payloads_round_trip() -> None:
    codec = Protobuf(Order)
    order = Order(id=7, lines=[{"name": "tea", "count": 2}], labels={3: 1})
    assert codec.decode(codec.encode(order)) == order
    assert codec.decode(b"") == Order()


@pytest.mark.parametrize("data", [b"\x08", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x2a\x02\x0a\xff"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"Protobuf\(Order\) cannot decode the payload: "):
        Protobuf(Order).decode(data)


def test_a_tombstone_is_refused() -> None:
    with pytest.raises(DecodeError, match="tombstone"):
        Protobuf(Order).decode(None)


def test_another_payload_is_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"Protobuf\(Order\) cannot encode a payload of type Node"):
        Protobuf(Order).encode(Node())


@pytest.mark.parametrize("kind", [int, "Order", Order()])
def test_another_class_is_refused(kind: object) -> None:
    with pytest.raises(ConfigurationError, match="Protobuf does not support"):
        Protobuf(kind)  # pyright: ignore[reportArgumentType]


def test_equal_codecs_are_one() -> None:
    assert {Protobuf(Order), Protobuf(Order)} == {Protobuf(Order)}
    assert Protobuf(Order) != Protobuf(Node)
