"""One assignment of one partition whose records are settled as messages, and how far it is done. Pure, no lock."""

from __future__ import annotations

from typing import Any

from broker.driver.as_messages.offset_tracker import OffsetTracker
from broker.driver.assignments import AssignedPartition
from broker.driver.contract import Progress, RetryTopic, TopicPartition
from broker.messages import Message

__all__ = ["MessagePartition", "done"]


class MessagePartition(AssignedPartition):
    """One assignment of one partition, and the work on it."""

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
        """The topic that its messages show."""
        self.delay = 0.0 if retry_topic is None else retry_topic.delay
        """The seconds that messages wait in it for their next try; 0 if it is none of a retry topic."""
        self.tracker = OffsetTracker()
        self.unsettled: dict[int, Message[Any]] = {}
        """What was given to the consumer and is not settled, by offset."""
        self.waiting = 0
        """How many records wait to be delivered, again or when they are due."""
        self.not_due = 0
        """How many of these are not due yet."""
        self.range_fullness = 0.0
        """How full the room for what is finished was at the last commit; 0 where the end of no work would make more."""
        self.over_limit = False
        """Whether too much is finished, or waits, above something unfinished."""
        self.paused = False
        self.restored: list[tuple[int, int]] | None = None
        """What an earlier owner had finished above its commit, not read again yet; None before the source was asked."""

    def was_finished(self, offset: int) -> bool:
        """Whether an earlier owner finished this record; asked in rising order."""
        restored = self.restored
        while restored and restored[0][1] <= offset:
            restored.pop(0)
        return bool(restored) and restored[0][0] <= offset

    def done(self, position: int) -> Progress:
        """How far it is done now, at least up to `position`."""
        tracker = self.tracker
        ranges = tracker.finished_ranges()
        last = tracker.last_started
        ranges += [(max(start, last + 1), stop) for start, stop in self.restored or () if stop > last + 1]
        return Progress(max(position, tracker.resume_at or position), ranges)

    @property
    def gap(self) -> int:
        return self.tracker.gap + self.waiting


def done(assigned: AssignedPartition, position: int) -> Progress:
    """`MessagePartition.done`, for a committer."""
    assert isinstance(assigned, MessagePartition)
    return assigned.done(position)
