"""Messages as NATS headers, and headers as messages. Pure functions and stateless views, safe from any thread.

| header | content |
|---|---|
| `anybroker-key`, `anybroker-key-64` | the key; in base64 if its bytes are not plain text |
| `anybroker-time` | publish time by the producer's clock, microseconds since 1970 |
| `anybroker-null` | the message is a tombstone |
| `anybroker-id` | the id, if the server removes `Nats-Msg-Id`, or if a given id looks like a made one |
| `anybroker-attributes` | attributes that a header cannot carry unchanged, percent-encoded |

Every other attribute is a plain header. Headers are parsed when a property is read. Any message of a foreign client
can be read: a value that this module did not write is ignored, and stays visible in `native`.

Every message has a `Nats-Msg-Id`. If it is 16 hexadecimal digits, a dash and a number, beside `anybroker-time` and
without `anybroker-id`, the SDK made it, in any version; a publisher, or a foreign program, gave every other id.

`header_columns` reads each block once for many messages. It parses blocks as our publishers write them, and leaves
all others to the view.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, unquote

import msgspec

from broker import MessageTooLarge, OutboundMessage
from broker.driver import NO_ATTRIBUTES, RESERVED_PREFIXES, Place, is_letter, shown_attributes
from broker_jetstream.times import microseconds, microseconds_at, parse_time

__all__ = [
    "LETTER_ROOM",
    "LETTER_TEXT",
    "NULL",
    "NUM_PENDING",
    "PIN",
    "SEQUENCE",
    "SUBJECT",
    "HeaderColumns",
    "LogView",
    "MessageView",
    "NativeMessage",
    "deliveries_of",
    "encode_headers",
    "encode_id",
    "header_columns",
    "header_lines",
    "key_of",
    "reserved_bytes",
    "sequence_of",
    "server_header",
    "status_of",
]


MAX_HEADERS: Final = 65_535
"""Bytes of headers that a server stores."""

LETTER_TEXT: Final = 1024
"""Bytes of text that a dead letter may add to a message of the largest size."""
LETTER_ROOM: Final = 3 * LETTER_TEXT + 512
"""Bytes of headers reserved for that text, which takes three times the space when percent-encoded."""
_FITS: Final = MAX_HEADERS - LETTER_ROOM
"""Bytes of headers that every message may have."""

_KEY: Final = b"\r\nanybroker-key: "
_KEY_64: Final = b"\r\nanybroker-key-64: "
_TIME: Final = b"\r\nanybroker-time: "
_ID: Final = b"\r\nanybroker-id: "
_MSG_ID: Final = b"\r\nNats-Msg-Id: "
_ATTRIBUTES: Final = b"\r\nanybroker-attributes: "
NULL: Final = b"\r\nanybroker-null: "
STREAM: Final = b"\r\nNats-Stream: "
SEQUENCE: Final = b"\r\nNats-Sequence: "
SUBJECT: Final = b"\r\nNats-Subject: "
TIME_STAMP: Final = b"\r\nNats-Time-Stamp: "
PIN: Final = b"\r\nNats-Pin-Id: "
NUM_PENDING: Final = b"\r\nNats-Num-Pending: "
_MADE_ID: Final = re.compile(rb"[0-9a-f]{16}-[0-9]+")
_OURS: Final = b"anybroker-"
_RESERVED: Final = tuple(prefix.encode() for prefix in RESERVED_PREFIXES)
_SERVERS: Final = b"nats-"
_NAME_CHARACTERS: Final = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class NativeMessage(msgspec.Struct, gc=False, eq=False):
    """A message as received from the server.

    :ivar subject: the subject it was published to.
    :ivar reply: the ack subject; empty for messages that are not settled.
    :ivar block: the header block, or empty.
    """

    subject: bytes
    reply: bytes
    data: bytes
    block: bytes
    lease_until: float = 0.0
    """Monotonic time at which the lease ends on the server."""
    first: bool = False
    """Known to be a first delivery; else see the ack subject."""
    releases: int = 0
    """How many deliveries were released unhandled."""
    attributes: Mapping[str, str] | None = None
    """Parsed from the block on first use."""

    @property
    def headers(self) -> Mapping[str, tuple[str, ...]]:
        """Every header with all its values, including the server's and `anybroker-` headers."""
        found: dict[str, list[str]] = {}
        for name, value in header_lines(self.block):
            found.setdefault(name.decode("utf-8", "replace"), []).append(value.decode("utf-8", "replace"))
        return {name: tuple(values) for name, values in found.items()}


