"""Pulsar's message ids as integers that sort the same; pure functions, safe from any thread.

An offset is ledger, entry and place in the batch, packed as 31, 20 and 12 bits. It only grows within a partition and is
not dense; `offset + 1` is a legal position. What does not fit is refused: an offset never wraps.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from broker import BackendError, OffsetOutOfRange
from broker_pulsar.client import MessageId, pulsar

__all__ = ["LARGEST", "PER_ENTRY", "PER_LEDGER", "Place", "after", "built_id", "offset_of", "pack", "unpack"]

_BATCH_BITS: Final = 12
_ENTRY_BITS: Final = 20
_LEDGER_BITS: Final = 31
_BATCH_SIZE: Final = 6
"""The field of Pulsar's `MessageIdData` that the client's id does not show."""
PER_ENTRY: Final = 1 << _BATCH_BITS
"""Positions that one entry, which is one batch, takes."""
PER_LEDGER: Final = PER_ENTRY << _ENTRY_BITS
LARGEST: Final = (1 << (_BATCH_BITS + _ENTRY_BITS + _LEDGER_BITS)) - 1


class Place(NamedTuple):
    """An offset taken apart; `slot` is the place in the batch plus one, or 0 for a message on its own."""

    ledger: int
    entry: int
    slot: int


def pack(ledger: int, entry: int, slot: int) -> int:
    """The offset of a place.

    :raises BackendError: one of the three does not fit.
    """
    if ledger >> _LEDGER_BITS or entry >> _ENTRY_BITS or slot >> _BATCH_BITS:
        raise BackendError(
            f"The message id {ledger}:{entry}:{slot - 1} does not fit an offset, which has {_LEDGER_BITS} bits for the "
            f"ledger, {_ENTRY_BITS} for the entry and {_BATCH_BITS} for the place in the batch",
            advice="Lower managedLedgerMaxEntriesPerLedger of the broker, or batching_max_messages of the producer",
        )
    return (((ledger << _ENTRY_BITS) | entry) << _BATCH_BITS) | slot


def unpack(offset: int) -> Place:
    """The place of an offset.

    :raises OffsetOutOfRange: it is none.
    """
    if not 0 <= offset <= LARGEST:
        raise OffsetOutOfRange(f"Offset {offset} is no position of a Pulsar topic, which lie between 0 and {LARGEST}")
    entry = offset >> _BATCH_BITS
    return Place(entry >> _ENTRY_BITS, entry & ((1 << _ENTRY_BITS) - 1), offset & (PER_ENTRY - 1))


def offset_of(message_id: Any) -> int:
    """The offset of a message, from the client's id of it."""
    return pack(message_id.ledger_id(), message_id.entry_id(), message_id.batch_index() + 1)


def after(message_id: Any) -> int:
    """Where what follows a message begins: in its batch, or with the next entry."""
    offset = offset_of(message_id)
    _, _, slot = unpack(offset)
    if slot and slot < _batch_size(message_id.serialize()):
        return offset + 1
    return (offset // PER_ENTRY + 1) * PER_ENTRY


def _batch_size(serialized: bytes) -> int:
    """The size of its batch; 0 if the id does not tell. Its fields are whole numbers, all of them."""
    numbers: list[int] = []
    number = shift = 0
    for byte in serialized:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    return {tag >> 3: value for tag, value in zip(numbers[::2], numbers[1::2], strict=False)}.get(_BATCH_SIZE, 0)


def built_id(partition: int, offset: int) -> MessageId:
    """The client's id of a position, for seeks and readers; it need not exist."""
    ledger, entry, slot = unpack(offset)
    return pulsar.MessageId(partition, ledger, entry, slot - 1)
