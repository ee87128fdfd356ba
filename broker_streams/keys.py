"""What is stored for a key, under which keys: its row, its agenda, and its entries in the index by time. Pure.

| namespace | key | value |
|---|---|---|
| `ROWS` | the application's key, in UTF-8 | the row, as the codec of the table writes it |
| `ROWS` | the reserved prefix, `t`, and the application's key | the agenda: timers, open windows, expiry |
| `ROWS` | the reserved prefix, `r`, and a number | a redo record: rows of the last checkpoint, see `redo` |
| `DUE` | a part of the index, a time in 8 bytes, and the application's key | nothing |

`ROWS` are the rows of the table topic, too. `DUE` is only in the store of a partition, and follows from the agendas.
"""

from __future__ import annotations

from typing import Final

from broker import CHECKPOINT_KEY, InvalidMessage
from broker_streams.agenda import PARTS, Agenda

__all__ = [
    "DUE",
    "REDO",
    "RESERVED",
    "RESERVED_STARTS",
    "ROWS",
    "agenda_key",
    "check",
    "decode",
    "due_changes",
    "due_key",
    "due_range",
    "encode",
    "is_reserved",
    "parse_due",
    "redo_key",
    "user_key",
]

ROWS: Final = "rows"
"""The namespace of rows and agendas."""
DUE: Final = "due"
"""The namespace of the index by time."""

RESERVED: Final = b"\x00anybroker\x00"
"""The beginning of all keys that are not the application's."""

RESERVED_STARTS: Final = (RESERVED, CHECKPOINT_KEY)
"""How reserved keys begin; other keys may begin with the second, too."""

REDO: Final = RESERVED + b"r"
"""The beginning of the keys of redo records."""

_AGENDA: Final = RESERVED + b"t"
_AGENDA_LENGTH: Final = len(_AGENDA)
_ZERO: Final = 1 << 63
"""Times before 1970 are negative, and sort first as well."""
_MOST: Final = (1 << 63) - 1


def encode(key: str) -> bytes:
    """The bytes of a key.

    :raises InvalidMessage: it has lone surrogates other than those of `decode`.
    """
    try:
        return key.encode()
    except UnicodeEncodeError:
        pass
    try:
        return key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidMessage(
            f"key {key!r} cannot be encoded as UTF-8", native=error, advice="Remove the lone surrogate"
        ) from None


def decode(key: bytes) -> str:
    """The key of these bytes; every byte that is not UTF-8 becomes a lone surrogate."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key.decode("utf-8", "surrogateescape")


def is_reserved(key: bytes) -> bool:
    """Whether no application may use the key."""
    return key.startswith(RESERVED) or key == CHECKPOINT_KEY


def check(key: bytes) -> None:
    """:raises InvalidMessage: the key is reserved."""
    if is_reserved(key):
        raise InvalidMessage(f"key {key!r} is reserved for checkpoints and timers", advice="Choose another key")


def agenda_key(key: bytes) -> bytes:
    """The key of the agenda of a key."""
    return _AGENDA + key


def user_key(row: bytes) -> bytes | None:
    """The application's key if the row is an agenda; otherwise None."""
    return row[_AGENDA_LENGTH:] if row.startswith(_AGENDA) else None


def redo_key(number: int) -> bytes:
    """The key of a redo record."""
    return REDO + b"%d" % number


def due_key(part: bytes, time: int, key: bytes) -> bytes:
    """An entry of the index: entries sort by part, time and key."""
    return part + (max(-_ZERO, min(time, _MOST)) + _ZERO).to_bytes(8, "big") + key


def due_range(part: bytes) -> tuple[bytes, bytes]:
    """Where a part of the index begins, and where it ends."""
    return part, bytes([part[0] + 1])


def parse_due(entry: bytes) -> tuple[int, bytes]:
    """The time and the application's key of an entry."""
    return int.from_bytes(entry[1:9], "big") - _ZERO, entry[9:]


def due_changes(key: bytes, old: bytes | None, new: bytes | None) -> dict[bytes, bytes | None]:
    """What changes in the index when the agenda of an application's key changes; None deletes an entry.

    :param old: the bytes of the earlier agenda, or None; `new` likewise.
    :raises DecodeError: the bytes are not those of an agenda.
    """
    changes: dict[bytes, bytes | None] = {}
    for part, was, due in zip(PARTS, Agenda.unpack(old).due(), Agenda.unpack(new).due(), strict=True):
        if was != due:
            if was is not None:
                changes[due_key(part, was, key)] = None
            if due is not None:
                changes[due_key(part, due, key)] = b""
    return changes
