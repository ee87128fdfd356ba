"""`TableCopy`: brings a store up to date from the topic of a table, in bulk, and then keeps it so.

Rows and the position behind them are one write, so a store that was stopped anywhere goes on where it was. A store is
emptied, with a warning, when it is of another topic, newer than the topic, or so old that it may have missed the
deletion of rows: tombstones go after a while.

*Concurrency.* One task runs a copy; any number may read the store meanwhile. *Cancellation.* Nothing is lost: the next
run goes on. *Failure.* `recover` raises the errors of the broker. `run` raises them until the copy was ready once; from
then on it tries again for ever, while the store keeps what it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final, NoReturn, Protocol

from broker import (
    CHECKPOINT_KEY,
    Bounds,
    BrokerError,
    Bus,
    Closed,
    NotFound,
    OffsetOutOfRange,
    RecordBatch,
    Retry,
    TopicRecreated,
)
from broker_streams import keys
from broker_streams.off_loop import in_thread
from broker_streams.redo import stored_redo
from broker_streams.stores.store import Store
from broker_streams.wording import counted

__all__ = [
    "CHECKPOINT",
    "TIME",
    "CopyState",
    "Enough",
    "RecoveryStats",
    "TableCopy",
    "position_name",
    "stamp",
    "stored_checkpoint",
]

logger: Final = logging.getLogger("broker_streams")

CHECKPOINT: Final = "checkpoint"
"""The name under which a store keeps the last checkpoint of its partition."""
_TOPIC: Final = "topic"
_IDENTITY: Final = "identity"
TIME: Final = "time"
"""The name under which a store keeps when it was up to date."""

_MAX_ROWS: Final = 5000
_LOOK_SECONDS: Final = 1.0
"""How often a copy without news looks whether the connection is well."""
_TELL_SECONDS: Final = 10.0
_SYNC_SECONDS: Final = 5.0
_LAG_SECONDS: Final = 10.0
_LAG_PAUSE: Final = 0.02
_OLDEST: Final = 20 * 3600
"""Seconds after which a store may lack deletions: brokers keep tombstones for a day unless told otherwise."""
_AGAIN: Final = Retry(initial=0.5, maximum=30.0)


Enough = Callable[[bytes | None], Awaitable[bool]]
"""Whether a checkpoint is the last one, as far as is known otherwise."""


class CopyState(StrEnum):
    """What a copy is doing."""

    IDLE = "idle"
    """It was not started, or has ended."""
    RECOVERING = "recovering"
    """It reads what the topic held when it began."""
    RUNNING = "running"
    """It is up to date, and follows."""
    CONNECTING = "connecting"
    """The broker does not answer; the store keeps what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStats:
    """How far a recovery is.

    :ivar rows: rows that were read.
    :ivar rate: rows per second.
    :ivar left: offsets to read before the end that the table had when the recovery began.
    :ivar seconds_left: how long that takes at this rate; None if it cannot be told yet.
    """

    rows: int
    rate: float
    left: int
    seconds_left: float | None


def position_name(partition: int) -> str:
    """The name under which a store keeps the position up to which it has read a partition."""
    return f"position.{partition}"


def stored_checkpoint(store: Store) -> bytes | None:
    """The last checkpoint of a store; None before the first, and after a tombstone, which is stored empty."""
    return store.meta(CHECKPOINT) or None


def stamp(ago: float = 0.0) -> bytes:
    """The time of so many seconds ago, as a store keeps it under `TIME`."""
    return b"%d" % (time.time() - ago)


def _too_old(seconds: float) -> str:
    return f"the store is {seconds / 3600:.0f} hours old, and rows that were deleted since may have left no trace"


class _Followed(Protocol):
    """The part of a followed log that a copy uses."""

    @property
    def behind(self) -> frozenset[int]: ...
    @property
    def healthy(self) -> bool: ...
    async def next_batch(self, max_records: int = ..., timeout: float | None = ...) -> RecordBatch[bytes]: ...


