"""Which windows a time belongs to, and when windows are closed. Pure arithmetic over milliseconds.

A window takes the times from its start to its end, without the end. Windows of fixed sizes are aligned to 1970. A
session begins with a message, and ends when for its gap no other message came: each message is a session of its own,
from its time to its time plus the gap, and sessions that overlap are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from broker_streams.agenda import OpenWindow
from broker_streams.edges import Hopping, Session, Tumbling, Windowed

__all__ = ["Assign", "Span", "assigner", "is_closed", "overlapping"]

Span = tuple[int, int]
"""Start and end."""
Assign = Callable[[int, Sequence[OpenWindow]], list[Span]]
"""Which windows a time belongs to."""


def assigner(edge: Windowed[Any]) -> Assign:
    """A function that returns the windows of a message, the earliest first.

    It is called with the time of the message, and the windows of its key that are open, on which only sessions depend.
    """
    if isinstance(edge, Session):
        return _sessions(edge.gap_ms)
    if isinstance(edge, Hopping):
        return _hopping(edge.size_ms, edge.advance_ms)
    assert isinstance(edge, Tumbling)
    return _tumbling(edge.size_ms)


def _tumbling(size: int) -> Assign:
    def assign(time: int, opened: Sequence[OpenWindow]) -> list[Span]:
        start = time - time % size
        return [(start, start + size)]

    return assign


def _hopping(size: int, advance: int) -> Assign:
    def assign(time: int, opened: Sequence[OpenWindow]) -> list[Span]:
        last = time - time % advance
        first = last - (last - time + size - 1) // advance * advance
        return [(start, start + size) for start in range(first, time + 1, advance)]

    return assign


def _sessions(gap: int) -> Assign:
    def assign(time: int, opened: Sequence[OpenWindow]) -> list[Span]:
        start, end = time, time + gap
        # Open sessions never overlap each other, so those that meet this message do not meet more of them.
        for each in overlapping(opened, start, end):
            start, end = min(start, each.start), max(end, each.end)
        return [(start, end)]

    return assign


def overlapping(opened: Sequence[OpenWindow], start: int, end: int) -> list[OpenWindow]:
    """The open windows that have a time in common with this span."""
    return [each for each in opened if each.start < end and start < each.end]


def is_closed(end: int, grace: int, stream_time: int, closed_until: int | None) -> bool:
    """Whether a window takes no more messages.

    :param closed_until: the end of the last window of the edge that closed because the partition was idle.
    """
    return end + grace <= stream_time or (closed_until is not None and end <= closed_until)
