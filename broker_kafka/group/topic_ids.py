"""Detects that a topic was deleted and recreated under its name, so that its offsets mean other records.

`TopicIds` detects it while a member reads the topic: the client of a classic group reads the new topic from the old
position and reports nothing. It requests topic ids from the brokers before a claim, before a release, and a few seconds
after a fetch or a commit to a missing topic; it sends nothing else. `TopicIdStore` detects it between two members: a
store outside Kafka keeps the positions of a deleted topic, which would skip records of the new one.

*Concurrency.* Used on the loop, one check at a time. *Failure.* A check without an answer within a second is logged,
and repeated with the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import TopicCollection

from broker import BrokerError, TopicNotFound, TopicPartition
from broker.driver import TaskSet, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of
from broker_kafka.cluster.requests import plain_str
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, OffsetStore, StoredOffset, failures

__all__ = ["TopicIdStore", "TopicIds"]


_CHECK_AFTER: Final = 5.0
_TIMEOUT: Final = 1.0


class TopicIds:
    """The ids of the topics of one member.

    :param assigned: what is assigned.
    :param owner: the member in its present generation.
    :param recreated: called with the partitions of a recreated topic, which the member has lost, and the error.
    """

    def __init__(
        self,
        connection: Connection,
        store: OffsetStore,
        tasks: TaskSet,
        *,
        assigned: Callable[[], Iterable[TopicPartition]],
        owner: Callable[[], GroupMember],
        recreated: Callable[[Collection[TopicPartition], TopicNotFound], object],
    ) -> None:
        self._connection = connection
        self._store = store
        self._assigned = assigned
        self._owner = owner
        self._recreated = recreated
        self._known: dict[str, str] = {}
        self._unchecked: set[str] = set()
        self._one_at_a_time = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = tasks
        self._closed = False

    def of(self, topic: str) -> str:
        """The id of a topic; empty if it is not known."""
        return self._known.get(topic, "")

    def fetched(self, topics: Iterable[str]) -> None:
        """Records of these came."""
        self._unchecked.update(topics)
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_AFTER, self._due)

    def missing(self, topics: Iterable[str]) -> None:
        """The brokers do not know these: a later commit may reach a recreated topic."""
        self.fetched(topics)

    async def assigning(self, partitions: Collection[TopicPartition]) -> None:
        """These are about to be claimed; a topic without an assigned partition may have been recreated unnoticed."""
        topics = {each.topic for each in partitions}
        for topic in topics - {each.topic for each in self._assigned()}:
            self._known.pop(topic, None)
        self._unchecked |= topics
        await self.check()

    async def check(self) -> None:
        """Find the topics that were recreated, of those read since the last check; takes two seconds at most."""
        async with self._one_at_a_time:
            if not self._unchecked or self._connection.down:
                return
            topics, self._unchecked = self._unchecked, set()
            try:
                async with asyncio.timeout(_TIMEOUT):
                    recreated = await self._find_recreated(topics)
            except BaseException as error:
                self._unchecked |= topics
                if not isinstance(error, (BrokerError, TimeoutError)):
                    raise
                logger.debug("The ids of topics %s are not known: %s", sorted(topics), error)
                return
            for topic in recreated:
                await self._end(topic)

    def close(self) -> None:
        """Begin no more checks."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    async def _find_recreated(self, topics: Collection[str]) -> list[str]:
        def describe(client: Any) -> Any:
            return client.describe_topics(TopicCollection(list(map(plain_str, topics))), request_timeout=_TIMEOUT)

        recreated: list[str] = []
        assigned = {each.topic for each in self._assigned()}
        for topic, found in (await self._connection.outcomes(describe, "Topics")).items():
            if isinstance(found, BrokerError):
                # A missing topic is reported elsewhere, and may be recreated.
                if topic in assigned if isinstance(found, TopicNotFound) else found.retriable:
                    self._unchecked.add(topic)
                continue
            identity = str(found.topic_id)
            if self._known.setdefault(topic, identity) != identity:
                self._known[topic] = identity
                recreated.append(topic)
        return recreated

    async def _end(self, topic: str) -> None:
        """The member loses the topic, and its stored positions, which are of the old topic, are reset."""
        partitions = [each for each in self._assigned() if each.topic == topic]
        if not partitions:
            return
        group = self._owner().group
        self._recreated(
            partitions,
            TopicNotFound(
                f"Topic {topic!r} was deleted and recreated while group {group!r} read it",
                advice="Open the consumer again; it begins at the first record of the new topic",
            ),
        )
        try:
            async with asyncio.timeout(_TIMEOUT):
                bounds = await bounds_of(self._connection, partitions)
                begins = {each: StoredOffset(bounds[each].first) for each in partitions}
                failed = failures(await self._store.commit(self._owner(), begins, rewind=True))
        except (BrokerError, TimeoutError) as error:
            failed = dict.fromkeys(partitions, error)
        for partition, error in failed.items():
            logger.warning(
                "The position of %s of group %r belongs to a deleted topic and was not reset: %s",
                partition,
                group,
                error,
            )

    def _due(self) -> None:
        self._timer = None
        self._tasks.spawn(self._check_again())

    async def _check_again(self) -> None:
        await self.check()
        if self._unchecked:
            self.fetched(())


class TopicIdStore:
    """An `OffsetStore` over another one; stores the topic id with each position. A position without one is trusted.

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

    def with_topic_ids(self, positions: Mapping[TopicPartition, StoredOffset]) -> dict[TopicPartition, StoredOffset]:
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
        return await self._store.commit(owner, self.with_topic_ids(positions), rewind=rewind)

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        return await self._store.reset(group, self.with_topic_ids(positions))

    async def stored(self, group: str) -> FetchResults:
        return _bare(await self._store.stored(group))

    async def close(self) -> None:
        await self._store.close()


def _bare(found: FetchResults) -> dict[TopicPartition, StoredOffset | BrokerError | None]:
    return {
        place: each._replace(topic_id="") if isinstance(each, StoredOffset) else each for place, each in found.items()
    }
