"""Pulsar's message ids as integers that sort the same. Pure functions, safe from any thread.

An offset packs ledger, entry and batch index into 31, 20 and 12 bits. Offsets only grow within a partition and are not
dense; `offset + 1` is a valid position. A value that does not fit is refused: an offset never wraps.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from broker import BackendError, OffsetOutOfRange
from broker_pulsar.client import MessageId, pulsar

__all__ = [
    "LARGEST",
    "PER_ENTRY",
    "PER_LEDGER",
    "MessageIdParts",
    "first_chunk",
    "is_beyond",
    "make_id",
    "next_position",
    "offset_of",
    "pack",
    "unpack",
]

_BATCH_BITS: Final = 12
_ENTRY_BITS: Final = 20
_LEDGER_BITS: Final = 31
_BATCH_SIZE: Final = 6 << 3
_FIRST_CHUNK: Final = (7 << 3) | 2
"""Tags of the batch size and of the first chunk's id in `MessageIdData`, which the client's id does not expose."""
PER_ENTRY: Final = 1 << _BATCH_BITS
"""Positions per entry; one entry is one batch."""
PER_LEDGER: Final = PER_ENTRY << _ENTRY_BITS
LARGEST: Final = (1 << (_BATCH_BITS + _ENTRY_BITS + _LEDGER_BITS)) - 1


class MessageIdParts(NamedTuple):
    """The parts of an offset; `slot` is the batch index plus one, or 0 for an unbatched message."""

    ledger: int
    entry: int
    slot: int


def pack(ledger: int, entry: int, slot: int) -> int:
    """Combine the parts of an offset.

    :raises BackendError: one of them does not fit.
    """
    if ledger >> _LEDGER_BITS or entry >> _ENTRY_BITS or slot >> _BATCH_BITS:
        raise BackendError(
            f"The message id {ledger}:{entry}:{slot - 1} does not fit into an offset: {_LEDGER_BITS} bits for the "
            f"ledger, {_ENTRY_BITS} for the entry and {_BATCH_BITS} for the batch index",
            advice="Lower managedLedgerMaxEntriesPerLedger of the broker, or batching_max_messages of the producer",
        )
    return (((ledger << _ENTRY_BITS) | entry) << _BATCH_BITS) | slot


def unpack(offset: int) -> MessageIdParts:
    """The parts of an offset.

    :raises OffsetOutOfRange: it is not a valid offset.
    """
    if not 0 <= offset <= LARGEST:
        raise OffsetOutOfRange(f"Offset {offset} is not a position of a Pulsar topic; positions are 0 to {LARGEST}")
    entry = offset >> _BATCH_BITS
    return MessageIdParts(entry >> _ENTRY_BITS, entry & ((1 << _ENTRY_BITS) - 1), offset & (PER_ENTRY - 1))


def offset_of(message_id: Any) -> int:
    """The offset of the client's message id."""
    return pack(message_id.ledger_id(), message_id.entry_id(), message_id.batch_index() + 1)


def next_position(message_id: Any) -> int:
    """The position after a message: in its batch, or the next entry."""
    offset = offset_of(message_id)
    _, _, slot = unpack(offset)
    if slot:
        numbers = _varints(message_id.serialize())
        if slot < dict(zip(numbers[::2], numbers[1::2], strict=False)).get(_BATCH_SIZE, 0):
            return offset + 1
    return (offset // PER_ENTRY + 1) * PER_ENTRY


def is_beyond(position: int, end: int) -> bool:
    """Whether a position is beyond the end of a log.

    :param end: the position after the last message. The start of the next entry is the same place: there is the cursor
        of a group that has read everything.
    """
    return position > end and position != (end // PER_ENTRY + 1) * PER_ENTRY


def first_chunk(message_id: Any) -> int:
    """The offset of a message's first chunk, or of its entry."""
    numbers = _varints(message_id.serialize())
    tags = numbers[::2]
    if _FIRST_CHUNK not in tags:
        return pack(message_id.ledger_id(), message_id.entry_id(), 0)
    inner = 2 * tags.index(_FIRST_CHUNK) + 2
    fields = dict(zip(numbers[inner::2], numbers[inner + 1 :: 2], strict=False))
    return pack(fields[1 << 3], fields[2 << 3], 0)


def _varints(serialized: bytes) -> list[int]:
    """The tags and values of a serialized id: all are varints, also those inside of the first chunk's id."""
    numbers: list[int] = []
    number = shift = 0
    for byte in serialized:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    return numbers


def make_id(partition: int, offset: int) -> MessageId:
    """A message id for a position, for seeks and readers; the message need not exist."""
    ledger, entry, slot = unpack(offset)
    return pulsar.MessageId(partition, ledger, entry, slot - 1)
