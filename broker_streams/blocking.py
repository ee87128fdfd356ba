"""`View` and `Processor` without `await`, on a bus of `broker.blocking`.

    with broker.blocking.connect(url) as bus, View(bus, "clicks-table", Json(int)) as view:
        view.ready()
        view.get("alice"), "bob" in view, list(view.items(prefix="a"))

*Concurrency.* Any thread. Rows are read in the thread of the caller, without a round trip to the loop of the bus, and
seen in whole writes. The callbacks of a group run on that loop: they make no blocking calls of the bus, or are async.
*Cancellation.* KeyboardInterrupt ends a waiting call; the iteration over `changes()` may lose one change by it.
*Failure.* As in the asynchronous form. Close views and processors before their bus.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypedDict, TypeVar

from typing_extensions import ParamSpec, Unpack

from broker import BrokerError, Closed, Codec, Receipt
from broker.blocking import Bus
from broker_streams import processor as asynchronous_processor
from broker_streams import view as asynchronous_view
from broker_streams.commits import Guarantee
from broker_streams.context import Context
from broker_streams.graph import Group
from broker_streams.partition import PartitionState
from broker_streams.recovery import CopyState
from broker_streams.stats import ProcessorState, ProcessorStats
from broker_streams.stores.store import StoreFactory
from broker_streams.topics import TopicPolicy
from broker_streams.view import Change, ViewStats

__all__ = ["Processor", "ProcessorOptions", "View"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class View(Generic[T]):
    """A copy of a table; `with` opens it. Parameters as for `broker_streams.View`."""

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
        self._bus = bus
        self._view = asynchronous_view.View(
            bus.asynchronous, table, codec, partitions=partitions, store=store, state_dir=state_dir
        )
        self.table: str = table

    def __enter__(self) -> Self:
        """Open the store and begin to copy.

        :raises TopicNotFound: the table does not exist.
        :raises Unsupported: the broker cannot follow a log.
        """
        try:
            self._bus.call(self._view.__aenter__)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop copying, and close the store; iterations over `changes()` end. May be called twice."""
        with suppress(Closed):
            # Otherwise the bus was closed before, which has ended the copy.
            self._bus.call(self._view.close)

    def ready(self) -> None:
        """Wait until the view has what the table held when it was opened.

        :raises BrokerError: the table cannot be read.
        """
        self._bus.call(self._view.ready)

    def get(self, key: str, *, at_least: Receipt | None = None) -> T | None:
        """The row of this key; None if there is none.

        :param at_least: first wait until the view has what this receipt confirmed.
        :raises DecodeError: the codec cannot read the row.
        :raises Closed: the view is not open.
        """
        if at_least is None:
            return self._view.get(key)

        async def get() -> T | None:
            return await self._view.get(key, at_least=at_least)

        return self._bus.call(get)

    def __contains__(self, key: str) -> bool:
        return key in self._view

    def __len__(self) -> int:
        return len(self._view)

    def items(
        self, *, start: str | None = None, stop: str | None = None, prefix: str = "", reverse: bool = False
    ) -> Iterator[tuple[str, T]]:
        """Rows in the order of their keys' bytes, over all partitions; see `broker_streams.View.items`."""
        return self._view.items(start=start, stop=stop, prefix=prefix, reverse=reverse)

    def changes(self) -> Iterator[Change[T]]:
        """The rows that change from now on; ends when the view is closed, for instance by another thread.

        :raises DecodeError: while iterating, the codec cannot read a row before or after its change. A `for` ends;
            `next(changes)`, or another `for` over the same changes, goes on with the next change.
        """
        return _Changes(self._bus, _on_loop(self._bus, self._view.changes))

    def evict(self, key: str) -> None:
        """Remove a row from this copy. It is there again when it is next written to the table."""
        _on_loop(self._bus, self._view.evict, key)

    @property
    def state(self) -> CopyState:
        """What the view is doing."""
        return self._view.state

    @property
    def staleness(self) -> float | None:
        """Seconds since the view was known to be up to date; None before it was."""
        return self._view.staleness

    def position(self, partition: int) -> int | None:
        """The next offset of the table that the view reads; None for a partition that it does not copy."""
        return self._view.position(partition)

    def stats(self) -> ViewStats:
        """Figures of this moment."""
        return _on_loop(self._bus, self._view.stats)


