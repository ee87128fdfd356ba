"""Whether a member that gets nothing may call its group read: others may hold what is unread, and be dead.

*What is known.* The description of a group tells its members and what they hold, not whether they live. A dead one is
found out when its session ends, so that what another holds counts as looked after only if all of it is committed, or if
the group has stayed as it is for a whole session. That of the other members is not told either: in the classic protocol
it is taken to be ours, with KIP-848 the brokers have one for all. *Concurrency.* One loop; any number may ask at once.
*Failure.* What ends by itself is no answer yet; other errors of the brokers are raised.
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

_MOMENT: Final = 0.4
_MARGIN: Final = 1.0
"""Seconds in which the coordinator notices that a session is over."""
_SESSION: Final = 45.0
"""Kafka's default for KIP-848, for those who may not ask the brokers."""
_SESSION_NAME: Final = "group.consumer.session.timeout.ms"


class Idleness:
    """:param settings: of the member.
    :param store: where the group's positions are.
    :param topics: what the member reads.
    :param held: what is assigned to it.
    :param paused: those that are not read for now.
    """

    def __init__(
        self,
        connection: Connection,
        settings: KafkaSettings,
        thread: ConsumerThread,
        store: OffsetStore,
        *,
        group: str,
        committed: bool,
        topics: Callable[[], Sequence[str]],
        held: Callable[[], Collection[TopicPartition]],
        paused: Callable[[], Collection[TopicPartition]],
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._thread = thread
        self._store = store
        self._groups = KafkaGroups(connection)
        self._group = group
        self._committed = committed
        self._topics = topics
        self._held = held
        self._paused = paused
        self._fetched: set[TopicPartition] = set()
        """Those held that were read of."""
        self._one = asyncio.Lock()
        self._not_before = 0.0
        self._session: float | None = None

    async def confirmed(self, seconds: float) -> bool:
        """Whether nothing is left to read, after so many seconds without a record and without a new partition.

        :raises BrokerError: the brokers do not tell, and will not.
        """
        now = asyncio.get_running_loop().time
        async with self._one:
            if now() < self._not_before:
                return False
            try:
                idle = await self._look(seconds)
            except Closed:
                return True
            except BrokerError as error:
                if not error.retriable:
                    raise
                logger.info("Group %r: it is not known whether all is read: %s", self._group, error)
                idle = False
            if not idle:
                self._not_before = now() + _MOMENT
            return idle

    async def _look(self, seconds: float) -> bool:
        if not await self._are_fetched():
            return False
        others = await self._not_held()
        if not others:
            return True
        info = await self._groups.state(self._group)
        if info is None or info.state != "stable":
            return False
        me = await self._thread.call(_member_id)
        with_somebody = {place for member in info.members if member.id != me for place in member.partitions}
        if me not in {member.id for member in info.members} or not others <= with_somebody:
            # It is about to be given to somebody, perhaps to us.
            return False
        return seconds >= await self._session_seconds() + _MARGIN or await self._are_read(others)

    async def _are_fetched(self) -> bool:
        """Whether a fetch of each partition was answered, and what came with it handed over."""
        held = set(self._held())
        self._fetched &= held
        missing = sorted(held - self._fetched - set(self._paused()))
        if not missing:
            return True
        answered, ended = await self._thread.call(lambda client: _progress(client, missing))
        # The records of the others are on their way.
        self._fetched |= answered
        return ended.issuperset(missing)

    async def _not_held(self) -> set[TopicPartition]:
        places: set[TopicPartition] = set()
        for topic in self._topics():
            try:
                places.update(await partitions_of(self._connection, topic))
            except TopicNotFound:
                # Nothing is left in it.
                continue
        return places.difference(self._held())

    async def _are_read(self, places: Collection[TopicPartition]) -> bool:
        asked = sorted(places)
        positions = await self._store.fetch(self._group, asked)
        bounds = await bounds_of(self._connection, asked, committed=self._committed)
        for place in asked:
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
                self._session = await self._ask_session()
            except BrokerError as error:
                if error.retriable:
                    raise
                self._session = _SESSION
        return self._session

    async def _ask_session(self) -> float:
        timeout = self._settings.request_timeout
        what = "Asking for the session time-out of groups"
        cluster = await read_metadata(self._connection, what, timeout)
        # One that has just answered; it is asked itself.
        resource = ConfigResource(ConfigResource.Type.BROKER, str(cluster.orig_broker_id))
        found = await request_with_retries(
            self._connection, lambda client: client.describe_configs([resource], request_timeout=timeout), what
        )
        entry = found.get(_SESSION_NAME)
        return _SESSION if entry is None else int(entry.value) / 1000


def _progress(client: Any, places: Sequence[TopicPartition]) -> tuple[set[TopicPartition], set[TopicPartition]]:
    """The partitions of which a fetch was answered, and those among them of which nothing is left."""
    answered: set[TopicPartition] = set()
    ended: set[TopicPartition] = set()
    for place in places:
        # These are noted with the answer to a fetch.
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
