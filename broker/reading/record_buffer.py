"""What was fetched and not handed over yet: records, and runs of records that nobody has made. Pure, without a lock.

Records leave in the order in which they came, runs as a whole where they can. What belongs to a partition that is held
back is kept aside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from broker.records import Record, RecordRun
from broker.spi import TopicPartition

__all__ = ["RecordBuffer"]


class RecordBuffer:
    """:param admits: whether a record of this partition may be handed over; others are dropped.

    :ivar size: bytes of what may leave.
    """

    def __init__(self, admits: Callable[[TopicPartition], bool]) -> None:
        self._admits = admits
        self._records: deque[Record[Any]] = deque()
        self._runs: deque[RecordRun] = deque()
        """Behind the records."""
        self._unmade = 0
        self._held_back: dict[TopicPartition, list[Record[Any]]] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._records) + self._unmade

    # -- in ------------------------------------------------------------------------------------------------

    def add(self, records: Sequence[Record[Any]]) -> None:
        """These were fetched."""
        self._make_all()
        buffer = self._records
        into: list[Record[Any]] | deque[Record[Any]] | None = None
        topic, partition, size = "", -1, 0
        for record in records:
            if record.partition != partition or record.topic != topic:
                topic, partition = record.topic, record.partition
                key = TopicPartition(topic, partition)
                into = self._held_back.get(key, buffer) if self._admits(key) else None
            if into is not None:
                into.append(record)
                if into is buffer:
                    size += record.size
        self.size += size

    def add_runs(self, runs: Iterable[RecordRun]) -> None:
        """These were fetched."""
        for run in runs:
            key = TopicPartition(run.topic, run.partition)
            if not self._admits(key):
                continue
            aside = self._held_back.get(key)
            if aside is not None:
                aside.extend(run.make(None, 0))
                continue
            self._runs.append(run)
            self._unmade += len(run)
            self.size += run.size

    def put_back(self, records: Sequence[Record[Any]]) -> None:
        """Return records that were popped in this same step and not handed over."""
        self._records.extendleft(reversed(records))
        self.size += _size_of(records)

    # -- out -----------------------------------------------------------------------------------------------

    @property
    def unmade(self) -> bool:
        """Whether a run is the next to leave, and nobody has made records of it."""
        return bool(self._runs) and not self._records

    def pop_runs(self, limit: int) -> list[RecordRun]:
        """Take out the next runs, of at most `limit` records together, where they are `unmade`."""
        taken: list[RecordRun] = []
        runs = self._runs
        while runs and limit > 0:
            run = runs.popleft()
            if len(run) > limit:
                run, rest = run.split(limit)
                runs.appendleft(rest)
            taken.append(run)
            limit -= len(run)
            self._unmade -= len(run)
            self.size -= run.size
        return taken

    def pop(self, limit: int) -> list[Record[Any]]:
        """Take out the next records, at most `limit`; none if there are none."""
        while self._runs and len(self._records) < limit:
            self._make_next()
        buffer = self._records
        if limit >= len(buffer):
            records = list(buffer)
            buffer.clear()
            self.size = sum([run.size for run in self._runs])
        else:
            take = buffer.popleft
            records = [take() for _ in range(limit)]
            self.size -= _size_of(records)
        return records

    def pop_one(self) -> Record[Any]:
        """Take out the next record; there must be one."""
        if not self._records:
            self._make_next()
        record = self._records.popleft()
        self.size -= record.size
        return record

    def peek(self) -> Record[Any] | None:
        """The next record, left where it is."""
        if self.unmade:
            self._make_next()
        return self._records[0] if self._records else None

    # -- partitions that go, or rest -----------------------------------------------------------------------

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget what is here of these, held back or not."""
        dropped = set(partitions)
        for partition in dropped & self._held_back.keys():
            self._held_back[partition] = []
        self._filter(dropped)

    def clear(self) -> None:
        """Forget everything."""
        self._held_back = {partition: [] for partition in self._held_back}
        self._records.clear()
        self._runs.clear()
        self._unmade = self.size = 0

    def hold_back(self, partitions: Iterable[TopicPartition]) -> None:
        """Let nothing of these out until `let_go`; what is here of them is kept aside."""
        asked = {partition for partition in partitions if partition not in self._held_back}
        for partition in asked:
            self._held_back[partition] = []
        for record in self._filter(asked):
            self._held_back[TopicPartition(record.topic, record.partition)].append(record)

    def let_go(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `hold_back`."""
        for partition in partitions:
            records = self._held_back.pop(partition, None)
            if records:
                self._make_all()
                self._records.extend(records)
                self.size += _size_of(records)

    # -- inside --------------------------------------------------------------------------------------------

    def _make_next(self) -> None:
        run = self._runs.popleft()
        self._unmade -= len(run)
        self._records.extend(run.make(None, 0))

    def _make_all(self) -> None:
        while self._runs:
            self._make_next()

    def _filter(self, partitions: set[TopicPartition]) -> list[Record[Any]]:
        """Take the records of these partitions out."""
        if not partitions or not len(self):
            return []
        self._make_all()
        taken: list[Record[Any]] = []
        kept: deque[Record[Any]] = deque()
        for record in self._records:
            (taken if (record.topic, record.partition) in partitions else kept).append(record)
        self._records = kept
        self.size -= _size_of(taken)
        return taken


def _size_of(records: Sequence[Record[Any]]) -> int:
    return sum([record.size for record in records])
