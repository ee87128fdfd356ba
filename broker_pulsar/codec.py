"""Messages as Pulsar messages and back. Pure functions and stateless views, safe from any thread.

An attribute is a property of the same name. These properties and prefixes are our own:

| name | content |
|---|---|
| `anybroker-id` | the id |
| `anybroker-time` | publish time that the message brings, microseconds since 1970 |
| `anybroker-key` | marks an empty key, as earlier versions wrote it |
| `anybroker-64:` | prefix of a key in base64, which is empty or not UTF-8 text |

Any message of a foreign client can be read: a value that this module did not write is ignored, and stays in `native`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, cast

from broker import OutboundMessage
from broker.driver import Place, shown_attributes
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.client import wrapped
from broker_pulsar.message_ids import offset_of

__all__ = ["LogView", "MessageView", "data_of", "key_of", "partition_key", "properties_of"]

_ID: Final = "anybroker-id"
_TIME: Final = "anybroker-time"
_KEY: Final = "anybroker-key"
_BINARY: Final = "anybroker-64:"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def partition_key(key: bytes | None) -> str | None:
    """A key as Pulsar's partition key, which is text and not empty; None for no key."""
    if not key:
        return None if key is None else _BINARY
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return _BINARY + b64encode(key).decode()
    return _BINARY + b64encode(key).decode() if text.startswith(_BINARY) else text


def properties_of(message: OutboundMessage) -> dict[str, str] | None:
    """The properties of a message; None if it needs none."""
    if message.plain:
        return None
    # Copying the proxy is ten times as fast as `dict`.
    found = cast("MappingProxyType[str, str]", message.attributes).copy()
    if message.id is not None:
        found[_ID] = message.id
    if message.publish_time is not None:
        found[_TIME] = str((message.publish_time - _EPOCH) // _MICROSECOND)
    return found or None


def key_of(raw: NativeMessage) -> bytes | None:
    """The key of a message."""
    try:
        text = raw.partition_key()
    except UnicodeDecodeError as error:
        return error.object
    if not text:
        return b"" if _properties(raw).get(_KEY) == "" else None
    if text.startswith(_BINARY):
        try:
            return b64decode(text[len(_BINARY) :], validate=True)
        except Base64Error:
            pass  # A foreign key with the same prefix.
    return text.encode("utf-8", "surrogateescape")


def data_of(raw: NativeMessage) -> bytes | None:
    """The body; None for a tombstone."""
    data = raw.data()
    return data if data or not raw.has_null_value() else None


def _properties(raw: NativeMessage) -> dict[str, str]:
    """The properties of a message; none if one is not UTF-8, because the client cannot read the others either."""
    try:
        return raw.properties()
    except UnicodeDecodeError:
        return {}


class MessageView:
    """Reads the properties of a message."""

    def id(self, raw: NativeMessage, /) -> str:
        if found := self.given_id(raw):
            return found
        message_id = raw.message_id()
        return f"{max(message_id.partition(), 0)}-{offset_of(message_id)}"

    def given_id(self, raw: NativeMessage, /) -> str | None:
        return _properties(raw).get(_ID)

    def key(self, raw: NativeMessage, /) -> bytes | None:
        return key_of(raw)

    def attributes(self, raw: NativeMessage, /) -> Mapping[str, str]:
        return shown_attributes(_properties(raw))

    def publish_time(self, raw: NativeMessage, /) -> datetime | None:
        text = _properties(raw).get(_TIME)
        if text:
            try:
                return _EPOCH + int(text) * _MICROSECOND
            except (ValueError, OverflowError):
                pass  # A foreign property of that name.
        try:
            return _EPOCH + timedelta(milliseconds=raw.publish_timestamp())
        except OverflowError:
            return None  # A foreign client may send any time.

    def broker_time(self, raw: NativeMessage, /) -> datetime | None:
        """None: Pulsar stores only the producer's time."""
        return None

    def delivery_attempt(self, raw: NativeMessage, /) -> int | None:
        return raw.redelivery_count() + 1

    def place(self, raw: NativeMessage, /) -> Place | None:
        message_id = raw.message_id()
        return Place(max(message_id.partition(), 0), offset_of(message_id))

    def native(self, raw: NativeMessage, /) -> Any:
        return wrapped(raw)


class LogView(MessageView):
    """Reads the properties of a record."""

    def delivery_attempt(self, raw: NativeMessage, /) -> int | None:
        return None
