"""The rules by which every store outside Kafka accepts a claim or a commit. Pure.

`MemoryOffsetStore` applies them. `SqlOffsetStore` repeats them as the condition of its UPDATE, and explains a refusal
by them.
"""

from __future__ import annotations

from typing import NamedTuple

from broker import LeaseLost, SettleError, TopicPartition
from broker_kafka.offsets.protocol import GroupMember, StoredOffset

__all__ = ["UNCLAIMED", "Entry", "check_claim", "check_commit"]

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


def _of(partition: TopicPartition, group: str) -> str:
    return f"{partition.topic!r}[{partition.partition}] of group {group!r}"
