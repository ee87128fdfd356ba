"""`MemoryOffsetStore`: positions in this process; for tests, and for positions that need not outlive it.

Calls do not suspend. Several consumers of one event loop may share a store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker import Closed, TopicPartition
from broker_kafka.offsets import fencing
from broker_kafka.offsets.arguments import check_claim, check_commit, check_fetch, check_group, check_reset
from broker_kafka.offsets.fencing import Entries
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, StoredOffset

__all__ = ["MemoryOffsetStore"]


class MemoryOffsetStore:
    """Implements `OffsetStore`."""

    def __init__(self) -> None:
        self._groups: dict[str, Entries] = {}
        self._closed = False

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        check_fetch(group, partitions)
        entries = self._entries(group)
        return {partition: fencing.position_of(entries, partition) for partition in partitions}

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        check_claim(owner, partitions)
        return fencing.claim(self._entries(owner.group), owner, partitions, restarted)

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        check_commit(owner, positions)
        return fencing.commit(self._entries(owner.group), owner, positions, rewind)

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        check_reset(group, positions)
        fencing.put_back(self._entries(group), positions)
        return dict.fromkeys(positions)

    async def stored(self, group: str) -> FetchResults:
        check_group(group)
        return {
            partition: entry.position
            for partition, entry in sorted(self._entries(group).items())
            if entry.offset is not None
        }

    async def close(self) -> None:
        self._closed = True

    def _entries(self, group: str) -> Entries:
        if self._closed:
            raise Closed("The offset store is closed")
        return self._groups.setdefault(group, {})
