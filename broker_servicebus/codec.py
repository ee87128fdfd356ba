"""Messages as Service Bus messages and back. Pure functions.

| application property | content |
|---|---|
| `anybroker-key` | the key, as bytes |
| `anybroker-time` | publish time by the producer's clock, microseconds since 1970 |
| `anybroker-null` | the message is a tombstone |
| `anybroker-id` | an id that is too long for a message id; and a given id that looks like a made one |

Attributes are application properties. Every message has a session id, which entities with sessions require: the key's
text if possible, else a digest of the key, else the message id. Any message of a foreign client can be read: properties
of other types become text, an AMQP value or sequence becomes JSON, and both are unchanged in `native`. A message that
is forwarded unchanged has them again, in the types that the client tells apart: it reads text as bytes, and a timestamp
as a number.

A message without an id gets a UUID. If a message id is 32 hexadecimal digits, beside `anybroker-time` and without
`anybroker-id`, the SDK made it, in any version; a publisher, or a foreign program, gave every other id.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage

from broker import OutboundMessage
from broker.driver import DEAD_LETTER_PREFIX, Place, shown_attributes

__all__ = ["VIEW", "Raw", "body_of", "encode", "size_of"]

KEY: Final = "anybroker-key"
TIME: Final = "anybroker-time"
NULL: Final = "anybroker-null"
ID: Final = "anybroker-id"
LONGEST_ID: Final = 128
_MADE_ID: Final = re.compile("[0-9a-f]{32}")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LONGEST_TTL: Final = 4_294_967
"""Seconds; the milliseconds in AMQP's header have 32 bits."""
_REASON: Final = b"DeadLetterReason"
_DESCRIPTION: Final = b"DeadLetterErrorDescription"


class Raw(msgspec.Struct, gc=False, eq=False):
    """A received message and the state of its lock.

    :ivar until: monotonic time at which its lock ends.
    :ivar link: the receiver that delivered it.
    """

    native: ServiceBusReceivedMessage
    until: float
    link: Any = None
    dead_of: str | None = None
    """The topic whose dead letter this is."""
    attributes: Mapping[str, str] | None = None
    settled: bool = False
    """Whether the broker has settled it."""


def encode(message: OutboundMessage) -> tuple[ServiceBusMessage, str]:
    """The native message and its id."""
    identity = message.id or uuid4().hex
    time = message.publish_time or datetime.now(UTC)
    properties: dict[Any, Any] = dict(message.attributes)
    properties[TIME] = str((time - _EPOCH) // _MICROSECOND)
    message_id = identity
    if len(identity) > LONGEST_ID:
        message_id = hashlib.blake2s(identity.encode()).hexdigest()
        properties[ID] = identity
    elif message.id is not None and _MADE_ID.fullmatch(identity):
        properties[ID] = identity
    key = message.key
    if key is not None:
        properties[KEY] = {"TYPE": "BINARY", "VALUE": key}
    if message.data is None:
        properties[NULL] = True
    native = message.native
    if isinstance(native, ServiceBusReceivedMessage):
        for name, value in (native.application_properties or {}).items():
            text = _text(name)
            if message.attributes.get(text) == _text(value):
                properties[text] = _typed(value)
    sent = ServiceBusMessage(
        message.data or b"",
        application_properties=properties,
        message_id=message_id,
        session_id=_session(key, message_id),
    )
    if message.ttl is not None:
        # The client would truncate it to whole seconds.
        seconds = math.ceil(message.ttl)
        if seconds > _LONGEST_TTL:
            raise ValueError(f"ttl is {message.ttl:g} s; the maximum is {_LONGEST_TTL} s (49 days)")
        sent.time_to_live = timedelta(seconds=seconds)
        header = sent.raw_amqp_message.header
        assert header is not None  # set by `time_to_live`
        header.time_to_live = max(1, round(message.ttl * 1000))
    if isinstance(native, ServiceBusReceivedMessage):
        sent.subject, sent.correlation_id = native.subject, native.correlation_id
        sent.content_type, sent.reply_to, sent.to = native.content_type, native.reply_to, native.to
        if native.body_type.value != "data" and native.body is not None and message.data == body_of(native):
            sent = _with_amqp_body(sent, native)
    return sent, identity


def _with_amqp_body(sent: ServiceBusMessage, native: ServiceBusReceivedMessage) -> ServiceBusMessage:
    """The message with the AMQP value or sequence of a received one as its body, if the client can write it."""
    body: Any = native.body
    raw: Any = sent.raw_amqp_message
    if native.body_type.value == "sequence":
        other = AmqpAnnotatedMessage(sequence_body=[[_typed(value) for value in section] for section in body])
    elif not body or (isinstance(body, int) and not -(2**31) <= body < 2**31):
        # As a whole body the client writes no value that is false, and no integer of more than 32 bits.
        return sent
    else:
        other = AmqpAnnotatedMessage(value_body=_untyped(body))
    other.header, other.properties, other.annotations = raw.header, raw.properties, raw.annotations
    other.application_properties = raw.application_properties
    # As the client makes one of an AmqpAnnotatedMessage.
    return ServiceBusMessage(None, message=None, raw_amqp_message=other)


def _untyped(body: Any) -> Any:
    """A whole body, whose own type the client takes from Python."""
    match body:
        case list():
            return [_typed(each) for each in body]  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {_untyped(name): _typed(each) for name, each in body.items()}  # pyright: ignore[reportUnknownVariableType]
        case bytes():
            typed = _typed(body)
            return typed["VALUE"]
        case _:
            return body


def _typed(value: Any) -> Any:
    """A property, or a part of a body, with its AMQP type: the client would encode all ints in 32 bits, and takes a map
    with a key "TYPE" for a type."""
    match value:
        case bool():
            return {"TYPE": "BOOL", "VALUE": value}
        case int():
            kind = "INT" if -(2**31) <= value < 2**31 else "LONG" if value < 2**63 else "ULONG"
            return {"TYPE": kind, "VALUE": value}
        case float():
            return {"TYPE": "DOUBLE", "VALUE": value}
        case str():
            return {"TYPE": "STRING", "VALUE": value}
        case bytes():
            try:
                return {"TYPE": "STRING", "VALUE": value.decode()}
            except UnicodeDecodeError:
                return {"TYPE": "BINARY", "VALUE": value}
        case UUID():
            return {"TYPE": "UUID", "VALUE": value}
        case Decimal():
            return {"TYPE": "DECIMAL128", "VALUE": value}
        case list():
            return {"TYPE": "LIST", "VALUE": [_typed(each) for each in value]}  # pyright: ignore[reportUnknownVariableType]
        case dict():
            pairs = [(_typed(name), _typed(each)) for name, each in value.items()]  # pyright: ignore[reportUnknownVariableType]
            return {"TYPE": "MAP", "VALUE": pairs}
        case _:
            return value


def _session(key: bytes | None, message_id: str) -> str:
    if key is None:
        return message_id
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    if 0 < len(text) <= LONGEST_ID:
        return text
    return f"anybroker-{hashlib.blake2s(key).hexdigest()}"


def body_of(native: ServiceBusReceivedMessage) -> bytes | None:
    """The body's bytes; an AMQP value becomes text, or JSON, and an AMQP sequence a list in JSON."""
    body: Any = native.body
    if body is None:
        return b""
    if isinstance(body, bytes):
        return body
    if native.body_type.value == "data":
        data = b"".join(bytes(part) for part in body)
        return None if not data and NULL.encode() in (native.application_properties or {}) else data
    value = [each for section in body for each in section] if native.body_type.value == "sequence" else body
    return value.encode() if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False).encode()


