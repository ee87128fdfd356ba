"""Messages in chunks that lie across the place at which a read begins: the client drops the rest of such a one.

Its offset is that of its last chunk, so it belongs to the read. Who begins there sees an entry of which nothing comes,
and begins again as many before as `near` tells, since other messages may lie between the chunks of one. Where the very
first entry is missing, and no message ends in the one before it, its message may be longer and begin `FURTHEST` before.
Used by threads of the connection, but for `begin_id`, which is for the loop; no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any, Final

from broker import TopicPartition
from broker_pulsar.client import MessageId, Reader, has_more, open_reader, pulsar
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate
from broker_pulsar.log_stats import spans_of
from broker_pulsar.message_ids import LARGEST, PER_ENTRY, built_id, offset_of, pack

__all__ = ["FURTHEST", "SILENT", "before", "begin_id", "entry_at", "first_chunk", "has_entries", "near"]

FURTHEST: Final = 4096
SILENT: Final = 1.0
"""Seconds without a message after which what there is is taken for the rest of what the client drops, and looked at
from further before."""
_NEAR_BYTES: Final = 64 << 20
_NEAREST: Final = 32
_WAIT: Final = 100
_FIRST_CHUNK: Final = (7 << 3) | 2
"""The tag, in Pulsar's `MessageIdData`, of the id of the first chunk, of which the client's id does not tell."""


def first_chunk(message_id: Any) -> int:
    """Where a message begins: the offset of its first chunk, or of its entry."""
    numbers: list[int] = []
    number = shift = 0
    for byte in message_id.serialize():
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    # All fields are numbers but this one, which has nothing but numbers in it and comes last.
    tags = numbers[::2]
    if _FIRST_CHUNK not in tags:
        return pack(message_id.ledger_id(), message_id.entry_id(), 0)
    inner = 2 * tags.index(_FIRST_CHUNK) + 2
    fields = dict(zip(numbers[inner::2], numbers[inner + 1 :: 2], strict=False))
    return pack(fields[1 << 3], fields[2 << 3], 0)


def has_entries(stats: Mapping[str, Any], start: int, stop: int) -> bool:
    """Whether there is an entry that begins in this range."""
    return bool(spans_of(stats, entry_at(start), stop))


def entry_at(position: int) -> int:
    """The first entry that begins at a position or behind it."""
    return -(-position // PER_ENTRY) * PER_ENTRY


def near(stats: Mapping[str, Any]) -> int:
    """How many entries of this log `_NEAR_BYTES` are, on average; at least `_NEAREST` and at most `FURTHEST`.

    By bytes, since thousands of small messages may lie between two chunks, and as many chunks would be gigabytes.
    """
    entries, size = int(stats.get("numberOfEntries") or 0), int(stats.get("totalSize") or 0)
    return min(max(_NEAREST, _NEAR_BYTES * entries // max(size, 1)), FURTHEST)


def before(stats: Mapping[str, Any], position: int, count: int) -> int | None:
    """The position of the entry so many before this one, or of the first; None if there is none."""
    found: int | None = None
    for span in reversed(spans_of(stats, 0, position)):
        entries = (span.stop - span.start) // PER_ENTRY
        if entries >= count:
            return span.stop - count * PER_ENTRY
        if entries:
            found, count = span.start, count - entries
    return found


async def begin_id(connection: Connection, place: TopicPartition, position: int) -> MessageId:
    """Where a consumer has to begin to get the message that is at a position, and what follows on it.

    :raises BrokerError: the log cannot be looked at.
    """
    log = (await connection.logs(place.topic))[place.partition]
    stats = await connection.internal_stats(log)
    asked, patience = built_id(place.partition, position), connection.settings.request_timeout
    if not has_entries(stats, position, LARGEST):
        return asked

    def look(begin: int, silence: float) -> tuple[int, bool]:
        reader = open_reader(connection.client, log, built_id(place.partition, begin))
        try:
            return _look(reader, entry_at(position), before(stats, position, 1), patience, silence)
        finally:
            reader.close()

    def find() -> MessageId:
        # Too early an end of this one has it look again, an early end of the others would lose a message.
        head, _ = look(position, min(SILENT, patience))
        for count in (near(stats), FURTHEST):
            begin = before(stats, position, count)
            if begin is None or not has_entries(stats, position, head):
                break
            head, is_known = look(begin, patience)
            if is_known:
                break
        return built_id(place.partition, head) if head < entry_at(position) else asked

    try:
        return await connection.call(find)
    except Exception as error:
        raise translate(error, f"Reading {log.url!r}") from error


def _look(reader: Reader, edge: int, last: int | None, patience: float, silence: float) -> tuple[int, bool]:
    """Where the first message at or behind an edge begins, or the largest position if none comes; and whether another
    one ends in the entry before the edge.

    :param silence: seconds without a message after which there is taken to be no more.
    """
    is_known = False
    deadline = monotonic() + silence
    while monotonic() < deadline:
        try:
            message_id = reader.read_next(_WAIT).message_id()
        except pulsar.Timeout:
            if not has_more(reader, patience):
                break
            continue
        deadline = monotonic() + silence
        offset = offset_of(message_id)
        if offset >= edge:
            return first_chunk(message_id), is_known
        is_known = is_known or (last is not None and last <= offset < last + PER_ENTRY)
    return LARGEST, is_known
