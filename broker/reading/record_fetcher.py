"""`RecordFetcher`: fetches the records of one source into a bounded buffer, and wakes the calls that wait for them.

*Concurrency.* One event loop. The fetch loop fetches again when the buffer is half empty. A waiter is woken, then pops
without suspending. *Cancellation.* A cancelled waiter has popped nothing. *Failure.* A retriable error is an event and
a pause with backoff. Any other error ends the loop and stays in `error`; the consumer raises it when the buffer is
empty.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from broker.consuming.fetch_loop import FetchLoop
from broker.driver.concurrency import Backoff
from broker.driver.contract import TopicPartition
from broker.driver.optional import FetchesRuns
from broker.errors import BrokerError
from broker.hooks import FetchFailed, Hooks, RecordsReceived, logger
from broker.records import Record, RecordRun

__all__ = ["RecordBuffer", "RecordFetcher"]


class RecordBuffer:
    """Records, and runs whose records are not created yet, in the order of their arrival.

    Runs leave whole where possible. Records of a paused partition are kept aside. Pure, without a lock.

    :param admits: whether a record of this partition may be handed over; others are dropped.
    :param shrunk: called when records have left.
    :ivar size: bytes of the records that are not paused.
    """

    def __init__(self, admits: Callable[[TopicPartition], bool], shrunk: Callable[[], None]) -> None:
        self._admits = admits
        self._shrunk = shrunk
        self._records: deque[Record[Any]] = deque()
        self._runs: deque[RecordRun] = deque()
        """They follow the records."""
        self._unmade = 0
        self._paused: dict[TopicPartition, list[Record[Any]]] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._records) + self._unmade

    # -- in ------------------------------------------------------------------------------------------------

    def add(self, records: Sequence[Record[Any]]) -> None:
        """Add fetched records."""
        self._make_all()
        buffer = self._records
        into: list[Record[Any]] | deque[Record[Any]] | None = None
        topic, partition, size = "", -1, 0
        for record in records:
            if record.partition != partition or record.topic != topic:
                topic, partition = record.topic, record.partition
                key = TopicPartition(topic, partition)
                into = self._paused.get(key, buffer) if self._admits(key) else None
            if into is not None:
                into.append(record)
                if into is buffer:
                    size += record.size
        self.size += size

    def add_runs(self, runs: Iterable[RecordRun]) -> None:
        """Add fetched runs."""
        for run in runs:
            key = TopicPartition(run.topic, run.partition)
            if not self._admits(key):
                continue
            aside = self._paused.get(key)
            if aside is not None:
                aside.extend(run.make(None, 0))
                continue
            self._runs.append(run)
            self._unmade += len(run)
            self.size += run.size

    def put_back(self, records: Sequence[Record[Any]]) -> None:
        """Put records back that were popped in the same step and not handed over."""
        self._records.extendleft(reversed(records))
        self.size += _size_of(records)

    # -- out -----------------------------------------------------------------------------------------------

    @property
    def unmade(self) -> bool:
        """Whether a run is next, so that its records are not created yet."""
        return bool(self._runs) and not self._records

    def pop_runs(self, limit: int) -> list[RecordRun]:
        """Remove and return the next runs, at most `limit` records in all; call it if `unmade`."""
        popped: list[RecordRun] = []
        runs = self._runs
        while runs and limit > 0:
            run = runs.popleft()
            if len(run) > limit:
                run, rest = run.split(limit)
                runs.appendleft(rest)
            popped.append(run)
            limit -= len(run)
            self._unmade -= len(run)
            self.size -= run.size
        self._shrunk()
        return popped

    def pop(self, limit: int) -> list[Record[Any]]:
        """Remove and return the next records, at most `limit`."""
        while self._runs and len(self._records) < limit:
            self._make_next()
        buffer = self._records
        if limit >= len(buffer):
            records = list(buffer)
            buffer.clear()
            self.size = sum([run.size for run in self._runs])
        else:
            take = buffer.popleft
            records = [take() for _ in range(limit)]
            self.size -= _size_of(records)
        self._shrunk()
        return records

    def pop_one(self) -> Record[Any]:
        """Remove and return the next record; there must be one."""
        if not self._records:
            self._make_next()
        record = self._records.popleft()
        self.size -= record.size
        self._shrunk()
        return record

    def records(self) -> Sequence[Record[Any]]:
        """The records that may be handed over, which stay in the buffer."""
        self._make_all()
        return tuple(self._records)

    def peek(self) -> Record[Any] | None:
        """The next record, which stays in the buffer."""
        if self.unmade:
            self._make_next()
        return self._records[0] if self._records else None

    def discard(self, record: Record[Any]) -> bool:
        """Remove this record if it is the next one."""
        if self.peek() is record:
            self.pop_one()
            return True
        return False

    # -- dropping and pausing ------------------------------------------------------------------------------

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the records of these partitions, paused or not."""
        dropped = set(partitions)
        for partition in dropped & self._paused.keys():
            self._paused[partition] = []
        self._filter(dropped)
        self._shrunk()

    def clear(self) -> None:
        """Drop all records."""
        self._paused = {partition: [] for partition in self._paused}
        self._records.clear()
        self._runs.clear()
        self._unmade = self.size = 0
        self._shrunk()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Return no records of these partitions until `resume`; buffered ones are kept aside."""
        added = {partition for partition in partitions if partition not in self._paused}
        for partition in added:
            self._paused[partition] = []
        for record in self._filter(added):
            self._paused[TopicPartition(record.topic, record.partition)].append(record)
        self._shrunk()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `pause`."""
        for partition in partitions:
            records = self._paused.pop(partition, None)
            if records:
                self._make_all()
                self._records.extend(records)
                self.size += _size_of(records)

    # -- inside --------------------------------------------------------------------------------------------

    def _make_next(self) -> None:
        run = self._runs.popleft()
        self._unmade -= len(run)
        self._records.extend(run.make(None, 0))

    def _make_all(self) -> None:
        while self._runs:
            self._make_next()

    def _filter(self, partitions: set[TopicPartition]) -> list[Record[Any]]:
        """Remove and return the records of these partitions."""
        if not partitions or not len(self):
            return []
        self._make_all()
        removed: list[Record[Any]] = []
        kept: deque[Record[Any]] = deque()
        for record in self._records:
            (removed if (record.topic, record.partition) in partitions else kept).append(record)
        self._records = kept
        self.size -= _size_of(removed)
        return removed


