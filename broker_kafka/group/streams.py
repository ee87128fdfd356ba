"""How an application reads: all partitions in one, or a stream for each.

*Concurrency.* Any number of iterations at a time; a record goes to one of them. Each step hands over what is there, and
says that what the step before handed over is done with. *Cancellation.* A cancelled step has taken nothing. *The end.*
A stream ends when its partition goes or the consumer closes; the others, when it closes. Errors of the consumer are
raised by all. One of a single record is raised by who would have got it, and the next step goes on behind it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Collection
from typing import Any, Generic, Self

from typing_extensions import TypeVar

from broker import ConfigurationError, Record, RecordBatch, TopicPartition
from broker.driver import is_whole
from broker_kafka.group.delivery import Delivery
from broker_kafka.group.held import Held
from broker_kafka.group.intake import Intake

__all__ = ["AllBatches", "AllRecords", "PartitionStream", "Streams", "check_limit"]

S = TypeVar("S")
T = TypeVar("T", default=bytes)


class _Reader(ABC, Generic[S]):
    """An iteration."""

    def __init__(self, intake: Intake, delivery: Delivery) -> None:
        self._intake = intake
        self._delivery = delivery
        self.holding: Collection[Held] = ()
        self.task: asyncio.Task[Any] | None = None
        delivery.joins(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> S:
        if self.holding:
            self.holding = ()
            self._delivery.came_back()
        self.task = asyncio.current_task()
        while True:
            taken = None if self._delivery.ended else self._take()
            if taken is not None:
                return taken
            if self._over() or not await self._delivery.more():
                raise StopAsyncIteration

    @abstractmethod
    def _take(self) -> S | None:
        """What is there, noted in `holding`."""

    def _over(self) -> bool:
        return False


class AllRecords(_Reader[Record[T]]):
    """The records of all partitions one by one."""

    def _take(self) -> Record[T] | None:
        taken = self._intake.take_one()
        if taken is None:
            return None
        self.holding = (taken[1],)
        return taken[0]


class AllBatches(_Reader[RecordBatch[T]]):
    """Batches of what is there of all partitions."""

    def __init__(self, intake: Intake, delivery: Delivery, limit: int, owner: Any) -> None:
        super().__init__(intake, delivery)
        self._limit = limit
        self._owner = owner

    def _take(self) -> RecordBatch[T] | None:
        records, self.holding = self._intake.take(self._limit)
        return RecordBatch(records, self._owner) if records else None


class _StreamReader(_Reader[S]):
    def __init__(self, intake: Intake, delivery: Delivery, held: Held) -> None:
        super().__init__(intake, delivery)
        self._held = held

    def _over(self) -> bool:
        return self._held.revoking or self._held.gone


class _StreamRecords(_StreamReader[Record[T]]):
    def _take(self) -> Record[T] | None:
        if not self._held.deliverable:
            return None
        record = self._intake.take_one_of(self._held)
        self.holding = (self._held,)
        return record


class _StreamBatches(_StreamReader[RecordBatch[T]]):
    def __init__(self, intake: Intake, delivery: Delivery, held: Held, limit: int, owner: Any) -> None:
        super().__init__(intake, delivery, held)
        self._limit = limit
        self._owner = owner

    def _take(self) -> RecordBatch[T] | None:
        if not self._held.deliverable:
            return None
        records = self._intake.take_of(self._held, self._limit)
        self.holding = (self._held,)
        return RecordBatch(records, self._owner)


class PartitionStream(Generic[T]):
    """The records of one partition, from its assignment to its release; iterate over it in a task of its own.

    The partition is released when the body of the loop comes back for more, at the flush deadline at the latest.
    """

    def __init__(self, held: Held, intake: Intake, delivery: Delivery, owner: Any) -> None:
        self._held = held
        self._intake = intake
        self._delivery = delivery
        self._owner = owner

    @property
    def topic(self) -> str:
        return self._held.partition.topic

    @property
    def partition(self) -> int:
        return self._held.partition.partition

    @property
    def place(self) -> TopicPartition:
        """Topic and partition."""
        return self._held.partition

    @property
    def position(self) -> int | None:
        """The next offset to be committed, or where reading began; None if at the first record there was."""
        return self._held.position

    @property
    def ended(self) -> bool:
        """Whether the partition goes, or is gone."""
        return self._held.revoking or self._held.gone or self._delivery.ended

    def __aiter__(self) -> AsyncIterator[Record[T]]:
        return _StreamRecords[T](self._intake, self._delivery, self._held)

    def batches(self, max_records: int = 1000) -> AsyncIterator[RecordBatch[T]]:
        """Batches of what is there, at most `max_records` each."""
        return _StreamBatches[T](self._intake, self._delivery, self._held, check_limit(max_records), self._owner)

    def __repr__(self) -> str:
        return f"<PartitionStream {self.topic!r}[{self.partition}]{', ended' if self.ended else ''}>"


class Streams:
    """A stream for each partition that is assigned."""

    def __init__(self, intake: Intake, delivery: Delivery, owner: Any) -> None:
        self._intake = intake
        self._delivery = delivery
        self._owner = owner
        self._new: deque[Held] | None = deque()

    def add(self, held: Held) -> None:
        """It was assigned, and its records may be handed over."""
        if self._new is not None:
            self._new.append(held)
            self._delivery.changed()

    def disable(self) -> None:
        """Nobody will ask."""
        self._new = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PartitionStream[Any]:
        while True:
            while self._new and not self._delivery.ended:
                held = self._new.popleft()
                if not (held.revoking or held.gone):
                    return PartitionStream(held, self._intake, self._delivery, self._owner)
            if not await self._delivery.more():
                raise StopAsyncIteration


def check_limit(max_records: int) -> int:
    """:raises ConfigurationError: it is no whole number of 1 or more."""
    if not is_whole(max_records) or max_records < 1:
        raise ConfigurationError(f"max_records is {max_records!r}", advice="It takes an int of 1 or more")
    return max_records
