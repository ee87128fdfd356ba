"""One partition of a group: `PartitionTables` are its stores and their copies, `PartitionRunner` feeds its engine.

*Concurrency.* One task for each runner, so that a callback that waits stops only its own partition. A checkpoint takes
turns with it: it never sees half of a message. *Cancellation.* A runner that is halted has handled a part of its
messages; the one that it was at is undone. *Failure.* The error of the engine ends the runner, which reports it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from itertools import count, islice, repeat
from typing import Any, Final, cast

from broker import Bounds, BrokerError, Bus, Limits, RecordBatch
from broker_streams import keys
from broker_streams.alignment import Alignment
from broker_streams.checkpoint import Checkpoint
from broker_streams.commits import Part
from broker_streams.context import Context, Incoming
from broker_streams.engine import PartitionEngine, Reader
from broker_streams.graph import Group
from broker_streams.off_loop import in_thread
from broker_streams.recovery import CHECKPOINT, TIME, Enough, TableCopy, position_name, stamp, stored_checkpoint
from broker_streams.stores.store import Store

__all__ = ["PartitionLog", "PartitionRunner", "PartitionState", "PartitionTables", "Rows"]

logger: Final = logging.getLogger("broker_streams")

_CHUNK: Final = 500
"""Messages that are handled before others get a turn."""
_SYNC_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.2
"""How long a topic is waited for before it is looked whether it has messages at all."""
_HALT_SECONDS: Final = 2.0
"""How long a running callback may take to end by itself."""


class PartitionState(StrEnum):
    """What a partition is doing."""

    RECOVERING = "recovering"
    """Its rows are brought up to date."""
    RUNNING = "running"
    """It handles messages."""
    STOPPING = "stopping"
    """It writes its last checkpoint."""
    STANDBY = "standby"
    """Another member has it; its rows are kept up to date."""


class Rows:
    """The rows of a store, as the engine reads joined tables."""

    __slots__ = ("_get",)

    def __init__(self, store: Store) -> None:
        self._get = store.get

    def get(self, key: bytes, /) -> bytes | None:
        return self._get(keys.ROWS, key)


class PartitionTables:
    """The stores of one partition: the rows of the group, and the joined tables.

    :param open_store: opens a store by its name.
    """

    def __init__(self, bus: Bus, group: Group, partition: int, open_store: Callable[[str], Store]) -> None:
        self.partition: Final = partition
        self.store: Final = open_store(f"{group.table}-{partition}")
        self.own: Final = TableCopy(bus, group.table, self.store, (partition,), own=True)
        self.joins: Final[dict[str, TableCopy]] = {
            join.table: TableCopy(bus, join.table, open_store(f"{join.table}-{partition}"), (partition,))
            for join in group.joins
        }
        self._tasks: dict[TableCopy, asyncio.Task[Any]] = {}

    async def recover(self, enough: Enough | None, patience: float) -> bool:
        """Bring the rows of the group up to date, and the joined tables, which are followed from then on.

        :returns: what `TableCopy.recover` returns for the rows.
        """
        await self._end(self.own)
        for copy in self.joins.values():
            self._begin(copy)
        done = await self.own.recover(enough, patience=patience)
        for copy in self.joins.values():
            await self._ready(copy)
        return done

    async def stand_by(self) -> None:
        """Follow everything, and return when it is up to date."""
        for copy in self.copies:
            self._begin(copy)
        for copy in self.copies:
            await self._ready(copy)

    @property
    def copies(self) -> tuple[TableCopy, ...]:
        """That of the group's rows, then those of the joined tables."""
        return self.own, *self.joins.values()

    def readers(self) -> dict[str, Reader]:
        """The rows of the joined tables."""
        return {table: Rows(copy.store) for table, copy in self.joins.items()}

    async def close(self) -> None:
        """Stop following, and close the stores. May be called twice."""
        for copy in self.copies:
            await self._end(copy)
        await in_thread(self._close_stores)

    def _close_stores(self) -> None:
        # One that fails leaves no other open.
        with ExitStack() as stack:
            stack.callback(self.store.close)
            for copy in self.joins.values():
                if not copy.store.closed:
                    stack.callback(copy.store.close)
                    stack.callback(copy.sync)

    def _begin(self, copy: TableCopy) -> None:
        task = self._tasks.get(copy)
        if task is None or task.done():
            self._tasks[copy] = asyncio.create_task(copy.run(), name=f"copy-{copy.topic}-{self.partition}")

    async def _end(self, copy: TableCopy) -> None:
        if (task := self._tasks.pop(copy, None)) is not None:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()

    async def _ready(self, copy: TableCopy) -> None:
        await wait_ready(copy, self._tasks[copy])


