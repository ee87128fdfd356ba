"""One assignment of one partition: its records that wait, and its marks. Pure and synchronous, without a lock."""

from __future__ import annotations

from collections import deque
from typing import Any

from broker import Record, TopicPartition
from broker_kafka.group.marks import Marks
from broker_kafka.offsets.protocol import StoredOffset

__all__ = ["Held"]


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
