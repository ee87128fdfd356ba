"""How far the work on one assignment of one partition is, and what of it is to be committed.

Pure and synchronous: no I/O, no clock, no lock. A position is always the *next* offset to read. Nothing here is dense:
offsets that the log has not (compaction, markers of transactions) count as done with the record before them.

MERGED broker_kafka.group.assigned_partition: One assignment of one partition: its records that wait, and its marks. Pure and synchronous, without a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from broker import Record, TopicPartition
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["Held", "Marks", "Runs"]


class Runs:
    """Which of the records that were handed over are finished, out of order; kept as runs of dense offsets.

    What is handed over costs memory by the gap, not by the record, so that it does not matter if nobody finishes.
    """

    __slots__ = ("_finished", "_runs")

    def __init__(self) -> None:
        self._runs: deque[list[int]] = deque()
        """First and last offset of each run, from the first unfinished record on."""
        self._finished: set[int] = set()

    def hand_over(self, records: Sequence[Record[Any]]) -> None:
        """Take note of records that somebody works on from now on; they lie above all before."""
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
        """`hand_over` of a single record."""
        if self._runs and self._runs[-1][1] == offset - 1:
            self._runs[-1][1] = offset
        else:
            self._runs.append([offset, offset])

    def finish(self, offset: int) -> int | None:
        """Take note that a record is done; the position that everything below is done of, if it grew."""
        runs = self._runs
        if not runs or offset < runs[0][0] or offset > runs[-1][1]:
            return None
        if offset == runs[0][0]:
            return self._advance(offset + 1)
        self._finished.add(offset)
        return None

    def pass_to(self, position: int) -> int:
        """All below this position is done; the position that follows from it, which may lie higher."""
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
        """Forget it all: the partition is read from elsewhere."""
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
        """The first run is done below `position`; go on over what is finished above."""
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


class Marks:
    """The mark of one assignment: what is to be committed, and what was.

    :ivar current: what the application wants to be stored; None while it said nothing and nothing was stored.
    :ivar committed: what is stored, as far as known.
    :ivar tried: what may be stored instead, since nobody has told that it is or is not.
    :ivar leap: a mark above all that was fetched, which is none if the log does not reach so far.
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
        """Whether there is something to commit. Only the commit of the current value ends it."""
        return self.current is not None and (self.current != self.committed or self.tried is not None)

    @property
    def pending(self) -> bool:
        """Whether there is something to commit, or to look at first."""
        return self.dirty or self.leap is not None

    @property
    def rewinds(self) -> bool:
        """Whether its commit would take the stored position back, or may."""
        known = [each.offset for each in (self.committed, self.tried) if each is not None]
        return self.current is not None and bool(known) and self.current.offset < max(known)

    def mark(self, position: int, metadata: str = "") -> int:
        """All below this position is done; by how much the mark grew. A lower one than before changes nothing."""
        position = self.runs.pass_to(position)
        return self._raise_to(position, metadata)

    def leap_to(self, position: int, metadata: str = "") -> int:
        """`mark`, of what nobody has seen: it counts once it was looked at with `landed`."""
        before = self.leap or self.current
        if before is not None and position <= before.offset:
            return 0
        self.leap = StoredOffset(position, metadata)
        return 1 if before is None else position - before.offset

    def landed(self, leap: StoredOffset, *, within: bool) -> None:
        """Whether the log reaches so far."""
        if self.leap == leap:
            self.leap = None
        if within:
            self.mark(leap.offset, leap.metadata)

    def finish(self, offset: int, metadata: str = "") -> int:
        """This record is done; by how much the mark grew, which waits for the records below."""
        position = self.runs.finish(offset)
        return 0 if position is None else self._raise_to(position, metadata)

    def reset(self, position: int, metadata: str = "") -> bool:
        """Go back to this position; False, and nothing done, if the mark is none or lies below it."""
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
        """There is no record from `after` to `end`: by how much the mark grew, which goes past them."""
        self._tail = (after, end)
        before = self.current
        return 0 if before is None else self._raise_to(before.offset, before.metadata)

    def covers(self, position: int) -> int:
        """The position from which as much is read as from this one: the highest that is known."""
        after, end = self._tail
        return end if after <= position < end else position

    def moved(self) -> None:
        """The partition is read from elsewhere."""
        self.runs.clear()
        self._tail = (0, 0)

    def rebase(self) -> None:
        """The partition is read from elsewhere, since its log does not hold the old position: any mark is news."""
        self.current = self.leap = None
        self.moved()

    def trying(self) -> None:
        """The current value is about to be committed; until `stored` that may have happened or not."""
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


class Held:
    """What the member holds of a partition, from its assignment to its release.

    :ivar generation: the number of this assignment; records carry it, so that those of an earlier one are told apart.
    :ivar begun: where reading began; None if at the first record there was.
    :ivar handed: the position after the last record that was handed over.
    :ivar records: fetched, and not handed over.
    :ivar size: their bytes.
    :ivar opened: `on_assigned` is over, so that records may be handed over.
    :ivar paused: by the application.
    :ivar full: paused because nobody takes its records.
    :ivar revoking: it is about to go; nothing more is handed over, marks and commits still count.
    :ivar gone: it is somebody else's.
    :ivar in_line: it waits for its turn among those with records.
    :ivar turn: how many records were taken one by one since its turn came.
    """

    __slots__ = (
        "begun",
        "full",
        "generation",
        "gone",
        "handed",
        "in_line",
        "marks",
        "opened",
        "partition",
        "paused",
        "records",
        "revoking",
        "size",
        "turn",
    )

    def __init__(self, partition: TopicPartition, generation: int, stored: StoredOffset | None, begun: int) -> None:
        self.partition = partition
        self.generation = generation
        self.marks = Marks(stored)
        self.begun = begun if begun >= 0 else None
        self.handed: int | None = None
        self.records: deque[Record[Any]] = deque()
        self.size = 0
        self.opened = self.paused = self.full = self.revoking = self.gone = self.in_line = False
        self.turn = 0

    @property
    def deliverable(self) -> bool:
        """Whether a record can be handed over now."""
        return bool(self.records) and self.opened and not (self.paused or self.revoking or self.gone)

    @property
    def position(self) -> int | None:
        """The next offset that counts as not done; None if nothing is known."""
        current = self.marks.current
        return self.begun if current is None else current.offset

    def take(self, limit: int) -> list[Record[Any]]:
        """Hand over the next records, at most `limit`; there is one at least."""
        waiting = self.records
        if limit >= len(waiting):
            records = list(waiting)
            waiting.clear()
            self.size = 0
        else:
            pop = waiting.popleft
            records = [pop() for _ in range(limit)]
            self.size -= sum([record.size for record in records])
        self.handed = records[-1].offset + 1
        self.marks.runs.hand_over(records)
        return records

    def take_one(self) -> Record[Any]:
        """Hand over the next record; there is one."""
        record = self.records.popleft()
        self.size -= record.size
        self.handed = record.offset + 1
        self.marks.runs.hand_over_one(record.offset)
        return record

    def drop(self) -> None:
        """Forget the records that wait."""
        self.records.clear()
        self.size = 0
