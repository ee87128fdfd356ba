"""What a member of a group holds: its partitions, how far each was handed over, and how far committed.

Pure and synchronous: no I/O, no clock, no lock. Positions are "the next offset to read". Each assignment of a partition
has a generation of its own, so that a commit for an earlier generation is recognised after the partition came back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from broker.checks import is_whole, refused
from broker.driver.contract import TopicPartition
from broker.errors import LeaseLost
from broker.records import Record, RecordRun, RecordsOfRuns

__all__ = ["Assignments", "Held", "as_partitions", "as_positions", "not_assigned"]

_FOREIGN: Final = -1
"""No assignment has this generation."""
_TOLD: Final = 10
"""An error names so many partitions, and counts the others."""


class Held:
    """One assignment of one partition.

    :ivar handed: the position after the last record that was handed over or skipped; None before the first.
    :ivar committed: the highest position that the broker has confirmed to this member, -1 if none.
    :ivar revoking: it is about to be given up: nothing more is handed over, commits still count.
    :ivar gone: another member has it: commits are refused.
    :ivar unsaved: something above the committed position was finished since the last commit, and can be stored.
    """

    __slots__ = (
        "committed",
        "generation",
        "gone",
        "handed",
        "partition",
        "revoking",
        "skipped_after",
        "skipped_to",
        "unsaved",
    )

    def __init__(self, partition: TopicPartition, generation: int) -> None:
        self.partition = partition
        self.generation = generation
        self.handed: int | None = None
        self.committed = -1
        self.revoking = False
        self.gone = False
        self.unsaved = False
        self.skipped_after = -1
        self.skipped_to = -1

    def skip(self, offset: int) -> None:
        """A record was dealt with without being handed over: the commit of the one before it covers it too."""
        position = -1 if self.handed is None else self.handed
        if self.skipped_to != position or position < 0:
            self.skipped_after = position
        self.skipped_to = self.handed = offset + 1

    def covers(self, position: int) -> int:
        """The position to commit when the record before `position` is done."""
        return self.skipped_to if position == self.skipped_after else position

    @property
    def skipped_alone(self) -> int | None:
        """A position that only skipped records separate from what is committed, or from the first read."""
        return self.skipped_to if self.skipped_to > self.committed and self.committed >= self.skipped_after else None

    @property
    def has_uncommitted(self) -> bool:
        """Whether something was handed over, or skipped, that is not committed."""
        return self.handed is not None and self.handed > self.committed

    def sought(self, position: int | None) -> None:
        """It is read on from here, None being the committed position; what was handed over below it still counts."""
        if position is None or self.handed is None or min(self.handed, position) <= self.committed:
            self.handed = None
        else:
            self.handed = min(self.handed, position)
        if position is not None and position < self.committed:
            self.committed = -1
        self.skipped_after = self.skipped_to = -1


class Assignments:
    """All partitions of one member."""

    def __init__(self) -> None:
        self._held: dict[TopicPartition, Held] = {}
        self._given_up: set[TopicPartition] = set()
        self._generation = 0
        self._recent: Held | None = None
        self.taken: list[TopicPartition] = []
        """Partitions that went away with something handed over and not committed; reading clears it."""

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def get(self, partition: TopicPartition) -> Held | None:
        return self._held.get(partition)

    def current(self) -> list[TopicPartition]:
        """The assigned partitions that are not being revoked."""
        return [partition for partition, held in self._held.items() if not held.revoking]

    def named(self, partitions: Iterable[tuple[str, int]] | None) -> list[TopicPartition]:
        """These partitions, ours or not; None means the current ones.

        :raises ConfigurationError: they are no partitions.
        """
        return self.current() if partitions is None else as_partitions(partitions)

    def own(self, partitions: Iterable[TopicPartition], group: str) -> None:
        """:raises LeaseLost: one of these is not ours."""
        for partition in partitions:
            if partition not in self._held:
                raise not_assigned(partition, group, self.current())

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Assign these; one that is assigned already keeps its generation."""
        for partition in map(TopicPartition._make, partitions):
            held = self._held.get(partition)
            if held is None or held.revoking:
                if held is not None:
                    self.give_up((held,))
                self._generation += 1
                self._held[partition] = Held(partition, self._generation)
                self._given_up.discard(partition)

    def begin_revoke(self, partitions: Iterable[TopicPartition]) -> list[Held]:
        """Mark these as being revoked; return those that are assigned."""
        going = [held for partition in partitions if (held := self._held.get(partition)) is not None]
        for held in going:
            held.revoking = True
        return going

    def give_up(self, partitions: Iterable[Held]) -> None:
        """These assignments are over."""
        for held in partitions:
            if not held.gone and held.has_uncommitted:
                self.taken.append(held.partition)
            held.gone = held.revoking = True
            if self._held.get(held.partition) is held:
                del self._held[held.partition]
                self._given_up.add(held.partition)

    def admit(self, partition: TopicPartition) -> Held | None:
        """The assignment that a fetched record belongs to; None if it is no longer, or about not to be, ours."""
        held = self._held.get(partition)
        if held is None:
            if partition in self._given_up:
                return None
            self.assign((partition,))
            held = self._held[partition]
        return None if held.revoking else held

    def hand_over(self, records: Sequence[Record[Any]], owner: Any) -> None:
        """Bind records to the consumer and to the assignments that they come from, and note how far these are."""
        held: Held | None = None
        topic, partition, generation = "", -1, 0
        last: Record[Any] | None = None
        for record in records:
            if record.partition != partition or record.topic != topic:
                if held is not None and last is not None:
                    held.handed = last.offset + 1
                topic, partition = record.topic, record.partition
                held = self._held.get(TopicPartition(topic, partition))
                generation = held.generation if held is not None else 0
            record.owner = owner
            record.generation = generation
            last = record
        if held is not None and last is not None:
            held.handed = last.offset + 1

    def hand_over_runs(self, runs: Sequence[RecordRun], owner: Any) -> RecordsOfRuns:
        """`hand_over` of records that are not made yet."""
        bound: list[tuple[RecordRun, int]] = []
        for run in runs:
            held = self._held.get(TopicPartition(run.topic, run.partition))
            if held is not None:
                held.handed = run.last + 1
            bound.append((run, 0 if held is None else held.generation))
        return RecordsOfRuns(bound, owner)

    def hand_over_one(self, record: Record[Any], owner: Any) -> None:
        """`hand_over` of a single record, the quick way."""
        held = self._recent
        if (
            held is None
            or held.gone
            or record.partition != held.partition.partition
            or record.topic != held.partition.topic
        ):
            held = self._recent = self._held.get(TopicPartition(record.topic, record.partition))
            if held is None:
                return
        record.owner = owner
        record.generation = held.generation
        held.handed = record.offset + 1

    def positions_of(
        self, records: Iterable[Record[Any]], owner: Any
    ) -> tuple[dict[TopicPartition, tuple[Held, int]], LeaseLost | None]:
        """The positions that settle these records, and the error if some partition was taken away since.

        Records of another consumer count as taken away: each numbers its assignments from 1.

        :param owner: whom `hand_over` bound the records of this member to.
        """
        highest: dict[tuple[str, int, int], int] = {}
        topic, partition, generation, top = "", -1, -1, -1
        whose: Any = owner
        for record in records:
            if (
                record.partition != partition
                or record.generation != generation
                or record.topic != topic
                or record.owner is not whose
            ):
                if partition >= 0:
                    run = (topic, partition, generation if whose is owner else _FOREIGN)
                    highest[run] = max(top, highest.get(run, -1))
                topic, partition, generation, top = record.topic, record.partition, record.generation, record.offset
                whose = record.owner
            elif record.offset > top:
                top = record.offset
        if partition >= 0:
            run = (topic, partition, generation if whose is owner else _FOREIGN)
            highest[run] = max(top, highest.get(run, -1))
        positions: dict[TopicPartition, tuple[Held, int]] = {}
        lost: LeaseLost | None = None
        for (topic, partition, generation), top in highest.items():
            key = TopicPartition(topic, partition)
            held = self._held.get(key)
            if held is None or held.generation != generation:
                lost = lost or taken_away(key)
            else:
                positions[key] = (held, held.covers(top + 1))
        return positions, lost

    def handed_over(self) -> dict[TopicPartition, tuple[Held, int]]:
        """The position of each partition after everything handed over that is not committed."""
        return {
            held.partition: (held, held.handed)
            for held in self._held.values()
            if held.handed is not None and held.handed > held.committed
        }

    def skipped_alone(self) -> Mapping[TopicPartition, tuple[Held, int]]:
        """Partitions whose position may move on although nothing of them was handed over since the last commit."""
        return {
            held.partition: (held, position)
            for held in self._held.values()
            if (position := held.skipped_alone) is not None
        }


