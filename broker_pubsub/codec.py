"""Messages as Pub/Sub messages and back. Pure functions, safe from any thread.

The key is the ordering key if ordering is on and the key fits, else an attribute. Fields that Pub/Sub lacks are
attributes with the prefix `anybroker-`; names that Google reserves are escaped under that prefix. An empty message gets
an attribute, because Pub/Sub refuses a message without body and attributes.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from broker import OutboundMessage
from broker.driver import NO_ATTRIBUTES, RESERVED_PREFIX, shown_attributes

__all__ = [
    "MAX_ATTRIBUTES",
    "MAX_KEY",
    "MAX_NAME",
    "MAX_VALUE",
    "NULL",
    "RESERVED_ATTRIBUTES",
    "MessageView",
    "encode",
    "ordering_key_of",
]

MAX_VALUE: Final = 1024
MAX_ATTRIBUTES: Final = 100
RESERVED_ATTRIBUTES: Final = 5
"""Key, id, time, null and one spare."""
KEY: Final = "anybroker-key"
KEY_64: Final = "anybroker-key-64"
ID: Final = "anybroker-id"
TIME: Final = "anybroker-time"
NULL: Final = "anybroker-null"
EMPTY: Final = "anybroker-empty"
ESCAPE: Final = "anybroker-name-"
MAX_NAME: Final = 256 - len(ESCAPE)
MAX_KEY: Final = 768
"""The longest key whose base64 fits into an attribute."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def ordering_key_of(key: bytes) -> str:
    """The ordering key of a key: the key itself if it is text, else a hash."""
    if key:
        try:
            return key.decode()
        except UnicodeDecodeError:
            pass
    # Collides only with a key chosen to do so; the two keys would then share one order.
    return f"anybroker:{hashlib.sha256(key).hexdigest()}"


def encode(message: OutboundMessage, encoded: Any, *, ordering: bool) -> None:
    """Write a message into an empty Pub/Sub message, preferably one that was added to a request: no copy is needed."""
    key, data = message.key, message.data
    if data:
        encoded.data = data
        if message.plain and key is None:
            return
    attributes = encoded.attributes
    for name, value in message.attributes.items():
        attributes[f"{ESCAPE}{name}" if name.startswith("goog") else name] = value
    if key is not None:
        if ordering:
            encoded.ordering_key = ordering_key_of(key)
        if not ordering or encoded.ordering_key.startswith("anybroker:"):
            try:
                attributes[KEY] = key.decode()
            except UnicodeDecodeError:
                attributes[KEY_64] = b64encode(key).decode()
    if message.id is not None:
        attributes[ID] = message.id
    if message.publish_time is not None:
        attributes[TIME] = str((message.publish_time - _EPOCH) // _MICROSECOND)
    if data is None:
        attributes[NULL] = "1"
    elif not data and not attributes:
        attributes[EMPTY] = "1"


class MessageView:
    """Reads the properties of a delivered message; `raw` is its ReceivedMessage."""

    __slots__ = ()

    def id(self, raw: Any, /) -> str:
        message = raw.message
        return message.attributes.get(ID) or message.message_id

    def given_id(self, raw: Any, /) -> str | None:
        return raw.message.attributes.get(ID)

    def key(self, raw: Any, /) -> bytes | None:
        message = raw.message
        if attributes := message.attributes:
            if (key := attributes.get(KEY)) is not None:
                return key.encode()
            if (key := attributes.get(KEY_64)) is not None:
                try:
                    return b64decode(key, validate=True)
                except ValueError:
                    pass
        return message.ordering_key.encode() or None

    def attributes(self, raw: Any, /) -> Mapping[str, str]:
        found = raw.message.attributes
        if not found:
            return NO_ATTRIBUTES
        shown = {
            name.removeprefix(ESCAPE): value
            for name, value in found.items()
            if name.startswith(ESCAPE) or not name.startswith(RESERVED_PREFIX)
        }
        # A name that was escaped may begin with a reserved prefix.
        return shown_attributes(shown)

    def publish_time(self, raw: Any, /) -> datetime | None:
        message = raw.message
        if (time := message.attributes.get(TIME)) is not None:
            try:
                return _EPOCH + timedelta(microseconds=int(time))
            except (ValueError, OverflowError):
                return None
        # Without a publish time of its own: the time at which the service stored the message.
        return self.broker_time(raw)

    def broker_time(self, raw: Any, /) -> datetime | None:
        stamp = raw.message.publish_time
        return _EPOCH + timedelta(seconds=stamp.seconds, microseconds=stamp.nanos // 1000)

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return raw.delivery_attempt or None

    def native(self, raw: Any, /) -> Any:
        return raw

    has_offsets = False
    """The ids in `stamps` are not offsets: they are unordered."""

    def stamps(self, raws: Sequence[Any], /) -> tuple[list[int], list[int]]:
        """Id and broker time in microseconds since 1970 of each message: unique within the topic."""
        return (
            [_number(raw.message.message_id) for raw in raws],
            [raw.message.publish_time.seconds * 1_000_000 + raw.message.publish_time.nanos // 1000 for raw in raws],
        )


def _number(message_id: str) -> int:
    """The service's ids are numbers; other ids are hashed to as many bits."""
    if message_id.isdecimal() and len(message_id) < 19:
        return int(message_id)
    return int.from_bytes(hashlib.sha256(message_id.encode()).digest()[:8], "big") >> 1
