"""The marks of a group consumer: what the application says is done. A base of `GroupConsumer`.

Synchronous, without I/O: what is marked is committed later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from broker import LeaseLost, Record, TopicPartition
from broker_kafka.group.arguments import check_kind, check_record, read_records
from broker_kafka.group.held import Held
from broker_kafka.group.membership import Membership
from broker_kafka.group.stash import OffsetStash, check_position
from broker_kafka.offsets.arguments import check_metadata
from broker_kafka.offsets.protocol import GroupMember, StoredOffset

__all__ = ["Marking", "SavePoint"]


class SavePoint(NamedTuple):
    """What a store saves along with the results of some records, in one transaction of theirs.

    :ivar owner: who saves; the store refuses it once somebody newer owns one of the partitions.
    """

    owner: GroupMember
    positions: Mapping[TopicPartition, StoredOffset]


class Marking(ABC):
    """All positions are the next offset to read."""

    @abstractmethod
    def _open_parts(self) -> Membership: ...

    @abstractmethod
    async def commit_records(self, records: Sequence[Record[Any]]) -> None:
        """What makes this the owner of records."""

    def mark(self, record: Record[Any], metadata: str = "") -> bool:
        """This record and every lower offset of its partition is done; committed later, the metadata along with it.

        A mark below an earlier one changes nothing.

        :returns: False if the partition was given up since, and its next owner reads the record again; or if another
            consumer handed it over.
        :raises ConfigurationError: this is no record, or the metadata cannot be stored: it is no text, or has a NUL, or
            is no Unicode.
        """
        held = self._held_of(record, metadata)
        if held is None:
            return False
        self._grew(held.marks.mark(record.offset + 1, metadata))
        return True

    def mark_all(self, records: Iterable[Record[Any]], metadata: str = "") -> bool:
        """`mark` for each of these; False if `mark` is for one of them.

        :raises ConfigurationError: one is no record, or the metadata cannot be stored; nothing is marked.
        """
        several = read_records(records)
        ours = True
        top: Record[Any] | None = None
        for record in several:
            # Of a run of one assignment only the highest counts.
            if top is None:
                top = record
            elif (
                record.partition != top.partition
                or record.generation != top.generation
                or record.topic != top.topic
                or record.owner is not top.owner
            ):
                ours &= self.mark(top, metadata)
                top = record
            elif record.offset > top.offset:
                top = record
        return (top is None or self.mark(top, metadata)) and ours

    def finish(self, record: Record[Any], metadata: str = "") -> bool:
        """This record is done, those below it perhaps not: the mark moves as far as all are.

        For work on several records of a partition at once. A release then waits for all that was handed over, at most
        `flush_timeout`.

        :returns: False if the partition was given up since, and its next owner may read the record again; or if another
            consumer handed it over.
        :raises ConfigurationError: this is no record, or the metadata cannot be stored.
        """
        parts = self._open_parts()
        held = self._held_of(record, metadata)
        if held is None:
            return False
        parts.member.finishes = True
        self._grew(held.marks.finish(record.offset, metadata))
        if held.revoking:
            parts.delivery.came_back()
        return True

    def reset(self, record: Record[Any], metadata: str = "") -> bool:
        """Take the mark back: this record is the last that is done. Above the mark it changes nothing.

        Reading goes on where it is. To have this record itself read by the next owner, give `record.offset` to
        `reset_position`.

        :returns: False if nothing was changed.
        :raises ConfigurationError: this is no record, or the metadata cannot be stored.
        """
        held = self._held_of(record, metadata)
        return held is not None and self._reset(held, record.offset + 1, metadata)

    def mark_position(self, topic: str, partition: int, position: int, metadata: str = "") -> bool:
        """Every offset below `position`, the next to read, is done; False if the partition is not assigned.

        One beyond the end of the log is no mark: its commit is answered with an OffsetOutOfRange.

        :raises ConfigurationError: the partition or the position cannot be one, or the metadata cannot be stored.
        """
        check_position(TopicPartition(topic, partition), position, metadata)
        held = self._open_parts().member.own(topic, partition)
        if held is None:
            return False
        self._mark_at(held, StoredOffset(position, metadata))
        return True

    def reset_position(self, topic: str, partition: int, position: int, metadata: str = "") -> bool:
        """Take the mark back to `position`, the next to read. Above the mark it changes nothing.

        :returns: False if nothing was changed.
        :raises ConfigurationError: the partition or the position cannot be one, or the metadata cannot be stored.
        """
        check_position(TopicPartition(topic, partition), position, metadata)
        held = self._open_parts().member.own(topic, partition)
        return held is not None and self._reset(held, position, metadata)

    def mark_stashed(self, stash: OffsetStash) -> list[TopicPartition]:
        """Mark what was stashed, and empty the stash; the partitions that were given up since.

        :raises ConfigurationError: this is no stash.
        """
        return self._drain(stash, self._mark_at)

    def reset_stashed(self, stash: OffsetStash) -> list[TopicPartition]:
        """Reset to what was stashed, and empty the stash; the partitions that were given up since.

        :raises ConfigurationError: this is no stash.
        """
        return self._drain(stash, lambda held, position: self._reset(held, *position[:2]))

    async def save_point(self, records: Sequence[Record[Any]]) -> SavePoint:
        """What to save in the same transaction as the results of these records: `store.save(tx, *point)`.

        The store refuses it if a partition went to somebody else since, which rolls the results back.

        :raises LeaseLost: a partition was taken away already, or a record is another consumer's.
        :raises ConfigurationError: one is no record.
        """
        parts = self._open_parts()
        positions: dict[TopicPartition, StoredOffset] = {}
        for record in read_records(records):
            held = self._held_of(record)
            if held is None:
                raise LeaseLost(
                    f"Partition {record.partition} of topic {record.topic!r} was taken away from this member of group "
                    f"{parts.claims.owner.group!r} before its results were saved",
                    advice="Drop the results; its new owner reads these records again",
                )
            before = positions.get(held.partition)
            after = record.offset + 1 if before is None else max(before.offset, record.offset + 1)
            positions[held.partition] = StoredOffset(held.marks.covers(after))
        return SavePoint(parts.claims.owner, parts.identified(positions))

    def saved(self, point: SavePoint) -> None:
        """The transaction with this save point was committed: nothing more is to be stored of it.

        A save point of another consumer, such as the former one of the group, changes nothing.

        :raises ConfigurationError: this is no save point.
        """
        check_kind("point", point, SavePoint, "what save_point(records) returned")
        member, present = self._open_parts().member, self._open_parts().claims.owner
        if (point.owner.group, point.owner.member) != (present.group, present.member):
            return
        for place, position in point.positions.items():
            held = member.own(*place)
            if held is not None:
                stored = position._replace(topic_id="")
                held.marks.mark(*stored[:2])
                if held.marks.current == stored:
                    held.marks.stored(stored)

    def _mark_at(self, held: Held, position: StoredOffset) -> None:
        seen = self._open_parts().member.has_seen(held.partition, position.offset)
        self._grew((held.marks.mark if seen else held.marks.leap_to)(*position[:2]))

    def _grew(self, offsets: int) -> None:
        if offsets:
            self._open_parts().commits.grew(offsets)

    def _reset(self, held: Held, position: int, metadata: str) -> bool:
        if not held.marks.reset(position, metadata):
            return False
        self._open_parts().commits.grew(1)
        return True

    def _drain(self, stash: OffsetStash, apply: Callable[[Held, StoredOffset], object]) -> list[TopicPartition]:
        check_kind("stash", stash, OffsetStash, "an OffsetStash")
        member, gone = self._open_parts().member, list[TopicPartition]()
        for place, stashed in stash.drain().items():
            held = member.own(*place)
            by_name = stashed.generation is None
            if held is None or not (by_name or (stashed.generation == held.generation and stashed.owner is self)):
                gone.append(place)
            else:
                apply(held, stashed.position)
        return gone

    def _held_of(self, record: Record[Any], metadata: str = "") -> Held | None:
        """The assignment that handed this record over, if that is not over, and was of this consumer.

        :raises ConfigurationError: this is no record, or the metadata cannot be stored.
        """
        if type(record) is not Record:
            check_record(record)
        if metadata != "":
            check_metadata((record.topic, record.partition), metadata)
        held = self._open_parts().member.own(record.topic, record.partition)
        # Generations are numbered per process, and other consumers number theirs as they like.
        if held is None or held.generation != record.generation or record.owner is not self:
            return None
        return held