async def wait_ready(copy: TableCopy, task: asyncio.Task[Any]) -> None:
    """Wait until a copy is ready that this task runs; raises the error of the task."""
    waiting = asyncio.ensure_future(copy.ready())
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if task.done() and not copy.is_ready:
        task.result()


class PartitionLog:
    """The logs of one partition."""

    def __init__(self, bus: Bus, partition: int) -> None:
        self._bus = bus
        self._partition = partition

    async def bounds(self, topics: Sequence[str]) -> dict[str, Bounds]:
        """By topic where the log begins and ends."""
        found = await asyncio.gather(*map(self._bus.log.bounds, topics))
        return {topic: bounds[self._partition] for topic, bounds in zip(topics, found, strict=True)}

    async def has_records(self, topic: str, start: int, stop: int) -> bool:
        """Whether there is a record from `start` on, below `stop`."""
        if start < stop:
            start = max(start, (await self.bounds((topic,)))[topic].first)
        if start >= stop:
            return False
        batches = self._bus.log.read(topic, self._partition, start, stop, max_records=1)
        try:
            async for _ in batches:
                return True
            return False
        finally:
            await cast("AsyncGenerator[Any]", batches).aclose()


class PartitionRunner:
    """Feeds the engine of a partition.

    :param checkpoint: where the partition goes on.
    :param log: tells where the topics begin and end.
    :param most_rows: the most rows of a checkpoint.
    :param progress: called after messages were handled.
    :param want_checkpoint: called when a checkpoint has to come before the next message.
    :param failed: called with the error that has ended the runner.
    :param attributes: as of the engine, like `limits`, `wrap` and `raises`.
    """

    def __init__(
        self,
        group: Group,
        partition: int,
        tables: PartitionTables,
        *,
        checkpoint: Checkpoint | None,
        lookups: Mapping[str, Reader],
        epoch: int,
        log: PartitionLog,
        most_rows: int | None,
        progress: Callable[[int], object],
        want_checkpoint: Callable[[], object],
        failed: Callable[[PartitionRunner, BaseException], object],
        limits: Limits,
        attributes: Mapping[str, str] | None = None,
        wrap: Callable[[Context], Context] | None = None,
        raises: Callable[[Exception], bool] | None = None,
    ) -> None:
        self.partition: Final = partition
        self.tables: Final = tables
        self.store: Final = tables.store
        self.engine: Final = PartitionEngine(
            group,
            partition,
            self.store,
            joins=tables.readers(),
            lookups=lookups,
            checkpoint=checkpoint,
            now=time.time,
            sleep=asyncio.sleep,
            epoch=epoch,
            attributes=attributes,
            limits=limits,
            wrap=wrap,
            most_rows=most_rows,
        )
        self.engine.raises = raises
        self.topics: Final = tuple(group.consumed)
        # The warning of a callback that blocks the event loop names the task.
        self._name = f"group {group.name}, partition {partition} of {', '.join(self.topics)}"
        self.error: BaseException | None = None
        self.backlog = 0
        """Records that were given and wait; those that the alignment holds do not count."""
        self.undone = 0
        """How often `rollback` was called."""
        self.paused = False
        self.retired = False
        """Whether another owner may have the partition now, so that nothing of this one may be written any more."""
        self.counts: Counter[str] = Counter()
        self.handled: dict[str, tuple[int, int]] = {}
        """By topic the messages of settled checkpoints, and their bytes."""
        self.checkpoints = self.rows = self.published = 0
        self._log = log
        self._most_rows = most_rows
        self._progress = progress
        self._want_checkpoint = want_checkpoint
        self._failed = failed
        self._before = stored_checkpoint(self.store)
        self._alignment = Alignment(self.topics) if group.order == "time" and len(self.topics) > 1 else None
        self._ends: Mapping[str, int] = {}
        self._next: dict[str, int] = {}
        """By topic the offset after the last message that the alignment has."""
        self._looked: dict[str, int] = {}
        """By topic the offset from which on it was looked for messages."""
        self._inbox: deque[tuple[str, RecordBatch[Any]]] = deque()
        self._ready: deque[Incoming] = deque()
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._visit: asyncio.Task[int] | None = None
        self._ending = False
        self._synced = 0.0

    # -- running -------------------------------------------------------------------------------------------

    async def upgrade(self) -> int:
        """Rewrite rows of an older version; return how many."""
        if not self.engine.needs_upgrade:
            return 0
        rows = ((key, data) for key, data in self.store.items(keys.ROWS) if not keys.is_reserved(key))
        return self.engine.upgrade(rows)

    async def start(self) -> None:
        """Begin to handle messages from the positions of the engine on.

        :raises BrokerError: the broker does not say where the topics begin and end.
        """
        if self._alignment is not None:
            bounds = await self._log.bounds(self.topics)
            positions = self.engine.positions
            self._next = {topic: max(positions.get(topic, 0), each.first) for topic, each in bounds.items()}
            self._ends = {topic: each.next for topic, each in bounds.items()}
            self._alignment.ends(self._ends)
            self._alignment.reached(self._next)
            self._looked.clear()
        self._ending = False
        self._task = asyncio.create_task(self._run(), name=self._name)
        self._task.add_done_callback(self._ended)

    def put(self, topic: str, batch: RecordBatch[Any]) -> None:
        """Give records of one topic, in order."""
        self._inbox.append((topic, batch))
        self.backlog += len(batch)
        self._news.set()

    def pause(self, paused: bool) -> None:
        """Handle no messages for a while, or again; timers go on."""
        self.paused = paused
        self._news.set()

    def drop_waiting(self) -> None:
        """Forget the records that wait: they are read again."""
        self._inbox.clear()
        self._ready.clear()
        self.backlog = 0
        if self._alignment is not None:
            self._alignment.clear()

    async def halt(self) -> None:
        """Stop handling messages: after the current ones, or within seconds. `take` may be called afterwards."""
        if self._task is not None:
            self._ending = True
            self._news.set()
            if working := [each for each in (self._task, self._visit) if each is not None and not each.done()]:
                await asyncio.wait(working, timeout=_HALT_SECONDS)
            await self.abort()

    async def abort(self) -> None:
        """Stop handling messages at once."""
        self._ending = True
        task, self._task = self._task, None
        for each in (task, self._visit, self._looking):
            if each is not None and not each.done():
                each.cancel()
                await asyncio.wait((each,))

    def rollback(self) -> None:
        """Forget everything since the last checkpoint that the store has; the runner is halted."""
        self.engine.rollback()
        self.drop_waiting()
        self.undone += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.error = error
            self._failed(self, error)

    async def _run(self) -> None:
        engine = self.engine
        while not self._ending:
            self._news.clear()
            self._unpack()
            if self.room < 1:
                self._want_checkpoint()
                await self._news.wait()
                continue
            if self._ready or (self._alignment is not None and len(self._alignment)):
                engine.awake()
            if (due := engine.next_due()) is not None and due <= time.time():
                if engine.is_idle and await self._has_unread():
                    engine.awake()
                async with self._turn:
                    await engine.advance()
                self._progress(0)
            if not self._ready or self.paused:
                await self._wait(due)
                continue
            chunk = [self._ready.popleft() for _ in range(min(len(self._ready), _CHUNK))]
            async with self._turn:
                handled = await engine.handle(chunk)
            self._ready.extendleft(reversed(chunk[handled:]))
            self.backlog -= handled
            self._progress(handled)
            await asyncio.sleep(0)

    async def _has_unread(self) -> bool:
        """Whether there are messages that have not come yet, as after a rebalance or while the broker is away."""
        positions = self.engine.positions
        try:
            for topic, bounds in (await self._log.bounds(self.topics)).items():
                if await self._log.has_records(topic, positions.get(topic, bounds.first), bounds.next):
                    return True
        except BrokerError as error:
            logger.debug("Looking for unread messages of partition %d failed: %s", self.partition, error)
            return True
        return bool(self._inbox)

    @property
    def room(self) -> int:
        """How many more keys may change before a checkpoint has to come; each has a row and an agenda."""
        return _CHUNK if self._most_rows is None else (self._most_rows - self.engine.dirty) // 2

    def _unpack(self) -> None:
        """Make messages of the records, in the order in which they are to be handled."""
        alignment, ready = self._alignment, self._ready
        while self._inbox:
            topic, batch = self._inbox.popleft()
            messages = _messages(topic, batch)
            if alignment is None:
                ready.extend(messages)
            else:
                alignment.add(messages)
                self._next[messages[-1].topic] = messages[-1].offset + 1
                self.backlog -= len(messages)
        if alignment is not None:
            aligned = alignment.ready(time.time())
            ready.extend(aligned)
            self.backlog += len(aligned)
            self._look_for_waiting(alignment)

    def _look_for_waiting(self, alignment: Alignment) -> None:
        """Look for messages of topics that others wait for."""
        idle = self._looking is None or self._looking.done()
        if idle and len(alignment) and any(self._next[each] != self._looked.get(each) for each in alignment.waiting):
            self._looking = asyncio.create_task(self._look(alignment), name=f"ends-{self.partition}")

    async def _look(self, alignment: Alignment) -> None:
        """Find out whether topics that others wait for have messages before their ends. The last offsets may have none:
        they are of transactions, or of messages that are gone."""
        await asyncio.sleep(_LOOK_SECONDS)
        for topic in alignment.waiting:
            position, end = self._next[topic], self._ends[topic]
            self._looked[topic] = position
            try:
                if not await self._log.has_records(topic, position, end) and self._next[topic] == position:
                    alignment.reached({topic: end})
                    self._news.set()
            except BrokerError as error:
                # The patience of the alignment ends the wait.
                logger.debug("Looking for messages of %r[%d] failed: %s", topic, self.partition, error)

    async def _wait(self, due: float | None) -> None:
        """Wait for records, or for what is due."""
        deadlines = [due, None if self._alignment is None else self._alignment.deadline]
        until = min((each for each in deadlines if each is not None), default=None)
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - time.time())):
                await self._news.wait()
        except TimeoutError:
            pass

    # -- checkpoints ---------------------------------------------------------------------------------------

    async def take(self) -> Part:
        """What the next checkpoint writes, once no message is half handled.

        :raises StreamFailed: a message that was to be done later has failed.
        """
        async with self._turn:
            await self.engine.drained()
            effects = self.engine.take()
        self._news.set()
        return Part(self.partition, effects, effects.checkpoint.pack(), self._before, lambda: self.retired)

    def store_checkpoint(self, part: Part, position: int | None) -> None:
        """The checkpoint is written: bring the store up to it. May be called in a thread, before `settled`.

        :param position: up to where the store then has the table; None if that is not known.
        """
        meta = {CHECKPOINT: part.packed, TIME: stamp()}
        if position is not None:
            meta[position_name(self.partition)] = b"%d" % position
        now = time.monotonic()
        durable = now - self._synced >= _SYNC_SECONDS
        if durable:
            self._synced = now
        self.store.write({keys.ROWS: part.effects.rows, keys.DUE: part.effects.due}, meta, durable=durable)

    def settled(self, part: Part) -> None:
        """The store has the checkpoint."""
        self.engine.settled(part.effects)
        self._before = part.packed
        self.checkpoints += 1
        self.rows += len(part.effects.rows)
        self.published += len(part.effects.outputs)
        self.counts.update(part.effects.counts)
        for topic, (number, size) in part.effects.topics.items():
            before = self.handled.get(topic, (0, 0))
            self.handled[topic] = (before[0] + number, before[1] + size)

    async def visit(self, visitor: Any, meta: Any, keys_of_rows: Sequence[bytes]) -> int | None:
        """Call a visitor for rows, between messages; return how many there were, or None if the runner was halted."""
        async with self._turn:
            if self._ending:
                return None
            # A task of its own, so that a visitor that waits does not hold up who halts the runner.
            visit = self._visit = asyncio.create_task(self.engine.visit(visitor, meta, keys_of_rows), name=self._name)
            try:
                await asyncio.wait((visit,))
            finally:
                self._visit = None
                if not visit.done():
                    visit.cancel()
                    await asyncio.wait((visit,))
        if visit.cancelled():
            return None
        visited = visit.result()
        self._progress(visited)
        return visited

    def stored_keys(self, after: bytes | None, limit: int) -> list[bytes]:
        """The next keys of rows in the store."""
        start = None if after is None else after + b"\x00"
        found = (key for key, _ in self.store.items(keys.ROWS, start=start) if not keys.is_reserved(key))
        return list(islice(found, limit))


def _messages(topic: str, batch: RecordBatch[Any]) -> list[Incoming]:
    """The records of a batch of one topic as messages, made without a call of Python for each."""
    columns = zip(*batch.rows("offset", "key", "data", "publish_time_ms"), strict=True)
    rows = zip(repeat(topic), *columns, zip(repeat(batch), count()))
    return list(map(_new_message, repeat(Incoming), rows))


_new_message: Final[Callable[[type[Incoming], tuple[Any, ...]], Incoming]] = cast("Any", tuple).__new__
