"""`MemoryOffsetStore`: positions in this process; for tests, and for positions that need not outlive it.

Calls do not suspend. Several consumers of one process may share one object; it holds no lock, so one loop uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker.errors import BrokerError, Closed
from broker.spi import TopicPartition
from broker_kafka.offsets import fencing
from broker_kafka.offsets.fencing import Entry
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, StoredOffset, check_positions

__all__ = ["MemoryOffsetStore"]

_NONE = Entry()


class MemoryOffsetStore:
    """Implements `OffsetStore`."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[TopicPartition, Entry]] = {}
        self._closed = False

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        entries = self._entries(group)
        return {partition: entries.get(partition, _NONE).position for partition in partitions}

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        entries = self._entries(owner.group)
        results: dict[TopicPartition, StoredOffset | BrokerError | None] = {}
        for partition in partitions:
            entry = entries.get(partition, _NONE)
            error = fencing.check_claim(partition, entry, owner, restarted)
            if error is None:
                entries[partition] = fencing.claimed(entry, owner)
            results[partition] = error or entry.position
        return results

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        check_positions(positions)
        entries = self._entries(owner.group)
        results: dict[TopicPartition, BrokerError | None] = {}
        for partition, position in positions.items():
            error = fencing.check_commit(partition, entries.get(partition, _NONE), owner, position.offset, rewind)
            if error is None:
                entries[partition] = fencing.committed(position, owner)
            results[partition] = error
        return results

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        check_positions(positions)
        entries = self._entries(group)
        for partition, position in positions.items():
            entries[partition] = fencing.put_back(entries.get(partition, _NONE), position)
        return dict.fromkeys(positions)

    async def stored(self, group: str) -> FetchResults:
        return {
            partition: entry.position
            for partition, entry in sorted(self._entries(group).items())
            if entry.offset is not None
        }

    async def close(self) -> None:
        self._closed = True

    def _entries(self, group: str) -> dict[TopicPartition, Entry]:
        if self._closed:
            raise Closed("The offset store is closed")
        return self._groups.setdefault(group, {})
