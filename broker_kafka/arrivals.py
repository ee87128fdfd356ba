"""What a polling thread has handed over and nobody has fetched yet. Pure, for one event loop, no lock.

Batches leave in the order in which they came. What belongs to a paused partition is kept aside until it is resumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from broker.records import Record
from broker.spi import TopicPartition

__all__ = ["Arrivals"]


class _Batch:
    __slots__ = ("from_thread", "records", "size")

    def __init__(self, records: list[Record[Any]], size: int, *, from_thread: bool = True) -> None:
        self.records = records
        self.size = size
        self.from_thread = from_thread
        """Whether the thread waits for it to be taken."""


class Arrivals:
    """:param taken: called for each batch of the thread that is not held here any more."""

    def __init__(self, taken: Callable[[], object]) -> None:
        self._taken = taken
        self._batches: deque[_Batch] = deque()
        self.paused: set[TopicPartition] = set()
        """Of which nothing is let out."""
        self._held: dict[TopicPartition, list[Record[Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, records: list[Record[Any]], size: int) -> None:
        """A batch came, of so many bytes."""
        self._batches.append(_Batch(records, size))
        if self.paused:
            self._hold_back()

    def take(self, max_records: int, max_bytes: int) -> list[Record[Any]]:
        """The next batch, or as much of it as is wanted: at least one record. There must be a batch."""
        batch = self._batches.popleft()
        records, size = batch.records, batch.size
        if len(records) > max_records or size > max_bytes:
            count = taken = 0
            for record in records:
                if count == max_records or (count and taken + record.size > max_bytes):
                    break
                count += 1
                taken += record.size
            if count < len(records):
                batch.records, batch.size = records[count:], size - taken
                self._batches.appendleft(batch)
                return records[:count]
        if batch.from_thread:
            self._taken()
        return records

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Forget what has come of these."""
        self._take_out(partitions)
        for partition in partitions:
            self._held.pop(partition, None)

    def clear(self) -> None:
        """Forget everything."""
        self._batches.clear()
        self._held.clear()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Let nothing of these out until they are resumed."""
        self.paused.update(partitions)
        self._hold_back()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `pause`; what was kept aside goes before what comes later."""
        for partition in partitions:
            self.paused.discard(partition)
            records = self._held.pop(partition, None)
            if records:
                self._batches.append(_Batch(records, sum([record.size for record in records]), from_thread=False))

    def _hold_back(self) -> None:
        for record in self._take_out(self.paused):
            self._held.setdefault(TopicPartition(record.topic, record.partition), []).append(record)

    def _take_out(self, partitions: Collection[TopicPartition]) -> list[Record[Any]]:
        taken: list[Record[Any]] = []
        kept: deque[_Batch] = deque()
        for batch in self._batches:
            rest: list[Record[Any]] = []
            for record in batch.records:
                (taken if (record.topic, record.partition) in partitions else rest).append(record)
            if rest:
                batch.records, batch.size = rest, sum([record.size for record in rest])
                kept.append(batch)
            elif batch.from_thread:
                self._taken()
        self._batches = kept
        return taken
