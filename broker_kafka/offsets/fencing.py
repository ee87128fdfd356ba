"""The rules by which every store outside Kafka accepts a claim or a commit. Pure.

One place, so that the memory and SQL stores cannot drift apart; SQL repeats them as a condition of its UPDATE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from broker import BrokerError, LeaseLost, SettleError, TopicPartition
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, StoredOffset

__all__ = ["UNCLAIMED", "Entries", "Entry", "check_claim", "check_commit", "claim", "commit", "position_of", "put_back"]

UNCLAIMED = -2
"""The generation of an unclaimed entry; Kafka uses -1 for a consumer without a group."""


class Entry(NamedTuple):
    """The entry of a partition in a store.

    :ivar offset: the next to read; None if the partition was claimed and never committed.
    """

    offset: int | None = None
    metadata: str = ""
    generation: int = UNCLAIMED
    member: str = ""
    topic_id: str = ""

    @property
    def position(self) -> StoredOffset | None:
        return None if self.offset is None else StoredOffset(self.offset, self.metadata, self.topic_id)


Entries = dict[TopicPartition, Entry]
"""The entries of a group."""
_NONE = Entry()


def check_claim(partition: TopicPartition, entry: Entry, owner: GroupMember, restarted: bool) -> LeaseLost | None:
    """The refusal of a claim, or None."""
    if owner.generation >= entry.generation or restarted:
        return None
    return LeaseLost(
        f"{_of(partition, owner.group)} was claimed in generation {entry.generation}, and this is "
        f"generation {owner.generation}",
        advice="A newer member owns the partition; if the group was recreated, claim with restarted=True",
    )


def check_commit(
    partition: TopicPartition, entry: Entry, owner: GroupMember, offset: int, rewind: bool
) -> SettleError | None:
    """The refusal of a commit, or None."""
    claimed = entry.generation != UNCLAIMED
    if claimed and (owner.generation < entry.generation or owner.member != entry.member):
        return LeaseLost(
            f"{_of(partition, owner.group)} belongs to member {entry.member!r} of generation {entry.generation}, and "
            f"the commit is of {owner.member!r} of generation {owner.generation}",
            advice="The partition was assigned to another member, which reads these records again",
        )
    if entry.offset is not None and offset < entry.offset and not rewind:
        return SettleError(
            f"{_of(partition, owner.group)} is at {entry.offset}; the commit of {offset} would move it back",
            advice="Commit with rewind=True to go back on purpose",
        )
    return None


def position_of(entries: Entries, partition: TopicPartition) -> StoredOffset | None:
    """The next offset to read; None if nothing was ever committed."""
    return entries.get(partition, _NONE).position


def claim(entries: Entries, owner: GroupMember, partitions: Sequence[TopicPartition], restarted: bool) -> FetchResults:
    """Make this member the owner of the partitions that it may claim."""
    results: dict[TopicPartition, StoredOffset | BrokerError | None] = {}
    for partition in partitions:
        entry = entries.get(partition, _NONE)
        error = check_claim(partition, entry, owner, restarted)
        if error is None:
            entries[partition] = entry._replace(generation=owner.generation, member=owner.member)
        results[partition] = error or entry.position
    return results


def commit(
    entries: Entries, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], rewind: bool
) -> CommitResults:
    """Store the positions that this member may commit."""
    results: dict[TopicPartition, BrokerError | None] = {}
    for partition, position in positions.items():
        error = check_commit(partition, entries.get(partition, _NONE), owner, position.offset, rewind)
        if error is None:
            entries[partition] = Entry(
                position.offset, position.metadata, owner.generation, owner.member, position.topic_id
            )
        results[partition] = error
    return results


def put_back(entries: Entries, positions: Mapping[TopicPartition, StoredOffset]) -> None:
    """An operator's reset: the present owners are fenced until their next generation."""
    for partition, position in positions.items():
        generation = entries.get(partition, _NONE).generation
        entries[partition] = Entry(position.offset, position.metadata, generation, topic_id=position.topic_id)


def _of(partition: TopicPartition, group: str) -> str:
    return f"{partition.topic!r}[{partition.partition}] of group {group!r}"
