"""Messages of `broker` as messages of Service Bus, and back. Pure functions.

What Service Bus has no place for rides in application properties of our own: `anybroker-key` (bytes),
`anybroker-time` (producer's clock, microseconds since 1970), `anybroker-null` (a tombstone) and `anybroker-id` (an id
longer than a message id may be). Every message has a session id, so that it may pass through entities with sessions:
the key's text where it can be one, else a digest of the key, else the message's id. Attributes are application
properties. Whatever a foreign client wrote can be read: properties of other types are shown as text, and are
themselves in `native`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

import msgspec
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage

from broker import OutboundMessage
from broker.driver import DEAD_LETTER_PREFIX, NO_ATTRIBUTES, RESERVED_PREFIX, Place, is_whole

__all__ = ["VIEW", "Raw", "body_of", "encode", "size_of"]

KEY: Final = "anybroker-key"
TIME: Final = "anybroker-time"
NULL: Final = "anybroker-null"
ID: Final = "anybroker-id"
LONGEST_ID: Final = 128

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LONGEST_TTL: Final = 4_294_967
"""Seconds, whose milliseconds AMQP's header has room for; the client derives the absolute expiry from them."""
_REASON: Final = b"DeadLetterReason"
_DESCRIPTION: Final = b"DeadLetterErrorDescription"


class Raw(msgspec.Struct, gc=False, eq=False):
    """A message as it came, and what is known of its lock.

    :ivar until: monotonic time at which its lock ends.
    :ivar link: the receiver that it came by; None where it came by none that is still there.
    """

    native: ServiceBusReceivedMessage
    until: float
    link: Any = None
    dead_of: str | None = None
    """The topic whose dead letters these are."""
    shown: Mapping[str, str] | None = None
    settled: bool = False
    """Whether the broker has carried out what ends its lock."""


def encode(message: OutboundMessage) -> tuple[ServiceBusMessage, str]:
    """The message as it is sent, and its id."""
    identity = message.id or uuid4().hex
    time = message.publish_time or datetime.now(UTC)
    properties: dict[Any, Any] = dict(message.attributes)
    properties[TIME] = str((time - _EPOCH) // _MICROSECOND)
    message_id = identity
    if len(identity) > LONGEST_ID:
        message_id = hashlib.blake2s(identity.encode()).hexdigest()
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
            if not isinstance(value, str | bytes) and text in message.attributes:
                properties[text] = _typed(value)
    sent = ServiceBusMessage(
        message.data or b"",
        application_properties=properties,
        message_id=message_id,
        session_id=_session(key, message_id),
    )
    if message.ttl is not None:
        # The client cuts it to whole seconds, and with it the moment that the message expires at.
        seconds = math.ceil(message.ttl)
        if seconds > _LONGEST_TTL:
            raise ValueError(f"ttl is {message.ttl:g} s, and at most {_LONGEST_TTL} fit, 49 days; give less, or none")
        sent.time_to_live = timedelta(seconds=seconds)
        header = sent.raw_amqp_message.header
        assert header is not None  # the line before made it
        header.time_to_live = max(1, round(message.ttl * 1000))
    if isinstance(native, ServiceBusReceivedMessage):
        sent.subject, sent.correlation_id = native.subject, native.correlation_id
        sent.content_type, sent.reply_to, sent.to = native.content_type, native.reply_to, native.to
    return sent, identity


def _typed(value: Any) -> Any:
    """A value as the client encodes it: it takes integers of 32 bits, unless it is told that they are long."""
    if is_whole(value) and abs(value) >= 2**31:
        return {"TYPE": "LONG", "VALUE": value}
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
    """The body's bytes; of a typed AMQP value its text, since only `native` shows what it is."""
    body: Any = native.body
    if body is None:
        return b""
    if isinstance(body, bytes):
        return body
    if native.body_type.value == "data":
        data = b"".join(bytes(part) for part in body)
        return None if not data and NULL.encode() in (native.application_properties or {}) else data
    value = list(body) if native.body_type.value == "sequence" else body
    return _shown(value).encode()


def size_of(native: ServiceBusReceivedMessage, data: bytes | None) -> int:
    """Bytes, about."""
    size = len(data or b"") + 100
    for name, value in (native.application_properties or {}).items():
        size += len(name) + (len(value) if isinstance(value, str | bytes) else 8)
    return size


class _View:
    """How a received message is shown."""

    __slots__ = ()

    def id(self, raw: Any, /) -> str:
        native: ServiceBusReceivedMessage = raw.native
        longer = (native.application_properties or {}).get(ID.encode())
        if longer is not None:
            return _shown(longer)
        return _shown(native.message_id) if native.message_id else f"#{native.sequence_number}"

    def key(self, raw: Any, /) -> bytes | None:
        native: ServiceBusReceivedMessage = raw.native
        properties: Mapping[Any, Any] = native.application_properties or {}
        found = properties.get(KEY.encode())
        if found is not None:
            return found if isinstance(found, bytes) else _shown(found).encode()
        if TIME.encode() in properties:
            return None
        foreign = native.session_id or native.partition_key
        return foreign.encode() if foreign else None

    def attributes(self, raw: Any, /) -> Mapping[str, str]:
        if raw.shown is None:
            raw.shown = _attributes(raw)
        return raw.shown

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
        # The message's own `delivery_count` lists the header's fields first, to see whether it has any.
        header = raw.native.raw_amqp_message.header
        return 1 if header is None else int(header.delivery_count or 0) + 1

    def place(self, raw: Any, /) -> Place | None:
        number: int | None = raw.native.sequence_number
        return None if number is None else Place(None, number)

    def native(self, raw: Any, /) -> Any:
        return raw.native


VIEW: Final = _View()


def _attributes(raw: Raw) -> Mapping[str, str]:
    found: dict[str, str] = {}
    properties: Mapping[Any, Any] = raw.native.application_properties or {}
    for name, value in properties.items():
        text = _text(name)
        if text and not text.startswith(RESERVED_PREFIX):
            found[text] = _shown(value)
    if raw.dead_of is not None:
        # The service's own dead letters tell in words of its own what ours do.
        found.pop(_REASON.decode(), None)
        found.pop(_DESCRIPTION.decode(), None)
        told = {
            "topic": raw.dead_of,
            "reason": properties.get(_REASON),
            "error": properties.get(_DESCRIPTION),
            "id": VIEW.id(raw),
            "attempts": raw.native.delivery_count,
        }
        found |= {f"{DEAD_LETTER_PREFIX}{name}": _shown(value) for name, value in told.items() if value is not None}
    return MappingProxyType(found) if found else NO_ATTRIBUTES


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _shown(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
