"""Encoded AMQP messages, split and reassembled without decoding sections that the double does not change.

A message keeps its bytes, so that typed values do not change. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["Sections", "head", "is_batch", "with_entries"]

HEADER: Final = 0x70
ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION: Final = 0x74
DATA: Final = 0x75

_EMPTY_LIST: Final = 0x45


class Sections:
    """The sections of one message, but for header and delivery annotations, of which each sender writes its own.

    :ivar annotations: encoded map of message annotations, or empty.
    :ivar properties: the encoded section of properties, or empty.
    :ivar application: encoded map of application properties, or empty.
    :ivar rest: body and footer as they came.
    """

    __slots__ = ("annotations", "application", "properties", "rest")

    def __init__(self, raw: bytes) -> None:
        self.annotations = self.properties = self.application = b""
        rest = len(raw)
        for code, start, end in _walk(raw):
            if code >= DATA:
                rest = start
                break
            if code == ANNOTATIONS:
                self.annotations = raw[start + 3 : end]
            elif code == PROPERTIES:
                self.properties = raw[start:end]
            elif code == APPLICATION:
                self.application = raw[start + 3 : end]
        self.rest = raw[rest:]

    def encode(
        self, *, count: int, ttl: int | None, annotations: Mapping[str, bytes], application: Mapping[str, str]
    ) -> bytes:
        """The message for a delivery.

        :param count: earlier deliveries.
        :param ttl: milliseconds, or None.
        :param annotations: encoded values that are added to its annotations.
        :param application: text that is added to its application properties.
        """
        fields = b"\x42\x50\x04" + (b"\x40" if ttl is None else b"\x70" + min(ttl, 2**32 - 1).to_bytes(4, "big"))
        fields += b"\x42\x70" + count.to_bytes(4, "big")
        parts = [b"\x00\x53\x70\xc0", bytes([len(fields) + 1, 5]), fields, b"\x00\x53\x72"]
        parts.append(with_entries(self.annotations, [_symbol(name) + value for name, value in annotations.items()]))
        parts.append(self.properties)
        if self.application or application:
            parts.append(b"\x00\x53\x74")
            parts.append(with_entries(self.application, [_text(n) + _text(v) for n, v in application.items()]))
        parts.append(self.rest)
        return b"".join(parts)


def head(raw: bytes) -> bytes:
    """The message without its body, which may be of types that proton cannot read, such as maps with binary keys.

    :raises ValueError: it is no message.
    """
    return raw[: next((start for code, start, _ in _walk(raw) if code >= DATA), len(raw))]


def with_entries(encoded: bytes, entries: list[bytes]) -> bytes:
    """An encoded map with further encoded pairs of key and value."""
    pairs, number = b"", 0
    if encoded[:1] == b"\xc1":
        number, pairs = encoded[2], encoded[3:]
    elif encoded[:1] == b"\xd1":
        number, pairs = int.from_bytes(encoded[5:9], "big"), encoded[9:]
    pairs += b"".join(entries)
    number += 2 * len(entries)
    return b"\xd1" + (len(pairs) + 4).to_bytes(4, "big") + number.to_bytes(4, "big") + pairs


def is_batch(raw: bytes) -> list[bytes] | None:
    """The messages of a batch: all of its body are Data sections, each of which is an encoded message.

    proton does not tell the message format, by which the service knows.
    """
    bodies: list[bytes] = []
    try:
        for code, start, end in _walk(raw):
            if code in (0x76, 0x77):
                return None
            if code == DATA:
                body = raw[start + 5 : end] if raw[start + 3] == 0xA0 else raw[start + 8 : end]
                if not (len(body) > 3 and body[:2] == b"\x00\x53" and 0x70 <= body[2] <= 0x78):
                    return None
                if [*_walk(body)][-1][2] != len(body):
                    return None
                bodies.append(body)
    except (ValueError, IndexError):
        return None
    return bodies or None


def long_(value: int) -> bytes:
    return b"\x81" + value.to_bytes(8, "big", signed=True)


def int_(value: int) -> bytes:
    return b"\x71" + value.to_bytes(4, "big", signed=True)


def timestamp_(seconds: float) -> bytes:
    return b"\x83" + int(seconds * 1000).to_bytes(8, "big", signed=True)


def text_(value: str) -> bytes:
    return _text(value)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"\xb1" + len(encoded).to_bytes(4, "big") + encoded


def _symbol(name: str) -> bytes:
    return b"\xa3" + bytes([len(name)]) + name.encode()


def _walk(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Descriptor, start and end of each section."""
    at = 0
    while at < len(raw):
        if raw[at : at + 2] != b"\x00\x53":
            raise ValueError("not a section")
        code, kind = raw[at + 2], raw[at + 3]
        if code in (0x76, 0x77) and kind not in (0xA0, 0xB0, 0xA1, 0xB1, 0xC0, 0xC1, 0xD0, 0xD1):
            # A value of another type; only a footer may follow, which no client sends.
            yield code, at, len(raw)
            return
        if kind == _EMPTY_LIST:
            end = at + 4
        elif kind & 0xF0 in (0xA0, 0xC0):
            end = at + 5 + raw[at + 4]
        else:
            end = at + 8 + int.from_bytes(raw[at + 4 : at + 8], "big")
        if end > len(raw):
            raise ValueError("cut off")
        yield code, at, end
        at = end
