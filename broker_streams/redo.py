"""Rows of a checkpoint as records that come before it, so that the checkpoint row alone decides. Pure.

A broker that writes rows in order, but not at once, leaves some of them out when the writer crashes. So all of them are
packed into *redo records* first. Then the checkpoint row is written, which names these records by a token: from now on
the checkpoint counts. The rows follow, and the checkpoint row again, without the token. Who finds a checkpoint row with
a token writes its rows once more.

Redo records of later checkpoints replace earlier ones. They are first written when the rows of the earlier checkpoint
are in the table, so redo records that were replaced are not needed any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from broker import DecodeError
from broker_streams import keys
from broker_streams.stores.store import Store

__all__ = ["pack", "redo_rows", "stored_redo"]

_ROW_BYTES: Final = 16
"""The most that a row takes beside its key and value."""


class _Redo(msgspec.Struct, array_like=True, frozen=True):
    token: str
    rows: dict[bytes, bytes | None]


def pack(rows: Mapping[bytes, bytes | None], token: str, most_bytes: int) -> dict[bytes, bytes]:
    """The redo records of these rows, by key.

    :param most_bytes: of a record. A row that is larger has a record of its own.
    """
    records: dict[bytes, bytes] = {}
    part: dict[bytes, bytes | None] = {}
    size = 0
    for key, data in rows.items():
        row = len(key) + len(data or b"") + _ROW_BYTES
        if part and size + row > most_bytes:
            records[keys.redo_key(len(records))] = _pack(_Redo(token, part))
            part, size = {}, 0
        part[key] = data
        size += row
    if part:
        records[keys.redo_key(len(records))] = _pack(_Redo(token, part))
    return records


def redo_rows(records: Iterable[bytes], token: str) -> dict[bytes, bytes | None]:
    """The rows of the redo records that have this token.

    :raises DecodeError: the bytes are not those of a redo record.
    """
    rows: dict[bytes, bytes | None] = {}
    for data in records:
        try:
            found = _unpack(data)
        except (ValueError, RecursionError) as error:
            raise DecodeError(
                f"A redo record cannot be read: {error}",
                native=error,
                advice="Another program wrote it; give the group a table topic of its own (table=)",
            ) from error
        if found.token == token:
            rows.update(found.rows)
    return rows


def stored_redo(store: Store, token: str) -> dict[bytes, bytes | None]:
    """The same of the records that the store of a partition has."""
    return redo_rows([data for _, data in store.items(keys.ROWS, prefix=keys.REDO)], token)


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(_Redo).decode
