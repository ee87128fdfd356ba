"""`OffsetStash`: marks that are collected apart from a consumer, and applied to it together later.

For work in stages: collect while records are handled, apply when their results are stored. For one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from broker import Record, TopicPartition
from broker.driver import RecordOwner
from broker_kafka.group.options import check_record
from broker_kafka.offsets.arguments import check_metadata, check_positions
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["OffsetStash", "Stashed", "check_position"]


class Stashed(NamedTuple):
    """The position of one partition.

    :ivar generation: the assignment of its record; None for a position by name.
    :ivar owner: the consumer that handed the record over.
    """

    position: StoredOffset
    generation: int | None
    owner: RecordOwner | None = None


class OffsetStash:
    """One position for each partition: `mark` keeps the largest, `reset` the smallest, of the latest assignment.

    Give it to `GroupConsumer.mark_stashed` or `GroupConsumer.reset_stashed`, which empty it.
    """

    def __init__(self) -> None:
        self._kept: dict[TopicPartition, Stashed] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def mark(self, record: Record[Any], metadata: str = "") -> None:
        """This record and all lower offsets of its partition are done.

        :raises ConfigurationError: not a record, or metadata that cannot be stored.
        """
        self._mark(*_following(record, metadata))

    def mark_position(self, topic: str, partition: int, position: int, metadata: str = "") -> None:
        """All offsets below `position`, the next to read, are done.

        :raises ConfigurationError: an impossible position, or metadata that cannot be stored.
        """
        place = TopicPartition(topic, partition)
        self._mark(place, Stashed(check_position(place, position, metadata), None))

    def reset(self, record: Record[Any], metadata: str = "") -> None:
        """This record is the last that is done.

        :raises ConfigurationError: not a record, or metadata that cannot be stored.
        """
        self._reset(*_following(record, metadata))

    def reset_position(self, topic: str, partition: int, position: int, metadata: str = "") -> None:
        """`position` is the next to read.

        :raises ConfigurationError: an impossible position, or metadata that cannot be stored.
        """
        place = TopicPartition(topic, partition)
        self._reset(place, Stashed(check_position(place, position, metadata), None))

    def positions(self) -> Mapping[TopicPartition, StoredOffset]:
        """The position of each partition."""
        return {place: kept.position for place, kept in self._kept.items()}

    def drain(self) -> dict[TopicPartition, Stashed]:
        """Take everything out."""
        kept, self._kept = self._kept, {}
        return kept

    def _mark(self, place: TopicPartition, new: Stashed) -> None:
        old = self._kept.get(place)
        if old is None or _later(new, old) or (not _later(old, new) and new.position.offset > old.position.offset):
            self._kept[place] = new

    def _reset(self, place: TopicPartition, new: Stashed) -> None:
        old = self._kept.get(place)
        if old is None or _later(new, old) or (not _later(old, new) and new.position.offset < old.position.offset):
            self._kept[place] = new


def check_position(place: TopicPartition, position: int, metadata: str) -> StoredOffset:
    """The position as stores take it.

    :raises ConfigurationError: not a whole number of 0 or more, or metadata that cannot be stored.
    """
    stored = StoredOffset(position, metadata)
    check_positions({place: stored})
    return stored


def _following(record: Record[Any], metadata: str) -> tuple[TopicPartition, Stashed]:
    check_record(record)
    place = TopicPartition(record.topic, record.partition)
    check_metadata(place, metadata)
    return place, Stashed(StoredOffset(record.offset + 1, metadata), record.generation, record.owner)


def _later(one: Stashed, other: Stashed) -> bool:
    """Whether the other is of an earlier assignment."""
    return one.generation is not None and other.generation is not None and one.generation > other.generation
