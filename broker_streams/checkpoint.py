"""`Checkpoint`: how far a partition of a group has come, and the bytes of it that are stored with the rows. Pure."""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec

from broker import DecodeError

__all__ = ["Checkpoint", "read_checkpoint"]

_FORMAT: Final = 1
_PENDING: Final = 2
"""The format of a checkpoint with a token: versions that do not know tokens must not take it for a whole one."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a partition needs to go on, besides its rows.

    :ivar positions: by topic the next offset to handle.
    :ivar stream_time: the event time of the partition, in milliseconds since 1970.
    :ivar senders: by sender the place of the last message of the loop that was handled: an offset, and a number among
        the messages that the sender made of it.
    :ivar fired: the place of what timers and windows published last: event time, and a number within it.
    :ivar closed: by edge the end of the last window that closed because the partition was idle.
    :ivar epoch: of the owner that wrote it; each owner of the partition has a higher one.
    :ivar number: of the checkpoint, counted from the first of the partition.
    :ivar version: of the rows: `Persist(version=)`.
    :ivar fingerprint: of the group, as `group.fingerprint()`.
    :ivar identities: by topic, the table included, what its broker calls it; a topic that was recreated has another.
    :ivar redo: the token of the redo records that have its rows, while the table may lack some; otherwise empty.
    """

    positions: dict[str, int] = {}
    stream_time: int = 0
    senders: dict[str, tuple[int, int]] = {}
    fired: tuple[int, int] = (-1, 0)
    closed: dict[str, int] = {}
    epoch: int = 0
    number: int = 0
    version: int = 1
    fingerprint: dict[str, Any] = {}
    format: int = _FORMAT
    redo: str = ""
    identities: dict[str, str] = {}

    def pack(self) -> bytes:
        """The bytes of the checkpoint."""
        return _pack(self)

    def pending(self, token: str) -> Self:
        """The same checkpoint while the table may lack rows, which the redo records with this token have."""
        return msgspec.structs.replace(self, redo=token, format=_PENDING)

    def settled(self) -> Self:
        """The same checkpoint once the table has all rows."""
        return msgspec.structs.replace(self, redo="", format=_FORMAT)

    @classmethod
    def unpack(cls, data: bytes) -> Checkpoint:
        """:raises DecodeError: the bytes are not those of a checkpoint, or of a newer format."""
        try:
            found = _unpack(data)
        except (ValueError, RecursionError) as error:
            raise DecodeError(
                f"The checkpoint cannot be read: {error}",
                native=error,
                advice="`broker streams reset GROUP --table` deletes the rows and reads the inputs from the beginning; "
                "if another program writes the topic, give the group a table of its own (table=)",
            ) from error
        if found.format > _PENDING:
            raise DecodeError(
                f"The checkpoint has format {found.format}, and this version of the package reads up to {_PENDING}",
                advice="Upgrade the package: a newer version of it wrote the checkpoint",
            )
        return found


def read_checkpoint(packed: bytes, table: str, partition: int) -> Checkpoint:
    """The checkpoint of a partition of a table.

    :raises DecodeError: the bytes are not those of a checkpoint, or of a newer format; the error names the place.
    """
    try:
        return Checkpoint.unpack(packed)
    except DecodeError as error:
        error.message = f"Partition {partition} of table {table!r}: {error.message}"
        raise


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Checkpoint).decode
