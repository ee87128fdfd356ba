"""`Assignments`: the partitions of a group member, with the position and the committed position of each.

Pure and synchronous: no I/O, no clock, no lock. A position is the next offset to read. Each assignment of a partition
has a generation of its own, so that commits for an earlier assignment are recognised after the partition came back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from broker.checks import is_whole, refused
from broker.driver.contract import TopicPartition
from broker.errors import LeaseLost, OffsetOutOfRange
from broker.records import Record, RecordRun, RecordsOfRuns

__all__ = [
    "AssignedPartition",
    "Assignments",
    "check_own_positions",
    "check_partitions",
    "check_positions",
    "check_reached",
    "not_assigned",
]

_FOREIGN: Final = -1
"""No assignment has this generation."""
_NAMED: Final = 10
"""The number of partitions that an error names; it counts the others."""


class AssignedPartition:
    """One assignment of one partition.

    :ivar position: the position after the last handed-over or skipped record; None before the first.
    :ivar committed: the highest position that the broker has confirmed to this member; -1 if none.
    :ivar opening: `on_assigned` has not returned yet: records wait.
    :ivar paused: the application paused the partition.
    :ivar revoking: the partition is being revoked: its records are no longer handed over, commits are still possible.
    :ivar lost: another member may have the partition: commits are refused.
    :ivar ranges_changed: a range above the committed position was finished since the last commit.
    :ivar sought_to: where the last seek went, and `sought_from` the lowest that one went since the last commit; -1
        before the first seek.
    :ivar stored: the position that the broker had when it was asked; None if it was not.
    """

    __slots__ = (
        "committed",
        "generation",
        "lost",
        "opening",
        "partition",
        "paused",
        "position",
        "ranges_changed",
        "revoking",
        "skipped_after",
        "skipped_to",
        "sought_from",
        "sought_to",
        "stored",
    )

    def __init__(self, partition: TopicPartition, generation: int) -> None:
        self.partition = partition
        self.generation = generation
        self.position: int | None = None
        self.committed = -1
        self.opening = False
        self.paused = False
        self.revoking = False
        self.lost = False
        self.ranges_changed = False
        self.skipped_after = -1
        self.skipped_to = -1
        self.sought_to = -1
        self.sought_from = -1
        self.stored: int | None = None

    def skip(self, offset: int) -> None:
        """Skip a record, such as a dead-lettered one: a commit of the record before covers it too."""
        position = -1 if self.position is None else self.position
        if self.skipped_to != position or position < 0:
            self.skipped_after = position
        self.skipped_to = self.position = offset + 1

    def covers(self, position: int) -> int:
        """The position to commit for `position`: after the skipped records that follow directly."""
        return self.skipped_to if position == self.skipped_after else position

    @property
    def skipped_alone(self) -> int | None:
        """The position to commit if only skipped records precede it since the last commit, or the start; else None."""
        return self.skipped_to if self.skipped_to > self.committed and self.committed >= self.skipped_after else None

    @property
    def has_uncommitted(self) -> bool:
        """Whether a handed-over or skipped record is not committed."""
        return self.position is not None and self.position > self.committed

    @property
    def reached(self) -> int:
        """The highest position that can be committed: where reading is; -1 if nothing was handed over or sought."""
        known = (self.position, self.floor)
        return max(self.sought_to, *(-1 if each is None else each for each in known))

    @property
    def floor(self) -> int | None:
        """The lowest position that can be committed; None if the broker must be asked for `stored`."""
        if self.committed >= 0:
            return self.committed
        if self.stored is None:
            return None
        return self.stored if self.sought_from < 0 else min(self.stored, self.sought_from)

    def sought(self, position: int | None) -> None:
        """Seek to the position; None is the committed one. Records handed over below it can still be committed."""
        back = position is not None and position < self.committed
        if position is None or back or self.sought_from < 0:
            self.sought_from = -1 if position is None else position
        else:
            self.sought_from = min(self.sought_from, position)
        self.sought_to = -1 if position is None else position
        if position is None or self.position is None or min(self.position, position) <= self.committed:
            self.position = None
        else:
            self.position = min(self.position, position)
        if back:
            self.committed = -1
            self.stored = None
        self.skipped_after = self.skipped_to = -1


class Assignments:
    """All partitions of one member."""

    def __init__(self) -> None:
        self._assigned: dict[TopicPartition, AssignedPartition] = {}
        self._given_up: set[TopicPartition] = set()
        self._generation = 0
        self._recent: AssignedPartition | None = None
        self.dropped: set[TopicPartition] = set()
        """Partitions of which fetched records were not admitted."""
        self.lost_uncommitted: list[TopicPartition] = []
        """Partitions that were lost with uncommitted records; the next commit reports them."""

    def __iter__(self) -> Iterator[AssignedPartition]:
        return iter(self._assigned.values())

    def __len__(self) -> int:
        return len(self._assigned)

    def get(self, partition: TopicPartition) -> AssignedPartition | None:
        return self._assigned.get(partition)

    def current(self) -> list[TopicPartition]:
        """The assigned partitions that are not being revoked."""
        return [partition for partition, assigned in self._assigned.items() if not assigned.revoking]

    def named(self, partitions: Iterable[tuple[str, int]] | None) -> list[TopicPartition]:
        """These partitions, assigned or not; None means `current()`.

        :raises ConfigurationError: they are not partitions.
        """
        return self.current() if partitions is None else check_partitions(partitions)

    def check_assigned(self, partitions: Iterable[TopicPartition], group: str) -> None:
        """:raises LeaseLost: one of these partitions is not assigned."""
        for partition in partitions:
            if partition not in self._assigned:
                raise not_assigned(partition, group, self.current())

    def assign(self, partitions: Iterable[TopicPartition]) -> list[AssignedPartition]:
        """Assign these partitions; return the new ones. One that is already assigned keeps its generation."""
        new: list[AssignedPartition] = []
        for partition in map(TopicPartition._make, partitions):
            assigned = self._assigned.get(partition)
            if assigned is None or assigned.revoking:
                if assigned is not None:
                    self.give_up((assigned,))
                self._generation += 1
                self._assigned[partition] = AssignedPartition(partition, self._generation)
                self._given_up.discard(partition)
                new.append(self._assigned[partition])
        return new

    def refuse(self, partitions: Iterable[TopicPartition]) -> None:
        """Admit no record of these until they are assigned."""
        self._given_up.update(partitions)

    def begin_revoke(self, partitions: Iterable[TopicPartition]) -> list[AssignedPartition]:
        """Mark these partitions as being revoked; return the assignments among them."""
        going = [assigned for partition in partitions if (assigned := self._assigned.get(partition)) is not None]
        for assigned in going:
            assigned.revoking = True
        return going

    def give_up(self, partitions: Iterable[AssignedPartition]) -> None:
        """End these assignments."""
        for assigned in partitions:
            if not assigned.lost and assigned.has_uncommitted:
                self.lost_uncommitted.append(assigned.partition)
            assigned.lost = assigned.revoking = True
            if self._assigned.get(assigned.partition) is assigned:
                del self._assigned[assigned.partition]
                self._given_up.add(assigned.partition)

    def admit(self, partition: TopicPartition) -> AssignedPartition | None:
        """The assignment that a fetched record belongs to; None if it is lost or being revoked."""
        assigned = self._assigned.get(partition)
        if assigned is None:
            if partition in self._given_up:
                self.dropped.add(partition)
                return None
            self.assign((partition,))
            assigned = self._assigned[partition]
        return None if assigned.revoking else assigned

    def hand_over(self, records: Sequence[Record[Any]], owner: Any) -> None:
        """Bind records to the consumer and to their assignments, and advance the positions."""
        assigned: AssignedPartition | None = None
        topic, partition, generation = "", -1, 0
        last: Record[Any] | None = None
        for record in records:
            if record.partition != partition or record.topic != topic:
                if assigned is not None and last is not None:
                    assigned.position = last.offset + 1
                topic, partition = record.topic, record.partition
                assigned = self._assigned.get(TopicPartition(topic, partition))
                generation = assigned.generation if assigned is not None else 0
            record.owner = owner
            record.generation = generation
            last = record
        if assigned is not None and last is not None:
            assigned.position = last.offset + 1

    def hand_over_runs(self, runs: Sequence[RecordRun], owner: Any) -> RecordsOfRuns:
        """`hand_over` for records that are not created yet."""
        bound: list[tuple[RecordRun, int]] = []
        for run in runs:
            assigned = self._assigned.get(TopicPartition(run.topic, run.partition))
            if assigned is not None:
                assigned.position = run.last + 1
            bound.append((run, 0 if assigned is None else assigned.generation))
        return RecordsOfRuns(bound, owner)

    def hand_over_one(self, record: Record[Any], owner: Any) -> None:
        """`hand_over` for one record, on the fast path."""
        assigned = self._recent
        if (
            assigned is None
            or assigned.lost
            or record.partition != assigned.partition.partition
            or record.topic != assigned.partition.topic
        ):
            assigned = self._recent = self._assigned.get(TopicPartition(record.topic, record.partition))
            if assigned is None:
                return
        record.owner = owner
        record.generation = assigned.generation
        assigned.position = record.offset + 1

    def positions_of(
        self, records: Iterable[Record[Any]], owner: Any
    ) -> tuple[dict[TopicPartition, tuple[AssignedPartition, int]], LeaseLost | None]:
        """The positions that settle these records, and the error if a partition was lost since the hand-over.

        Records of another consumer count as lost: each consumer numbers its assignments from 1.

        :param owner: the consumer to which `hand_over` bound the records.
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
        positions: dict[TopicPartition, tuple[AssignedPartition, int]] = {}
        lost: LeaseLost | None = None
        for (topic, partition, generation), top in highest.items():
            key = TopicPartition(topic, partition)
            assigned = self._assigned.get(key)
            if assigned is None or assigned.generation != generation:
                lost = lost or partition_lost(key)
            else:
                positions[key] = (assigned, assigned.covers(top + 1))
        return positions, lost

    def assigned(
        self, positions: Mapping[TopicPartition, int]
    ) -> tuple[dict[TopicPartition, tuple[AssignedPartition, int]], list[TopicPartition]]:
        """The assignments that these positions are for, and the partitions that are not assigned."""
        found: dict[TopicPartition, tuple[AssignedPartition, int]] = {}
        lost: list[TopicPartition] = []
        for partition, position in positions.items():
            assigned = self._assigned.get(partition)
            if assigned is None:
                lost.append(partition)
            else:
                found[partition] = (assigned, position)
        return found, lost

    def handed_over(self) -> dict[TopicPartition, tuple[AssignedPartition, int]]:
        """The position of each partition with handed-over records that are not committed."""
        return {
            assigned.partition: (assigned, assigned.position)
            for assigned in self._assigned.values()
            if assigned.position is not None and assigned.position > assigned.committed
        }

    def skipped_alone(self) -> Mapping[TopicPartition, tuple[AssignedPartition, int]]:
        """The positions of partitions in which only skipped records are uncommitted."""
        return {
            assigned.partition: (assigned, position)
            for assigned in self._assigned.values()
            if (position := assigned.skipped_alone) is not None
        }