def taken_away(partition: TopicPartition) -> LeaseLost:
    """The error of a commit for a partition that is no longer ours."""
    return LeaseLost(
        f"Partition {partition.partition} of topic {partition.topic!r} was taken away before the commit",
        advice="Its new owner reads from the last commit on; make the work repeatable",
    )


def not_assigned(partition: TopicPartition, group: str, held: Iterable[TopicPartition]) -> LeaseLost:
    """The error of whatever is asked of a partition that this member, which holds these, has not."""
    names = [f"{topic!r}[{number}]" for topic, number in sorted(held)]
    more = len(names) - _TOLD
    has = ", ".join(names[:_TOLD]) + (f" and {more} more" if more > 0 else "")
    return LeaseLost(
        f"Partition {partition.partition} of topic {partition.topic!r} is not assigned to this member of group "
        f"{group!r}, which has {has or 'none'}",
        advice="Name partitions of assignment()",
    )


def as_partitions(partitions: Iterable[tuple[str, int]]) -> list[TopicPartition]:
    """The partitions that any pairs name.

    :raises ConfigurationError: they are no partitions.
    """
    if not _is_iterable(partitions):
        raise refused("partitions", partitions, "a list of (topic, number), or None")
    return [_as_partition(partition) for partition in partitions]


def as_positions(positions: Mapping[tuple[str, int], int | None]) -> dict[TopicPartition, int | None]:
    """The positions by partition, whatever pairs name them.

    :raises ConfigurationError: it is no mapping of partitions to offsets.
    """
    if not _is_mapping(positions):
        raise refused("positions", positions, "a mapping of (topic, number) to an offset or None")
    for position in positions.values():
        if position is not None and not is_whole(position):
            raise refused("position", position, "an offset, or None")
    return {_as_partition(partition): position for partition, position in positions.items()}


def _as_partition(partition: tuple[str, int]) -> TopicPartition:
    if not _is_partition(partition):
        raise refused("partition", partition, "a TopicPartition, or (topic, number)")
    return TopicPartition(*partition)


# For values of any type, since callers need not have a type checker.


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_partition(value: Any) -> bool:
    if not isinstance(value, tuple | list):
        return False
    parts: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
    return len(parts) == 2 and isinstance(parts[0], str) and is_whole(parts[1])
