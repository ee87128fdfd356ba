"""Records of a log: what is read of a partition in order, and committed.

Objects here hold no lock: use them from the event loop that made them. Awaiting a commit may be cancelled; the commit
itself goes on, because it belongs to the consumer from the moment of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, Protocol

import msgspec
from typing_extensions import TypeVar

from broker.arrow import records_to_arrow
from broker.batches import Batch
from broker.envelopes import UNSET, View, brief

__all__ = ["Record", "RecordBatch", "RecordOwner"]

T = TypeVar("T", default=bytes)


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
        :raises SettleError: the broker did not take the commit.
        """
        if self.owner is not None:
            await self.owner.commit_records((self,))

    def __repr__(self) -> str:
        return f"<Record {self.topic!r}[{self.partition}]@{self.offset}, key={self.key!r}, data={brief(self.data)}>"


class RecordBatch(Batch[Record[T]], Generic[T]):
    """Records read together, in order within each partition."""

    __slots__ = ("_owner",)

    def __init__(self, records: list[Record[T]], owner: RecordOwner | None = None) -> None:
        super().__init__(records)
        self._owner = owner

    async def commit(self) -> None:
        """Settle all records of the batch and every lower offset of their partitions.

        :raises LeaseLost: a partition was taken away since; the commits of the others were carried out.
        """
        if self._owner is not None:
            await self._owner.commit_records(self._items)

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """The batch as a `pyarrow.Table`.

        Columns: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

        :param columns: only these, in this order. Ids, attributes and times cost several times what the others do.
        :raises ConfigurationError: there is no such column.
        :raises MissingClient: pyarrow is not installed.
        """
        return records_to_arrow(self._items, columns)
