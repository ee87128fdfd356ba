"""Values that a header can carry, and those that it cannot, in base64. Pure."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Final

__all__ = ["ENCODED_ID", "decode_id", "encode_id", "from_base64", "is_plain"]

ENCODED_ID: Final = b"anybroker-64:"
"""What an id in base64 begins with."""


def encode_id(message_id: str) -> bytes:
    """An id as a header's value; base64 under a prefix where a header cannot carry it."""
    value = message_id.encode()
    if is_plain(message_id) and not value.startswith(ENCODED_ID):
        return value
    return ENCODED_ID + b64encode(value)


def decode_id(value: bytes) -> str:
    """What `encode_id` made a value of; what is none of ours as it is."""
    decoded = from_base64(value[len(ENCODED_ID) :]) if value.startswith(ENCODED_ID) else None
    return (decoded or value).decode("utf-8", "replace")


def from_base64(value: bytes) -> bytes | None:
    """The bytes, or None if it is no base64."""
    try:
        return b64decode(value, validate=True)
    except ValueError:
        return None


def is_plain(value: str) -> bool:
    """Whether a header carries it unchanged."""
    return not value or (value.isprintable() and value[0] != " " and value[-1] != " ")
