"""Arrow batches as messages, with deterministic ids. Pure.

A generated id consists of a prefix (query and batch, or the write), the task, the row's place in the task and a hash of
its contents. A batch that runs again over the same rows in the same order has the same ids, by which a broker
deduplicates. If the order changed, a row gets another id: it is duplicated rather than dropped as a duplicate of
another row. With a stored id of the write (`writeId`), the place is counted among equal rows of the task, so that the
order does not matter.

A row keeps the id in its column `id`, unless an earlier row of the task has the same id, as rows made from one message
do: then its count and hash are appended, so that neither row is dropped as a duplicate.
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
"""Columns that few writes have."""
_NO_MORE: Final[tuple[Any, ...]] = (None,) * len(_MORE)
_NO_LENGTHS: Final = b", None" * len(_MORE)

Outbound = tuple[str, OutboundMessage]
"""A topic and its message."""


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

    :param topic: the topic of all rows; None uses column `topic`.
    :param columns: the columns of the batch that are used.
    :param prefix: the beginning of generated ids; None generates none.
    :param first_row: the number of the batch's first row in its task.
    :param given: counts the ids in column `id` of the task; updated.
    :param seen: counts equal rows of the task, so that generated ids do not depend on their order; updated.
    :raises ConfigurationError: a row has no topic.
    :raises InvalidMessage: a row cannot be published.
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
        # Text is UTF-8 in Arrow, so this copies nothing.
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
    """A hash of everything that distinguishes one message from another, including its times.

    :param size: bytes of the hash."""
    target = topic.encode()
    # The lengths separate the parts, and None from empty.
    lengths = b"[%d, %a, %a" % (len(target), None if key is None else len(key), None if value is None else len(value))
    if more is _NO_MORE:
        rest, bodies = _NO_LENGTHS, ()
    else:
        bodies = tuple(None if part is None else str(part).encode() for part in more)
        rest = b"".join(b", %a" % (None if body is None else len(body)) for body in bodies)
    parts = (lengths, rest, b"]", target, key or b"", value or b"", *filter(None, bodies))
    return blake2b(b"".join(parts), digest_size=size).hexdigest()
