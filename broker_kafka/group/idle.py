"""`Idleness`: whether a member that gets no records may call its group read, or others hold what is unread.

The description of a group names its members and their partitions, not whether they live; a dead member is removed when
its session ends. So a partition of another member counts as read only if all of it is committed, or if the group has
not changed for a whole session. Nor does the description contain the sessions of other members: with the classic
protocol they are assumed to be the same as ours, and with KIP-848 the brokers set one session for all.

*Concurrency.* One loop; callers queue. *Failure.* A retriable error means "not idle yet"; others are raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from confluent_kafka import TopicPartition as NativePartition
from confluent_kafka.admin import ConfigResource  # pyright: ignore[reportPrivateImportUsage]

from broker import BrokerError, Closed, TopicNotFound, TopicPartition
from broker.driver import logger
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.client.consumer import ConsumerThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, partitions_of
from broker_kafka.cluster.requests import read_metadata, request_with_retries
from broker_kafka.offsets.protocol import GroupMember, OffsetStore, StoredOffset
from broker_kafka.settings import KafkaSettings

__all__ = ["Idleness"]

_RECHECK_PAUSE: Final = 0.4
_MARGIN: Final = 1.0
"""Seconds in which the coordinator notices the end of a session."""
_SESSION: Final = 45.0
"""Kafka's default for KIP-848, where the configuration of brokers may not be read."""
_SESSION_NAME: Final = "group.consumer.session.timeout.ms"


class Idleness:
    """:param settings: of the member.
    :param store: where the group's positions are.
    :param read_committed: whether open transactions bound what can be read.
    :param topics: what the member reads.
    :param assigned: its partitions.
    :param paused: those that are not fetched for now.
    """

    def __init__(
        self,
        connection: Connection,
        settings: KafkaSettings,
        thread: ConsumerThread,
        store: OffsetStore,
        *,
        group: str,
        read_committed: bool,
        topics: Callable[[], Sequence[str]],
        assigned: Callable[[], Collection[TopicPartition]],
        paused: Callable[[], Collection[TopicPartition]],
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._thread = thread
        self._store = store
        self._groups = KafkaGroups(connection)
        self._group = group
        self._read_committed = read_committed
        self._topics = topics
        self._assigned = assigned
        self._paused = paused
        self._fetched: set[TopicPartition] = set()
        """Assigned partitions whose fetch was answered."""
        self._one_at_a_time = asyncio.Lock()
        self._not_before = 0.0
        self._session: float | None = None

    async def confirmed(self, seconds: float) -> bool:
        """Whether nothing is left to read, after so many seconds without a record and without a new partition.

        :raises BrokerError: the brokers refuse to answer.
        """
        now = asyncio.get_running_loop().time
        async with self._one_at_a_time:
            if now() < self._not_before:
                return False
            try:
                idle = await self._check(seconds)
            except Closed:
                return True
            except BrokerError as error:
                if not error.retriable:
                    raise
                logger.info("Group %r: could not check whether all records are read: %s", self._group, error)
                idle = False
            if not idle:
                self._not_before = now() + _RECHECK_PAUSE
            return idle

    async def _check(self, seconds: float) -> bool:
        if not await self._are_fetched():
            return False
        others = await self._of_others()
        if not others:
            return True
        info = await self._groups.state(self._group)
        if info is None or info.state != "stable":
            return False
        me = await self._thread.call(_member_id)
        assigned = {place for member in info.members if member.id != me for place in member.partitions}
        if me not in {member.id for member in info.members} or not others <= assigned:
            # A partition is about to be assigned, perhaps to this member.
            return False
        return seconds >= await self._session_seconds() + _MARGIN or await self._are_read(others)

    async def _are_fetched(self) -> bool:
        """Whether a fetch of each partition was answered, and its records were handed over."""
        assigned = set(self._assigned())
        self._fetched &= assigned
        missing = sorted(assigned - self._fetched - set(self._paused()))
        if not missing:
            return True
        answered, ended = await self._thread.call(lambda client: _progress(client, missing))
        # The records of the others are on their way.
        self._fetched |= answered
        return ended.issuperset(missing)

    async def _of_others(self) -> set[TopicPartition]:
        places: set[TopicPartition] = set()
        for topic in self._topics():
            try:
                places.update(await partitions_of(self._connection, topic))
            except TopicNotFound:
                continue  # nothing is left in it
        return places.difference(self._assigned())

    async def _are_read(self, places: Collection[TopicPartition]) -> bool:
        wanted = sorted(places)
        positions = await self._store.fetch(self._group, wanted)
        bounds = await bounds_of(self._connection, wanted, committed=self._read_committed)
        for place in wanted:
            position = positions[place]
            if isinstance(position, BrokerError):
                raise position
            first, following = bounds[place]
            if max(first, position.offset if isinstance(position, StoredOffset) else first) < following:
                return False
        return True

    async def _session_seconds(self) -> float:
        if self._settings.group_protocol == "classic":
            return self._settings.session_timeout_ms / 1000
        if self._session is None:
            try:
                self._session = await self._read_session()
            except BrokerError as error:
                if error.retriable:
                    raise
                self._session = _SESSION
        return self._session

    async def _read_session(self) -> float:
        timeout = self._settings.request_timeout
        what = "Reading the session timeout of groups"
        cluster = await read_metadata(self._connection, what, timeout)
        # A broker that has just answered; its configuration is requested from itself.
        resource = ConfigResource(ConfigResource.Type.BROKER, str(cluster.orig_broker_id))
        found = await request_with_retries(
            self._connection, lambda client: client.describe_configs([resource], request_timeout=timeout), what
        )
        entry = found.get(_SESSION_NAME)
        return _SESSION if entry is None else int(entry.value) / 1000


def _progress(client: Any, places: Sequence[TopicPartition]) -> tuple[set[TopicPartition], set[TopicPartition]]:
    """The partitions with an answered fetch, and those among them with nothing left."""
    answered: set[TopicPartition] = set()
    ended: set[TopicPartition] = set()
    for place in places:
        # The client keeps the watermarks of the last answered fetch.
        first, following = client.get_watermark_offsets(NativePartition(*place), cached=True)
        if following >= 0:
            answered.add(place)
            (position,) = client.position([NativePartition(*place)])
            if max(first, position.offset) >= following:
                ended.add(place)
    return answered, ended


def _member_id(client: Any) -> str:
    metadata = client.consumer_group_metadata()
    return "" if metadata is None else GroupMember.from_metadata(metadata).member