def partition_lost(partition: TopicPartition) -> LeaseLost:
    """The error of a commit for a partition that was lost."""
    return LeaseLost(
        f"Partition {partition.partition} of topic {partition.topic!r} was revoked before the commit",
        advice="Make the work idempotent, because the new owner reads again from the last commit on",
    )


def not_assigned(partition: TopicPartition, group: str, assigned: Iterable[TopicPartition]) -> LeaseLost:
    """The error of a call for a partition that is not assigned to this member; names the `assigned` ones."""
    names = [f"{topic!r}[{number}]" for topic, number in sorted(assigned)]
    more = len(names) - _NAMED
    has = ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return LeaseLost(
        f"Partition {partition.partition} of topic {partition.topic!r} is not assigned to this member of group "
        f"{group!r}, which has {has or 'none'}",
        advice="Name partitions of assignment()",
    )


def check_reached(assigned: AssignedPartition, position: int) -> None:
    """Check that a position lies between what is committed and what was handed over.

    :raises OffsetOutOfRange: it does not.
    """
    topic, number = assigned.partition
    floor = assigned.floor
    if position > assigned.reached:
        at = f"which ends at {assigned.reached}" if assigned.reached >= 0 else "of which nothing was"
        raise OffsetOutOfRange(
            f"Position {position} of {topic!r}[{number}] lies beyond what was handed over since its assignment, {at}",
            advice="Commit the offset + 1 of a record that was handed over, or seek to the position first",
        )
    if floor is not None and position < floor:
        raise OffsetOutOfRange(
            f"Position {position} of {topic!r}[{number}] lies below the committed one, {floor}",
            advice="To move the group back, seek to the position first",
        )