def header(block: bytes, name: bytes) -> bytes | None:
    """The first value of a header; `name` is spelled `\\r\\nName: `."""
    return _value(block, block.find(name), len(name))


def server_header(block: bytes, name: bytes) -> bytes | None:
    """The value of a header that the server appended, after a publisher's header of the same name."""
    # Without the leading CRLF, which is missing if the publisher's block had no end.
    return _value(block, block.rfind(name[2:]), len(name) - 2)


def _value(block: bytes, start: int, name_length: int) -> bytes | None:
    if start < 0:
        return None
    start += name_length
    end = block.find(b"\r\n", start)
    return block[start : end if end >= 0 else None]


def header_lines(block: bytes) -> list[tuple[bytes, bytes]]:
    """Every header, in order."""
    lines: list[tuple[bytes, bytes]] = []
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            lines.append((name.strip(), value.strip()))
    return lines


def status_of(block: bytes) -> tuple[int, str]:
    """The status of a server message without a body, such as (408, 'Request Timeout'); 0 if there is none."""
    if block[8:9] != b" ":
        return 0, ""
    code, _, text = block[9:].partition(b"\r\n")[0].partition(b" ")
    return (int(code), text.decode("utf-8", "replace")) if len(code) == 3 and code.isdigit() else (0, "")


def encode_headers(message: OutboundMessage, message_id: bytes, now: int, extra: bytes = b"") -> bytes:
    """The header block of a message.

    :param message_id: the `Nats-Msg-Id`, or empty.
    :param now: microseconds since 1970, for a message without a publish time.
    :param extra: further header lines.
    :raises MessageTooLarge: the block exceeds what a server stores.
    """
    key = message.key
    time = message.publish_time
    if time is not None:
        now = (time - _EPOCH) // _MICROSECOND if time.tzinfo else (time.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
    block = b"NATS/1.0\r\n" if key is None else _key_line(key)
    if message_id:
        block = b"%bNats-Msg-Id: %b\r\nanybroker-time: %d\r\n" % (block, message_id, now)
        if message.id is not None and _MADE_ID.fullmatch(message_id):
            block = b"%banybroker-id: %b\r\n" % (block, message_id)
    else:
        block = b"%banybroker-time: %d\r\n" % (block, now)
    if message.data is None:
        block += b"anybroker-null: 1\r\n"
    if type(message.native) is NativeMessage:
        # Before the attributes, because of repeated names the last value counts.
        block += _foreign_lines(message)
    if message.attributes:
        block += _attribute_lines(message.attributes)
    block = b"%b%b\r\n" % (block, extra)
    if len(block) > _FITS and len(block) > MAX_HEADERS - reserved_bytes(message):
        raise MessageTooLarge(
            f"Key, id and attributes take {len(block)} bytes of headers, and NATS stores {MAX_HEADERS}, of which "
            f"{LETTER_ROOM} are reserved for the headers of a dead letter",
            advice="Move large values into the body",
        )
    return block


def reserved_bytes(message: OutboundMessage) -> int:
    """Bytes that a message must leave free for the headers of its dead letter."""
    return 0 if is_letter(message.attributes) else LETTER_ROOM


def _key_line(key: bytes) -> bytes:
    if key.isascii() and is_plain(key.decode()):
        return b"NATS/1.0\r\nanybroker-key: %b\r\n" % key
    return b"NATS/1.0\r\nanybroker-key-64: %b\r\n" % b64encode(key)


