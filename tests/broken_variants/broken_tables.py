"""Variants that compact wrongly, or write tables wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from broker.driver.contract import TopicInfo
from broker.outbound import OutboundMessage
from broker_inmem.entries import Entry
from broker_inmem.partition_log import PartitionLog
from tests.broken_variants.breaking import BrokenAdmin, BrokenHarness, BrokenTarget
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
class NumbersRecordsAnew(_Compacts):
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
