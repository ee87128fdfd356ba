"""The edges of a group through which a callback reads and writes, typed by their codecs. Immutable; safe everywhere.

`ctx[clicks]` is an `int | None` because `clicks` is a `Persist[int]`. Edges that call back are in `graph`; their
bases here are what a `Context` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, Final, Generic, Literal, TypeVar

from broker import Codec

__all__ = [
    "AnyEdge",
    "Clock",
    "Duration",
    "Join",
    "Lookup",
    "LoopHandle",
    "Output",
    "Persist",
    "TimerHandle",
    "WindowHandle",
    "as_ms",
]

T = TypeVar("T")

Duration = float | timedelta
"""Seconds, or a timedelta."""

Clock = Literal["event", "wall"]
"""The time of the messages, or that of the machine."""

_MILLISECOND: Final = timedelta(milliseconds=1)


def as_ms(duration: Duration) -> int:
    """Whole milliseconds, rounded."""
    return round(duration / _MILLISECOND) if isinstance(duration, timedelta) else round(duration * 1000)


@dataclass(frozen=True)
class Persist(Generic[T]):
    """The table of the group, one row per key: `ctx[persist]` reads and writes the row of the key.

    :param version: of the rows' format. Raise it when the codec no longer reads the rows that are stored.
    :param upgrade: called with the version and the bytes of an older row; returns its bytes in this version.
    :param ttl: time after which a row that is not set again is deleted, in event time.
    """

    codec: Codec[T]
    _: KW_ONLY
    version: int = 1
    upgrade: Callable[[int, bytes], bytes] | None = None
    ttl: Duration | None = None

    @property
    def ttl_ms(self) -> int | None:
        return None if self.ttl is None else as_ms(self.ttl)

    def __str__(self) -> str:
        return "Persist"


@dataclass(frozen=True)
class Join(Generic[T]):
    """Another table, read at the key of the message: `ctx[join]`. It has as many partitions as the inputs."""

    table: str
    codec: Codec[T]

    @property
    def topic(self) -> str:
        return self.table

    def __str__(self) -> str:
        return f"Join({self.table!r})"


@dataclass(frozen=True)
class Lookup(Generic[T]):
    """Another table, read at any key: `ctx.lookup(lookup, key)`. Every processor keeps a copy of the whole table."""

    table: str
    codec: Codec[T]

    @property
    def topic(self) -> str:
        return self.table

    def __str__(self) -> str:
        return f"Lookup({self.table!r})"


@dataclass(frozen=True)
class Output(Generic[T]):
    """A topic to publish to: `ctx.emit(output, key=, value=)`."""

    topic: str
    codec: Codec[T]

    def __str__(self) -> str:
        return f"Output({self.topic!r})"


@dataclass(frozen=True)
class LoopHandle(Generic[T]):
    """What `ctx.loop` takes: a `Loop`."""

    codec: Codec[T]

    def __str__(self) -> str:
        return "Loop"


@dataclass(frozen=True)
class TimerHandle:
    """What `ctx.set_timer` takes: a `Timer`."""

    name: str
    _: KW_ONLY
    clock: Clock = "event"

    def __str__(self) -> str:
        return f"Timer({self.name!r})"


@dataclass(frozen=True)
class WindowHandle(Generic[T]):
    """What `ctx.windows` takes: a `Tumbling`, `Hopping` or `Session`."""

    name: str
    codec: Codec[T]

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


AnyEdge = Persist[Any] | Join[Any] | Lookup[Any] | Output[Any] | LoopHandle[Any] | TimerHandle | WindowHandle[Any]
"""Any handle."""
