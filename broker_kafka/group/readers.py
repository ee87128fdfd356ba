"""Where the application waits for records, and who works on what.

*Concurrency.* One loop, any number of readers. Waiters are woken and then take without suspending, so that no record is
on its way in between. *Cancellation.* A cancelled wait has taken nothing. *In flight* is what a reader handed out and
did not come back from: the body of an `async for` that runs, in a task that is not done. *Failure.* `fail` is raised by
every reader, once what came before it is handed over.

MERGED broker_kafka.group.readers: How an application reads: all partitions in one, or a stream for each.

*Concurrency.* Any number of iterations at a time; a record goes to one of them. Each step hands over what is there, and
says that what the step before handed over is done with. *Cancellation.* A cancelled step has taken nothing. *The end.*
A stream ends when its partition goes or the consumer closes; the others, when it closes. Errors of the consumer are
raised by all. One of a single record is raised by who would have got it, and the next step goes on behind it.
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
from broker_kafka.group.assigned_partition import Held
from broker_kafka.group.buffer import Intake

__all__ = ["AllBatches", "AllRecords", "Delivery", "PartitionStream", "Streams", "Worker", "check_limit"]


_LOOK_AGAIN: Final = 0.5


class Worker(Protocol):
    """A reader.

    :ivar holding: what its last step handed out, until the next.
    :ivar task: who took that step.
    """

    holding: Collection[Held]
    task: asyncio.Task[Any] | None


class Delivery:
    """:param stop_when_idle: end the iterations after so many seconds without a record; None is never.
    :param is_idle: asked then, with the seconds: whether no record means that there is none.
    """

    def __init__(self, stop_when_idle: float | None, is_idle: Callable[[float], Awaitable[bool]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_when_idle = stop_when_idle
        self._is_idle = is_idle
        self._idle_since = self._loop.time()
        self._waiters: set[asyncio.Future[None]] = set()
        self._workers: set[ref[Any]] = set()
        self._returns: set[asyncio.Future[None]] = set()
        self.ended = False
        self.error: BrokerError | None = None

    # -- for readers ---------------------------------------------------------------------------------------

    async def more(self) -> bool:
        """Wait until something may have changed; False if nothing ever will, or it has been idle for long.

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
                    # What comes while this is asked resolves the waiter.
                    if await self._is_idle(now - self._idle_since) and not waiter.done():
                        return False
                    until = self._loop.time() + _LOOK_AGAIN
                timer = self._loop.call_at(until, _wake, waiter)
            await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()
        return True

    def joins(self, worker: Worker) -> None:
        """A reader begins."""
        self._workers.add(ref(worker, self._leaves))

    def came_back(self) -> None:
        """A reader is done with what it had handed out."""
        for returned in self._returns:
            _wake(returned)

    # -- for the member ------------------------------------------------------------------------------------

    def active(self) -> None:
        """Something came."""
        self._idle_since = self._loop.time()

    def joined(self) -> None:
        """The group has given us partitions, whose records may follow."""
        self.active()
        self.changed()

    def changed(self) -> None:
        """Have every reader look again."""
        for waiter in self._waiters:
            _wake(waiter)

    def end(self) -> None:
        """Nothing is handed over any more."""
        self.ended = True
        self.changed()

    def fail(self, error: BrokerError) -> None:
        """Nothing more comes, for this reason."""
        self.error = self.error or error
        self.changed()

    async def settled(
        self, going: Iterable[Held], finished: Callable[[], bool], exempt: asyncio.Task[Any] | None
    ) -> None:
        """Wait until nobody works on these any more.

        :param finished: whether the records that were handed over one by one are finished.
        :param exempt: a task that waits for this itself.
        """
        asked = set(going)
        while True:
            working = self._working(asked, exempt)
            if not working and finished():
                return
            returned: asyncio.Future[None] = self._loop.create_future()
            self._returns.add(returned)
            try:
                await asyncio.wait({returned, *working}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._returns.discard(returned)

    def _working(self, asked: set[Held], exempt: asyncio.Task[Any] | None) -> set[asyncio.Task[Any]]:
        tasks: set[asyncio.Task[Any]] = set()
        for each in self._workers:
            worker: Worker | None = each()
            if worker is None or not asked.intersection(worker.holding):
                continue
            task = worker.task
            if task is not None and task is not exempt and not task.done():
                tasks.add(task)
        return tasks

    def _leaves(self, gone: ref[Any]) -> None:
        self._workers.discard(gone)
        self.came_back()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


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
