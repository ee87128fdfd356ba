"""Compacted topics and their writers: the optional protocol `WritesTables`, and the errors that backends share.

A table is a compacted topic. A writer of a partition writes rows and a checkpoint together, and is the only one:
opening a writer fences the earlier one of that partition. The checkpoint is a row too, under `CHECKPOINT_KEY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

from broker.errors import InvalidMessage, TransactionFatal, Unsupported
from broker.outbound import OutboundMessage

__all__ = ["CHECKPOINT_KEY", "TableWriterSpi", "WritesTables", "keyless_message", "not_compacted", "writer_fenced"]

CHECKPOINT_KEY: Final = b"anybroker-checkpoint"
"""The key of the checkpoint of each partition of a table."""


class TableWriterSpi(Protocol):
    """The writer of one partition of a compacted topic. One call at a time; never cancelled."""

    async def write(self, rows: Sequence[OutboundMessage]) -> None:
        """Write rows in order; the last one is the checkpoint. Each has a key, and the partition of this writer.

        All or nothing, where `capabilities.publish.atomic_tables` is set; otherwise the checkpoint is written after all
        rows are stored. No row is stored after one of a later writer.

        :raises TransactionFatal: another writer of the partition was opened.
        :raises TransactionAborted: nothing was written; the call may be repeated.
        :raises OperationTimeout: the outcome is unknown; the call may be repeated.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class WritesTables(Protocol):
    """A backend that writes tables by other means than transactions; `capabilities.publish.tables` is set.

    On a backend with transactions the core writes tables by them, and asks for no protocol.
    """

    async def table_writer(self, topic: str, partition: int) -> TableWriterSpi:
        """Open the writer of a partition, which fences the earlier one. The topic is compacted and has the partition.

        :raises Unsupported: the topic was made without what its tables need.
        """
        ...


def keyless_message(topic: str) -> InvalidMessage:
    """The error of a message without a key for a compacted topic."""
    return InvalidMessage(
        f"The message has no key, and topic {topic!r} is compacted: it keeps the last value of each key",
        advice="Give every message of a compacted topic a key",
    )


def not_compacted(topic: str) -> Unsupported:
    """The error of a topic that exists and is not compacted."""
    return Unsupported(
        f"Topic {topic!r} is not compacted, and cannot be changed into one",
        advice="Create another topic with ensure_topic(compacted=True)",
    )


def writer_fenced(topic: str, partition: int, native: Exception | None = None) -> TransactionFatal:
    """The error of a writer after a later one was opened."""
    return TransactionFatal(
        f"Another writer of partition {partition} of table {topic!r} was opened; this one is fenced, and its write was "
        "refused",
        native=native,
        advice="Stop, or open a new writer and read the table again up to its checkpoint",
    )
