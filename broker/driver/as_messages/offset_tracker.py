"""Which position of a partition may be committed when its records are finished out of order.

Pure and synchronous: no I/O, no clock, no lock. It fails only on misuse (ValueError), and then changes nothing.
Every call is amortised O(1), however many finished offsets wait above an unfinished one.
"""

from __future__ import annotations

from collections import deque

__all__ = ["OffsetTracker"]


class OffsetTracker:
    """The contiguous finished offsets of one assignment of one partition.

    Offsets are started in rising order, need not be dense, and are finished in any order. The position
    grows only over offsets that are finished and have no unfinished one below them, so committing it
    never passes work that is still to be done.
    """

    __slots__ = ("_committed", "_finished", "_last", "_position", "_window")

    def __init__(self) -> None:
        self._window: deque[int] = deque()
        """Started offsets from the first unfinished one on, rising."""
        self._finished: set[int] = set()
        """Those of the window that are finished."""
        self._last = -1
        self._position: int | None = None
        self._committed = -1

    def started(self, offset: int) -> None:
        """Take note of a record that is being worked on.

        :raises ValueError: it does not lie above every offset started before.
        """
        if offset <= self._last:
            raise ValueError(f"offset {offset} was started after offset {self._last}")
        self._last = offset
        self._window.append(offset)

    def finished(self, offset: int) -> bool:
        """Take note that a started record is done; whether the position grew by it. Harmless if repeated.

        :raises ValueError: it lies above every started offset.
        """
        window = self._window
        if window and window[0] == offset:
            window.popleft()
            position = offset + 1
            if self._finished:
                while window and window[0] in self._finished:
                    passed = window.popleft()
                    self._finished.remove(passed)
                    position = passed + 1
            self._position = position
            return True
        if offset > self._last or offset < 0:
            raise ValueError(f"offset {offset} was not started")
        if window and offset > window[0]:
            self._finished.add(offset)
        return False

    def committable(self) -> int | None:
        """The next position to read, if it lies above what was committed; None when there is nothing to commit."""
        position = self._position
        return position if position is not None and position > self._committed else None

    def committed(self, position: int) -> None:
        """Take note that the broker has stored this position; a lower one than before changes nothing."""
        self._committed = max(self._committed, position)

    @property
    def last_started(self) -> int:
        """The highest started offset, -1 before the first."""
        return self._last

    @property
    def first_unfinished(self) -> int | None:
        """The lowest started offset that is not finished."""
        return self._window[0] if self._window else None

    @property
    def resume_at(self) -> int | None:
        """The lowest position from which nothing unfinished is left out; None before the first record."""
        return self._window[0] if self._window else self._position

    def finished_ranges(self) -> list[tuple[int, int]]:
        """What is finished above the first unfinished record, half-open and rising.

        A range may contain offsets at which there is no record.
        """
        ranges: list[tuple[int, int]] = []
        start: int | None = None
        last = -1
        for offset in self._window if self._finished else ():
            if offset in self._finished:
                start = offset if start is None else start
            elif start is not None:
                ranges.append((start, last + 1))
                start = None
            last = offset
        if start is not None:
            ranges.append((start, last + 1))
        return ranges

    @property
    def gap(self) -> int:
        """How many finished records wait above the first unfinished one: what a crash now would repeat for nothing."""
        return len(self._finished)

    @property
    def unfinished(self) -> int:
        """How many records are started and not finished."""
        return len(self._window) - len(self._finished)
