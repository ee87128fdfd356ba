"""The records between the client's thread and the application, by partition, and how many of them there may be.

*Concurrency.* One loop; nothing here suspends, so that a record is either here or handed over. *Flow.* In multiplexed
mode the thread is answered only while there is room, and waits otherwise; partitions are paused for nobody. In
partitions mode the thread never waits: a partition whose stream does not take its records is paused by itself, so that
the others go on. What the application paused counts for neither. *Failure.* A record that cannot be decoded is raised
in its place, as a DecodeError that holds it, and counts as handed over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final, Protocol

from broker import DecodeError, Record, TopicPartition
from broker.driver import RecordRun, undecodable
from broker_kafka.group.assigned_partition import Held

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
    :param decode: makes payloads of bodies; None leaves them bytes.
    """

    def __init__(
        self,
        held: Mapping[TopicPartition, Held],
        owner: Any,
        *,
        max_records: int,
        max_bytes: int,
        decode: Callable[[bytes | None], Any] | None,
        changed: Callable[[], None],
    ) -> None:
        self._held = held
        self._owner = owner
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._decode = decode
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

    def arrived(self, runs: Iterable[RecordRun]) -> None:
        """A batch of the thread."""
        self._owed += 1
        self.last_activity = self._loop.time()
        for run in runs:
            held = self._held.get(TopicPartition(run.topic, run.partition))
            if held is None or held.revoking or held.gone:
                continue
            held.records.extend(run.make(self._owner, held.generation))
            held.size += run.size
            if not held.paused:
                self._count += len(run)
                self._size += run.size
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
                try:
                    records = self.take_of(held, limit - len(taken), alone=not taken)
                finally:
                    self._line_up(held)
                if not records:
                    break
                taken = [*taken, *records] if taken else records
                whose.append(held)
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

    def take_of(self, held: Held, limit: int, *, alone: bool = True) -> list[Record[Any]]:
        """The next records of a partition, at most `limit`; there is one at least.

        :param alone: nothing goes before it; else one that cannot be decoded stays, and there may be none.
        :raises DecodeError: the first cannot be decoded; it was handed over.
        """
        if self._decode is not None:
            limit, failure = self._decoded(self._decode, held, limit)
            if not limit:
                if alone and failure is not None:
                    self._hand_over_one(held)
                    raise failure
                return []
        size = held.size
        records = held.take(limit)
        self._less(held, len(records), size - held.size)
        return records

    def take_one_of(self, held: Held) -> Record[Any]:
        """The next record of a partition; there is one.

        :raises DecodeError: it cannot be decoded; it was handed over.
        """
        _, failure = (1, None) if self._decode is None else self._decoded(self._decode, held, 1)
        record = self._hand_over_one(held)
        if failure is not None:
            raise failure
        return record

    def __len__(self) -> int:
        return self._count

    def _hand_over_one(self, held: Held) -> Record[Any]:
        record = held.take_one()
        self._less(held, 1, record.size)
        return record

    def _decoded(self, decode: Callable[[bytes | None], Any], held: Held, limit: int) -> tuple[int, DecodeError | None]:
        """Decode the next records, at most `limit`; how many could be, and the error of the one after them."""
        done = 0
        for record in islice(held.records, limit):
            try:
                record.decoded = decode(record.data)
            except Exception as error:
                failure = undecodable(record, error, "mark the error's record, and go on")
                failure.record = record
                failure.__cause__ = error
                return done, failure
            done += 1
        return done, None

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
