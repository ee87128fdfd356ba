"""Codecs of bytes and text."""

from __future__ import annotations

from broker.codecs.errors import not_encodable, present
from broker.errors import DecodeError

__all__ = ["Bytes", "Text"]


class Bytes:
    """Bytes, unchanged."""

    __slots__ = ()

    def encode(self, payload: bytes) -> bytes:
        """:raises InvalidMessage: the payload is not bytes-like."""
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise not_encodable("Bytes", payload)
        return bytes(payload)

    def decode(self, data: bytes | None) -> bytes:
        """:raises DecodeError: the message is a tombstone."""
        return present("Bytes", data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bytes)

    def __hash__(self) -> int:
        return hash(Bytes)

    def __repr__(self) -> str:
        return "Bytes()"


class Text:
    """Text in UTF-8. Invalid UTF-8 raises `DecodeError`; no character is replaced."""

    __slots__ = ()

    def encode(self, payload: str) -> bytes:
        """:raises InvalidMessage: the payload is not a str, or contains a lone surrogate."""
        if not isinstance(payload, str):
            raise not_encodable("Text", payload)
        try:
            return payload.encode()
        except UnicodeEncodeError as error:
            raise not_encodable("Text", payload, error) from error

    def decode(self, data: bytes | None) -> str:
        """:raises DecodeError: the bytes are not UTF-8, or the message is a tombstone."""
        try:
            return present("Text", data).decode()
        except UnicodeDecodeError as error:
            raise DecodeError(f"Text() cannot decode the payload: {error}", native=error) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text)

    def __hash__(self) -> int:
        return hash(Text)

    def __repr__(self) -> str:
        return "Text()"
