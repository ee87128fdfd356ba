"""`View`: a read-only copy of a table, anywhere, that follows it.

    async with View(bus, "clicks-table", Json(int)) as view:
        await view.ready()
        view.get("alice"), "bob" in view, list(view.items(prefix="a"))

A view is a moment behind its table: what a processor wrote is there a little later. So never write a value that was
read from a view back to its table.

*Concurrency.* One event loop. Reads are plain calls and see whole writes. *Cancellation.* Nothing is lost. *Failure.*
Until the view is ready, `ready` raises what is wrong; after that the view serves what it has for as long as the broker
is away, and says so by `state` and `staleness`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from os import PathLike
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, overload
from weakref import WeakSet

from broker import Bus, Closed, Codec, ConfigurationError, DecodeError, Receipt
from broker_streams import keys
from broker_streams.metrics import ViewMetrics
from broker_streams.recovery import CopyState, TableCopy
from broker_streams.states import StateSignal
from broker_streams.stores.directory import StateDirectory
from broker_streams.stores.memory import Memory
from broker_streams.stores.store import Store, StoreCorrupt, StoreFactory

__all__ = ["Change", "Changes", "View", "ViewStats"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """A row that has changed.

    :ivar old: None if the row is new.
    :ivar new: None if the row was deleted.
    """

    key: str
    old: T | None
    new: T | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStats:
    """Figures of a view.

    :ivar read: rows that were read since the start.
    :ivar recovery_seconds: None until the first recovery has ended.
    :ivar bytes: the size of the store.
    :ivar positions: the next offset to read of each partition.
    """

    state: CopyState
    rows: int
    read: int
    recovery_seconds: float | None
    staleness: float | None
    bytes: int
    positions: Mapping[int, int]


class View(Generic[T]):
    """A copy of a table; `async with` opens it.

    :param table: a compacted topic; `group.table` is that of a group.
    :param partitions: the partitions to copy; None is all.
    :param store: where the copy is kept; by default in memory. A store on disk goes on where it was.
    :param state_dir: of a store on disk, as that of a processor: views and processors may share it.
    """

    def __init__(
        self,
        bus: Bus,
        table: str,
        codec: Codec[T],
        *,
        partitions: Collection[int] | None = None,
        store: StoreFactory | None = None,
        state_dir: str | PathLike[str] | None = None,
    ) -> None:
        if partitions is not None and not partitions:
            raise ConfigurationError("partitions is empty", advice="Leave it out to copy all partitions")
        self.table: Final = table
        self._bus = bus
        self._codec = codec
        self._partitions = partitions
        self._factory: StoreFactory = Memory() if store is None else store
        self._state_dir = state_dir
        self._directory: StateDirectory | None = None
        self._store: Store | None = None
        self._copy: TableCopy | None = None
        self._task: asyncio.Task[Any] | None = None
        self._signal = StateSignal(CopyState.IDLE)
        self._listeners: WeakSet[Changes[T]] = WeakSet()

    # -- opening and closing -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Open the store and begin to copy.

        :raises TopicNotFound: the table does not exist.
        :raises Unsupported: the broker cannot follow a log.
        :raises StorageFailed: the disk is full, or fails.
        """
        if self._task is not None:
            raise Closed("A view opens once", advice="Create a new one")
        await self._bus.admin.describe_topic(self.table)
        self._store = self._open_store()
        self._copy = TableCopy(
            self._bus,
            self.table,
            self._store,
            self._partitions,
            before_write=self._note_changes,
            on_state=self._signal.change,
        )
        self._task = asyncio.create_task(self._copy.run(), name=f"view-{self.table}")
        self._task.add_done_callback(self._ended)
        metrics = ViewMetrics(self._bus, self._copy)
        self._gauges = asyncio.create_task(metrics.run(), name=f"gauges-{self.table}")
        self._hide_metrics = self._bus.hooks.show_metrics(metrics)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop copying, and close the store. May be called twice."""
        task, store, self._store = self._task, self._store, None
        if task is None or store is None or self._copy is None:
            return
        self._hide_metrics()
        self._gauges.cancel()
        task.cancel()
        await asyncio.wait((task, self._gauges))
        try:
            self._close_store(self._copy, store, None if task.cancelled() else task.exception())
        finally:
            self._signal.end()
            for listener in tuple(self._listeners):
                listener.end()

    def _open_store(self) -> Store:
        if isinstance(self._factory, Memory):
            return self._factory.open(None, self.table)
        # No group has such a name.
        directory = StateDirectory(self._state_dir, f"view~{self.table}")
        try:
            store = directory.open(self._factory, self._store_name())
        except BaseException:
            directory.close()
            raise
        self._directory = directory
        return store

    def _store_name(self) -> str:
        """Views of other partitions have other stores: nobody would delete the rows of those that are left out."""
        if self._partitions is None:
            return self.table
        numbers = ",".join(map(str, sorted(set(self._partitions))))
        return f"{self.table}-{blake2b(numbers.encode(), digest_size=8).hexdigest()}"

    def _close_store(self, copy: TableCopy, store: Store, failure: BaseException | None) -> None:
        """Close the store. One that cannot be read is set aside with a warning, and the next view begins anew."""
        with ExitStack() as stack:
            stack.callback(store.close)
            if self._directory is not None:
                stack.callback(self._directory.close)
            corrupt = failure if isinstance(failure, StoreCorrupt) else None
            if corrupt is None:
                try:
                    copy.sync()
                except StoreCorrupt as error:
                    corrupt = error
            if corrupt is not None and self._directory is not None:
                self._directory.set_aside(corrupt)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        # `ready` raises it; asyncio must not log it as never retrieved.
        if not task.cancelled():
            task.exception()

    async def ready(self) -> None:
        """Wait until the view has what the table held when it was opened.

        :raises BrokerError: the table cannot be read.
        """
        await self._unless_ended(self._opened().ready())

    async def _unless_ended(self, event: Coroutine[Any, Any, None]) -> None:
        """Wait for something that the copy does, which it does not do once it has ended."""
        task = self._task
        assert task is not None
        waiting = asyncio.ensure_future(event)
        try:
            await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return
        finally:
            waiting.cancel()
        with suppress(asyncio.CancelledError):
            task.result()
        raise Closed(f"The view of {self.table!r} is closed")

    # -- reading -------------------------------------------------------------------------------------------

    @overload
    def get(self, key: str) -> T | None: ...
    @overload
    def get(self, key: str, *, at_least: Receipt) -> Awaitable[T | None]: ...
    def get(self, key: str, *, at_least: Receipt | None = None) -> T | Awaitable[T | None] | None:
        """The row of this key; None if there is none.

        :param at_least: await the call: it first waits until the view has what this receipt confirmed.
        :raises DecodeError: the codec cannot read the row.
        :raises Closed: the view is not open, or was closed meanwhile.
        """
        if at_least is not None:
            return self._get_at_least(key, at_least)
        data = self._opened().store.get(keys.ROWS, keys.encode(key))
        return None if data is None else self._codec.decode(data)

    async def _get_at_least(self, key: str, receipt: Receipt) -> T | None:
        if receipt.partition is None or receipt.offset is None:
            raise ConfigurationError(f"{receipt!r} has no position", advice="Pass a receipt of the table's topic")
        copy = self._opened()
        if self._partitions is not None and receipt.partition not in self._partitions:
            raise ConfigurationError(f"{receipt!r} is of a partition that the view does not copy")
        await self._unless_ended(copy.reached(receipt.partition, receipt.offset))
        return self.get(key)

    def __contains__(self, key: str) -> bool:
        return self._opened().store.get(keys.ROWS, keys.encode(key)) is not None

    def __len__(self) -> int:
        return self._opened().store.count(keys.ROWS)

    def items(
        self, *, start: str | None = None, stop: str | None = None, prefix: str = "", reverse: bool = False
    ) -> Iterator[tuple[str, T]]:
        """Rows in the order of their keys' bytes, over all partitions.

        A row that stays throughout is never left out; one that comes or goes meanwhile may be.

        :param start: the first key.
        :param stop: the first key that is no longer wanted.
        :param prefix: only keys that begin so.
        :param reverse: from the last row to the first.
        """
        store, decode = self._opened().store, self._codec.decode
        rows = store.items(
            keys.ROWS,
            start=None if start is None else keys.encode(start),
            stop=None if stop is None else keys.encode(stop),
            prefix=keys.encode(prefix),
            reverse=reverse,
        )
        return ((keys.decode(key), decode(data)) for key, data in rows)

    def changes(self) -> Changes[T]:
        """The rows that change from now on, for `async for`; ends when the view is closed.

        Changes of a row that come faster than they are read become one, so a slow reader misses none and needs no more
        memory than the table.

        :raises DecodeError: while iterating, the codec cannot read a row before or after its change. An `async for`
            ends; `anext(changes)`, or another `async for` over the same changes, goes on with the next change.
        """
        self._opened()
        changes = Changes(self._codec)
        self._listeners.add(changes)
        return changes

    def evict(self, key: str) -> None:
        """Remove a row from this copy. It is there again when it is next written to the table."""
        self._opened().store.write({keys.ROWS: {keys.encode(key): None}})

    # -- how far it is -------------------------------------------------------------------------------------

    @property
    def state(self) -> CopyState:
        """What the view is doing."""
        return self._signal.state

    def states(self) -> AsyncIterator[CopyState]:
        """The state now, and each that follows; ends with the view. One who does not read misses older ones."""
        return self._signal.watch()

    @property
    def staleness(self) -> float | None:
        """Seconds since the view was known to be up to date; None before it was."""
        return None if self._copy is None else self._copy.staleness

    def position(self, partition: int) -> int | None:
        """The next offset of the table that the view reads; None for a partition that it does not copy."""
        return self._opened().positions.get(partition)

    def stats(self) -> ViewStats:
        """Figures of this moment."""
        copy = self._opened()
        return ViewStats(
            state=copy.state,
            rows=copy.store.count(keys.ROWS),
            read=copy.rows,
            recovery_seconds=copy.seconds,
            staleness=copy.staleness,
            bytes=copy.store.size(),
            positions=dict(copy.positions),
        )

    def _opened(self) -> TableCopy:
        if self._copy is None or self._store is None:
            raise Closed(f"The view of {self.table!r} is not open", advice="Use it as `async with View(...) as view:`")
        return self._copy

    def _note_changes(self, rows: Mapping[bytes, bytes | None]) -> None:
        if self._listeners:
            assert self._store is not None
            olds = self._store.get_many(keys.ROWS, list(rows))
            for listener in tuple(self._listeners):
                listener.add(zip(rows, olds, rows.values(), strict=True))


class Changes(Generic[T]):
    """The changes of a view; see `View.changes`. An error ends no iteration over it: the next one goes on."""

    def __init__(self, codec: Codec[T]) -> None:
        self._codec = codec
        self._waiting: dict[bytes, tuple[bytes | None, bytes | None]] = {}
        self._news = asyncio.Event()
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change[T]:
        while not self._waiting:
            if self._over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        row = next(iter(self._waiting))
        old, new = self._waiting.pop(row)
        key, decode = keys.decode(row), self._codec.decode
        try:
            return Change(key, None if old is None else decode(old), None if new is None else decode(new))
        except DecodeError as error:
            raise DecodeError(
                f"The change of row {key!r} cannot be decoded: {error.message}",
                native=error,
                advice="Go on with the next change, or give the view the codec of the table",
            ) from error

    def add(self, changes: Iterator[tuple[bytes, bytes | None, bytes | None]]) -> None:
        """Called by the view."""
        waiting = self._waiting
        for key, old, new in changes:
            first = waiting.pop(key)[0] if key in waiting else old
            if first != new:
                waiting[key] = (first, new)
        self._news.set()

    def end(self) -> None:
        """Called by the view."""
        self._over = True
        self._news.set()
