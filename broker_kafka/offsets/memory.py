"""`MemoryOffsetStore`: positions in this process; for tests, and for positions that need not outlive it.

Calls do not suspend. Several consumers of one event loop may share a store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from broker import BrokerError, Closed, TopicPartition
from broker_kafka.offsets import fencing
from broker_kafka.offsets.arguments import check_claim, check_commit, check_fetch, check_group, check_reset
from broker_kafka.offsets.fencing import Entry
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, StoredOffset

__all__ = ["MemoryOffsetStore"]

_EMPTY = Entry()


class MemoryOffsetStore:
    """Implements `OffsetStore`."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, dict[TopicPartition, Entry]] = defaultdict(dict)
        self._closed = False

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        check_fetch(group, partitions)
        entries = self._entries(group)
        return {partition: entries.get(partition, _EMPTY).position for partition in partitions}

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        check_claim(owner, partitions)
        entries = self._entries(owner.group)
        results: dict[TopicPartition, StoredOffset | BrokerError | None] = {}
        for partition in partitions:
            entry = entries.get(partition, _EMPTY)
            error = fencing.check_claim(partition, entry, owner, restarted)
            if error is None:
                entries[partition] = entry._replace(generation=owner.generation, member=owner.member)
            results[partition] = error or entry.position
        return results

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        check_commit(owner, positions)
        entries = self._entries(owner.group)
        results: dict[TopicPartition, BrokerError | None] = {}
        for partition, position in positions.items():
            entry = entries.get(partition, _EMPTY)
            error = fencing.check_commit(partition, entry, owner, position.offset, rewind)
            if error is None:
                entries[partition] = Entry(
                    position.offset, position.metadata, owner.generation, owner.member, position.topic_id
                )
            results[partition] = error
        return results

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        check_reset(group, positions)
        entries = self._entries(group)
        for partition, position in positions.items():
            # Without a member: the owner is fenced until its next generation.
            generation = entries.get(partition, _EMPTY).generation
            entries[partition] = Entry(position.offset, position.metadata, generation, topic_id=position.topic_id)
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

    def _entries(self, group: str) -> dict[TopicPartition, Entry]:
        if self._closed:
            raise Closed("The offset store is closed")
        return self._groups[group]
