"""The records between the client's thread and the application, by partition, and how many of them there may be.

*Concurrency.* One loop; nothing here suspends, so that a record is either here or handed over. *Flow.* In multiplexed
mode the thread is answered only while there is room, and waits otherwise; partitions are paused for nobody. In
partitions mode the thread never waits: a partition whose stream does not take its records is paused by itself, so that
the others go on. What the application paused counts for neither.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from broker.records import Record
from broker.spi import TopicPartition
from broker_kafka.group.held import Held

__all__ = ["Intake", "Source"]

_LEAST_PER_PARTITION: Final = 500
_TURN: Final = 500
"""Records that are taken one by one of a partition before the next has its turn."""


class Source(Protocol):
    """What the intake asks of the client's thread."""

    def taken(self) -> None: ...
    def pause(self, partitions: Iterable[TopicPartition]) -> None: ...
    def resume(self, partitions: Iterable[TopicPartition]) -> None: ...


class Intake:
    """:param owner: what records are bound to.
    :param max_records: the most records that wait here.
    :param max_bytes: likewise in bytes; exceeded by a batch of the client at most.
    """

    def __init__(
        self,
        held: Mapping[TopicPartition, Held],
        owner: Any,
        *,
        max_records: int,
        max_bytes: int,
        changed: Callable[[], None],
    ) -> None:
        self._held = held
        self._owner = owner
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._source: Source | None = None
        self._line: deque[Held] = deque()
        self._count = 0
        """Records that wait and are not paused by the application."""
        self._size = 0
        self._owed = 0
        """Batches that the thread waits to be answered for."""
        self._by_partition = False
        self.last_activity = self._loop.time()

    def connect(self, source: Source) -> None:
        """This is the thread."""
        self._source = source

    def by_partition(self) -> None:
        """Partitions mode: nobody waits for anybody else from now on."""
        self._by_partition = True
        for held in self._held.values():
            self._check_full(held)
        self._answer()

    # -- records in ----------------------------------------------------------------------------------------

    def arrived(self, records: list[Record[Any]]) -> None:
        """A batch of the thread."""
        self._owed += 1
        self.last_activity = self._loop.time()
        for run in _runs(records):
            first = run[0]
            held = self._held.get(TopicPartition(first.topic, first.partition))
            if held is None or held.revoking or held.gone:
                continue
            size = sum([record.size for record in run])
            held.records.extend(run)
            held.size += size
            if not held.paused:
                self._count += len(run)
                self._size += size
            self._line_up(held)
            if self._by_partition:
                self._check_full(held)
        self._answer()
        self._changed()

    def drop(self, partitions: Iterable[Held]) -> None:
        """Forget what waits of these."""
        for held in partitions:
            if not held.paused:
                self._count -= len(held.records)
                self._size -= held.size
            held.drop()
            if not held.gone:
                self._check_room(held)
        self._answer()

    def open(self, partitions: Iterable[Held]) -> None:
        """Records of these may be handed over."""
        for held in partitions:
            held.opened = True
            self._line_up(held)
        self._changed()

    def pause(self, held: Held) -> None:
        """The application wants no more of it for now."""
        if held.paused:
            return
        held.paused = True
        self._count -= len(held.records)
        self._size -= held.size
        if self._source is not None and not held.full:
            self._source.pause((held.partition,))
        self._answer()

    def resume(self, held: Held) -> None:
        """Undo `pause`."""
        if not held.paused:
            return
        held.paused = False
        self._count += len(held.records)
        self._size += held.size
        if self._source is not None and not held.full:
            self._source.resume((held.partition,))
        self._line_up(held)
        self._changed()

    # -- records out ---------------------------------------------------------------------------------------

    def take(self, limit: int) -> tuple[list[Record[Any]], list[Held]]:
        """The next records of all partitions, at most `limit`, and whose they are; none if there are none."""
        taken: list[Record[Any]] = []
        whose: list[Held] = []
        line = self._line
        while line and len(taken) < limit:
            held = line.popleft()
            held.in_line = False
            if held.deliverable:
                records = self.take_of(held, limit - len(taken))
                taken = [*taken, *records] if taken else records
                whose.append(held)
                self._line_up(held)
        return taken, whose

    def take_one(self) -> tuple[Record[Any], Held] | None:
        """The next record of all partitions."""
        line = self._line
        while line:
            held = line[0]
            if held.deliverable and held.turn < _TURN:
                held.turn += 1
                return self.take_one_of(held), held
            line.popleft()
            held.turn = 0
            held.in_line = False
            self._line_up(held)
        return None

    def take_of(self, held: Held, limit: int) -> list[Record[Any]]:
        """The next records of a partition, at most `limit`; there is one at least."""
        size = held.size
        records = held.take(limit, self._owner)
        self._less(held, len(records), size - held.size)
        return records

    def take_one_of(self, held: Held) -> Record[Any]:
        """The next record of a partition; there is one."""
        record = held.take_one(self._owner)
        self._less(held, 1, record.size)
        return record

    def __len__(self) -> int:
        return self._count

    # -- flow ----------------------------------------------------------------------------------------------

    def _less(self, held: Held, count: int, size: int) -> None:
        self._count -= count
        self._size -= size
        if held.full:
            self._check_room(held)
        if self._owed:
            self._answer()

    def _line_up(self, held: Held) -> None:
        if not held.in_line and held.deliverable:
            held.in_line = True
            self._line.append(held)

    def _answer(self) -> None:
        """Let the thread go on if there is room."""
        if self._owed and (
            self._by_partition or (2 * self._count <= self._max_records and 2 * self._size <= self._max_bytes)
        ):
            owed, self._owed = self._owed, 0
            if self._source is not None:
                for _ in range(owed):
                    self._source.taken()

    def _share(self) -> tuple[int, int]:
        """What a partition may have waiting."""
        count = max(1, len(self._held))
        return max(_LEAST_PER_PARTITION, self._max_records // count), max(1, self._max_bytes // count)

    def _check_full(self, held: Held) -> None:
        if held.full:
            return
        records, size = self._share()
        if len(held.records) >= records or held.size >= size:
            held.full = True
            if self._source is not None and not held.paused:
                self._source.pause((held.partition,))

    def _check_room(self, held: Held) -> None:
        if not held.full:
            return
        records, size = self._share()
        if 2 * len(held.records) <= records and 2 * held.size <= size:
            held.full = False
            if self._source is not None and not held.paused:
                self._source.resume((held.partition,))


def _runs(records: list[Record[Any]]) -> Iterator[Sequence[Record[Any]]]:
    """Split where the partition changes."""
    begin, topic, partition = 0, records[0].topic, records[0].partition
    for index, record in enumerate(records):
        if record.partition != partition or record.topic != topic:
            yield records[begin:index]
            begin, topic, partition = index, record.topic, record.partition
    yield records[begin:] if begin else records
