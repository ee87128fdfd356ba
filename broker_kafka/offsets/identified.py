"""`IdentifiedStore`: stores the topic id with each position, and detects positions of a deleted topic.

A store outside Kafka keeps the positions of a deleted topic, which would skip records of a topic that is recreated
under the same name. Wraps the store of one member. A position without a topic id is trusted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from broker import BrokerError, TopicPartition
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, OffsetStore, StoredOffset

__all__ = ["IdentifiedStore"]


class IdentifiedStore:
    """Implements `OffsetStore`.

    :param identity: returns the present id of a topic; empty if it is not known.
    :param moved: called with a position of a deleted topic; returns the position to begin at instead.
    """

    def __init__(
        self,
        store: OffsetStore,
        identity: Callable[[str], str],
        moved: Callable[[TopicPartition, int], Awaitable[int]],
    ) -> None:
        self._store = store
        self._identity = identity
        self._moved = moved

    def identified(self, positions: Mapping[TopicPartition, StoredOffset]) -> dict[TopicPartition, StoredOffset]:
        """These with the ids of their topics."""
        return {
            partition: position._replace(topic_id=self._identity(partition.topic))
            for partition, position in positions.items()
        }

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        return _bare(await self._store.fetch(group, partitions))

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        """:raises OffsetOutOfRange: a position is of a deleted topic, and `offset_reset` is "error"."""
        found = await self._store.claim(owner, partitions, restarted=restarted)
        moved: dict[TopicPartition, StoredOffset] = {}
        for partition, position in found.items():
            if isinstance(position, StoredOffset) and position.topic_id:
                now = self._identity(partition.topic)
                if now and now != position.topic_id:
                    moved[partition] = StoredOffset(await self._moved(partition, position.offset))
        if not moved:
            return _bare(found)
        results = await self.commit(owner, moved, rewind=True)
        return {**_bare(found), **{place: results.get(place) or position for place, position in moved.items()}}

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        return await self._store.commit(owner, self.identified(positions), rewind=rewind)

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        return await self._store.reset(group, self.identified(positions))

    async def stored(self, group: str) -> FetchResults:
        return _bare(await self._store.stored(group))

    async def close(self) -> None:
        await self._store.close()


def _bare(found: FetchResults) -> dict[TopicPartition, StoredOffset | BrokerError | None]:
    return {
        place: each._replace(topic_id="") if isinstance(each, StoredOffset) else each for place, each in found.items()
    }
