"""Tells a topic from one of the same name that was made after it was deleted, whose offsets mean other records.

The client of a classic group reads on in the new one at the old position and says nothing, and a position that was
stored for the old one is taken for one of the new. So the brokers are asked for the topic's id: when a partition comes,
before it goes, and a few seconds after records of it came. *Idle.* Nothing is asked. *Concurrency.* Used on the loop,
one look at a time. *Failure.* What brokers do not tell within a second is asked again at the next look; it is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final

from confluent_kafka import TopicCollection

from broker import BrokerError, TopicNotFound, TopicPartition
from broker.driver import TaskSet, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, partitions_of
from broker_kafka.cluster.requests import plain, until_told
from broker_kafka.offsets.protocol import GroupMember, OffsetStore, StoredOffset, failures

__all__ = ["TopicIdentities"]

_LATER: Final = 5.0
_PATIENCE: Final = 1.0


class TopicIdentities:
    """The topics of one member.

    :param held: what is assigned.
    :param owner: as whom the store is told to commit.
    :param gone: is told the partitions of a topic that was made anew, which the member has lost, and why.
    """

    def __init__(
        self,
        connection: Connection,
        store: OffsetStore,
        tasks: TaskSet,
        *,
        held: Callable[[], Iterable[TopicPartition]],
        owner: Callable[[], GroupMember],
        gone: Callable[[Collection[TopicPartition], TopicNotFound], object],
    ) -> None:
        self._connection = connection
        self._store = store
        self._held = held
        self._owner = owner
        self._gone = gone
        self._known: dict[str, str] = {}
        self._read: set[str] = set()
        self._one_at_a_time = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = tasks
        self._closed = False

    def of(self, topic: str) -> str:
        """The id of a topic, as far as known."""
        return self._known.get(topic, "")

    def read(self, topics: Iterable[str]) -> None:
        """Records of these came."""
        self._read.update(topics)
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(_LATER, self._due)

    async def coming(self, partitions: Collection[TopicPartition]) -> None:
        """These are about to be claimed; a topic of which nothing is held may be a new one."""
        topics = {each.topic for each in partitions}
        for topic in topics - {each.topic for each in self._held()}:
            self._known.pop(topic, None)
        self._read |= topics
        await self.look()

    async def look(self) -> None:
        """See which topics that were read since the last look were made anew; no longer than a second or two."""
        async with self._one_at_a_time:
            if not self._read or self._connection.down:
                return
            topics, self._read = self._read, set()
            try:
                async with asyncio.timeout(_PATIENCE):
                    anew = await self._made_anew(topics)
            except BaseException as error:
                self._read |= topics
                if not isinstance(error, (BrokerError, TimeoutError)):
                    raise
                logger.debug("Topics %s could not be looked at: %s", sorted(topics), error)
                return
            for topic in anew:
                await self._end(topic)

    def went(self, partitions: Collection[TopicPartition]) -> None:
        """These were given up. A topic of which nothing is left may have been deleted: with KIP-848 nobody tells."""
        for topic in {each.topic for each in partitions} - {each.topic for each in self._held()}:
            if not self._closed:
                # What it raises is the reader's to hear.
                self._tasks.spawn(until_told(partial(partitions_of, self._connection, topic), lambda: not self._closed))

    def close(self) -> None:
        """Look no more by itself."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    async def _made_anew(self, topics: Collection[str]) -> list[str]:
        def ask(client: Any) -> Any:
            return client.describe_topics(TopicCollection(list(map(plain, topics))), request_timeout=_PATIENCE)

        anew: list[str] = []
        for topic, found in (await self._connection.outcomes(ask, "Topics")).items():
            if isinstance(found, BrokerError):
                # That there is none is told otherwise, and it may come again.
                if found.retriable and not isinstance(found, TopicNotFound):
                    self._read.add(topic)
                continue
            identity = str(found.topic_id)
            if self._known.setdefault(topic, identity) != identity:
                self._known[topic] = identity
                anew.append(topic)
        return anew

    async def _end(self, topic: str) -> None:
        """The member loses it; what is stored of it, by this member at least, was for the old one."""
        partitions = [each for each in self._held() if each.topic == topic]
        if not partitions:
            return
        group = self._owner().group
        self._gone(
            partitions,
            TopicNotFound(
                f"Topic {topic!r} was deleted and made anew while group {group!r} read it",
                advice="Open the consumer again; it begins at the first record of the new topic",
            ),
        )
        try:
            async with asyncio.timeout(_PATIENCE):
                bounds = await bounds_of(self._connection, partitions)
                begins = {each: StoredOffset(bounds[each].first) for each in partitions}
                failed = failures(await self._store.commit(self._owner(), begins, rewind=True))
        except (BrokerError, TimeoutError) as error:
            failed = dict.fromkeys(partitions, error)
        for partition, error in failed.items():
            logger.warning("The position of %s of group %r is of a topic that is gone: %s", partition, group, error)

    def _due(self) -> None:
        self._timer = None
        self._tasks.spawn(self._look_again())

    async def _look_again(self) -> None:
        await self.look()
        if self._read:
            self.read(())
