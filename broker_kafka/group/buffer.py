"""`DeliveryBuffer`: the records between the client's thread and the application, by partition, with flow control.

*Concurrency.* One loop; nothing here suspends, so that a record is either here or handed over. *Flow.* When all
partitions are read as one, the thread is answered only while there is room, and waits otherwise. When each partition is
read by itself, the thread never waits: a partition whose records are not read is paused, and the others continue. In
neither mode do partitions count that the application paused. *Failure.* A record that cannot be decoded is raised in
its place, as a DecodeError that holds the record, and counts as handed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final, Protocol

from broker import AnyCodec, DecodeError, EnvelopeCodec, Record, TopicPartition
from broker.driver import RecordRun, undecodable
from broker_kafka.group.assigned_partition import AssignedPartition

__all__ = ["DeliveryBuffer"]

_LEAST_PER_PARTITION: Final = 500
_TURN: Final = 500
"""Records that are handed over one by one of a partition before the next partition has its turn."""


class _Source(Protocol):
    """The client's thread."""

    def taken(self) -> None: ...
    def pause(self, partitions: Iterable[TopicPartition]) -> None: ...
    def resume(self, partitions: Iterable[TopicPartition]) -> None: ...


class DeliveryBuffer:
    """:param owner: what records are bound to.
    :param max_records: the most records that wait here.
    :param max_bytes: the most bytes that wait here; one batch of the client may exceed them.
    :param codec: decodes payloads; None leaves them bytes.
    :param changed: called when a record may be ready.
    """

    def __init__(
        self,
        assignments: Mapping[TopicPartition, AssignedPartition],
        source: _Source,
        owner: Any,
        *,
        max_records: int,
        max_bytes: int,
        codec: AnyCodec[Any] | None,
        changed: Callable[[], None],
    ) -> None:
        self._assignments = assignments
        self._source = source
        self._owner = owner
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._takes_records = isinstance(codec, EnvelopeCodec)
        self._decode: Callable[[Any], Any] | None = (
            codec.unpack if isinstance(codec, EnvelopeCodec) else None if codec is None else codec.decode
        )
        self._changed = changed
        self._line: deque[AssignedPartition] = deque()
        self._count = 0
        """Records that wait and are not paused by the application."""
        self.handed_over = 0
        """How many records were handed over."""
        self._size = 0
        self._owed = 0
        """Batches that the thread was not answered for."""
        self._by_partition = False

    def by_partition(self) -> None:
        """Read each partition by itself from now on."""
        self._by_partition = True
        for assigned in self._assignments.values():
            self._check_full(assigned)
        self._answer()

    # -- records in ----------------------------------------------------------------------------------------

    def add(self, runs: Iterable[RecordRun]) -> None:
        """A batch of the thread came."""
        self._owed += 1
        for run in runs:
            assigned = self._assignments.get(TopicPartition(run.topic, run.partition))
            if assigned is None or assigned.revoking or assigned.gone:
                continue
            assigned.records.extend(run.make(self._owner, assigned.generation))
            assigned.size += run.size
            if not assigned.paused:
                self._count += len(run)
                self._size += run.size
            self._line_up(assigned)
            if self._by_partition:
                self._check_full(assigned)
        self._answer()
        self._changed()

    def drop(self, partitions: Iterable[AssignedPartition]) -> None:
        """Forget the records of these."""
        for assigned in partitions:
            if not assigned.paused:
                self._count -= len(assigned.records)
                self._size -= assigned.size
            assigned.drop()
            if not assigned.gone:
                self._check_room(assigned)
        self._answer()

    def open(self, partitions: Iterable[AssignedPartition]) -> None:
        """Records of these may be handed over."""
        for assigned in partitions:
            assigned.opened = True
            self._line_up(assigned)
        self._changed()

    def pause(self, assigned: AssignedPartition) -> None:
        """Hand over nothing of this until `resume`."""
        if assigned.paused:
            return
        assigned.paused = True
        self._count -= len(assigned.records)
        self._size -= assigned.size
        if not assigned.full:
            self._source.pause((assigned.partition,))
        self._answer()

    def resume(self, assigned: AssignedPartition) -> None:
        """Undo `pause`."""
        if not assigned.paused:
            return
        assigned.paused = False
        self._count += len(assigned.records)
        self._size += assigned.size
        if not assigned.full:
            self._source.resume((assigned.partition,))
        self._line_up(assigned)
        self._changed()

    # -- records out ---------------------------------------------------------------------------------------

    def take(self, limit: int) -> tuple[list[Record[Any]], list[AssignedPartition]]:
        """The next records of all partitions, at most `limit`, and their assignments; empty if there are none."""
        taken: list[Record[Any]] = []
        whose: list[AssignedPartition] = []
        line = self._line
        while line and len(taken) < limit:
            assigned = line.popleft()
            assigned.in_line = False
            if assigned.deliverable:
                try:
                    records = self.take_of(assigned, limit - len(taken), alone=not taken)
                finally:
                    self._line_up(assigned)
                if not records:
                    break
                taken = [*taken, *records] if taken else records
                whose.append(assigned)
        return taken, whose

    def take_one(self) -> tuple[Record[Any], AssignedPartition] | None:
        """The next record of all partitions."""
        line = self._line
        while line:
            assigned = line[0]
            if assigned.deliverable and assigned.turn < _TURN:
                assigned.turn += 1
                return self.take_one_of(assigned), assigned
            line.popleft()
            assigned.turn = 0
            assigned.in_line = False
            self._line_up(assigned)
        return None

    def take_of(self, assigned: AssignedPartition, limit: int, *, alone: bool = True) -> list[Record[Any]]:
        """The next records of a partition, at most `limit`; there must be one.

        :param alone: the first records of a batch; else a record that cannot be decoded stays, and there may be none.
        :raises DecodeError: the first cannot be decoded; it was handed over.
        """
        if self._decode is not None:
            limit, failure = self._decoded(self._decode, assigned, limit)
            if not limit:
                if alone and failure is not None:
                    self._hand_over_one(assigned)
                    raise failure
                return []
        size = assigned.size
        records = assigned.take(limit)
        self._less(assigned, len(records), size - assigned.size)
        return records

    def take_one_of(self, assigned: AssignedPartition) -> Record[Any]:
        """The next record of a partition; there must be one.

        :raises DecodeError: it cannot be decoded; it was handed over.
        """
        _, failure = (1, None) if self._decode is None else self._decoded(self._decode, assigned, 1)
        record = self._hand_over_one(assigned)
        if failure is not None:
            raise failure
        return record

    def __len__(self) -> int:
        return self._count

    def _hand_over_one(self, assigned: AssignedPartition) -> Record[Any]:
        record = assigned.take_one()
        self._less(assigned, 1, record.size)
        return record

    def _decoded(
        self, decode: Callable[[Any], Any], assigned: AssignedPartition, limit: int
    ) -> tuple[int, DecodeError | None]:
        """Decode the next records, at most `limit`; how many succeeded, and the error of the next."""
        done = 0
        for record in islice(assigned.records, limit):
            try:
                record.decoded = decode(record if self._takes_records else record.data)
            except Exception as error:
                failure = undecodable(record, error, "mark the error's record, and go on")
                failure.record = record
                failure.__cause__ = error
                return done, failure
            done += 1
        return done, None

    # -- flow ----------------------------------------------------------------------------------------------

    def _less(self, assigned: AssignedPartition, count: int, size: int) -> None:
        self._count -= count
        self._size -= size
        self.handed_over += count
        if assigned.full:
            self._check_room(assigned)
        if self._owed:
            self._answer()

    def _line_up(self, assigned: AssignedPartition) -> None:
        if not assigned.in_line and assigned.deliverable:
            assigned.in_line = True
            self._line.append(assigned)

    def _answer(self) -> None:
        """Let the thread continue if there is room."""
        if self._owed and (
            self._by_partition or (2 * self._count <= self._max_records and 2 * self._size <= self._max_bytes)
        ):
            owed, self._owed = self._owed, 0
            for _ in range(owed):
                self._source.taken()

    def _share(self) -> tuple[int, int]:
        """The records and bytes that one partition may have here."""
        count = max(1, len(self._assignments))
        return max(_LEAST_PER_PARTITION, self._max_records // count), max(1, self._max_bytes // count)

    def _check_full(self, assigned: AssignedPartition) -> None:
        if assigned.full:
            return
        records, size = self._share()
        if len(assigned.records) >= records or assigned.size >= size:
            assigned.full = True
            if not assigned.paused:
                self._source.pause((assigned.partition,))

    def _check_room(self, assigned: AssignedPartition) -> None:
        if not assigned.full:
            return
        records, size = self._share()
        if 2 * len(assigned.records) <= records and 2 * assigned.size <= size:
            assigned.full = False
            if not assigned.paused:
                self._source.resume((assigned.partition,))