class _Changes(Iterator[Change[T]]):
    """No generator, which would end at the first change that cannot be decoded."""

    def __init__(self, bus: Bus, changes: asynchronous_view.Changes[T]) -> None:
        self._bus = bus
        self._changes = changes

    def __next__(self) -> Change[T]:
        async def following() -> Change[T] | None:
            return await anext(self._changes, None)

        if (change := self._bus.call(following)) is None:
            raise StopIteration
        return change


class ProcessorOptions(TypedDict, total=False):
    """The options of `broker_streams.Processor`."""

    state_dir: str | PathLike[str] | None
    store: StoreFactory | None
    guarantee: Guarantee | None
    checkpoint_interval: float
    checkpoint_messages: int
    standby: Literal["all"] | Collection[int] | None
    recover_ahead: bool
    topics: TopicPolicy | None
    name: str | None
    attributes: Mapping[str, str] | None
    wrap: Callable[[Context], Context] | None


class Processor:
    """A member of a group; `with` runs it beside the caller, on the loop of the bus.

    :param options: as for `broker_streams.Processor`.
    :raises ConfigurationError: an option is invalid.
    """

    def __init__(self, bus: Bus, group: Group, **options: Unpack[ProcessorOptions]) -> None:
        self._bus = bus
        self._processor = asynchronous_processor.Processor(bus.asynchronous, group, **options)
        self.group: Group = group

    def __enter__(self) -> Self:
        """Check the topics and what the broker can do; then join the group in the background. See `ready`.

        :raises ConfigurationError: the topics do not fit.
        :raises Unsupported: the broker lacks something, or the guarantee does not hold.
        :raises StoreLocked: another process uses the state directory under this name.
        :raises Closed: the processor was used before.
        """
        try:
            self._bus.call(self._processor.__aenter__)
        except BaseException:
            with suppress(BrokerError):
                self._bus.call(self._processor.__aexit__, None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, with a last checkpoint; raise the error that has ended the processor."""
        self._bus.call(self._processor.__aexit__, kind, error, trace)

    def run(self) -> None:
        """Open, and handle messages until `stop`, an interrupt or an error, which is raised."""
        self._bus.call(self._processor.run)

    def ready(self) -> None:
        """Wait until all partitions that this member has are recovered and handle messages; a spare member, which gets
        none, is ready too: see `broker_streams.Processor.ready`.

        :raises BrokerError: the error that has ended the processor.
        """
        self._bus.call(self._processor.ready)

    def get(self, key: str) -> Any:
        """The row of a key as of the last checkpoint; None if there is none.

        :raises NotFound: another member has the partition of the key.
        :raises ConfigurationError: the group has no `Persist`.
        """
        return self._bus.call(self._processor.get, key)

    def visit(self, name: str, meta: Any = None) -> int:
        """Call the `Visitor` of this name for every row of this member's partitions, between messages.

        :returns: how many rows were visited, and are part of a checkpoint.
        :raises VisitAborted: a partition left, or the processor stopped.
        :raises ConfigurationError: the group has no such visitor.
        """
        return self._bus.call(self._processor.visit, name, meta)

    def stop(self) -> None:
        """Stop, with a last checkpoint. Returns at once; leaving the `with` block waits for it."""
        _on_loop(self._bus, self._processor.stop)

    def pause(self) -> None:
        """Handle no messages until `resume`; the member stays in its group, and timers go on."""
        _on_loop(self._bus, self._processor.pause)

    def resume(self) -> None:
        """Undo `pause`."""
        _on_loop(self._bus, self._processor.resume)

    @property
    def state(self) -> ProcessorState:
        """What the processor is doing."""
        return self._processor.state

    @property
    def healthy(self) -> bool:
        """Whether the processor is a member of its group, and its last fetch succeeded. Asks nobody."""
        return self._processor.healthy

    @property
    def partitions(self) -> Mapping[int, PartitionState]:
        """The partitions of this member, by number."""
        return _on_loop(self._bus, lambda: self._processor.partitions)

    def stats(self) -> ProcessorStats:
        """Figures of this moment."""
        return _on_loop(self._bus, self._processor.stats)


def _on_loop(bus: Bus, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a plain function on the loop of the bus."""

    async def run() -> R:
        return function(*args, **kwargs)

    return bus.call(run)
