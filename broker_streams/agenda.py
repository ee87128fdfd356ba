"""`Agenda`: what is still to come for a key: its timers, its open windows, and when its row expires. Pure.

The agenda of a key is a row of the table beside the row of the key itself, so it is restored with the table. All times
are in milliseconds since 1970. An agenda has all that the index by time needs, so that recovery rebuilds the index
without the graph of the group.
"""

from __future__ import annotations

from typing import Final

import msgspec

from broker import DecodeError

__all__ = ["EVENT", "PARTS", "WALL", "WINDOWS", "Agenda", "OpenWindow"]

WINDOWS: Final = b"c"
"""The part of the index by time with the windows that close, in event time."""
EVENT: Final = b"e"
"""The part with timers and expiring rows, in event time."""
WALL: Final = b"w"
"""The part with timers of the machine's clock."""
PARTS: Final = (WINDOWS, EVENT, WALL)
"""All parts; in each a key has at most one entry, the earliest."""

_Times = tuple[int | None, int | None, int | None]


class OpenWindow(msgspec.Struct, array_like=True):
    """A window that takes messages.

    :ivar due: when it closes: its end and the grace of its edge.
    :ivar data: its value, encoded.
    """

    start: int
    end: int
    due: int
    data: bytes


class Agenda(msgspec.Struct, array_like=True):
    """See the module.

    :ivar expiry: when the row is deleted.
    :ivar timers: due time by name, in event time.
    :ivar wall_timers: due time by name, by the machine's clock.
    :ivar windows: by edge, in the order of their starts.
    """

    expiry: int | None = None
    timers: dict[str, int] = {}
    wall_timers: dict[str, int] = {}
    windows: dict[str, list[OpenWindow]] = {}

    def due(self) -> _Times:
        """The earliest time in each of the parts of the index."""
        window, event, wall = None, self.expiry, None
        for opened in self.windows.values():
            for each in opened:
                if window is None or each.due < window:
                    window = each.due
        if self.timers:
            first = min(self.timers.values())
            event = first if event is None else min(first, event)
        if self.wall_timers:
            wall = min(self.wall_timers.values())
        return window, event, wall

    def pack(self) -> bytes | None:
        """The bytes of the row; None if nothing is to come, so that the row is deleted."""
        if self.expiry is None and not self.timers and not self.wall_timers and not self.windows:
            return None
        return _pack(self)

    @classmethod
    def unpack(cls, data: bytes | None) -> Agenda:
        """:raises DecodeError: the bytes are not those of an agenda."""
        if data is None:
            return cls()
        try:
            return _unpack(data)
        except (ValueError, RecursionError) as error:
            raise DecodeError(
                f"An agenda, the timers and windows of a key, cannot be read: {error}",
                native=error,
                advice="A newer version of this package wrote it, or another program; restore the table topic",
            ) from error


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Agenda).decode