def _plain(value: Any) -> Any:
    """An AMQP value as JSON can show it: what is not text, a number, a list or a map is shown as text."""
    match value:
        case None | bool() | int() | float():
            return value
        case list():
            return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {_text(name): _plain(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case _:
            return _text(value)


def size_of(native: ServiceBusReceivedMessage, data: bytes | None) -> int:
    """The approximate size in bytes."""
    size = len(data or b"") + 100
    for name, value in (native.application_properties or {}).items():
        size += len(name) + (len(value) if isinstance(value, str | bytes) else 8)
    return size


class MessageView:
    """Reads the properties of a received message."""

    __slots__ = ()

    def id(self, raw: Any, /) -> str:
        native: ServiceBusReceivedMessage = raw.native
        longer = (native.application_properties or {}).get(ID.encode())
        if longer:
            return _text(longer)
        return _text(native.message_id) if native.message_id else f"#{native.sequence_number}"

    def given_id(self, raw: Any, /) -> str | None:
        native: ServiceBusReceivedMessage = raw.native
        properties: Mapping[Any, Any] = native.application_properties or {}
        if repeated := properties.get(ID.encode()):
            return _text(repeated)
        sent = _text(native.message_id) if native.message_id else None
        return None if sent is None or (TIME.encode() in properties and _MADE_ID.fullmatch(sent)) else sent

    def key(self, raw: Any, /) -> bytes | None:
        native: ServiceBusReceivedMessage = raw.native
        properties: Mapping[Any, Any] = native.application_properties or {}
        found = properties.get(KEY.encode())
        if found is not None:
            return found if isinstance(found, bytes) else _text(found).encode()
        if TIME.encode() in properties:
            return None
        foreign = native.session_id or native.partition_key
        if not foreign:
            return None
        # Text that is not UTF-8 comes as bytes.
        return foreign if isinstance(foreign, bytes) else _text(foreign).encode()

    def attributes(self, raw: Any, /) -> Mapping[str, str]:
        if raw.attributes is None:
            raw.attributes = _attributes(raw)
        return raw.attributes

    def publish_time(self, raw: Any, /) -> datetime | None:
        properties: Mapping[Any, Any] = raw.native.application_properties or {}
        found = properties.get(TIME.encode())
        try:
            return None if found is None else _EPOCH + timedelta(microseconds=int(found))
        except (ValueError, OverflowError, TypeError):
            return None

    def broker_time(self, raw: Any, /) -> datetime | None:
        moment: datetime | None = raw.native.enqueued_time_utc
        return None if moment is None else moment.astimezone(UTC)

    def delivery_attempt(self, raw: Any, /) -> int | None:
        # Read directly, because the message's `delivery_count` lists all header fields first.
        header = raw.native.raw_amqp_message.header
        return 1 if header is None else int(header.delivery_count or 0) + 1

    def place(self, raw: Any, /) -> Place | None:
        number: int | None = raw.native.sequence_number
        return None if number is None else Place(None, number)

    def native(self, raw: Any, /) -> Any:
        return raw.native


VIEW: Final = MessageView()


def _attributes(raw: Raw) -> Mapping[str, str]:
    found: dict[str, str] = {}
    properties: Mapping[Any, Any] = raw.native.application_properties or {}
    for name, value in properties.items():
        found[_text(name)] = _text(value)
    if raw.dead_of is not None:
        # The service's own dead letters use other names.
        found.pop(_REASON.decode(), None)
        found.pop(_DESCRIPTION.decode(), None)
        details = {
            "topic": raw.dead_of,
            "reason": properties.get(_REASON),
            "error": properties.get(_DESCRIPTION),
            "id": VIEW.id(raw),
            "attempts": raw.native.delivery_count,
        }
        found |= {f"{DEAD_LETTER_PREFIX}{name}": _text(value) for name, value in details.items() if value is not None}
    return shown_attributes(found)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
