"""Writers of tables without `await`: `with bus.table_writer(topic, partition) as table:`, from any thread.

An interrupted write is carried out all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from broker import protocols
from broker.errors import Closed
from broker.outbound import OutboundMessage
from broker.threads.portal import Portal

__all__ = ["TableWriter"]


class TableWriter:
    """Writes one partition of a table, within its `with` block."""

    def __init__(self, writer: AbstractAsyncContextManager[protocols.TableWriter], portal: Portal) -> None:
        self._context = writer
        self._writer: protocols.TableWriter | None = None
        self._portal = portal

    def __enter__(self) -> Self:
        self._writer = self._portal.call(self._context.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._writer = None
        return self._portal.call(self._context.__aexit__, kind, error, trace)

    def write(self, rows: Sequence[OutboundMessage], *, checkpoint: bytes) -> None:
        """Write rows, and with them the checkpoint, which replaces the former one of the partition.

        :raises InvalidMessage, MessageTooLarge: a row or the checkpoint is invalid, or there are too many rows; nothing
            was written.
        :raises TransactionAborted: nothing was written; repeat the write.
        :raises TransactionFatal: another writer of the partition was opened, and this one can write no more.
        :raises OperationTimeout: the outcome is unknown; repeat the write.
        """
        if self._writer is None:
            raise Closed("The table writer is not open", advice="Use it as `with bus.table_writer(...) as table:`")
        self._portal.call(self._writer.write, rows, checkpoint=checkpoint)
