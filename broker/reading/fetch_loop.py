"""Fetches the records of one source into a bounded buffer, and wakes the calls that wait for records.

`RecordBuffer` keeps records, and runs of records that are not made yet, in the order of their arrival; runs leave whole
where possible. Records of a partition that is held back are kept aside. Pure, without a lock.

*Concurrency.* One event loop. One task calls `source.fetch`, and again when the buffer is half empty. A waiter is
woken, then pops without suspending. *Cancellation.* The fetch is never cancelled: `stop` and `paused_intake` interrupt
it and keep its records. A cancelled waiter has taken nothing. *Failure.* A retriable error is an event and a pause with
backoff and jitter. Any other error ends the loop and stays in `error`; the consumer raises it when the buffer is empty.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from broker.driver.concurrency import Backoff
from broker.driver.contract import RecordSource, TopicPartition
from broker.driver.optional import FetchesRuns
from broker.errors import BackendError, BrokerError
from broker.hooks import FetchFailed, Hooks, RecordsReceived, logger
from broker.records import Record, RecordRun

__all__ = ["RecordBuffer", "RecordFetchLoop"]


class RecordBuffer:
    """:param admits: whether a record of this partition may be handed over; others are dropped.

    :ivar size: bytes of what may leave.
    """

    def __init__(self, admits: Callable[[TopicPartition], bool]) -> None:
        self._admits = admits
        self._records: deque[Record[Any]] = deque()
        self._runs: deque[RecordRun] = deque()
        """Behind the records."""
        self._unmade = 0
        self._held_back: dict[TopicPartition, list[Record[Any]]] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._records) + self._unmade

    # -- in ------------------------------------------------------------------------------------------------

    def add(self, records: Sequence[Record[Any]]) -> None:
        """These were fetched."""
        self._make_all()
        buffer = self._records
        into: list[Record[Any]] | deque[Record[Any]] | None = None
        topic, partition, size = "", -1, 0
        for record in records:
            if record.partition != partition or record.topic != topic:
                topic, partition = record.topic, record.partition
                key = TopicPartition(topic, partition)
                into = self._held_back.get(key, buffer) if self._admits(key) else None
            if into is not None:
                into.append(record)
                if into is buffer:
                    size += record.size
        self.size += size

    def add_runs(self, runs: Iterable[RecordRun]) -> None:
        """These were fetched."""
        for run in runs:
            key = TopicPartition(run.topic, run.partition)
            if not self._admits(key):
                continue
            aside = self._held_back.get(key)
            if aside is not None:
                aside.extend(run.make(None, 0))
                continue
            self._runs.append(run)
            self._unmade += len(run)
            self.size += run.size

    def put_back(self, records: Sequence[Record[Any]]) -> None:
        """Return records that were popped in this same step and not handed over."""
        self._records.extendleft(reversed(records))
        self.size += _size_of(records)

    # -- out -----------------------------------------------------------------------------------------------

    @property
    def unmade(self) -> bool:
        """Whether a run is the next to leave, and its records are not made yet."""
        return bool(self._runs) and not self._records

    def pop_runs(self, limit: int) -> list[RecordRun]:
        """Take out the next runs, of at most `limit` records together, where they are `unmade`."""
        taken: list[RecordRun] = []
        runs = self._runs
        while runs and limit > 0:
            run = runs.popleft()
            if len(run) > limit:
                run, rest = run.split(limit)
                runs.appendleft(rest)
            taken.append(run)
            limit -= len(run)
            self._unmade -= len(run)
            self.size -= run.size
        return taken

    def pop(self, limit: int) -> list[Record[Any]]:
        """Take out the next records, at most `limit`; none if there are none."""
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
        return records

    def pop_one(self) -> Record[Any]:
        """Take out the next record; there must be one."""
        if not self._records:
            self._make_next()
        record = self._records.popleft()
        self.size -= record.size
        return record

    def peek(self) -> Record[Any] | None:
        """The next record, left where it is."""
        if self.unmade:
            self._make_next()
        return self._records[0] if self._records else None

    # -- partitions that go, or rest -----------------------------------------------------------------------

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget what is here of these, held back or not."""
        dropped = set(partitions)
        for partition in dropped & self._held_back.keys():
            self._held_back[partition] = []
        self._filter(dropped)

    def clear(self) -> None:
        """Forget everything."""
        self._held_back = {partition: [] for partition in self._held_back}
        self._records.clear()
        self._runs.clear()
        self._unmade = self.size = 0

    def hold_back(self, partitions: Iterable[TopicPartition]) -> None:
        """Let nothing of these out until `let_go`; what is here of them is kept aside."""
        asked = {partition for partition in partitions if partition not in self._held_back}
        for partition in asked:
            self._held_back[partition] = []
        for record in self._filter(asked):
            self._held_back[TopicPartition(record.topic, record.partition)].append(record)

    def let_go(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `hold_back`."""
        for partition in partitions:
            records = self._held_back.pop(partition, None)
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
        """Take the records of these partitions out."""
        if not partitions or not len(self):
            return []
        self._make_all()
        taken: list[Record[Any]] = []
        kept: deque[Record[Any]] = deque()
        for record in self._records:
            (taken if (record.topic, record.partition) in partitions else kept).append(record)
        self._records = kept
        self.size -= _size_of(taken)
        return taken


def _size_of(records: Sequence[Record[Any]]) -> int:
    return sum([record.size for record in records])


_WAIT: Final = 2.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 10.0
_JOIN_GRACE: Final = 10.0


class RecordFetchLoop:
    """The intake and the buffer of one record consumer.

    :param admits: whether a record of this partition may be handed over; others are dropped.
    :param max_records: the most records buffered.
    :param max_bytes: the most bytes buffered; one record may exceed it.
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
        self._buffer = RecordBuffer(admits)
        self._waiters: set[asyncio.Future[bool]] = set()
        self._poke: asyncio.Event = asyncio.Event()
        self._wants_room = False
        self._fetch_over: asyncio.Event = asyncio.Event()
        self._fetch_over.set()
        self._stops_of_intake = 0
        self._stopping = False
        self._failing = False
        self._source: RecordSource | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle_since = self._loop.time() + _JOIN_GRACE
        self.error: BrokerError | None = None

    # -- for the consumer ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def failing(self) -> bool:
        """Whether the last fetch ended with a retriable error."""
        return self._failing

    @property
    def idle_since(self) -> float | None:
        """The loop time since which the source has been healthy and had nothing; None while it fails."""
        return None if self._failing else self._idle_since

    def start(self, source: RecordSource) -> None:
        """Begin to fetch."""
        self._source = source
        self._task = self._loop.create_task(self._run(source), name="broker-record-fetch-loop")

    def joined(self) -> None:
        """The group has given us partitions: from now on, no records means idle."""
        self._idle_since = self._loop.time()
        self.wake()

    @property
    def unmade(self) -> bool:
        """Whether `pop_runs` gives the next records."""
        return self._buffer.unmade

    def pop_runs(self, limit: int) -> list[RecordRun]:
        """Take out the next runs of records, at most `limit` of these together; only where they are `unmade`."""
        runs = self._buffer.pop_runs(limit)
        if self._wants_room:
            self._check_room()
        return runs

    def pop(self, limit: int) -> list[Record[Any]]:
        """Take out the next records, at most `limit`; none if there are none."""
        records = self._buffer.pop(limit)
        if self._wants_room:
            self._check_room()
        return records

    def pop_one(self) -> Record[Any]:
        """Take out the next record; there must be one."""
        record = self._buffer.pop_one()
        if self._wants_room:
            self._check_room()
        return record

    def peek(self) -> Record[Any] | None:
        """The next record, left where it is."""
        return self._buffer.peek()

    def put_back(self, records: Sequence[Record[Any]]) -> None:
        """Return records that were popped in this same step and not handed over."""
        self._buffer.put_back(records)

    def discard(self, record: Record[Any]) -> bool:
        """Take out this very record if it is the next one."""
        if self.peek() is record:
            self.pop_one()
            return True
        return False

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget what is buffered of these, or kept aside."""
        self._buffer.drop(partitions)
        self._check_room()

    def clear(self) -> None:
        """Forget everything that is buffered."""
        self._buffer.clear()
        self._poke.set()

    def hold_back(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand over nothing of these until `let_go`; what is buffered of them is kept aside."""
        self._buffer.hold_back(partitions)
        self._check_room()

    def let_go(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo `hold_back`."""
        self._buffer.let_go(partitions)
        if len(self._buffer):
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
        """Have every waiter look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    @asynccontextmanager
    async def paused_intake(self) -> AsyncGenerator[None]:
        """Within the block no fetch runs; what the interrupted one had is in the buffer."""
        self._stops_of_intake += 1
        try:
            if self._source is not None and not self._fetch_over.is_set():
                self._source.interrupt()
                await self._fetch_over.wait()
            yield
        finally:
            self._stops_of_intake -= 1
            self._poke.set()

    def fail(self, error: BrokerError) -> None:
        """End the intake with this error, and forget what is buffered."""
        self.error = self.error or error
        self._stopping = True
        self.clear()
        if self._source is not None:
            self._source.interrupt()
        self.wake()

    async def stop(self, deadline: float) -> None:
        """Fetch no more, and wait for the running fetch, at most until the loop time `deadline`."""
        self._stopping = True
        self._poke.set()
        self.wake()
        if self._task is None or self._task.done():
            return
        if self._source is not None:
            self._source.interrupt()
        await asyncio.wait((self._task,), timeout=max(0.0, deadline - self._loop.time()))

    def abandon(self) -> None:
        """End a fetch that did not heed its interruption, after its source was closed."""
        if self._task is not None:
            self._task.cancel()

    # -- the intake ----------------------------------------------------------------------------------------

    async def _run(self, source: RecordSource) -> None:
        try:
            await self._fetch_until_stopped(source)
        except BrokerError as error:
            self.error = self.error or error
        except Exception as error:
            self.error = BackendError(f"The backend failed to fetch: {error}", native=error)
        finally:
            self._fetch_over.set()
            self.wake()

    async def _fetch_until_stopped(self, source: RecordSource) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        fetch = self._fetching_by(source)
        while not self._stopping:
            if self._stops_of_intake or not self._has_room():
                await self._wait_for_room()
                continue
            self._fetch_over.clear()
            try:
                arrived = await fetch(self._max_records - len(self._buffer), self._max_bytes - self._buffer.size)
            except BrokerError as error:
                if not error.retriable:
                    raise
                self._fetch_over.set()
                await self._back_off(error, backoff.next())
                continue
            self._fetch_over.set()
            if self.error is not None:
                # Nothing is handed over after it.
                self._buffer.clear()
                return
            backoff.reset()
            if self._failing:
                self._failing = False
                self._idle_since = self._loop.time()
                self.wake()
            if arrived:
                self._idle_since = self._loop.time()
                if len(self._buffer):
                    self.wake()
            else:
                # A source that answers without suspending must not block the event loop.
                await asyncio.sleep(0)

    def _fetching_by(self, source: RecordSource) -> Callable[[int, int], Awaitable[bool]]:
        """What fetches into the buffer, in the way that this source does best; whether anything came."""
        buffer = self._buffer

        async def fetch(max_records: int, max_bytes: int) -> bool:
            records = await source.fetch(max_records, max_bytes, _WAIT)
            buffer.add(records)
            if records and self._hooks.listening:
                self._emit_counts(Counter(record.topic for record in records))
            return bool(records)

        if not isinstance(source, FetchesRuns):
            return fetch

        async def fetch_runs(max_records: int, max_bytes: int) -> bool:
            runs = await source.fetch_runs(max_records, max_bytes, _WAIT)
            buffer.add_runs(runs)
            if runs and self._hooks.listening:
                counts: Counter[str] = Counter()
                for run in runs:
                    counts[run.topic] += len(run)
                self._emit_counts(counts)
            return bool(runs)

        return fetch_runs

    def _emit_counts(self, counts: Counter[str]) -> None:
        for topic, count in counts.items():
            self._hooks.emit(RecordsReceived(topic=topic, count=count))

    async def _wait_for_room(self) -> None:
        self._poke.clear()
        self._wants_room = True
        try:
            await self._poke.wait()
        finally:
            self._wants_room = False

    async def _back_off(self, error: BrokerError, seconds: float) -> None:
        self._failing = True
        logger.warning("Fetching from %r failed, next try in %.2f s: %s", self._topic, seconds, error)
        if self._hooks.listening:
            self._hooks.emit(FetchFailed(topic=self._topic, error=error, pause=seconds))
        ends = self._loop.time() + seconds
        while not self._stopping and (left := ends - self._loop.time()) > 0:
            self._poke.clear()
            try:
                async with asyncio.timeout(left):
                    await self._poke.wait()
            except TimeoutError:
                return

    def _has_room(self) -> bool:
        return 2 * len(self._buffer) <= self._max_records and 2 * self._buffer.size <= self._max_bytes

    def _check_room(self) -> None:
        if self._has_room():
            self._poke.set()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