def _size_of(records: Sequence[Record[Any]]) -> int:
    return sum([record.size for record in records])


_FETCH_SECONDS: Final = 2.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 10.0
_JOIN_GRACE: Final = 10.0


class FetchedSource(Protocol):
    """The part of a source that fetches."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]: ...
    def interrupt(self) -> None: ...


class RecordFetcher:
    """Fetches the records of one consumer into its buffer.

    :param admits: whether a record of this partition may be handed over; others are dropped.
    :param max_records: the most records buffered.
    :param max_bytes: the most bytes buffered; one record may exceed it.
    :ivar error: the error that ended the loop.
    :ivar failing: whether the last fetch ended with a retriable error.
    """

    def __init__(
        self,
        *,
        admits: Callable[[TopicPartition], bool],
        topic: str,
        hooks: Hooks,
        max_records: int,
        max_bytes: int,
    ) -> None:
        self._topic = topic
        self._hooks = hooks
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self.buffer = RecordBuffer(admits, self._check_room)
        self._waiters: set[asyncio.Future[bool]] = set()
        self._pauses = 0
        self._fetch_loop: FetchLoop[Any] | None = None
        self._idle_since = self._loop.time() + _JOIN_GRACE
        self.failing = False
        self.error: Exception | None = None

    def start(self, source: FetchedSource) -> None:
        """Begin to fetch."""
        fetches_runs = isinstance(source, FetchesRuns)
        self._fetch_loop = FetchLoop[Any](
            source.fetch_runs if fetches_runs else source.fetch,
            source.interrupt,
            demand=self._demand,
            deliver=self._deliver_runs if fetches_runs else self._deliver_records,
            retrying=self._retrying,
            failed=self._failed,
            backoff=Backoff(_FIRST_PAUSE, _LONGEST_PAUSE),
            wait=_FETCH_SECONDS,
        )

    # -- waiting -------------------------------------------------------------------------------------------

    @property
    def idle_since(self) -> float | None:
        """The loop time since which the source has been healthy and returned nothing; None while it fails."""
        return None if self.failing else self._idle_since

    def joined(self) -> None:
        """The group has assigned partitions: from now on, no records means idle."""
        self._idle_since = self._loop.time()
        self.wake()

    async def arrival(self, timeout: float | None) -> bool:
        """Wait until something may have changed; False after `timeout` seconds."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.add(waiter)
        timer = None if timeout is None else self._loop.call_later(timeout, _expire, waiter)
        try:
            return await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Wake all waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    # -- pausing and ending --------------------------------------------------------------------------------

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `RecordBuffer.pause`."""
        self.buffer.resume(partitions)
        if len(self.buffer):
            self.wake()

    @asynccontextmanager
    async def interrupted(self) -> AsyncGenerator[None]:
        """Within the block no fetch runs; the result of the interrupted one is in the buffer."""
        self._pauses += 1
        try:
            if self._fetch_loop is not None:
                await self._fetch_loop.interrupted()
            yield
        finally:
            self._pauses -= 1
            self._poke()

    def fail(self, error: Exception) -> None:
        """Stop with this error, and drop all buffered records."""
        self.error = self.error or error
        self.buffer.clear()
        self.stop()

    def stop(self) -> None:
        """Start no further fetch."""
        if self._fetch_loop is not None:
            self._fetch_loop.stop()
        self.wake()

    async def stopped(self, deadline: float) -> None:
        """Wait until the last fetch is over, at most until the loop time `deadline`."""
        if self._fetch_loop is not None:
            await self._fetch_loop.stopped(max(0.0, deadline - self._loop.time()))

    def cancel(self) -> None:
        """Cancel a fetch that ignored `interrupt`, after its source was closed."""
        if self._fetch_loop is not None:
            self._fetch_loop.cancel()

    # -- fetching ------------------------------------------------------------------------------------------

    def _demand(self) -> tuple[int, int]:
        if self._pauses or not self.has_room:
            return 0, 0
        return self._max_records - len(self.buffer), self._max_bytes - self.buffer.size

    @property
    def has_room(self) -> bool:
        """Whether the buffer is empty enough for the next fetch."""
        return 2 * len(self.buffer) <= self._max_records and 2 * self.buffer.size <= self._max_bytes

    def _check_room(self) -> None:
        if self._fetch_loop is not None and self._fetch_loop.waiting and self.has_room:
            self._fetch_loop.poke()

    def _poke(self) -> None:
        if self._fetch_loop is not None:
            self._fetch_loop.poke()

    def _deliver_records(self, records: Sequence[Record[Any]]) -> None:
        self.buffer.add(records)
        self._delivered(records, Counter(record.topic for record in records) if self._hooks.listening else None)

    def _deliver_runs(self, runs: Sequence[RecordRun]) -> None:
        counts: Counter[str] | None = None
        self.buffer.add_runs(runs)
        if self._hooks.listening:
            counts = Counter()
            for run in runs:
                counts[run.topic] += len(run)
        self._delivered(runs, counts)

    def _delivered(self, fetched: Sequence[object], counts: Counter[str] | None) -> None:
        for topic, count in (counts or {}).items():
            self._hooks.emit(RecordsReceived(topic=topic, count=count))
        if self.error is not None:
            # No record is handed over after the error.
            self.buffer.clear()
            return
        if self.failing:
            self.failing = False
            self._idle_since = self._loop.time()
            self.wake()
        if fetched:
            self._idle_since = self._loop.time()
            if len(self.buffer):
                self.wake()

    def _retrying(self, error: BrokerError, seconds: float) -> None:
        self.failing = True
        logger.warning("Fetching from %r failed, next try in %.2f s: %s", self._topic, seconds, error)
        if self._hooks.listening:
            self._hooks.emit(FetchFailed(topic=self._topic, error=error, pause=seconds))

    def _failed(self, error: BrokerError) -> None:
        self.error = self.error or error
        self.wake()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
