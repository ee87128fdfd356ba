"""`MessagePartition`: a partition whose records are settled as messages, and the position to commit. Pure, no lock."""

from __future__ import annotations

from collections import deque
from typing import Any

from broker.driver.assignments import AssignedPartition
from broker.driver.contract import RetryTopic, TopicPartition
from broker.driver.optional import Progress
from broker.messages import Message

__all__ = ["MessagePartition", "OffsetTracker", "progress_of"]


class OffsetTracker:
    """The contiguous finished offsets of one assignment of one partition; each call is amortised O(1).

    Offsets are started in rising order, possibly with gaps, and finished in any order. The position grows only over
    finished offsets without an unfinished one below, so that a commit never passes unfinished work. Misuse raises
    ValueError and changes nothing.
    """

    __slots__ = ("_committed", "_finished", "_last", "_position", "_window")

    def __init__(self) -> None:
        self._window: deque[int] = deque()
        """The started offsets from the first unfinished one on, rising."""
        self._finished: set[int] = set()
        """The finished offsets of the window."""
        self._last = -1
        self._position: int | None = None
        self._committed = -1

    def started(self, offset: int) -> None:
        """A record was delivered.

        :raises ValueError: the offset is not above all that were started before.
        """
        if offset <= self._last:
            raise ValueError(f"offset {offset} was started after offset {self._last}")
        self._last = offset
        self._window.append(offset)

    def finished(self, offset: int) -> bool:
        """A started record is finished; return whether the position grew. May be repeated.

        :raises ValueError: the offset was not started.
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
        """The position to commit; None if it is already committed."""
        position = self._position
        return position if position is not None and position > self._committed else None

    def committed(self, position: int) -> None:
        """The broker has stored this position; a lower one than before has no effect."""
        self._committed = max(self._committed, position)

    @property
    def last_started(self) -> int:
        """The highest started offset; -1 before the first."""
        return self._last

    @property
    def first_unfinished(self) -> int | None:
        """The lowest started and unfinished offset."""
        return self._window[0] if self._window else None

    @property
    def resume_at(self) -> int | None:
        """The first unfinished offset, otherwise the position; None before the first record."""
        return self._window[0] if self._window else self._position

    def finished_ranges(self) -> list[tuple[int, int]]:
        """The half-open finished ranges above the first unfinished record, rising; they may span missing offsets."""
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
        """The number of finished records above the first unfinished one. A crash would repeat them."""
        return len(self._finished)

    @property
    def unfinished(self) -> int:
        """The number of started records that are not finished."""
        return len(self._window) - len(self._finished)


class MessagePartition(AssignedPartition):
    """One assignment of one partition, and its unfinished messages."""

    __slots__ = (
        "delay",
        "not_due",
        "over_limit",
        "paused",
        "range_fullness",
        "restored",
        "topic",
        "tracker",
        "unsettled",
        "waiting",
    )

    def __init__(self, partition: TopicPartition, generation: int, retry_topic: RetryTopic | None = None) -> None:
        super().__init__(partition, generation)
        self.topic = partition.topic if retry_topic is None else retry_topic.origin
        """The topic of its messages."""
        self.delay = 0.0 if retry_topic is None else retry_topic.delay
        """The delay of the retry topic, in seconds; 0 for any other topic."""
        self.tracker = OffsetTracker()
        self.unsettled: dict[int, Message[Any]] = {}
        """The messages that the consumer has, by offset."""
        self.waiting = 0
        """The number of records that wait for redelivery, or until they are due."""
        self.not_due = 0
        """The number of these records that wait on a retry topic until they are due."""
        self.range_fullness = 0.0
        """`CommitsRanges.fullness` after the last commit; 0 if no unfinished message could make room."""
        self.over_limit = False
        """Whether too many records are finished, or wait, above an unfinished one."""
        self.paused = False
        self.restored: list[tuple[int, int]] | None = None
        """Ranges that an earlier owner finished, from the next record on; None until they are read from the source."""

    def was_finished(self, offset: int) -> bool:
        """Whether an earlier owner finished this record; call it in rising order."""
        restored = self.restored
        while restored and restored[0][1] <= offset:
            restored.pop(0)
        return bool(restored) and restored[0][0] <= offset

    def progress(self, position: int) -> Progress:
        """The current progress, at least up to `position`."""
        tracker = self.tracker
        ranges = tracker.finished_ranges()
        last = tracker.last_started
        ranges += [(max(start, last + 1), stop) for start, stop in self.restored or () if stop > last + 1]
        return Progress(max(position, tracker.resume_at or position), ranges)

    @property
    def gap(self) -> int:
        return self.tracker.gap + self.waiting


def progress_of(assigned: AssignedPartition, position: int) -> Progress:
    """`MessagePartition.progress`, for a committer."""
    assert isinstance(assigned, MessagePartition)
    return assigned.progress(position)
