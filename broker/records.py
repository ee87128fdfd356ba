"""`Record` and `RecordBatch`: entries of a partitioned log, read in order and committed by position.

Use them on the event loop that created them. Cancelling a call that commits does not cancel the commit, which the
consumer carries out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Generic, Protocol, cast, overload

import msgspec
from typing_extensions import TypeVar

from broker.arrow import COLUMNS, check_columns, column_of, records_to_arrow
from broker.envelopes import UNSET, Batch, TopicPartition, View, brief, given_id
from broker.errors import ConfigurationError, DecodeError

__all__ = ["Record", "RecordBatch", "RecordOwner", "RecordRun", "RecordsOfRuns", "undecodable"]

T = TypeVar("T", default=bytes)

_IN_MILLISECONDS: Final = {"publish_time_ms": "publish_time", "broker_time_ms": "broker_time"}
_ROW: Final = (*COLUMNS, "payload", *_IN_MILLISECONDS)
"""The columns of `RecordBatch.rows`."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class RecordOwner(Protocol):
    """The consumer that delivered a record; it commits."""

    async def commit_records(self, records: Sequence[Record[Any]]) -> None: ...


class Record(msgspec.Struct, Generic[T], eq=False, gc=False):
    """An entry of an ordered, partitioned log.

    Offsets grow within a partition and may have gaps; `offset + 1` is always a valid position.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    data: bytes | None
    raw: Any
    view: View
    size: int = 0
    owner: RecordOwner | None = None
    decoded: Any = UNSET
    generation: int = 0
    """The assignment of the partition that delivered the record; commits of an older assignment raise LeaseLost."""

    @property
    def id(self) -> str:
        """The publisher's id, otherwise one made of partition and offset."""
        return self.view.id(self.raw)

    @property
    def given_id(self) -> str | None:
        """The publisher's id; None if the SDK or the broker made the id. `OutboundMessage.from_message` copies it."""
        return given_id(self.view, self.raw)

    @property
    def attributes(self) -> Mapping[str, str]:
        return self.view.attributes(self.raw)

    @property
    def publish_time(self) -> datetime | None:
        """The producer's clock, UTC."""
        return self.view.publish_time(self.raw)

    @property
    def broker_time(self) -> datetime | None:
        """The broker's clock, UTC."""
        return self.view.broker_time(self.raw)

    @property
    def native(self) -> Any:
        """The client library's own object."""
        return self.view.native(self.raw)

    @property
    def payload(self) -> T:
        """The body, decoded by the consumer's codec; without a codec the bytes themselves."""
        decoded = self.decoded
        return self.data if decoded is UNSET else decoded  # pyright: ignore[reportReturnType]

    async def commit(self) -> None:
        """Commit the position after this record, which settles all lower offsets of the partition.

        :raises LeaseLost: the partition was revoked; its new owner reads the record again.
        :raises BrokerError: the commit failed; it may be repeated.
        """
        if self.owner is not None:
            await self.owner.commit_records((self,))

    def __repr__(self) -> str:
        return f"<Record {self.topic!r}[{self.partition}]@{self.offset}, key={self.key!r}, data={brief(self.data)}>"


