"""What an offset store is: where a consumer group's positions live, in Kafka or elsewhere.

An offset is always the *next* one to read, never that of the last record handled; `None` is "never committed", which
is neither 0 nor a failure. Every answer is per partition, for success and failure alike.

*Fencing.* A store outside Kafka is not guarded by the group's coordinator, so it guards itself: it keeps with each
partition the generation and member that claimed it last, and refuses what an older one commits. `claim` is called
when a partition is assigned and reads the position in the same step: from then on a former owner, however late it
wakes up, can change nothing, and the new owner's position is the last that was ever taken.

*Concurrency.* All methods may be called at once, from the event loop; partitions of one call are stored together where
the store can. *Cancellation.* A cancelled write may have taken effect. *Failure.* What concerns one partition is that
partition's entry; nothing is raised but for wrong arguments and after `close`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from broker import BrokerError, TopicPartition
from broker.driver import refused
from broker_kafka.codec.group_metadata import parse_group_metadata

__all__ = [
    "CommitResults",
    "FetchResults",
    "GroupMember",
    "OffsetStore",
    "StoredOffset",
    "failures",
]


class StoredOffset(NamedTuple):
    """A position of a partition.

    :ivar offset: the next offset to read.
    :ivar metadata: what the application, or the offset map, keeps with it.
    :ivar topic_id: the id of the topic that it is of, which a topic of the same name that is made later does not have;
        empty if nobody knows. Kafka's own store keeps none: Kafka drops the positions of topics that are deleted.
    """

    offset: int
    metadata: str = ""
    topic_id: str = ""


class GroupMember(NamedTuple):
    """Who commits: one member of a group in one generation of it.

    :ivar generation: of the group, or the member's epoch in the newer protocol; it only grows while the group lives.
    :ivar member: the member's id, which tells apart two members of one generation.
    """

    group: str
    generation: int
    member: str = ""

    @classmethod
    def from_metadata(cls, metadata: bytes) -> GroupMember:
        """Read what `Consumer.consumer_group_metadata()` of the client library returns.

        :raises ConfigurationError: it is not in the form that this version of the library writes.
        """
        if not _is_bytes(metadata):
            raise refused("metadata", metadata, "what consumer_group_metadata() returns, unchanged")
        return cls(*parse_group_metadata(metadata))


FetchResults = Mapping[TopicPartition, StoredOffset | BrokerError | None]
"""One entry for each partition asked for: its position, None if there is none, or why it cannot be told."""

CommitResults = Mapping[TopicPartition, BrokerError | None]
"""One entry for each partition given: None if it was stored, else why not. `LeaseLost` is a newer owner's doing."""


class OffsetStore(Protocol):
    """Implemented by the stores of this package, and by yours."""

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        """Read positions; nothing is changed and nobody is fenced."""
        ...

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        """Read the positions of partitions that were assigned to this member, and fence everybody before it.

        :param restarted: the group was founded anew, so that its generations count from the beginning: claim in spite
            of a higher generation in the store. Only for a member that the coordinator has just confirmed.
        """
        ...

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        """Store positions of partitions that this member claimed, now or in an earlier generation, or that nobody has.

        :param rewind: positions may also go back; without it, one below what is stored is refused.
        """
        ...

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        """Store positions as an operator, in either direction, while the group does not run.

        A member that runs in spite of it cannot commit in its present generation any more.
        """
        ...

    async def stored(self, group: str) -> FetchResults:
        """All positions of a group. An empty result means that there are none; an unreadable store raises.

        :raises BrokerError: they cannot be read.
        """
        ...

    async def close(self) -> None: ...


def failures(results: CommitResults) -> dict[TopicPartition, BrokerError]:
    """Those of a commit that were not stored."""
    return {partition: error for partition, error in results.items() if error is not None}


def _is_bytes(value: object) -> bool:
    return isinstance(value, bytes)
