"""The edges of a group that call back: inputs, loop, visitors, timers and windows. Frozen data; `Group` checks them.

Times are in seconds or a timedelta, and are kept in whole milliseconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from broker import Codec
from broker_streams.context import Context, Window
from broker_streams.failures import STOP, Policy
from broker_streams.handles import (
    Clock,
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
    "Callback",
    "Edge",
    "Hopping",
    "Input",
    "Loop",
    "Session",
    "Start",
    "Timer",
    "TimerCallback",
    "Tombstones",
    "Tumbling",
    "Visitor",
    "VisitorCallback",
    "WindowCallback",
    "Windowed",
]

T = TypeVar("T")

Callback = Callable[[Context, T], None] | Callable[[Context, T], Awaitable[None]]
"""Handles a message: a plain function or an `async def`."""
TimerCallback = Callable[[Context], None] | Callable[[Context], Awaitable[None]]
VisitorCallback = Callable[[Context, Any], None] | Callable[[Context, Any], Awaitable[None]]
"""Visits a row; the second argument is the `meta` of `processor.visit(name, meta)`."""
WindowCallback = Callable[[Context, Window[T]], None] | Callable[[Context, Window[T]], Awaitable[None]]

Start = Literal["earliest", "latest"] | datetime
"""Where a group that has no position yet begins to read; a datetime is timezone-aware."""
Tombstones = Literal["skip", "pass", "decode"]
"""A message without data is passed over, given to the callback as None, or given to the codec."""


@dataclass(frozen=True)
class Input(Generic[T]):
    """Topics to consume; each message calls the callback with the context and the decoded payload.

    :param topic: one topic, or several that share codec and callback. All inputs have as many partitions as the table.
    :param start: where the group begins to read.
    :param tombstones: messages without data are skipped, or the callback gets None ("pass"), or what the codec makes
        of it ("decode").
    :param on_error: when the callback raises.
    :param on_undecodable: when the codec cannot read a message, or it has no key.
    """

    topic: str | Sequence[str]
    codec: Codec[T]
    callback: Callback[T]
    _: KW_ONLY
    start: Start = "earliest"
    tombstones: Tombstones = "skip"
    on_error: Policy = STOP
    on_undecodable: Policy = STOP

    def __post_init__(self) -> None:
        # A list could be changed, and has no hash.
        if isinstance(self.topic, list):
            object.__setattr__(self, "topic", tuple(self.topic))

    @property
    def topics(self) -> tuple[str, ...]:
        return (self.topic,) if isinstance(self.topic, str) else tuple(self.topic)

    def __str__(self) -> str:
        return f"Input({','.join(map(str, self.topics))!r})"


@dataclass(frozen=True)
class Loop(LoopHandle[T]):
    """Messages of the group to itself, at other keys: `ctx.loop(loop, key=, value=)`. Their topic is `<group>-loop`.

    :param on_error: as of `Input`, like `on_undecodable`.
    """

    callback: Callback[T]
    _: KW_ONLY
    on_error: Policy = STOP
    on_undecodable: Policy = STOP


@dataclass(frozen=True)
class Visitor:
    """Called for each row of the table by `processor.visit(name, meta)`, between messages."""

    name: str
    callback: VisitorCallback

    def __str__(self) -> str:
        return f"Visitor({self.name!r})"


@dataclass(frozen=True)
class Timer(TimerHandle):
    """Called for a key at the time of `ctx.set_timer(timer, at= or after=)`.

    :param clock: "event" goes by the time of the messages, "wall" by that of the machine.
    """

    callback: TimerCallback
    _: KW_ONLY
    clock: Clock = "event"


@dataclass(frozen=True)
class Windowed(WindowHandle[T]):
    """What `Tumbling`, `Hopping` and `Session` share. A callback writes to the windows of its message:

        for window in ctx.windows(hourly):
            window.value = (window.value or 0) + 1

    :param name: names the windows in the table; a window under another name begins empty.
    :param grace: how long after its end a window still takes messages, in event time.
    :param on_close: called once with the final value, for a window that has one.
    :param on_late: called with the closed window of a message that is too late, after the callback of the message,
        which is `ctx.payload`. Without it late messages are counted.
    :param close_after_idle: closes the open windows of a partition that had no message for so long, by the machine's
        time; None leaves them open until a message moves event time on.
    """

    _: KW_ONLY
    grace: Duration = 0
    on_close: WindowCallback[T] | None = None
    on_late: WindowCallback[T] | None = None
    close_after_idle: Duration | None = None

    @property
    def grace_ms(self) -> int:
        return as_ms(self.grace)

    @property
    def idle_seconds(self) -> float | None:
        return None if self.close_after_idle is None else as_ms(self.close_after_idle) / 1000


@dataclass(frozen=True)
class Tumbling(Windowed[T]):
    """Windows of one size, one after the other, aligned to 1970."""

    _: KW_ONLY
    size: Duration

    @property
    def size_ms(self) -> int:
        return as_ms(self.size)


@dataclass(frozen=True)
class Hopping(Windowed[T]):
    """Windows of one size that begin every `advance`, so that they overlap; aligned to 1970."""

    _: KW_ONLY
    size: Duration
    advance: Duration

    @property
    def size_ms(self) -> int:
        return as_ms(self.size)

    @property
    def advance_ms(self) -> int:
        return as_ms(self.advance)


@dataclass(frozen=True)
class Session(Windowed[T]):
    """Windows of messages that follow each other within `gap`. A message between two sessions makes one of them.

    :param merge: the value of one session of two, the earlier first.
    """

    _: KW_ONLY
    gap: Duration
    merge: Callable[[T, T], T]

    @property
    def gap_ms(self) -> int:
        return as_ms(self.gap)


Edge = Input[Any] | Loop[Any] | Persist[Any] | Join[Any] | Lookup[Any] | Output[Any] | Visitor | Timer | Windowed[Any]