class RecordRun(Protocol):
    """One or more records of a partition, in order. `Record` objects are created on demand."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def size(self) -> int:
        """Size in bytes, as in `Record.size`."""
        ...

    @property
    def last(self) -> int:
        """The offset of the last record."""
        ...

    def __len__(self) -> int: ...
    def split(self, count: int) -> tuple[RecordRun, RecordRun]:
        """The first `count` records, and the rest; neither is empty."""
        ...

    def make(self, owner: Any, generation: int) -> list[Record[Any]]:
        """New `Record` objects, bound to their consumer and assignment."""
        ...

    def values(self, name: str) -> Iterable[Any] | None:
        """The attribute `name` of each record; None if it must be read from the `Record` objects.

        Also called for `publish_time_ms` and `broker_time_ms`, the times in whole milliseconds since 1970.
        """
        ...

    def column(self, name: str) -> Sequence[Any] | None:
        """The same for Arrow: times may be microseconds since 1970, and offsets without gaps a `range`.

        Never called for topic and partition.
        """
        ...


class RecordsOfRuns(Sequence[Record[Any]]):
    """A sequence of runs; the `Record` objects of a run are created on demand and kept.

    :param runs: the runs, each with the generation of its assignment.
    :param owner: the consumer of the records.
    :param made: the `Record` objects of each run, where they exist.
    """

    __slots__ = ("_all", "_made", "_owner", "_runs")

    def __init__(
        self,
        runs: Sequence[tuple[RecordRun, int]],
        owner: RecordOwner | None,
        made: Sequence[list[Record[Any]] | None] | None = None,
    ) -> None:
        self._runs = runs
        self._owner = owner
        self._made: list[list[Record[Any]] | None] = [None] * len(runs) if made is None else list(made)
        self._all: list[Record[Any]] | None = None

    @overload
    def __getitem__(self, index: int) -> Record[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record[Any]]: ...
    def __getitem__(self, index: int | slice) -> Record[Any] | Sequence[Record[Any]]:
        if self._all is None:
            self._all = list(self)
        return self._all[index]

    def __len__(self) -> int:
        return sum([len(run) for run, _ in self._runs])

    def __iter__(self) -> Iterator[Record[Any]]:
        return chain.from_iterable(map(self._of, range(len(self._runs))))

    def last_of_each(self) -> list[Record[Any]]:
        """The last record of each run."""
        last: list[Record[Any]] = []
        for (run, generation), made in zip(self._runs, self._made, strict=True):
            if made is None:
                made = (run if len(run) == 1 else run.split(len(run) - 1)[1]).make(self._owner, generation)
            last.append(made[-1])
        return last

    def by_partition(self) -> dict[TopicPartition, RecordsOfRuns]:
        """The runs of each partition; creates no `Record` objects."""
        indexes: dict[TopicPartition, list[int]] = {}
        for index, (run, _) in enumerate(self._runs):
            indexes.setdefault(TopicPartition(run.topic, run.partition), []).append(index)
        if len(indexes) == 1:
            return dict.fromkeys(indexes, self)
        return {
            place: RecordsOfRuns([self._runs[at] for at in mine], self._owner, [self._made[at] for at in mine])
            for place, mine in indexes.items()
        }

    @property
    def runs(self) -> list[RecordRun]:
        """The runs, which return columns without creating `Record` objects."""
        return [run for run, _ in self._runs]

    def rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """The attributes `names` of each record; creates `Record` objects only if a run lacks an attribute."""
        return chain.from_iterable(map(partial(self._rows_of, names), range(len(self._runs))))

    def _rows_of(self, names: Sequence[str], index: int) -> Iterator[tuple[Any, ...]]:
        return zip(*(self._column_of(name, index) for name in names), strict=True)

    def _column_of(self, name: str, index: int) -> Iterable[Any]:
        values = self._runs[index][0].values(name)
        return _values_of(name, self._of(index)) if values is None else values

    def _of(self, index: int) -> list[Record[Any]]:
        made = self._made[index]
        if made is None:
            run, generation = self._runs[index]
            made = self._made[index] = run.make(self._owner, generation)
        return made


class RecordBatch(Batch[Record[T]], Generic[T]):
    """Records read together, in order within each partition."""

    __slots__ = ("_owner",)

    def __init__(self, records: Sequence[Record[T]], owner: RecordOwner | None = None) -> None:
        super().__init__(records)
        self._owner = owner

    async def commit(self) -> None:
        """Commit the positions after the batch, which settles all lower offsets of its partitions.

        :raises LeaseLost: a partition was revoked; the other partitions are committed.
        :raises BrokerError: the commit failed; it may be repeated.
        """
        if self._owner is not None:
            records = self._items
            # Committing a record settles all lower offsets.
            await self._owner.commit_records(records.last_of_each() if isinstance(records, RecordsOfRuns) else records)

    def rows(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Iterate over the records as tuples of these columns: the fastest way to read a batch.

        `for key, data, offset in batch.rows("key", "data", "offset")` creates no `Record` objects on some backends.

        :param columns: topic, partition, offset, id, key, data, payload, attributes, publish_time, broker_time, or the
            times as whole milliseconds since 1970, which cost less: publish_time_ms, broker_time_ms.
        :raises ConfigurationError: a column does not exist, or `columns` is empty.
        """
        if not columns:
            raise ConfigurationError("rows() was called without a column", advice=f"The columns are {', '.join(_ROW)}")
        check_columns(columns, _ROW)
        records = self._items
        if isinstance(records, RecordsOfRuns):
            return records.rows(columns)
        return zip(*(_values_of(name, records) for name in columns), strict=True)

    def by_partition(self) -> dict[TopicPartition, RecordBatch[T]]:
        """The batch as one batch for each of its partitions, with the same records in the same order.

        `for place, part in batch.by_partition().items()`. Committing a part commits its partition only. Creates no
        `Record` objects where `rows` creates none.
        """
        records = self._items
        if isinstance(records, RecordsOfRuns):
            found: Mapping[TopicPartition, Sequence[Record[Any]]] = records.by_partition()
        else:
            lists: dict[tuple[str, int], list[Record[T]]] = {}
            for record in records:
                lists.setdefault((record.topic, record.partition), []).append(record)
            found = {TopicPartition(*place): mine for place, mine in lists.items()}
        return {place: RecordBatch(cast("Sequence[Record[T]]", mine), self._owner) for place, mine in found.items()}

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """The batch as a `pyarrow.Table`.

        Columns: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

        :param columns: only these columns, in this order; ids, attributes and times are the slow ones.
        :raises ConfigurationError: a column does not exist.
        :raises MissingClient: pyarrow is not installed.
        """
        return records_to_arrow(self._items, columns)


def _values_of(name: str, records: Sequence[Record[Any]]) -> Iterable[Any]:
    """A column of `RecordBatch.rows`."""
    if (time := _IN_MILLISECONDS.get(name)) is None:
        return map(attrgetter(name), records)
    # A backend that reads many times at once returns them in microseconds.
    return [
        None if at is None else at // 1000 if isinstance(at, int) else (at - _EPOCH) // _MILLISECOND
        for at in column_of(time)(records)
    ]


def undecodable(record: Record[Any], error: Exception, otherwise: str) -> DecodeError:
    """The error of a record whose payload cannot be decoded.

    :param otherwise: advice for when neither the producer nor the codec can be fixed.
    """
    return DecodeError(
        f"Record {record.topic!r}[{record.partition}]@{record.offset} cannot be decoded: {error}",
        native=error,
        advice=f"Fix the producer or the codec, or {otherwise}",
    )