def check_partitions(partitions: Iterable[tuple[str, int]]) -> list[TopicPartition]:
    """The pairs as partitions.

    :raises ConfigurationError: they are not partitions.
    """
    if not _is_iterable(partitions):
        raise refused("partitions", partitions, "a list of (topic, number), or None")
    return [_as_partition(partition) for partition in partitions]


def check_own_positions(positions: object) -> dict[TopicPartition, int]:
    """The positions to commit with their keys as partitions.

    :raises ConfigurationError: this is not a mapping of partitions to offsets.
    """
    if not isinstance(positions, Mapping):
        raise refused("positions", positions, "a mapping of (topic, number) to the next offset to read")
    found: dict[TopicPartition, int] = {}
    for partition, position in cast("Mapping[tuple[str, int], int]", positions).items():
        if not is_whole(position) or position < 0:
            raise refused("position", position, "the next offset to read, 0 or more")
        found[_as_partition(partition)] = position
    return found


def check_positions(positions: Mapping[tuple[str, int], int | None]) -> dict[TopicPartition, int | None]:
    """The positions with their keys as partitions.

    :raises ConfigurationError: this is not a mapping of partitions to offsets.
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


# These take any value: not every caller uses a type checker.


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_partition(value: Any) -> bool:
    if not isinstance(value, tuple | list):
        return False
    parts: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
    return len(parts) == 2 and isinstance(parts[0], str) and is_whole(parts[1])
