"""Variants that compact wrongly, or write tables wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

from broker.bus import Bus
from broker.driver.contract import TopicInfo
from broker.errors import BrokerError
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.testing.faults import Wrapped
from broker_inmem.entries import Entry
from broker_inmem.partition_log import PartitionLog
from tests.broken_variants.breaking import BrokenAdmin, BrokenBackend, BrokenHarness, BrokenTarget
from tests.broken_variants.registry import breaks


@breaks("compaction.is-chosen-at-creation")
class AcceptsAnyTopicAsCompacted(BrokenAdmin):
    """`ensure_topic(compacted=True)` accepts a topic that is not compacted, and says that it is."""

    async def ensure_compacted_topic(
        self, name: str, *, partitions: int | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        if name in await self.inner.list_topics():
            info = await self.inner.ensure_topic(name, partitions=partitions, retention=None, options=options)
            return replace(info, compacted=True)
        return await self.inner.ensure_compacted_topic(name, partitions=partitions, options=options)


@breaks("compaction.keys-are-needed")
class TakesNoKeyForTheEmptyOne(BrokenTarget):
    """A message without a key is stored under the empty key."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return message.replace(key=message.key or b"")


@breaks("compaction.keys-are-needed")
class CutsLongKeys(BrokenTarget):
    """Keys that differ only after a hundred bytes are one key."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return message.replace(key=message.key and message.key[:100])


class _Compacts(BrokenHarness):
    """Compacts by `compacted`."""

    async def compact(self, topic: str) -> None:
        with self.broker.lock:
            for log in self.broker.topics[topic].partitions:
                self.change(log)

    def change(self, log: PartitionLog) -> None:
        raise NotImplementedError


@breaks("compaction.last-values-stay")
class KeepsTheFirstValue(_Compacts):
    """Compaction keeps the first value of each key instead of the last."""

    def change(self, log: PartitionLog) -> None:
        first: dict[bytes | None, Entry] = {}
        for entry in log.entries:
            first.setdefault(entry.key, entry)
        log.entries = sorted(first.values(), key=lambda entry: entry.offset)


@breaks("compaction.deleted-keys-go")
class ForgetsTombstonesFirst(_Compacts):
    """Compaction removes tombstones before it looks for the last values, so deleted values return."""

    def change(self, log: PartitionLog) -> None:
        log.entries = [entry for entry in log.entries if entry.data is not None]
        log.compact(0.0)


@breaks("compaction.positions-stay-valid", healthy="compaction.deleted-keys-go")
class RenumbersRecords(_Compacts):
    """Compaction closes the gaps between offsets."""

    def change(self, log: PartitionLog) -> None:
        log.compact(float("inf"))
        for offset, entry in enumerate(log.entries):
            entry.offset = offset
        log.next = len(log.entries)


@breaks("compaction.readers-miss-nothing", healthy="compaction.last-values-stay")
class RemovesAllButTheNewest(_Compacts):
    """Compaction keeps only the newest record of a log that it has compacted before."""

    def __init__(self) -> None:
        super().__init__()
        self.compacted: list[PartitionLog] = []

    def change(self, log: PartitionLog) -> None:
        log.compact(float("inf"))
        if log in self.compacted:
            del log.entries[:-1]
        self.compacted.append(log)


class _WithoutTransaction(Wrapped):
    """Publishes rows at once, one after the other."""

    async def publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        target = self.backend.inner.publish_target(topic)
        outcomes: list[Receipt | BrokerError | None] = []
        for message in messages:
            outcomes += await target.publish([message])
            await asyncio.sleep(0.001)
        return outcomes

    backend: BrokenBackend


@breaks("tables.no-half-write-and-no-zombie")
class WritesRowByRow(BrokenBackend):
    """A write to a table stores one row after the other, without a transaction."""

    async def transaction(self, transactional_id: str) -> Any:
        transaction = _WithoutTransaction(await self.inner.transaction(transactional_id))
        transaction.backend = self
        return transaction


@breaks("tables.old-writer-is-fenced", healthy="tables.rows-and-checkpoint")
class FencesNoWriter(BrokenBackend):
    """Each writer of a table has an id of its own, so that none fences another."""

    async def transaction(self, transactional_id: str) -> Any:
        return await self.inner.transaction(f"{transactional_id}-{uuid4().hex}")


class _CheckpointFirst(Wrapped):
    async def publish(self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True) -> Any:
        return await self.inner.publish(topic, [messages[-1], *messages[:-1]], receipts=receipts)


@breaks("tables.rows-and-checkpoint")
class WritesTheCheckpointFirst(BrokenBackend):
    """The checkpoint of a write to a table precedes its rows."""

    transaction_class = _CheckpointFirst


@breaks("tables.bad-writes-are-refused", healthy="tables.rows-and-checkpoint")
class WritesAnyTopic(BrokenAdmin):
    """Every topic is described as compacted."""

    async def describe_topic(self, name: str) -> TopicInfo:
        return replace(await self.inner.describe_topic(name), compacted=True)


@breaks("tables.cancelled-write-is-whole")
class CancelsWritesHalfWay(Bus):
    """A cancelled write to a table leaves the rows that it had written."""

    def table_writer(self, topic: str, partition: int) -> Any:
        return self._write_row_by_row(super().table_writer(topic, partition))

    @asynccontextmanager
    async def _write_row_by_row(self, opened: Any) -> AsyncGenerator[Any]:
        async with opened as table:
            yield _RowByRow(table)


class _RowByRow(Wrapped):
    async def write(self, rows: Sequence[OutboundMessage], *, checkpoint: bytes) -> None:
        for count in range(1, len(rows) + 1):
            await self.inner.write(rows[:count], checkpoint=checkpoint)
        await self.inner.write(rows, checkpoint=checkpoint)
