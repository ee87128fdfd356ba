"""`Context`: what a callback sees of its message and of the state of the group.

A context is a typed face of the engine, its `Scope`. There is one for each partition, valid while a callback runs:
after a callback that has called `defer`, it still has the message, and refuses the rest.
Values are copies: a value is encoded when it is set, and decoded whenever it is read, so a callback that changes a
value and does not set it changes nothing.

A callback should be repeatable: after a crash a message is handled again. So take the time from `ctx.now` and chance
from `ctx.random`, which are the same again.

*Concurrency.* The engine's task only. Other tasks may call what `defer` returned, on the same event loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, NoReturn, Protocol, Self, TypeVar, cast, overload

from broker import ConfigurationError, InvalidMessage, Record, RecordBatch
from broker.checks import check_seconds, is_finite
from broker_streams.handles import (
    AnyEdge,
    Duration,
    Join,
    Lookup,
    LoopHandle,
    Output,
    Persist,
    TimerHandle,
    WindowHandle,
    as_ms,
)

__all__ = [
    "Context",
    "Done",
    "Graph",
    "Incoming",
    "Scope",
    "Window",
    "attributes_of",
    "moment_of",
    "record_of",
    "used_late",
]

T = TypeVar("T")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NO_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType({})


class Incoming(NamedTuple):
    """A message for the engine.

    :ivar source: what has its attributes: a record, a batch of records with an index, a mapping, or None.
    """

    topic: str
    offset: int
    key: bytes | None
    data: bytes | None
    timestamp_ms: int | None
    source: Record[Any] | tuple[RecordBatch[Any], int] | Mapping[str, str] | None = None


def record_of(message: Incoming | None) -> Record[Any] | None:
    """The record that a message was made of; None if there is none."""
    source = None if message is None else message.source
    if isinstance(source, tuple):
        batch, index = source
        return batch[index]
    return source if isinstance(source, Record) else None


def attributes_of(message: Incoming | None) -> Mapping[str, str]:
    """The attributes of a message."""
    if (record := record_of(message)) is not None:
        return record.attributes
    source = None if message is None else message.source
    return source if isinstance(source, Mapping) else _NO_ATTRIBUTES


def moment_of(milliseconds: int) -> datetime:
    """The time in UTC of milliseconds since 1970."""
    return _EPOCH + timedelta(milliseconds=milliseconds)


class Done(Protocol):
    """Ends the deferral of a message: without an error as handled, otherwise by the policy of its edge."""

    def __call__(self, error: BaseException | None = None, /) -> None: ...


class Graph(Protocol):
    """What a context has to know of its group."""

    @property
    def name(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def loop_topic(self) -> str: ...
    @property
    def persist(self) -> Persist[Any] | None: ...
    @property
    def edges(self) -> tuple[Any, ...]: ...


class Scope(Protocol):
    """What a context asks the engine for. Edges are the group's own objects, values are of the codecs' types.

    :ivar key: the key of the row.
    :ivar message: None in timers, visits and closing windows.
    :ivar payload: the decoded message; None likewise.
    :ivar timestamp_ms: of the message, or stream time if it has none; in a timer its due time; in a window its end.
    :ivar stream_time: the event time of the partition, in milliseconds.
    :ivar turn: differs for each run of a callback.
    """

    partition: int
    key: str
    message: Incoming | None
    payload: Any
    timestamp_ms: int
    stream_time: int
    turn: int

    def place(self) -> str:
        """The place of the call in the log, the same when it is repeated and of no other call; seeds `ctx.random`."""
        ...

    def wall_ms(self) -> int: ...
    def get_row(self) -> Any: ...
    def set_row(self, value: Any) -> None: ...
    def delete_row(self) -> None: ...
    def joined(self, join: Join[Any]) -> Any: ...
    def looked_up(self, lookup: Lookup[Any], key: str) -> Any: ...
    def emit(self, output: Output[Any], key: str | None, value: Any, attributes: Mapping[str, str] | None) -> None: ...
    def send_loop(self, key: str, value: Any, attributes: Mapping[str, str] | None) -> None: ...
    def defer(self, timeout: float) -> Done: ...
    def set_timer(self, timer: TimerHandle, due_ms: int) -> None: ...
    def cancel_timer(self, timer: TimerHandle) -> None: ...
    def windows(self, edge: WindowHandle[Any]) -> Iterable[Window[Any]]: ...
    def get_window(self, window: Window[Any]) -> Any: ...
    def set_window(self, window: Window[Any], value: Any) -> None: ...


class _Ended:
    """The scope of a context after its callback: the message is there, everything else is refused."""

    def __init__(self, scope: Scope) -> None:
        self.partition = scope.partition
        self.key = scope.key
        self.message = scope.message
        self.payload = scope.payload
        self.timestamp_ms = scope.timestamp_ms
        self.stream_time = scope.stream_time

    def __getattr__(self, name: str) -> NoReturn:
        raise used_late(self.key)


def used_late(key: str) -> ConfigurationError:
    """The error of a context that is used after its callback."""
    return ConfigurationError(
        f"The context of key {key!r} is used after its callback has returned",
        advice="Read and write rows, timers and outputs within the callback; what comes later, publish to an input",
    )


class Window(Generic[T]):
    """A window of a key: the time from `start` to `end`, without the end, and a value.

    :ivar closed: the window takes no more messages; its value can be read only.
    """

    __slots__ = ("_scope", "closed", "edge", "end_ms", "start_ms")

    def __init__(
        self, scope: Scope, edge: WindowHandle[T], start_ms: int, end_ms: int, *, closed: bool = False
    ) -> None:
        self._scope = scope
        self.edge: Final = edge
        self.start_ms: Final = start_ms
        self.end_ms: Final = end_ms
        self.closed: Final = closed

    @property
    def start(self) -> datetime:
        return moment_of(self.start_ms)

    @property
    def end(self) -> datetime:
        return moment_of(self.end_ms)

    @property
    def value(self) -> T | None:
        """The value of the window; None until it is set.

        :raises DecodeError: the codec cannot read what is stored.
        """
        return self._scope.get_window(self)

    @value.setter
    def value(self, value: T) -> None:
        """:raises InvalidMessage: the window is closed, the value is None, or the codec cannot encode it."""
        if self.closed:
            raise InvalidMessage(
                f"{self} is closed", advice="Its value can be read only: emit a result, or write to the table"
            )
        if value is None:
            raise InvalidMessage(f"The value of {self} is set to None", advice="Set a value of the codec's type")
        self._scope.set_window(self, value)

    def __repr__(self) -> str:
        return f"<Window {self.edge.name!r} {self.start.isoformat()}/{self.end.isoformat()}>"


class Context:
    """What a callback sees; see the module."""

    __slots__ = ("_group", "_known", "_persist", "_random", "_scope", "_turn")

    def __init__(self, scope: Scope, group: Graph) -> None:
        self._scope = scope
        self._group = group
        self._known: dict[int, AnyEdge] = {id(edge): edge for edge in group.edges}
        # Without a table, what no handle is.
        self._persist: object = group.persist or self
        self._random: random.Random | None = None
        self._turn = -1

    @classmethod
    def of(cls, context: Context) -> Self:
        """The same context as one of this class, for a subclass that sees or changes what callbacks do."""
        return cls(context._scope, context._group)

    def end(self) -> None:
        """The callback has returned: from now on, the context has its message only. Called by the engine."""
        self._scope = cast("Scope", _Ended(self._scope))

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._group.name

    @property
    def key(self) -> str:
        """The key of the message, and of the row. Bytes that are not UTF-8 are lone surrogates."""
        return self._scope.key

    @property
    def partition(self) -> int:
        return self._scope.partition

    @property
    def topic(self) -> str:
        """The topic of the message; empty in timers, visits and closing windows."""
        message = self._scope.message
        return "" if message is None else message.topic

    @property
    def offset(self) -> int:
        """The offset of the message; -1 in timers, visits and closing windows."""
        message = self._scope.message
        return -1 if message is None else message.offset

    @property
    def payload(self) -> Any:
        """The decoded message; None in timers, visits and closing windows."""
        return self._scope.payload

    @property
    def record(self) -> Record[Any] | None:
        """The record that the message came in; None in timers, visits, closing windows, and most tests."""
        return record_of(self._scope.message)

    @property
    def attributes(self) -> Mapping[str, str]:
        """The attributes of the message."""
        return attributes_of(self._scope.message)

    @property
    def timestamp(self) -> datetime | None:
        """The time of the message, UTC; None if the message has none. In a timer the time when it was due, in a
        closing window the window's end."""
        message = self._scope.message
        if message is not None and message.timestamp_ms is None:
            return None
        return moment_of(self._scope.timestamp_ms)

    @property
    def timestamp_ms(self) -> int:
        """The same in milliseconds since 1970; the event time of the partition if the message has none."""
        return self._scope.timestamp_ms

    @property
    def now(self) -> datetime:
        """The event time of the partition, UTC: the latest time among the messages so far."""
        return moment_of(self._scope.stream_time)

    @property
    def random(self) -> random.Random:
        """A source of chance that gives the same when the message is handled again."""
        turn = self._scope.turn
        found = self._random
        if found is None or self._turn != turn:
            found = self._random = random.Random(self._scope.place())
            self._turn = turn
        return found

    @overload
    def __getitem__(self, handle: Persist[T]) -> T | None: ...
    @overload
    def __getitem__(self, handle: Join[T]) -> T | None: ...
    def __getitem__(self, handle: Persist[T] | Join[T]) -> T | None:
        """The row of the key, in the table of the group or a joined one; None if there is none.

        :raises ConfigurationError: the group has no such edge.
        :raises DecodeError: the codec cannot read what is stored.
        """
        if handle is self._persist:
            return self._scope.get_row()
        if isinstance(handle, Persist):
            self._own(handle)
            return self._scope.get_row()
        if isinstance(handle, Join):
            return self._scope.joined(self._own(handle))
        return self._unreadable(handle)

    def __setitem__(self, handle: Persist[T], value: T) -> None:
        """Write the row of the key.

        :raises InvalidMessage: the value is None, or the codec cannot encode it.
        :raises ConfigurationError: the handle is not the group's `Persist`.
        """
        if handle is not self._persist:
            self._own_persist(handle, "written")
        if value is None:
            raise InvalidMessage(f"The row of {self.key!r} is set to None", advice="Delete it: `del ctx[...]`")
        self._scope.set_row(value)

    def __delitem__(self, handle: Persist[Any]) -> None:
        """Delete the row of the key, if there is one.

        :raises ConfigurationError: the handle is not the group's `Persist`.
        """
        if handle is not self._persist:
            self._own_persist(handle, "deleted")
        self._scope.delete_row()

    def lookup(self, lookup: Lookup[T], key: str) -> T | None:
        """The row of any key in a table that the group looks up; None if there is none. The copy may lag behind.

        :raises ConfigurationError: the group has no such edge.
        :raises InvalidMessage: the key is not a str.
        """
        return self._scope.looked_up(self._own(lookup), _checked_key(key))

    def emit(
        self, output: Output[T], *, key: str | None, value: T | None, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Publish with the next checkpoint.

        :param key: None leaves the partition to the broker.
        :param value: None is a tombstone. `Json` also refuses a value that it could not read back as its type.
        :raises InvalidMessage: the codec cannot encode the value, or the key or an attribute is invalid.
        :raises ConfigurationError: the group has no such edge.
        """
        if self._known.get(id(output)) is not output:
            output = self._own(output)
        if key is not None and not isinstance(key, str):
            key = _checked_key(key)
        self._scope.emit(output, key, value, attributes)

    def loop(
        self, loop: LoopHandle[T], *, key: str, value: T | None, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Send a message to the group itself, at any key.

        :param value: None is a tombstone, which the loop's codec has to decode.
        :raises InvalidMessage: the codec cannot encode the value, or the key or an attribute is invalid.
        :raises ConfigurationError: the group has no such edge.
        """
        self._own(loop)
        self._scope.send_loop(_checked_key(key), value, attributes)

    def fail(self, error: BaseException) -> NoReturn:
        """Raise the error. What the callback has done to rows, outputs and timers is undone; the policy decides."""
        raise error

    def defer(self, timeout: float = 60) -> Done:
        """Hold the position of the message until the returned function is called, as for a call to a service.

        The context ends with its callback all the same: what the service answers cannot be written to it. `done()` ends
        the deferral. `done(error)` fails the message, and so do `timeout` seconds. Only the first call counts.

        :raises ConfigurationError: the timeout is not a number above 0.
        """
        check_seconds("timeout", timeout)
        return self._scope.defer(timeout)

    def set_timer(self, timer: TimerHandle, *, at: datetime | None = None, after: Duration | None = None) -> None:
        """Call the timer once for this key. A key has each timer at most once: setting it again moves it.

        :param at: when, timezone-aware, in the time of the timer's clock.
        :param after: how long from now: from the time of the message, or from the machine's time.
        :raises ConfigurationError: not exactly one of `at` and `after` is given, or the group has no such edge.
        """
        own = self._own(timer)
        if (at is None) == (after is None):
            raise ConfigurationError(
                f"{own} is set with at={at!r} and after={after!r}", advice="Give exactly one of them"
            )
        if after is not None:
            since = self._scope.timestamp_ms if own.clock == "event" else self._scope.wall_ms()
            self._scope.set_timer(own, since + _milliseconds(own, after))
        elif not isinstance(at, datetime) or at.tzinfo is None:
            raise ConfigurationError(f"{own} is set at {at!r}", advice="Use a datetime with a timezone")
        else:
            # A timer is never early, so a part of a millisecond counts whole.
            self._scope.set_timer(own, -((_EPOCH - at) // _MILLISECOND))

    def cancel_timer(self, timer: TimerHandle) -> None:
        """Forget the timer of this key, if it is set.

        :raises ConfigurationError: the group has no such edge.
        """
        self._scope.cancel_timer(self._own(timer))

    def windows(self, edge: WindowHandle[T]) -> Iterable[Window[T]]:
        """The open windows of this key to which the time of the message belongs. Closed ones go to `on_late`.

        :raises ConfigurationError: the group has no such edge.
        """
        return self._scope.windows(self._own(edge))

    def __repr__(self) -> str:
        return f"<Context of {self.group!r} [{self.partition}], key={self.key!r}>"

    def _own(self, handle: H) -> H:
        """The edge of the group that the handle is, or is equal to."""
        own = self._known.get(id(handle))
        if own is handle:
            return handle
        for edge in self._group.edges:
            if type(edge) is type(handle) and edge == handle:
                return edge
        raise self._unknown(handle)

    def _own_persist(self, handle: object, verb: str) -> None:
        if not isinstance(handle, Persist):
            raise ConfigurationError(
                f"{handle} is {verb} through ctx[...]", advice="Only the table of the group, its Persist, can be"
            )
        self._own(cast("Persist[Any]", handle))

    def _unreadable(self, handle: object) -> NoReturn:
        advice = "ctx[...] reads a Persist or a Join"
        if isinstance(handle, Lookup):
            advice = "Read it with ctx.lookup(lookup, key)"
        elif isinstance(handle, WindowHandle):
            advice = "Read its windows with ctx.windows(...)"
        raise ConfigurationError(f"ctx[{handle}] cannot be read", advice=advice)

    def _unknown(self, handle: object) -> ConfigurationError:
        group = self._group
        advice = "Pass it to Group(...), and use the object that was passed"
        if isinstance(handle, Output):
            if handle.topic == group.loop_topic:
                advice = "It is the loop of the group: use ctx.loop(...)"
            elif handle.topic == group.table:
                advice = "It is the table of the group: use ctx[...] = value"
        return ConfigurationError(f"{handle} is not an edge of group {group.name!r}", advice=advice)


H = TypeVar("H", bound=AnyEdge)


def _checked_key(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidMessage(f"key is {key!r} of type {type(key).__name__}", advice="It takes a str")
    return key


def _milliseconds(timer: TimerHandle, after: object) -> int:
    if not (isinstance(after, timedelta) or is_finite(after)) or (milliseconds := as_ms(after)) < 0:
        advice = "It takes seconds, or a timedelta, of 0 or more"
        raise ConfigurationError(f"{timer} is set after {after!r}", advice=advice)
    return milliseconds
