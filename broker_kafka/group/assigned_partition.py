"""One assignment of one partition: its marks, and the records that wait to be handed over.

Pure and synchronous: no I/O, no clock, no lock. A position is always the *next* offset to read. Offsets are not dense:
those that the log does not have (compaction, transaction markers) count as done with the record before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, Final

from broker import Record, TopicPartition
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["AssignedPartition", "Assignment", "Marks", "Runs"]

_GENERATIONS: Final = count(1)
"""Unique in this process, so that an `OffsetStash` can order two assignments."""


class Assignment:
    """A partition of a member, from its assignment to its release.

    :ivar generation: the number of this assignment, which its records carry.
    :ivar revoking: about to be released; marks and commits still count.
    :ivar gone: released, or lost.
    """

    __slots__ = ("generation", "gone", "partition", "revoking")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.generation = next(_GENERATIONS)
        self.revoking = self.gone = False


class AssignedPartition(Assignment):
    """A partition of a `GroupConsumer`.

    :ivar begun: where reading began; None if at the first record.
    :ivar records: fetched, and not handed over.
    :ivar size: their bytes.
    :ivar opened: `on_assigned` is over, so that records may be handed over.
    :ivar paused: by the application.
    :ivar full: paused because its records are not read.
    :ivar in_line: waits for its turn among those with records.
    :ivar turn: how many records were handed over one by one in this turn.
    """

    __slots__ = ("begun", "full", "in_line", "marks", "opened", "paused", "records", "size", "turn")

    def __init__(self, partition: TopicPartition, stored: StoredOffset | None, begun: int) -> None:
        super().__init__(partition)
        self.marks = Marks(stored)
        self.begun = begun if begun >= 0 else None
        self.records: deque[Record[Any]] = deque()
        self.size = 0
        self.opened = self.paused = self.full = self.in_line = False
        self.turn = 0

    @property
    def deliverable(self) -> bool:
        """Whether a record can be handed over now."""
        return bool(self.records) and self.opened and not (self.paused or self.revoking or self.gone)

    @property
    def position(self) -> int | None:
        """The next offset that is not done; None if nothing is known."""
        current = self.marks.current
        return self.begun if current is None else current.offset

    def take(self, limit: int) -> list[Record[Any]]:
        """Hand over the next records, at most `limit`; there is at least one."""
        waiting = self.records
        if limit >= len(waiting):
            records = list(waiting)
            waiting.clear()
            self.size = 0
        else:
            pop = waiting.popleft
            records = [pop() for _ in range(limit)]
            self.size -= sum([record.size for record in records])
        self.marks.runs.hand_over(records)
        return records

    def take_one(self) -> Record[Any]:
        """Hand over the next record; there is at least one."""
        record = self.records.popleft()
        self.size -= record.size
        self.marks.runs.hand_over_one(record.offset)
        return record

    def drop(self) -> None:
        """Forget the records that wait."""
        self.records.clear()
        self.size = 0


class Marks:
    """The mark of one assignment: what is to be committed, and what was.

    :ivar current: the mark; None if there is none and nothing was stored.
    :ivar committed: what is stored, as far as known.
    :ivar tried: what may be stored instead: the commit was sent and not answered.
    :ivar leap: a mark above all that was fetched; it counts once the log is known to reach so far.
    """

    __slots__ = ("_tail", "committed", "current", "leap", "runs", "tried")

    def __init__(self, stored: StoredOffset | None) -> None:
        self.committed = stored
        self.current = stored
        self.tried: StoredOffset | None = None
        self.leap: StoredOffset | None = None
        self.runs = Runs()
        self._tail = (0, 0)

    @property
    def dirty(self) -> bool:
        """Whether there is something to commit. Only a commit of the current value ends this."""
        return self.current is not None and (self.current != self.committed or self.tried is not None)

    @property
    def pending(self) -> bool:
        """Whether there is something to commit, or to check first."""
        return self.dirty or self.leap is not None

    @property
    def rewinds(self) -> bool:
        """Whether the commit would, or may, move the stored position back."""
        known = [each.offset for each in (self.committed, self.tried) if each is not None]
        return self.current is not None and bool(known) and self.current.offset < max(known)

    def mark(self, position: int, metadata: str = "") -> int:
        """All below this position is done; by how much the mark grew. A lower mark than before changes nothing."""
        position = self.runs.pass_to(position)
        return self._raise_to(position, metadata)

    def leap_to(self, position: int, metadata: str = "") -> int:
        """`mark` above all that was fetched: it counts after `landed`."""
        before = self.leap or self.current
        if before is not None and position <= before.offset:
            return 0
        self.leap = StoredOffset(position, metadata)
        return 1 if before is None else position - before.offset

    def landed(self, leap: StoredOffset, *, within: bool) -> None:
        """A leap was checked. :param within: whether the log reaches so far."""
        if self.leap == leap:
            self.leap = None
        if within:
            self.mark(leap.offset, leap.metadata)

    def finish(self, offset: int, metadata: str = "") -> int:
        """This record is done; by how much the mark grew, which waits for the records below."""
        position = self.runs.finish(offset)
        return 0 if position is None else self._raise_to(position, metadata)

    def reset(self, position: int, metadata: str = "") -> bool:
        """Go back to this position; False, and nothing done, if there is no mark or a lower one."""
        leap = self.leap
        if leap is not None and position <= leap.offset:
            self.leap = None
            if self.current is None or position > self.current.offset:
                self.leap = StoredOffset(position, metadata)
                return True
        if self.current is None or position > self.current.offset:
            return False
        self.current = StoredOffset(position, metadata)
        return True

    def end(self, after: int, end: int) -> int:
        """There is no record from `after` to `end`: by how much the mark grew."""
        self._tail = (after, end)
        before = self.current
        return 0 if before is None else self._raise_to(before.offset, before.metadata)

    def covers(self, position: int) -> int:
        """The highest position known that has the same records before it as this one."""
        after, end = self._tail
        return end if after <= position < end else position

    def moved(self) -> None:
        """The partition is read from elsewhere."""
        self.runs.clear()
        self._tail = (0, 0)

    def rebase(self) -> None:
        """The partition is read from elsewhere, as its log does not hold the old position: every mark counts."""
        self.current = self.leap = None
        self.moved()

    def trying(self) -> None:
        """The current value is being committed; until `stored`, it may or may not be stored."""
        if self.tried is None or (self.current is not None and self.current.offset > self.tried.offset):
            self.tried = self.current

    def stored(self, value: StoredOffset) -> None:
        """This value was committed."""
        self.committed = value
        self.tried = None

    def _raise_to(self, position: int, metadata: str) -> int:
        before, position = self.current, self.covers(position)
        if before is not None and position <= before.offset:
            return 0
        self.current = StoredOffset(position, metadata)
        return 1 if before is None else position - before.offset


class Runs:
    """Which of the records that were handed over are finished, in any order; kept as runs of dense offsets.

    Memory grows with the gaps, not with the records, so that it stays small if nothing is ever finished.
    """

    __slots__ = ("_finished", "_runs")

    def __init__(self) -> None:
        self._runs: deque[list[int]] = deque()
        """First and last offset of each run, from the first unfinished record on."""
        self._finished: set[int] = set()

    def hand_over(self, records: Sequence[Record[Any]]) -> None:
        """Add records, which lie above all before."""
        first, last = records[0].offset, records[-1].offset
        if last - first + 1 == len(records):
            self._append(first, last)
            return
        begun = previous = first
        for record in records:
            offset = record.offset
            if offset > previous + 1:
                self._append(begun, previous)
                begun = offset
            previous = offset
        self._append(begun, previous)

    def hand_over_one(self, offset: int) -> None:
        """`hand_over` of one record."""
        if self._runs and self._runs[-1][1] == offset - 1:
            self._runs[-1][1] = offset
        else:
            self._runs.append([offset, offset])

    def finish(self, offset: int) -> int | None:
        """A record is done; the position below which everything is done, if it grew."""
        runs = self._runs
        if not runs or offset < runs[0][0] or offset > runs[-1][1]:
            return None
        if offset == runs[0][0]:
            return self._advance(offset + 1)
        self._finished.add(offset)
        return None

    def pass_to(self, position: int) -> int:
        """All below this position is done; the resulting position, which may lie higher."""
        runs = self._runs
        if not runs or position <= runs[0][0]:
            return position
        while runs and runs[0][1] < position:
            runs.popleft()
        if runs and runs[0][0] < position:
            runs[0][0] = position
        if not self._finished:
            return position
        self._finished = {offset for offset in self._finished if offset >= position}
        if runs and runs[0][0] in self._finished:
            self._finished.remove(runs[0][0])
            return self._advance(runs[0][0] + 1)
        return position

    def clear(self) -> None:
        """Forget everything: the partition is read from elsewhere."""
        self._runs.clear()
        self._finished.clear()

    @property
    def unfinished(self) -> int:
        """How many records were handed over and are not finished."""
        return sum([last - first + 1 for first, last in self._runs]) - len(self._finished)

    def _append(self, first: int, last: int) -> None:
        if self._runs and self._runs[-1][1] == first - 1:
            self._runs[-1][1] = last
        else:
            self._runs.append([first, last])

    def _advance(self, position: int) -> int:
        """The first run is done below `position`; continue over finished records above it."""
        runs, finished = self._runs, self._finished
        while True:
            last = runs[0][1]
            while position <= last and position in finished:
                finished.remove(position)
                position += 1
            if position <= last:
                runs[0][0] = position
                return position
            runs.popleft()
            if not runs or runs[0][0] not in finished:
                return position
            position = runs[0][0]
