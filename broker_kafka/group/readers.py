"""How an application reads: all partitions as one, or a stream for each; and the work that readers have in flight.

*Concurrency.* One loop, any number of readers; a record goes to one of them. Woken readers take records without
suspending, so that no record is between the buffer and a reader. Each step hands over buffered records, and ends the
work on those of the step before. *In flight* is what a reader handed over until its next step: the body of a running
`async for`, in a task that is not done. *Cancellation.* A cancelled step has taken nothing. *The end.* A stream ends
when its partition goes or the consumer closes; other readers, when the consumer closes. *Failure.* Every reader raises
the error of the consumer, after the records that came before it. The error of one record is raised by the reader that
would have got the record, and the next step continues behind it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import Any, Final, Generic, Protocol, Self
from weakref import ref

from typing_extensions import TypeVar

from broker import BrokerError, ConfigurationError, Record, RecordBatch, TopicPartition
from broker.driver import is_whole
from broker_kafka.group.assigned_partition import AssignedPartition
from broker_kafka.group.buffer import DeliveryBuffer

__all__ = ["AllBatches", "AllRecords", "PartitionStream", "PartitionStreams", "Readers", "check_limit"]

_IDLE_RECHECK: Final = 0.5


class _InFlight(Protocol):
    """A reader.

    :ivar holding: the partitions of what its last step handed over, until the next step.
    :ivar task: the task of that step.
    """

    holding: Collection[AssignedPartition]
    task: asyncio.Task[Any] | None


class Readers:
    """All readers of one consumer.

    :param stop_when_idle: end the iterations after so many seconds without a record; None is never.
    :param is_idle: called then, with the seconds; returns whether nothing is left to read.
    """

    def __init__(self, stop_when_idle: float | None, is_idle: Callable[[float], Awaitable[bool]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_when_idle = stop_when_idle
        self._is_idle = is_idle
        self._idle_since = self._loop.time()
        self._waiters: set[asyncio.Future[None]] = set()
        self._readers: set[ref[Any]] = set()
        self._returns: set[asyncio.Future[None]] = set()
        self.ended = False
        self.error: BrokerError | None = None

    async def more(self) -> bool:
        """Wait until a record may be there; False if the consumer ended, or was idle for `stop_when_idle`.

        :raises BrokerError: the consumer has failed.
        """
        if self.error is not None:
            raise self.error
        if self.ended:
            return False
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        timer: asyncio.TimerHandle | None = None
        try:
            if self._stop_when_idle is not None:
                until, now = self._idle_since + self._stop_when_idle, self._loop.time()
                if until <= now:
                    # A record that comes meanwhile resolves the waiter.
                    if await self._is_idle(now - self._idle_since) and not waiter.done():
                        return False
                    until = self._loop.time() + _IDLE_RECHECK
                timer = self._loop.call_at(until, _wake, waiter)
            await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()
        return True

    def add(self, reader: _InFlight) -> None:
        self._readers.add(ref(reader, self._discard))

    def returned(self) -> None:
        """A reader is done with what it handed over."""
        for returned in self._returns:
            _wake(returned)

    def active(self) -> None:
        """Records came, or partitions: not idle."""
        self._idle_since = self._loop.time()

    def wake(self) -> None:
        """Have every reader check the buffer again."""
        for waiter in self._waiters:
            _wake(waiter)

    def end(self) -> None:
        """Hand nothing over any more."""
        self.ended = True
        self.wake()

    def fail(self, error: BrokerError) -> None:
        """Reading ends with this error."""
        self.error = self.error or error
        self.wake()

    async def settled(
        self, going: Iterable[AssignedPartition], finished: Callable[[], bool], exempt: asyncio.Task[Any] | None
    ) -> None:
        """Wait until nothing of these is in flight.

        :param finished: whether the records that were handed over one by one are finished.
        :param exempt: a task that waits for this itself.
        """
        partitions = set(going)
        while True:
            working = self._working(partitions, exempt)
            if not working and finished():
                return
            returned: asyncio.Future[None] = self._loop.create_future()
            self._returns.add(returned)
            try:
                await asyncio.wait({returned, *working}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._returns.discard(returned)

    def _working(self, partitions: set[AssignedPartition], exempt: asyncio.Task[Any] | None) -> set[asyncio.Task[Any]]:
        tasks: set[asyncio.Task[Any]] = set()
        for each in self._readers:
            reader: _InFlight | None = each()
            if reader is None or not partitions.intersection(reader.holding):
                continue
            task = reader.task
            if task is not None and task is not exempt and not task.done():
                tasks.add(task)
        return tasks

    def _discard(self, gone: ref[Any]) -> None:
        self._readers.discard(gone)
        self.returned()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


S = TypeVar("S")
T = TypeVar("T", default=bytes)


class _Reader(ABC, Generic[S]):
    """An iteration."""

    def __init__(self, buffer: DeliveryBuffer, readers: Readers) -> None:
        self._buffer = buffer
        self._readers = readers
        self.holding: Collection[AssignedPartition] = ()
        self.task: asyncio.Task[Any] | None = None
        readers.add(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> S:
        if self.holding:
            self.holding = ()
            self._readers.returned()
        self.task = asyncio.current_task()
        while True:
            taken = None if self._readers.ended else self._take()
            if taken is not None:
                return taken
            if self._over() or not await self._readers.more():
                raise StopAsyncIteration

    @abstractmethod
    def _take(self) -> S | None:
        """The next records, if some are buffered; their partitions go into `holding`."""

    def _over(self) -> bool:
        return False


class AllRecords(_Reader[Record[T]]):
    """The records of all partitions one by one."""

    def _take(self) -> Record[T] | None:
        taken = self._buffer.take_one()
        if taken is None:
            return None
        self.holding = (taken[1],)
        return taken[0]


class AllBatches(_Reader[RecordBatch[T]]):
    """Batches of buffered records of all partitions."""

    def __init__(self, buffer: DeliveryBuffer, readers: Readers, limit: int, owner: Any) -> None:
        super().__init__(buffer, readers)
        self._limit = limit
        self._owner = owner

    def _take(self) -> RecordBatch[T] | None:
        records, self.holding = self._buffer.take(self._limit)
        return RecordBatch(records, self._owner) if records else None


class _StreamReader(_Reader[S]):
    def __init__(self, buffer: DeliveryBuffer, readers: Readers, assigned: AssignedPartition) -> None:
        super().__init__(buffer, readers)
        self._assigned = assigned

    def _over(self) -> bool:
        return self._assigned.revoking or self._assigned.gone


class _StreamRecords(_StreamReader[Record[T]]):
    def _take(self) -> Record[T] | None:
        if not self._assigned.deliverable:
            return None
        record = self._buffer.take_one_of(self._assigned)
        self.holding = (self._assigned,)
        return record


class _StreamBatches(_StreamReader[RecordBatch[T]]):
    def __init__(
        self, buffer: DeliveryBuffer, readers: Readers, assigned: AssignedPartition, limit: int, owner: Any
    ) -> None:
        super().__init__(buffer, readers, assigned)
        self._limit = limit
        self._owner = owner

    def _take(self) -> RecordBatch[T] | None:
        if not self._assigned.deliverable:
            return None
        records = self._buffer.take_of(self._assigned, self._limit)
        self.holding = (self._assigned,)
        return RecordBatch(records, self._owner)


class PartitionStream(Generic[T]):
    """The records of one partition, from its assignment to its release; iterate over it in a task of its own.

    The partition is released when the body of the loop is over, at the flush deadline at the latest.
    """

    def __init__(self, assigned: AssignedPartition, buffer: DeliveryBuffer, readers: Readers, owner: Any) -> None:
        self._assigned = assigned
        self._buffer = buffer
        self._readers = readers
        self._owner = owner

    @property
    def topic(self) -> str:
        return self._assigned.partition.topic

    @property
    def partition(self) -> int:
        return self._assigned.partition.partition

    @property
    def place(self) -> TopicPartition:
        """Topic and partition."""
        return self._assigned.partition

    @property
    def position(self) -> int | None:
        """The next offset to be committed, or where reading began; None if at the first record there was."""
        return self._assigned.position

    @property
    def ended(self) -> bool:
        """Whether the partition is being released, or is gone."""
        return self._assigned.revoking or self._assigned.gone or self._readers.ended

    def __aiter__(self) -> AsyncIterator[Record[T]]:
        return _StreamRecords[T](self._buffer, self._readers, self._assigned)

    def batches(self, max_records: int = 5000) -> AsyncIterator[RecordBatch[T]]:
        """Batches of buffered records, at most `max_records` each."""
        return _StreamBatches[T](self._buffer, self._readers, self._assigned, check_limit(max_records), self._owner)

    def __repr__(self) -> str:
        return f"<PartitionStream {self.topic!r}[{self.partition}]{', ended' if self.ended else ''}>"


class PartitionStreams:
    """A stream for each partition that is assigned."""

    def __init__(self, buffer: DeliveryBuffer, readers: Readers, owner: Any) -> None:
        self._buffer = buffer
        self._readers = readers
        self._owner = owner
        self._new: deque[AssignedPartition] | None = deque()

    def add(self, assigned: AssignedPartition) -> None:
        """This was assigned, and its records may be handed over."""
        if self._new is not None:
            self._new.append(assigned)
            self._readers.wake()

    def disable(self) -> None:
        """The consumer is not read by partition."""
        self._new = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PartitionStream[Any]:
        while True:
            while self._new and not self._readers.ended:
                assigned = self._new.popleft()
                if not (assigned.revoking or assigned.gone):
                    return PartitionStream(assigned, self._buffer, self._readers, self._owner)
            if not await self._readers.more():
                raise StopAsyncIteration


def check_limit(max_records: int) -> int:
    """:raises ConfigurationError: not a whole number of 1 or more."""
    if not is_whole(max_records) or max_records < 1:
        raise ConfigurationError(f"max_records is {max_records!r}", advice="It takes an int of 1 or more")
    return max_records
