"""`RebalanceCommits`: stores the positions of a member whose own commits wait for the end of a rebalance.

In the classic protocol a member joins a rebalance by a request that the coordinator answers when every member has
joined; if one was killed, when its session ends. The client sends the coordinator nothing else meanwhile, and so no
commit. A transaction of another producer passes that request. The coordinator takes its positions from a member of the
present generation only, and that is the member's own until the rebalance ends.

*Concurrency.* One event loop; one write at a time. *Cancellation.* A write that has begun continues. *Failure.* A write
that fails leaves the positions to the client's own commit. Without the right to use the transactional id no other write
is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from uuid import uuid4

from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, NotAuthorized, TopicPartition
from broker.driver import TaskSet, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.codec.group_metadata import parse_group_metadata
from broker_kafka.fenced_writer import FencedWriter, NotWritten, Positions
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["RebalanceCommits"]

_TIMEOUT_MS: Final = 5_000
"""Of a transaction; if its process dies within, the next owner of a partition waits until the brokers abort it."""
_IDLE_SECONDS: Final = 3.0
_STOP_SECONDS: Final = 1.0


class RebalanceCommits:
    """:param metadata: reads the client's `consumer_group_metadata`, which fences the writes."""

    def __init__(self, connection: Connection, group: str, metadata: Callable[[], Awaitable[Any]]) -> None:
        self._connection = connection
        self._group = group
        self._metadata = metadata
        self._writer: FencedWriter | None = None
        self._one_at_a_time = asyncio.Lock()
        self._tasks = TaskSet(
            f"broker-kafka-rebalance-commits-{group}", lambda error: logger.warning("A commit failed: %r", error)
        )
        self._usable = True

    def begin(self, positions: Mapping[TopicPartition, StoredOffset]) -> asyncio.Task[bool]:
        """Store these positions; the task returns whether they are stored."""
        return self._tasks.spawn(self._store(positions))

    async def idle(self) -> None:
        """Wait for writes that were begun, three seconds at most: a late one could undo a newer commit."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=_IDLE_SECONDS)

    async def close(self) -> None:
        """Close the producer; may be called twice."""
        self._usable = False
        await self._drop_writer()

    async def _store(self, positions: Mapping[TopicPartition, StoredOffset]) -> bool:
        async with self._one_at_a_time:
            if not self._usable or self._connection.down:
                return False
            try:
                metadata = await self._metadata()
                generation, member = (0, "") if metadata is None else parse_group_metadata(metadata)[1:]
                if generation < 0 or not member:
                    return False  # not a member: the coordinator would fence nothing
                writer = self._writer or await self._open_writer()
                offsets = [NativePartition(*place, at.offset, metadata=at.metadata) for place, at in positions.items()]
                await writer.write([], Positions(offsets, metadata))
            except NotAuthorized as error:
                self._usable = False
                logger.info("Group %r: commits wait for the end of each rebalance: %s", self._group, error)
                return False
            except BrokerError as error:
                logger.debug("Group %r: a commit waits for the end of the rebalance: %s", self._group, error)
                if not isinstance(error, NotWritten):
                    await self._drop_writer()
                return False
            return True

    async def _open_writer(self) -> FencedWriter:
        # A random id: no writer of another member fences this one, and this one fences no other.
        writer = FencedWriter(self._connection, f"{self._group}.commits-{uuid4().hex}", _TIMEOUT_MS)
        try:
            await writer.start()
        except BaseException:
            await writer.stop(_STOP_SECONDS)
            raise
        self._writer = writer
        return writer

    async def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.stop(_STOP_SECONDS)