_LONGEST_CACHED_NAME: Final = 200
"""The names of a foreign message that is forwarded may have a megabyte each."""


@lru_cache(4096)
def _plain_name(name: str) -> bytes | None:
    """The name as the start of a header line; None if it is invalid or reserved."""
    if not _NAME_CHARACTERS.issuperset(name) or name.lower().startswith("nats-") or name in {"Status", "Description"}:
        return None
    return name.encode() + b": "


def _attribute_lines(attributes: Mapping[str, str]) -> bytes:
    lines: list[bytes] = []
    escaped: list[str] = []
    for name, value in attributes.items():
        start = _plain_name(name) if len(name) <= _LONGEST_CACHED_NAME else _plain_name.__wrapped__(name)
        if start is not None and is_plain(value):
            lines.append(b"%b%b\r\n" % (start, value.encode()))
        else:
            escaped.append(f"{quote(name, safe='')}={quote(value, safe='')}")
    if escaped:
        lines.append(b"anybroker-attributes: %b\r\n" % "&".join(escaped).encode())
    return b"".join(lines)


def _foreign_lines(message: OutboundMessage) -> bytes:
    """Headers of a foreign producer that attributes cannot represent, for a message that is forwarded."""
    native: NativeMessage = message.native
    found = [
        (name, value)
        for name, value in header_lines(native.block)
        if name[:10] != _OURS and name[:5].lower() != _SERVERS
    ]
    shown = {
        name: index
        for index, (name, value) in enumerate(found)
        if name and _text(name) is not None and _text(value) is not None
    }
    # The other values of a name are dropped if the forwarder removed it.
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for index, (name, value) in enumerate(found)
        if shown.get(name) != index and (name not in shown or _text(name) in message.attributes)
    )


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _attributes(block: bytes) -> Mapping[str, str]:
    found: dict[str, str] = {}
    escaped: bytes | None = None
    for line in block.split(b"\r\n")[1:-2]:
        if line[:10] == _OURS:
            if escaped is None and line.startswith(_ATTRIBUTES[2:]):
                escaped = line[len(_ATTRIBUTES) - 2 :]
            continue
        if line[:5].lower() == _SERVERS:
            continue
        name, colon, value = line.partition(b":")
        if not colon or not name:
            continue
        try:
            # Of repeated headers the last counts, as on every backend.
            found[name.decode()] = value.strip(b" \t").decode()
        except UnicodeDecodeError:
            continue
    if escaped is not None:
        for item in escaped.decode("utf-8", "replace").split("&"):
            name, _, value = item.partition("=")
            found[unquote(name)] = unquote(value)
    return shown_attributes(found)


def key_of(block: bytes) -> bytes | None:
    """The key, or None."""
    key = header(block, _KEY)
    if key is None:
        encoded = header(block, _KEY_64)
        return None if encoded is None else from_base64(encoded)
    return key


def _reply_field(reply: bytes, index: int) -> int:
    """A number in an ack subject: 0 deliveries, 1 stream sequence, 2 consumer sequence, 3 time, 4 pending."""
    fields = reply.split(b".")
    # $JS.ACK.<stream>.<consumer>.… or, in accounts and domains, $JS.ACK.<domain>.<account>.<stream>.<consumer>.….
    return int(fields[(4 if len(fields) == 9 else 6) + index])


def deliveries_of(reply: bytes) -> int:
    """How often the message with this ack subject was delivered, including this time."""
    return _reply_field(reply, 0)


def sequence_of(reply: bytes) -> int:
    """The stream sequence of the message with this ack subject."""
    return _reply_field(reply, 1)


