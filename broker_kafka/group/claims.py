"""Where a member begins with partitions that it was assigned: their stored positions, claimed, or the group's start.

*Concurrency.* One call at a time. *Failure.* What passes is tried again for a while, since the group waits for nobody
here. A claim that the store refuses because the group's generations began anew is repeated, if the brokers confirm that
this is a member; else the group is joined again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from broker import BackendError, BrokerError, LeaseLost, TopicPartition
from broker.driver import logger
from broker_kafka.cluster.connection import LONGEST_TIMEOUT, Connection
from broker_kafka.cluster.group_requests import request_group
from broker_kafka.cluster.requests import plain_str
from broker_kafka.group.start_offsets import StartPositions
from broker_kafka.offsets.arguments import is_offset
from broker_kafka.offsets.protocol import FetchResults, GroupMember, OffsetStore, StoredOffset

__all__ = ["Claim", "Claims"]

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_TRY_SECONDS: Final = 30.0
_NOTHING: Final = object()


class Claim(NamedTuple):
    """A partition's stored position, if there is one, and where to begin."""

    stored: StoredOffset | None
    begin: int


class Claims:
    """:param metadata: what `Consumer.consumer_group_metadata` says now; None for Kafka's own store, which fences by
    itself.
    """

    def __init__(
        self,
        connection: Connection,
        group: str,
        store: OffsetStore,
        starts: StartPositions,
        metadata: Callable[[], Awaitable[Any]] | None,
    ) -> None:
        self._connection = connection
        self._group = group
        self._store = store
        self._starts = starts
        self._metadata = metadata
        self.owner = GroupMember(group, -1)
        """Who commits: this member in the generation of its last claim, which fences all its earlier ones."""

    async def claim(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Claim]:
        """Claim these.

        :raises BrokerError: they could not be; retriable if the group should be joined again.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _TRY_SECONDS
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._claim(partitions)
            except BrokerError as error:
                if not error.retriable or loop.time() + pause > until:
                    raise
                logger.info("Group %r: positions are not known yet: %s", self._group, error)
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    async def _claim(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Claim]:
        if self._metadata is not None:
            self.owner = GroupMember.from_metadata(await self._metadata())
        found = dict(await self._store.claim(self.owner, partitions))
        fenced = [partition for partition, position in found.items() if isinstance(position, LeaseLost)]
        if fenced:
            found |= await self._claim_anew(fenced)
        claims: dict[TopicPartition, Claim] = {}
        missing: list[TopicPartition] = []
        for partition in partitions:
            position = self._told(partition, found.get(partition, _NOTHING))
            if isinstance(position, BrokerError):
                raise position
            if position is None:
                missing.append(partition)
            else:
                claims[partition] = Claim(position, position.offset)
        return claims | await self._begin(missing)

    def _told(self, partition: TopicPartition, answer: object) -> StoredOffset | BrokerError | None:
        """What the store answered, if a position can be that: below 0, the client would take it for an end of the log.

        :raises BackendError: it cannot.
        """
        if answer is None or isinstance(answer, BrokerError):
            return answer
        if isinstance(answer, StoredOffset) and is_offset(answer.offset):
            return answer
        said = "nothing" if answer is _NOTHING else repr(answer)
        raise BackendError(
            f"The offset store says {said} of {partition.topic!r}[{partition.partition}] of group {self._group!r}",
            advice="It has to answer with a StoredOffset of 0 or more, None or an error; put the stored position right "
            "with its reset(group, positions)",
        )

    async def _begin(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Claim]:
        if not partitions:
            return {}
        # Numbers, because librdkafka takes half a second to look for "the beginning".
        begins = {place: StoredOffset(at) for place, at in (await self._starts.numbered(partitions)).items()}
        if not self._starts.moves:
            return {place: Claim(None, position.offset) for place, position in begins.items()}
        # Stored, because another member that gets the partition before the first commit begins here too.
        for error in (await self._store.commit(self.owner, begins)).values():
            if error is not None:
                raise error
        return {place: Claim(position, position.offset) for place, position in begins.items()}

    async def _claim_anew(self, partitions: Sequence[TopicPartition]) -> FetchResults:
        """The store knows a later generation: of a newer owner, or of a group that was forgotten since."""
        described = await request_group(
            self._connection,
            lambda client: client.describe_consumer_groups([plain_str(self._group)], request_timeout=LONGEST_TIMEOUT),
            f"Describing group {self._group!r}",
            self._group,
        )
        if self.owner.member not in [member.member_id for member in described.members]:
            raise BackendError(
                f"Member {self.owner.member!r} of group {self._group!r} was replaced; it joins again", retriable=True
            )
        return await self._store.claim(self.owner, partitions, restarted=True)
