"""Reads that begin within a chunked message, the rest of which the client would drop.

The offset of a chunked message is that of its last chunk, so it belongs to a read that begins between its chunks. Such
a read finds an entry without a message, and starts again `search_depth` entries earlier, because other messages may lie
between the chunks. If the very first entry is missing and no message ends in the entry before, the message may be
longer: the read starts `MAX_DEPTH` entries earlier. Called in threads of the connection, except `start_id`. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final

from broker import TopicPartition
from broker.driver import reads_answer
from broker_pulsar.client import MessageId, Reader, has_more, open_reader, pulsar
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate
from broker_pulsar.log_stats import entry_spans
from broker_pulsar.message_ids import LARGEST, PER_ENTRY, first_chunk, make_id, offset_of

__all__ = [
    "MAX_DEPTH",
    "SILENCE_SECONDS",
    "entries_before",
    "entry_at",
    "has_entries",
    "search_depth",
    "start_id",
]

MAX_DEPTH: Final = 4096
SILENCE_SECONDS: Final = 1.0
"""Seconds without a message after which the read restarts further back: the client may be dropping chunks."""
_NEAR_BYTES: Final = 64 << 20
_NEAREST: Final = 32
_WAIT: Final = 100


def has_entries(stats: Mapping[str, Any], start: int, stop: int) -> bool:
    """Whether an entry starts in this range."""
    return bool(entry_spans(stats, entry_at(start), stop))


def entry_at(position: int) -> int:
    """The first entry that starts at or after a position."""
    return -(-position // PER_ENTRY) * PER_ENTRY


@reads_answer("The statistics of a log")
def search_depth(stats: Mapping[str, Any]) -> int:
    """The average number of entries in `_NEAR_BYTES` of this log; at least `_NEAREST` and at most `MAX_DEPTH`.

    By bytes, because thousands of small messages may lie between two chunks, and as many chunks would be gigabytes.
    """
    entries, size = int(stats.get("numberOfEntries") or 0), int(stats.get("totalSize") or 0)
    return min(max(_NEAREST, _NEAR_BYTES * entries // max(size, 1)), MAX_DEPTH)


def entries_before(stats: Mapping[str, Any], position: int, count: int) -> int | None:
    """The position `count` entries before this one, or of the first entry; None if there is none."""
    found: int | None = None
    for span in reversed(entry_spans(stats, 0, position)):
        entries = (span.stop - span.start) // PER_ENTRY
        if entries >= count:
            return span.stop - count * PER_ENTRY
        if entries:
            found, count = span.start, count - entries
    return found


async def start_id(connection: Connection, topic_partition: TopicPartition, position: int) -> MessageId:
    """The message id at which a consumer must start to receive the message at a position and all later ones.

    :raises BrokerError: the log cannot be read.
    """
    log = await connection.log(*topic_partition)
    stats = await connection.internal_stats(log)
    requested, patience = make_id(topic_partition.partition, position), connection.settings.request_timeout
    if not has_entries(stats, position, LARGEST):
        return requested

    def look(begin: int, silence: float) -> tuple[int, bool]:
        reader = open_reader(connection.client, log, make_id(topic_partition.partition, begin))
        try:
            last = entries_before(stats, position, 1)
            return _find_start(reader, entry_at(position), last, patience, silence, connection.is_open)
        finally:
            reader.close()

    def find() -> MessageId:
        # If this one ends too early it is repeated; if one of the others did, a message would be lost.
        head, _ = look(position, min(SILENCE_SECONDS, patience))
        for count in (search_depth(stats), MAX_DEPTH):
            begin = entries_before(stats, position, count)
            if begin is None or not has_entries(stats, position, head):
                break
            head, boundary_seen = look(begin, patience)
            if boundary_seen:
                break
        return make_id(topic_partition.partition, head) if head < entry_at(position) else requested

    try:
        return await connection.call(find)
    except Exception as error:
        raise translate(error, f"Reading {log.url!r}") from error


def _find_start(
    reader: Reader, edge: int, last: int | None, patience: float, silence: float, is_open: Callable[[], bool]
) -> tuple[int, bool]:
    """The start of the first message at or after an edge, or the largest position if none arrives; and whether another
    one ends in the entry before the edge.

    :param silence: seconds without a message after which none is expected.
    """
    boundary_seen = False
    deadline = monotonic() + silence
    while monotonic() < deadline:
        try:
            message_id = reader.read_next(_WAIT).message_id()
        except pulsar.Timeout:
            if not has_more(reader, patience, is_open):
                break
            continue
        deadline = monotonic() + silence
        offset = offset_of(message_id)
        if offset >= edge:
            return first_chunk(message_id), boundary_seen
        boundary_seen = boundary_seen or (last is not None and last <= offset < last + PER_ENTRY)
    return LARGEST, boundary_seen