class TableCopy:
    """A copy of some partitions of a table, or of all, in one store.

    :param partitions: None is all, also those that are added later.
    :param own: whether this is the state of a group of its own. Then the copy has its reserved rows, its checkpoint and
        the index of what is due; otherwise only the rows of the application.
    :param before_write: called with rows by key right before they are written; None deletes a row.
    :param on_state: called when `state` has changed.
    """

    def __init__(
        self,
        bus: Bus,
        topic: str,
        store: Store,
        partitions: Collection[int] | None = None,
        *,
        own: bool = False,
        before_write: Callable[[Mapping[bytes, bytes | None]], object] | None = None,
        on_state: Callable[[CopyState], object] = lambda state: None,
    ) -> None:
        self.topic: Final = topic
        self.store: Final = store
        self._bus = bus
        self._partitions = None if partitions is None else frozenset(partitions)
        self._own = own
        self._before_write = before_write
        self._on_state = on_state
        self._ready = asyncio.Event()
        self._advanced = asyncio.Event()
        self._synced = 0.0
        self._durable = True
        """Whether the last write was durable."""
        self._log: _Followed | None = None
        self._known_at: float | None = None
        self._began = 0.0, 0
        """When the recovery began, and how many rows had been read before."""
        self._begins: Mapping[int, int] = {}
        """By partition the position from which on it reads."""
        self._ends: Mapping[int, int] = {}
        """And the end that the log had then."""
        self.state = CopyState.IDLE
        self.positions: dict[int, int] = {}
        """The next offset to read of each partition."""
        self.read: Counter[int] = Counter()
        """By partition the number of rows that were read since the start."""
        self.seconds: float | None = None
        """How long the recovery took; None until it has ended."""

    # -- running -------------------------------------------------------------------------------------------

    async def recover(self, enough: Enough | None = None, *, patience: float = 30.0) -> bool:
        """Read up to what the topic holds now; return whether that was enough.

        :param enough: asked about the checkpoint that was read last, once the end is reached: False reads on, for a
            checkpoint that the broker shows late.
        :param patience: the most seconds to wait for that.
        """
        while True:
            try:
                began = await self._begin()
                if self._left > _MAX_ROWS:
                    async with self._open() as log:
                        await self._catch_up(log, _MAX_ROWS)
                await self._read_rest()
                done = enough is None or await enough(stored_checkpoint(self.store))
                if not done and enough is not None:
                    async with self._open() as log:
                        done = await self._read_on(log, enough, patience)
                await self._recovered(began)
                return done
            except (TopicRecreated, OffsetOutOfRange) as error:
                self._start_over(error.message)
            finally:
                self._log = None
                self._change(CopyState.IDLE)

    async def run(self) -> NoReturn:
        """Recover, then follow until cancelled.

        :raises BrokerError: before the copy was ready for the first time, or because the bus was closed.
        """
        failures = 0
        try:
            while True:
                try:
                    began = await self._begin()
                    if self._left <= _MAX_ROWS:
                        await self._read_rest()
                    async with self._open() as log:
                        await self._catch_up(log)
                        await self._recovered(began)
                        failures = 0
                        self._ready.set()
                        await self._follow(log)
                except (TopicRecreated, OffsetOutOfRange) as error:
                    self._start_over(error.message)
                except Closed:
                    raise
                except BrokerError as error:
                    if not (self._ready.is_set() or error.retriable):
                        raise
                    failures += 1
                    delay = _AGAIN.delay(failures)
                    self._change(CopyState.CONNECTING)
                    logger.warning(
                        "The copy of table %s is out of date; it tries again in %.1f s: %s", self.topic, delay, error
                    )
                    await asyncio.sleep(delay)
                finally:
                    self._log = None
        finally:
            self._change(CopyState.IDLE)

    async def ready(self) -> None:
        """Wait until `run` has recovered the store."""
        await self._ready.wait()

    @property
    def rows(self) -> int:
        """The number of rows that were read since the start."""
        return self.read.total()

    @property
    def is_ready(self) -> bool:
        """Whether `run` has recovered the store."""
        return self._ready.is_set()

    async def reached(self, partition: int, offset: int) -> None:
        """Wait until the record at this offset was read, or a later one."""
        while self.positions.get(partition, 0) <= offset:
            await self._advanced.wait()

    @property
    def staleness(self) -> float | None:
        """Seconds since the copy was known to be up to date; None if it never was."""
        if self._known_at is None:
            return None
        if self.state is CopyState.RUNNING and self._log is not None and self._log.healthy:
            return 0.0
        return time.monotonic() - self._known_at

    def sync(self, *, current: bool = False) -> None:
        """Make durable what was written, and note of when the store is.

        :param current: the store is of now, since its owner has written all rows.
        """
        stale = 0.0 if current else self.staleness
        self.store.write({}, {} if stale is None else {TIME: stamp(stale)})

    def redo(self, token: str) -> dict[bytes, bytes | None]:
        """Bring the store up to a checkpoint whose rows may not all be in the table; return these rows.

        :param token: of the checkpoint that was read last.
        """
        rows = stored_redo(self.store, token)
        self.store.write({keys.ROWS: rows, keys.DUE: self._due(rows)})
        return rows

    # -- reading -------------------------------------------------------------------------------------------

    async def _begin(self) -> tuple[float, int]:
        """Check the store against the topic, and find out how far it has to be read.

        :returns: the time, and the rows that were read before.
        """
        began = self._began = time.monotonic(), self.rows
        self._begins = self._ends = {}
        self._change(CopyState.RECOVERING)
        identity = await self._bus.admin.topic_identity(self.topic)
        bounds = await self._bounds()
        if self._partitions is not None and (missing := self._partitions - bounds.keys()):
            raise NotFound(
                f"Table {self.topic!r} has no partition {min(missing)}",
                advice=f"It has {counted(len(bounds), 'partition')}",
            )
        numbers = bounds.keys() if self._partitions is None else self._partitions
        if reason := self._unusable(identity, {number: bounds[number] for number in numbers}):
            self._start_over(reason)
        meta = {_TOPIC: self.topic.encode()}
        if identity is not None:
            meta[_IDENTITY] = identity.encode()
        if any(self.store.meta(name) != value for name, value in meta.items()):
            await in_thread(lambda: self.store.write({}, meta, durable=False))
        self.positions = {number: max(self._stored(number) or 0, bounds[number].first) for number in numbers}
        self._ends = {number: bounds[number].next for number in numbers}
        self._begins = dict(self.positions)
        return began

    def _open(self) -> Any:
        """The log that follows from the positions of the store."""
        return self._bus.log.follow(self.topic, self.positions, others="earliest" if self._partitions is None else None)

    async def _bounds(self) -> Mapping[int, Bounds]:
        """The bounds of the log. If the store has read beyond its end, ask for a while: on some brokers the end lags a
        moment behind what was committed."""
        deadline = time.monotonic() + _LAG_SECONDS
        while True:
            bounds = await self._bus.log.bounds(self.topic)
            ahead = any((self._stored(number) or 0) > bound.next for number, bound in bounds.items())
            if not ahead or time.monotonic() >= deadline:
                return bounds
            await asyncio.sleep(_LAG_PAUSE)

    def _unusable(self, identity: str | None, bounds: Mapping[int, Bounds]) -> str | None:
        """Why the store cannot be brought up to date; None if it can."""
        store = self.store
        topic, written = store.meta(_TOPIC), store.meta(TIME)
        if topic is None:
            return None
        if topic != self.topic.encode():
            return f"the store is of table {topic.decode(errors='replace')!r}"
        had = store.meta(_IDENTITY)
        if identity is not None and had is not None and had != identity.encode():
            return "the topic was deleted and recreated since the store was written"
        for number, bound in bounds.items():
            if (position := self._stored(number)) is not None and position > bound.next:
                return (
                    f"the store is newer than the topic: it has read up to {position}, and the log ends at {bound.next}"
                )
        if written is not None and (age := time.time() - int(written)) > _OLDEST and store.count(keys.ROWS):
            return _too_old(age)
        return None

    def _stored(self, partition: int) -> int | None:
        position = self.store.meta(position_name(partition))
        return None if position is None else int(position)

    def _start_over(self, reason: str) -> None:
        logger.warning("The copy of table %s is emptied and read again: %s", self.topic, reason)
        if self._before_write is not None:
            gone = {key: None for key, _ in self.store.items(keys.ROWS)}
            self._before_write(gone)
        self.store.clear()
        self.positions = {}

    @property
    def _left(self) -> int:
        """How many offsets there are up to the ends that the log had at the start."""
        # Without positions, it is about to start over.
        return sum(max(0, end - self.positions.get(number, 0)) for number, end in self._ends.items())

    async def _catch_up(self, log: _Followed, rest: int = -1) -> None:
        """Read until the end that the log had at the start, or until no more than `rest` offsets are left."""
        self._log = log
        told = time.monotonic()
        while log.behind and self._left > rest:
            await self._apply(await log.next_batch(_MAX_ROWS, timeout=_LOOK_SECONDS), bulk=True)
            if (now := time.monotonic()) - told >= _TELL_SECONDS:
                told = now
                self._tell()

    async def _read_rest(self) -> None:
        """Read what is left as ranges: a followed log takes a client of its own, and on Kafka half a second to tell
        that only the marker of a transaction is left."""
        for number, end in self._ends.items():
            if self.positions[number] < end:
                batches = self._bus.log.read(self.topic, number, self.positions[number], end, max_records=_MAX_ROWS)
                async for batch in batches:
                    await self._apply(batch, bulk=True)
                self.positions[number] = end
                meta = {position_name(number): b"%d" % end}
                await in_thread(partial(self.store.write, {}, meta, durable=False))

    async def _read_on(self, log: _Followed, enough: Enough, patience: float) -> bool:
        """Read what comes until it is enough; return whether it is."""
        self._log = log
        deadline = time.monotonic() + patience
        logger.info("%s of table %s: the last checkpoint is not visible yet", self._named(), self.topic)
        done = False
        while not done and (left := deadline - time.monotonic()) > 0:
            await self._apply(await log.next_batch(_MAX_ROWS, timeout=min(left, _LOOK_SECONDS)), bulk=True)
            done = await enough(stored_checkpoint(self.store))
        return done

    async def _recovered(self, began: tuple[float, int]) -> None:
        at, rows = began
        await in_thread(self.sync)
        self._known_at = time.monotonic()
        self.seconds = self._known_at - at
        logger.info(
            "Recovered %s of table %s: %s in %.2f s",
            *(self._named(), self.topic, counted(self.rows - rows, "row"), self.seconds),
        )

    async def _follow(self, log: _Followed) -> NoReturn:
        while True:
            if log.healthy:
                self._known_at = time.monotonic()
                self._change(CopyState.RUNNING)
            else:
                self._change(CopyState.CONNECTING)
                if (self.staleness or 0.0) > _OLDEST:
                    raise OffsetOutOfRange(_too_old(self.staleness or 0.0))
            await self._apply(await log.next_batch(_MAX_ROWS, timeout=_LOOK_SECONDS))

    async def _apply(self, batch: RecordBatch[bytes], *, bulk: bool = False) -> None:
        if not batch:
            return
        rows: dict[bytes, bytes | None] = {}
        meta: dict[str, bytes] = {}
        own, parts = self._own, batch.by_partition()
        for place, part in parts.items():
            position = self.positions.get(place.partition, 0)
            for key, data, offset in part.rows("key", "data", "offset"):
                position = offset + 1
                if key is None:
                    continue
                if key == CHECKPOINT_KEY:
                    if own:
                        meta[CHECKPOINT] = data or b""
                elif own or not keys.is_reserved(key):
                    rows[key] = data
            self.positions[place.partition] = position
            meta[position_name(place.partition)] = b"%d" % position
        if self._before_write is not None and rows:
            self._before_write(rows)
        changes: dict[str, Mapping[bytes, bytes | None]] = {keys.ROWS: rows}
        if own and (due := self._due(rows)):
            changes[keys.DUE] = due
        now = time.monotonic()
        durable = not bulk and now - self._synced >= _SYNC_SECONDS
        if durable:
            self._synced = now
            meta[TIME] = stamp()
        # The write after a durable one waits for the disk, too, while the store gives up to sync.
        waits, self._durable = bulk or durable or self._durable, durable
        # Listeners were told of these rows, so the rows are written before any other task runs.
        if waits and self._before_write is None:
            await in_thread(lambda: self.store.write(changes, meta, durable=durable))
        else:
            self.store.write(changes, meta, durable=durable)
        for place, part in parts.items():
            self.read[place.partition] += len(part)
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _due(self, rows: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
        """The changes of the index of what is due that follow from changed agendas."""
        agendas = {row: key for row in rows if (key := keys.user_key(row)) is not None}
        due: dict[bytes, bytes | None] = {}
        if agendas:
            for (row, key), old in zip(agendas.items(), self.store.get_many(keys.ROWS, list(agendas)), strict=True):
                due.update(keys.due_changes(key, old, rows[row]))
        return due

    # -- telling -------------------------------------------------------------------------------------------

    def recovery(self) -> RecoveryStats | None:
        """How far the recovery is; None if it is not under way."""
        if self.state is not CopyState.RECOVERING:
            return None
        at, before = self._began
        rows, seconds, left = self.rows - before, time.monotonic() - at, self._left
        done = sum(max(0, end - self._begins[number]) for number, end in self._ends.items()) - left
        return RecoveryStats(
            rows=rows,
            rate=rows / seconds if seconds else 0.0,
            left=left,
            seconds_left=seconds * left / done if done > 0 else None,
        )

    def _tell(self) -> None:
        found = self.recovery()
        assert found is not None
        left = "time left unknown" if found.seconds_left is None else f"{found.seconds_left:.0f} s left"
        logger.info(
            "Recovering %s of table %s: %s, %.0f rows/s, about %s",
            *(self._named(), self.topic, counted(found.rows, "row"), found.rate, left),
        )

    def _named(self) -> str:
        if self._partitions is None:
            return "all partitions"
        return ("partition " if len(self._partitions) == 1 else "partitions ") + ", ".join(
            map(str, sorted(self._partitions))
        )

    def _change(self, state: CopyState) -> None:
        if state is not self.state:
            self.state = state
            self._on_state(state)
