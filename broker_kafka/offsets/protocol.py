"""`OffsetStore`: where the positions of a consumer group live, in Kafka or elsewhere.

An offset is always the *next* one to read, never that of the last record handled; `None` is "never committed", which is
neither 0 nor a failure. Every answer is per partition, for success and failure alike.

*Fencing.* The coordinator of the group does not guard a store outside Kafka, so the store guards itself: it keeps the
generation and member that claimed each partition last, and refuses commits of older ones. `claim` is called when a
partition is assigned, and reads the position in the same step: after that no former owner can change the position.

*Concurrency.* Methods may be called concurrently, from the event loop; the partitions of one call are stored together
where the store can. *Cancellation.* A cancelled write may have taken effect. *Failure.* An error of one partition is
that partition's answer; only wrong arguments, and calls after `close`, raise.
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
    "positions_in",
]


class StoredOffset(NamedTuple):
    """A position of a partition.

    :ivar offset: the next offset to read.
    :ivar metadata: what the application, or the offset map, keeps with it.
    :ivar topic_id: the id of its topic, which a recreated topic of the same name does not have; empty if not known.
        Kafka's own store keeps none: Kafka deletes the positions of deleted topics.
    """

    offset: int
    metadata: str = ""
    topic_id: str = ""


class GroupMember(NamedTuple):
    """One member of a group in one generation, as the owner of commits.

    :ivar generation: of the group, or the member's epoch in the newer protocol; it only grows while the group lives.
    :ivar member: the member id, which distinguishes members of one generation.
    """

    group: str
    generation: int
    member: str = ""

    @classmethod
    def from_metadata(cls, metadata: bytes) -> GroupMember:
        """Decode the result of `Consumer.consumer_group_metadata()` of the client library.

        :raises ConfigurationError: not in the format of this version of the library.
        """
        if not _is_bytes(metadata):
            raise refused("metadata", metadata, "what consumer_group_metadata() returns, unchanged")
        return cls(*parse_group_metadata(metadata))


FetchResults = Mapping[TopicPartition, StoredOffset | BrokerError | None]
"""One entry for each requested partition: its position, None if there is none, or an error."""

CommitResults = Mapping[TopicPartition, BrokerError | None]
"""One entry for each given partition: None if it was stored, else an error; LeaseLost if a newer member owns it."""


class OffsetStore(Protocol):
    """Implemented by the stores of this package, or by the application."""

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        """Read positions; nothing is changed or fenced."""
        ...

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        """Read the positions of partitions that were assigned to this member, and fence all earlier owners.

        :param restarted: the group was recreated, and its generations start over: claim in spite of a higher generation
            in the store. Only for a member that the coordinator has just confirmed.
        """
        ...

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        """Store positions of partitions that this member claimed, in any generation, or that are unclaimed.

        :param rewind: positions may also go back; otherwise a position below the stored one is refused.
        """
        ...

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        """Store positions as an operator, in either direction, while the group does not run.

        A running member cannot commit in its present generation any more.
        """
        ...

    async def stored(self, group: str) -> FetchResults:
        """All positions of a group. An empty result means that there are none.

        :raises BrokerError: the store cannot be read.
        """
        ...

    async def close(self) -> None: ...


def failures(results: CommitResults) -> dict[TopicPartition, BrokerError]:
    """The errors of a commit."""
    return {partition: error for partition, error in results.items() if error is not None}


def positions_in(found: FetchResults) -> dict[TopicPartition, StoredOffset]:
    """The positions that are stored.

    :raises BrokerError: one could not be read.
    """
    for position in found.values():
        if isinstance(position, BrokerError):
            raise position
    return {partition: position for partition, position in found.items() if isinstance(position, StoredOffset)}


def _is_bytes(value: object) -> bool:
    return isinstance(value, bytes)