class MessageView:
    """Reads the properties of a message that a consumer delivered."""

    __slots__ = ()

    def id(self, raw: Any, /) -> str:
        block: bytes = raw.block
        found = header(block, _MSG_ID) or header(block, _ID)
        if found:
            return decode_id(found)
        fields = raw.reply.split(b".")
        stream = fields[2 if len(fields) == 9 else 4]
        return f"{stream.decode()}:{_reply_field(raw.reply, 1)}"

    def given_id(self, raw: Any, /) -> str | None:
        block: bytes = raw.block
        sent, repeated = header(block, _MSG_ID), header(block, _ID)
        if sent and repeated:
            return decode_id(sent)
        found = sent or repeated
        if not found or (_MADE_ID.fullmatch(found) and header(block, _TIME) is not None):
            return None
        return decode_id(found)

    def key(self, raw: Any, /) -> bytes | None:
        return key_of(raw.block)

    def keys(self, raws: Sequence[Any], /) -> list[bytes | None]:
        """The keys of many messages."""
        return [key_of(raw.block) for raw in raws]

    def attributes(self, raw: Any, /) -> Mapping[str, str]:
        found = raw.attributes
        if found is None:
            found = raw.attributes = _attributes(raw.block) if raw.block else NO_ATTRIBUTES
        return found

    def publish_time(self, raw: Any, /) -> datetime | None:
        time = header(raw.block, _TIME)
        try:
            return None if time is None else _EPOCH + timedelta(microseconds=int(time))
        except (ValueError, OverflowError):
            return None

    def publish_times(self, raws: Sequence[Any], /) -> list[int | None]:
        """The times of many messages, in microseconds since 1970."""
        return [None if (time := header(raw.block, _TIME)) is None else microseconds(time) for raw in raws]

    def header_columns(self, raws: Sequence[Any], /) -> HeaderColumns:
        """The headers of many messages, each block read once."""
        return header_columns(raws, self)

    def broker_time(self, raw: Any, /) -> datetime | None:
        return _EPOCH + timedelta(microseconds=_reply_field(raw.reply, 3) // 1000)

    def broker_times(self, raws: Sequence[Any], /) -> list[int | None]:
        """The times of many messages, in microseconds since 1970."""
        return [_reply_field(raw.reply, 3) // 1000 for raw in raws]

    def delivery_attempt(self, raw: Any, /) -> int | None:
        # Read for every message; `first` is computed on arrival.
        return 1 if raw.first else _reply_field(raw.reply, 0) - raw.releases

    def place(self, raw: Any, /) -> Place | None:
        return Place(None, sequence_of(raw.reply))

    def native(self, raw: Any, /) -> Any:
        return raw

    def stamps(self, raws: Sequence[Any], /) -> tuple[list[int], list[int]]:
        """Sequence and broker time in microseconds since 1970 of each message: unique within the topic."""
        fields = b".".join([raw.reply for raw in raws]).split(b".")
        if len(fields) == 9 * len(raws):
            # Nine fields is the minimum, so every subject has nine, and no domain.
            return list(map(int, fields[5::9])), [int(each) // 1000 for each in fields[7::9]]
        each_fields = [raw.reply.split(b".") for raw in raws]
        return (
            [int(each[5 if len(each) == 9 else 7]) for each in each_fields],
            [int(each[7 if len(each) == 9 else 9]) // 1000 for each in each_fields],
        )


class LogView(MessageView):
    """Reads the properties of a message that came by a direct get."""

    __slots__ = ()

    def id(self, raw: Any, /) -> str:
        block: bytes = raw.block
        found = header(block, _MSG_ID) or header(block, _ID)
        if found:
            return decode_id(found)
        stream = server_header(block, STREAM) or b""
        sequence = server_header(block, SEQUENCE) or b""
        return f"{stream.decode()}:{sequence.decode()}"

    def broker_time(self, raw: Any, /) -> datetime | None:
        stamp = server_header(raw.block, TIME_STAMP)
        return None if stamp is None else parse_time(stamp.decode())

    def broker_times(self, raws: Sequence[Any], /) -> list[int | None]:
        stamps = [server_header(raw.block, TIME_STAMP) for raw in raws]
        return [None if stamp is None else microseconds_at(stamp) for stamp in stamps]

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return None


_KEY_NAME: Final = b"anybroker-key"
_ID_NAME: Final = b"Nats-Msg-Id"
_TIME_NAME: Final = b"anybroker-time"


class HeaderColumns(NamedTuple):
    """Columns with one value per message.

    :ivar publish_times: microseconds since 1970, or None.
    """

    ids: list[str]
    keys: list[bytes | None]
    attributes: list[Mapping[str, str]]
    publish_times: list[int | None]


class _View(Protocol):
    def id(self, raw: Any, /) -> str: ...
    def key(self, raw: Any, /) -> bytes | None: ...
    def attributes(self, raw: Any, /) -> Mapping[str, str]: ...
    def publish_times(self, raws: Sequence[Any], /) -> list[int | None]: ...


def header_columns(raws: Sequence[Any], view: _View) -> HeaderColumns:
    """Read the headers of messages; `view` reads blocks that our publishers did not write."""
    ids: list[str] = []
    keys: list[bytes | None] = []
    shown: list[Mapping[str, str]] = []
    times: list[int | None] = []
    for raw in raws:
        read = _read(raw.block)
        if read is None:
            ids.append(view.id(raw))
            keys.append(view.key(raw))
            shown.append(view.attributes(raw))
            times += view.publish_times((raw,))
            continue
        identity, key, attributes, time = read
        ids.append(view.id(raw) if identity is None else identity)
        keys.append(key)
        shown.append(MappingProxyType(attributes) if attributes else NO_ATTRIBUTES)
        times.append(None if time is None else microseconds(time))
    return HeaderColumns(ids, keys, shown, times)


def _read(block: bytes) -> tuple[str | None, bytes | None, dict[str, str] | None, bytes | None] | None:
    """Id, key, attributes and time; None if the view must read the block."""
    identity: str | None = None
    key: bytes | None = None
    time: bytes | None = None
    attributes: dict[str, str] | None = None
    for line in block.split(b"\r\n")[1:-2]:
        name, colon, value = line.partition(b": ")
        if name == _KEY_NAME and key is None:
            key = value
        elif name == _ID_NAME and identity is None and value and not value.startswith(ENCODED_ID):
            identity = value.decode("utf-8", "replace")
        elif name == _TIME_NAME and time is None:
            time = value
        elif name.startswith(_RESERVED) or name[:5].lower() == _SERVERS or not _is_attribute(name, colon, value):
            return None
        else:
            if attributes is None:
                attributes = {}
            try:
                # As in the view, the last value counts.
                attributes[name.decode()] = value.decode()
            except UnicodeDecodeError:
                return None
    return identity, key, attributes, time


def _is_attribute(name: bytes, colon: bytes, value: bytes) -> bool:
    """Whether a line is an attribute in the form that our publishers write."""
    return bool(colon and name) and b":" not in name and value == value.strip(b" \t")


ENCODED_ID: Final = b"anybroker-64:"
"""Prefix of an id in base64."""


def encode_id(message_id: str) -> bytes:
    """An id as a header value; base64 with a prefix if a header cannot carry it."""
    value = message_id.encode()
    if is_plain(message_id) and not value.startswith(ENCODED_ID):
        return value
    return ENCODED_ID + b64encode(value)


def decode_id(value: bytes) -> str:
    """Inverse of `encode_id`; a foreign value is returned unchanged."""
    decoded = from_base64(value[len(ENCODED_ID) :]) if value.startswith(ENCODED_ID) else None
    return (decoded or value).decode("utf-8", "replace")


def from_base64(value: bytes) -> bytes | None:
    """The decoded bytes, or None if the value is not base64."""
    try:
        return b64decode(value, validate=True)
    except ValueError:
        return None


def is_plain(value: str) -> bool:
    """Whether a header carries the value unchanged."""
    return not value or (value.isprintable() and value[0] != " " and value[-1] != " ")
