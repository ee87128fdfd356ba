"""Fields of an OutboundMessage; an invalid value is an InvalidMessage with advice."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from broker.errors import InvalidMessage
from broker.outbound import OutboundMessage, OutboundPayload
from broker.testing import make_message, make_record

NOW = datetime(2030, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("field", "value", "named", "advice"),
    [
        ("data", "text", "data is 'text' of type str", "codec"),
        ("key", "\ud800", r"key '\ud800' cannot be encoded as UTF-8", "surrogate"),
        ("key", 5, "key is 5 of type int", "bytes, str or None"),
        ("id", "\ud800", r"id '\ud800' cannot be encoded as UTF-8", "surrogate"),
        ("id", "", "id is ''", "non-empty str"),
        ("id", 7, "id is 7 of type int", "non-empty str"),
        ("attributes", [("a", "b")], "attributes is [('a', 'b')] of type list", "mapping of str to str"),
        ("attributes", [], "attributes is [] of type list", "mapping of str to str"),
        ("attributes", "", "attributes is '' of type str", "mapping of str to str"),
        ("attributes", {"n": 3}, "attributes['n'] is 3 of type int", "str"),
        ("attributes", {3: "n"}, "attributes[3] is 'n'", "str name"),
        ("attributes", {"\ud800": ""}, "cannot be encoded as UTF-8", "surrogate"),
        ("attributes", {"": "x"}, "has an empty name", "name"),
        ("deliver_at", 5.0, "deliver_at is 5.0 of type float", "timezone-aware datetime"),
        ("deliver_at", "2030-01-31", "deliver_at is '2030-01-31' of type str", "timezone-aware datetime"),
        ("deliver_at", NOW.date(), "of type date", "timezone-aware datetime"),
        ("deliver_at", NOW.replace(tzinfo=None), "deliver_at 2030-01-31T00:00:00 has no timezone", "UTC"),
        ("publish_time", 5.0, "publish_time is 5.0 of type float", "timezone-aware datetime"),
        ("publish_time", NOW.replace(tzinfo=None), "publish_time 2030-01-31T00:00:00 has no timezone", "UTC"),
        ("ttl", "3", "ttl is '3' of type str", "finite number of seconds above 0"),
        ("ttl", math.nan, "ttl is nan", "finite number of seconds above 0"),
        ("ttl", math.inf, "ttl is inf", "finite number of seconds above 0"),
        ("ttl", True, "ttl is True", "finite number of seconds above 0"),
        ("ttl", 0, "ttl is 0", "finite number of seconds above 0"),
        ("partition", 1.0, "partition is 1.0", "int of 0 or more"),
        ("partition", -1, "partition is -1", "int of 0 or more"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_advice(field: str, value: Any, named: str, advice: str) -> None:
    fields: dict[str, Any] = {"data": b"", field: value}
    with pytest.raises(InvalidMessage) as raised:
        OutboundMessage(**fields)
    assert named in raised.value.message
    assert advice in raised.value.advice
    str(raised.value).encode()


@pytest.mark.parametrize("given", [b"k\xff", bytearray(b"k\xff"), memoryview(b"k\xff")], ids=lambda g: type(g).__name__)
def test_body_and_key_accept_bytes_like_objects_and_copy_them(given: Any) -> None:
    message = OutboundMessage(given, given)
    assert (type(message.data), type(message.key)) == (bytes, bytes)
    if isinstance(given, bytearray):
        given[:] = b"changed"
    assert message.data == message.key == b"k\xff"


def test_every_field_accepts_its_documented_values() -> None:
    message = OutboundMessage(None, "ключ", MappingProxyType({"ä": "ö"}), "é", NOW, 10**400, 0, NOW)
    assert message.key == "ключ".encode()
    assert dict(message.attributes) == {"ä": "ö"}
    assert (message.id, message.deliver_at, message.partition, message.publish_time) == ("é", NOW, 0, NOW)
    assert not OutboundMessage(b"", attributes={}).attributes


FIELDS: dict[str, Any] = {
    "data": b"body",
    "key": b"key",
    "attributes": {"a": "b"},
    "id": "1",
    "deliver_at": NOW,
    "ttl": 60.0,
    "partition": 1,
    "publish_time": NOW,
    "native": object(),
}


def fields_of(message: OutboundMessage) -> dict[str, Any]:
    return {name: getattr(message, name) for name in OutboundMessage.__slots__ if name != "plain"}


@pytest.mark.parametrize("name", FIELDS)
def test_replace_changes_one_field_and_keeps_the_others(name: str) -> None:
    original = OutboundMessage(**FIELDS)
    assert fields_of(original.replace()) == FIELDS
    removed: Any = original.replace(**{name: None})
    assert fields_of(removed) == FIELDS | {name: {} if name == "attributes" else None}
    assert fields_of(removed.replace(**{name: FIELDS[name]})) == FIELDS


def test_replace_validates() -> None:
    with pytest.raises(InvalidMessage, match="id is ''"):
        OutboundMessage(b"").replace(id="")
    assert OutboundMessage(b"", id="1").replace(id=None).plain


@pytest.mark.parametrize(("field", "value"), [("key", 5), ("attributes", {"n": 3}), ("id", ""), ("ttl", 0)])
def test_an_outbound_payload_validates_its_fields_when_it_is_created(field: str, value: Any) -> None:
    with pytest.raises(InvalidMessage, match=field):
        OutboundPayload({"n": 1}, **{field: value})


def test_an_outbound_message_of_another_type_names_the_way() -> None:
    with pytest.raises(InvalidMessage) as raised:
        OutboundMessage({"n": 1})  # type: ignore[arg-type]
    assert "OutboundPayload" in raised.value.advice


def test_a_large_wrong_value_does_not_flood_the_error() -> None:
    with pytest.raises(InvalidMessage) as raised:
        OutboundMessage("x" * 1_000_000)  # type: ignore[arg-type]
    assert len(raised.value.message) < 200


@pytest.mark.parametrize("given", [None, b"body", memoryview(b"body"), {"data": b"body"}])
def test_only_received_messages_can_be_forwarded(given: Any) -> None:
    with pytest.raises(InvalidMessage) as raised:
        OutboundMessage.from_message(given)
    assert raised.value.message.startswith(f"message is {given!r} of type {type(given).__name__}")
    assert raised.value.advice == "It takes a received message or record"


@pytest.mark.parametrize(
    ("given", "attributes", "copied"),
    [
        (None, {}, None),
        ("order-1", {}, "order-1"),
        ("order-1-r0123456789abcdef", {}, None),
        ("order-1-0", {"dead-letter-topic": "orders"}, None),
        ("order-1-0", {"retry-letter-topic": "orders"}, None),
    ],
    ids=["made", "given", "of a redrive", "of a dead letter", "of a retry letter"],
)
def test_a_copy_has_only_an_id_that_a_publisher_gave(
    given: str | None, attributes: dict[str, str], copied: str | None
) -> None:
    sent = OutboundMessage(b"x", attributes=attributes, id=given)
    assert OutboundMessage.from_message(make_message(sent)).id == copied
    assert OutboundMessage.from_message(make_record(sent)).id == copied


def test_a_fake_of_a_message_is_copied_with_its_id() -> None:
    seen = SimpleNamespace(data=b"x", key=None, attributes={}, id="1", publish_time=None, native=None)
    assert OutboundMessage.from_message(cast("Any", seen)).id == "1"
