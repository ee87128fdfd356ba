"""`IdentifiedStore`: keeps with each position which topic it is of, and takes none for one of another topic.

A store outside Kafka outlives a topic that is deleted, and its position would skip as much of one that is made under
the same name. Wraps the store of one member, and is used as that is. A store that keeps no `topic_id`, or a position
that was stored without one, is taken at its word.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from broker import BrokerError, TopicPartition
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, OffsetStore, StoredOffset

__all__ = ["IdentifiedStore"]


class IdentifiedStore:
    """Implements `OffsetStore`.

    :param identity: the id of the topic that bears this name now, as far as known.
    :param moved: is given a partition and a position of a topic that is gone; where reading begins instead.
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
        """:raises OffsetOutOfRange: a position is of a topic that is gone, and `moved` refuses to go on."""
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
