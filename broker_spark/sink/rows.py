"""Arrow batches as messages, with deterministic ids. Pure.

The id of a row is made of what writes it (query and batch, or the write itself), its task, its place in the task and a
hash of its contents. A batch that is run again over the same rows in the same order has the same ids, which is what a
broker deduplicates by; if their order changed, a row gets another id, and comes twice rather than pass for another.
Where the write itself has a name that is kept (`writeId`), the place is that among equal rows of the task, and their
order makes no difference.

An id that a row brings is its own, unless a row before it in the task had that id, as rows have that were made of one
message: then how often it came and the hash are added, lest they pass for copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import pyarrow

from broker.errors import ConfigurationError, InvalidMessage
from broker.outbound import OutboundMessage
from broker_spark.common.options import topic_name
from broker_spark.sink.duplicate_ids import IdCounter

__all__ = ["Outbound", "messages_of"]

_BODIES: Final = ("key", "value")
_MORE: Final = frozenset({"attributes", "partition", "publish_time", "deliver_at"})
"""Columns of a message beside those that most have."""
_NO_MORE: Final[tuple[Any, ...]] = (None,) * len(_MORE)
_NO_LENGTHS: Final = b", None" * len(_MORE)

Outbound = tuple[str, OutboundMessage]
"""A topic and what goes there."""


def messages_of(
    batch: pyarrow.RecordBatch,
    *,
    topic: str | None,
    columns: Sequence[str],
    prefix: str | None,
    first_row: int,
    given: IdCounter,
    seen: IdCounter | None = None,
) -> Iterator[Outbound]:
    """The messages of a batch, in order.

    :param topic: of all rows; None takes their own.
    :param columns: those of the batch that are used.
    :param prefix: what ids begin with; None gives none, but those that the rows bring.
    :param first_row: the number of the batch's first row in its task.
    :param given: counts the ids that rows of the task bring; it is added to.
    :param seen: counts the equal rows of the task, whose ids then do not depend on order; it is added to.
    :raises ConfigurationError: a row has no topic.
    :raises InvalidMessage: a row is no message that could be published.
    """
    count = batch.num_rows
    values = {name: _list(name, batch.column(name), first_row) for name in columns}
    nothing: list[Any] = [None] * count
    topics = values.get("topic", nothing)
    attributes = values.get("attributes", nothing)
    given_ids = values.get("id", nothing)
    given.expect(given_ids)
    partitions = values.get("partition", nothing)
    published = values.get("publish_time", nothing)
    due = values.get("deliver_at", nothing)
    keys, bodies = values.get("key", nothing), values["value"]
    bare = _MORE.isdisjoint(columns)
    names: dict[str | None, str | None] = {None: topic}

    def parts(row: int) -> tuple[str, bytes | None, bytes | None, tuple[Any, ...]]:
        target = names.get(topics[row])
        if target is None:
            target = names[topics[row]] = _topic(topics[row], first_row + row)
        more = _NO_MORE if bare else (attributes[row], partitions[row], published[row], due[row])
        return target, keys[row], bodies[row], more

    hashes: list[str | None] = []
    if prefix and seen is not None:
        hashes = [None if given_ids[row] else _row_hash(16, *parts(row)) for row in range(count)]
        seen.expect(hashes)
    for row in range(count):
        target, key, value, more = parts(row)
        name = given_ids[row]
        if name:
            times = given.times(name)
            if times > 1:
                name = f"{name}-{times}-{_row_hash(16, target, key, value, more)}"
        elif prefix:
            digest = hashes[row] if hashes else None
            if seen is None or digest is None:
                name = f"{prefix}-{first_row + row}-{_row_hash(8, target, key, value, more)}"
            else:
                name = f"{prefix}-{seen.times(digest)}-{digest}"
        try:
            if bare:
                message = OutboundMessage(value, key, None, name or None)
            else:
                pairs, partition, publish_time, deliver_at = more
                message = OutboundMessage(
                    value,
                    key,
                    dict(pairs) if pairs else None,
                    id=name or None,
                    deliver_at=deliver_at,
                    partition=partition,
                    publish_time=publish_time,
                )
        except InvalidMessage as error:
            raise InvalidMessage(f"Row {first_row + row} of this task: {error.message}", advice=error.advice) from error
        yield target, message


def _list(name: str, column: Any, first_row: int) -> list[Any]:
    if name in _BODIES and not pyarrow.types.is_binary(column.type):
        # Text is UTF-8 in Arrow too, so this only looks at it otherwise.
        column = column.cast(pyarrow.binary())
    try:
        return column.to_pylist()
    except (ValueError, OverflowError) as error:
        raise InvalidMessage(
            f"Row {first_row + _first_out_of_range(column)} of this task: column {name} has a time that overflows",
            advice="Write times of the years 1 to 9999 only",
        ) from error


def _first_out_of_range(column: Any) -> int:
    for row, value in enumerate(column):
        try:
            value.as_py()
        except (ValueError, OverflowError):
            return row
    return 0


def _topic(name: str | None, row: int) -> str:
    if name is None:
        raise ConfigurationError(
            f"Row {row} of this task names no topic",
            advice="Fill column topic, or give option topic, which is for all rows",
        )
    return topic_name(name)


def _row_hash(size: int, topic: str, key: bytes | None, value: bytes | None, more: Sequence[Any]) -> str:
    """A hash of a row in so many bytes; all that makes it another message, or one at another time, makes another."""
    target = topic.encode()
    # With the lengths no part can pass for the end of another, nor nothing for what is empty.
    lengths = b"[%d, %a, %a" % (len(target), None if key is None else len(key), None if value is None else len(value))
    if more is _NO_MORE:
        rest, bodies = _NO_LENGTHS, ()
    else:
        bodies = tuple(None if part is None else str(part).encode() for part in more)
        rest = b"".join(b", %a" % (None if body is None else len(body)) for body in bodies)
    parts = (lengths, rest, b"]", target, key or b"", value or b"", *filter(None, bodies))
    return blake2b(b"".join(parts), digest_size=size).hexdigest()
