"""Records of a log: what is read of a partition in order, and committed.

Objects here hold no lock: use them from the event loop that made them. Awaiting a commit may be cancelled; the commit
itself goes on, because it belongs to the consumer from the moment of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Generic, Protocol, overload

import msgspec
from typing_extensions import TypeVar

from broker.arrow import COLUMNS, check_columns, records_to_arrow
from broker.batches import Batch
from broker.envelopes import UNSET, View, brief
from broker.errors import ConfigurationError, DecodeError

__all__ = ["Record", "RecordBatch", "RecordOwner", "RecordRun", "RecordsOfRuns", "undecodable"]

T = TypeVar("T", default=bytes)

_ROW: Final = (*COLUMNS, "payload")
"""What `RecordBatch.rows` has."""


class RecordOwner(Protocol):
    """The consumer that handed a record over."""

    async def commit_records(self, records: Sequence[Record[Any]]) -> None: ...


class Record(msgspec.Struct, Generic[T], eq=False, gc=False):
    """An entry of an ordered, partitioned log.

    `offset` only grows within a partition; it is not dense, but `offset + 1` is a legal position.
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
    """Which assignment of the partition handed it over; a commit of an older one is refused."""

    @property
    def id(self) -> str:
        """The publisher's id if it gave one, else one made of partition and offset."""
        return self.view.id(self.raw)

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
        """The body as the consumer's codec decoded it; the bytes themselves without a codec."""
        decoded = self.decoded
        return self.data if decoded is UNSET else decoded  # pyright: ignore[reportReturnType]

    async def commit(self) -> None:
        """Settle this record and every lower offset of its partition.

        :raises LeaseLost: the partition was taken away since; its new owner reads the record again.
        :raises BrokerError: the broker did not take the commit; it can be repeated.
        """
        if self.owner is not None:
            await self.owner.commit_records((self,))

    def __repr__(self) -> str:
        return f"<Record {self.topic!r}[{self.partition}]@{self.offset}, key={self.key!r}, data={brief(self.data)}>"


class RecordRun(Protocol):
    """Records of one partition in their order, one at least, that are made when somebody looks at them."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def size(self) -> int:
        """Their bytes, as `Record.size` counts them."""
        ...

    @property
    def last(self) -> int:
        """The offset of the last."""
        ...

    def __len__(self) -> int: ...
    def split(self, count: int) -> tuple[RecordRun, RecordRun]:
        """The first so many, and the rest; neither is empty."""
        ...

    def make(self, owner: Any, generation: int) -> list[Record[Any]]:
        """The records, bound to their consumer and assignment; new ones with each call."""
        ...

    def values(self, name: str) -> Iterable[Any] | None:
        """What each has under this name, one after another; None if the records themselves are to be asked."""
        ...

    def column(self, name: str) -> Sequence[Any] | None:
        """The same for Arrow, where times may be microseconds since 1970, and offsets without gaps a `range`; None as
        for `values`. Nobody asks for topic and partition."""
        ...


class RecordsOfRuns(Sequence[Record[Any]]):
    """Records that were handed over together, made run by run when somebody looks at them, and kept.

    :param runs: with the assignment that each was handed over in. :param owner: what the records are bound to.
    """

    __slots__ = ("_all", "_made", "_owner", "_runs")

    def __init__(self, runs: Sequence[tuple[RecordRun, int]], owner: RecordOwner | None) -> None:
        self._runs = runs
        self._owner = owner
        self._made: list[list[Record[Any]] | None] = [None] * len(runs)
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

    @property
    def runs(self) -> list[RecordRun]:
        """Which tell columns without making records."""
        return [run for run, _ in self._runs]

    def rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """What each record has under these names; records are made where a run does not tell."""
        return chain.from_iterable(map(partial(self._rows_of, names), range(len(self._runs))))

    def _rows_of(self, names: Sequence[str], index: int) -> Iterator[tuple[Any, ...]]:
        run, _ = self._runs[index]
        columns = [run.values(name) for name in names]
        return zip(
            *(
                map(attrgetter(name), self._of(index)) if values is None else values
                for name, values in zip(names, columns, strict=True)
            ),
            strict=True,
        )

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
        """Settle all records of the batch and every lower offset of their partitions.

        :raises LeaseLost: a partition was taken away since; the commits of the others were carried out.
        """
        if self._owner is not None:
            records = self._items
            # All below a record is settled with it.
            await self._owner.commit_records(records.last_of_each() if isinstance(records, RecordsOfRuns) else records)

    def rows(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """These columns of each record, as a tuple in that order: the quickest way to read a batch.

        `for key, data, offset in batch.rows("key", "data", "offset")` makes no `Record` where the backend can do
        without. Each call begins anew.

        :param columns: topic, partition, offset, id, key, data, payload, attributes, publish_time or broker_time.
        :raises ConfigurationError: there is no such column, or none was named.
        """
        if not columns:
            raise ConfigurationError("rows() needs a column at least", advice=f"There are {', '.join(_ROW)}")
        check_columns(columns, _ROW)
        records = self._items
        if isinstance(records, RecordsOfRuns):
            return records.rows(columns)
        return zip(*(map(attrgetter(name), records) for name in columns), strict=True)

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """The batch as a `pyarrow.Table`.

        Columns: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

        :param columns: only these, in this order. Ids, attributes and times cost several times what the others do.
        :raises ConfigurationError: there is no such column.
        :raises MissingClient: pyarrow is not installed.
        """
        return records_to_arrow(self._items, columns)


def undecodable(record: Record[Any], error: Exception, otherwise: str) -> DecodeError:
    """The error of a record whose payload cannot be decoded.

    :param otherwise: what to do where neither producer nor codec can be mended.
    """
    return DecodeError(
        f"Record {record.topic!r}[{record.partition}]@{record.offset} cannot be decoded: {error}",
        native=error,
        advice=f"Mend the producer or the codec, or {otherwise}",
    )
