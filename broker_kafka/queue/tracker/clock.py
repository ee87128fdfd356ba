"""The time of one marker partition: that of its log, which goes on between markers while the log is known to be read.

Pure: milliseconds come in, none are looked up. The wall clock of this machine plays no part. Log times should be the
broker's (`message.timestamp.type=LogAppendTime`); if they are not, the clock still never runs backwards, and a marker
from the future cannot take it further ahead than `max_jump_ms` in all.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LogClock"]


class LogClock:
    """:param at: the local monotonic time.
    :param max_jump_ms: how far log times may run ahead of this machine's monotonic clock once the clock is anchored.
    :param stall_ms: silence that is longer than this does not count as time: who is cut off from the brokers here may
        not say that others did not write.
    :ivar jumps: how many log times were cut back.
    :ivar stalls: how many silences were left out.
    """

    def __init__(self, at: int, *, max_jump_ms: int = 10_000, stall_ms: int = 10_000) -> None:
        self._max_jump: Final = max_jump_ms
        self._stall: Final = stall_ms
        self._now: int | None = None
        self._lead = 0
        """How far the log's time is ahead of the local one, at least: a marker is read after it was written."""
        self._alive = at
        """The local time at which something was read, or nothing was there to read."""
        self._anchor: tuple[int, int] | None = None
        self.jumps = 0
        self.stalls = 0

    @property
    def now(self) -> int | None:
        """The log time up to which all markers are known; None before the first."""
        return self._now

    def read(self, timestamp: int, at: int) -> int:
        """A marker of this log time was read; the time that counts for it, which never falls.

        :param at: the local monotonic time.
        """
        anchor = self._anchor
        if anchor is not None and timestamp > (limit := anchor[0] + at - anchor[1] + self._max_jump):
            timestamp = limit
            self.jumps += 1
        now = self._now
        if now is None:
            self._lead = timestamp - at
            now = timestamp
        else:
            self._lead = max(self._lead, timestamp - at)
            now = max(now, timestamp)
        self._now = now
        self._alive = max(self._alive, at)
        return now

    def caught_up(self, at: int) -> None:
        """The log is read to its end at this local time: all that was to be said until now has been."""
        silent = at - self._alive
        if silent > self._stall:
            self._lead -= silent
            self.stalls += 1
        self._alive = max(self._alive, at)
        if self._now is not None:
            self._now = max(self._now, self._lead + at)
            if self._anchor is None:
                self._anchor = (self._now, at)

    def estimate(self, at: int) -> int:
        """What the log's time is at this local time, at least; to know when to ask the brokers for it."""
        return self._lead + at

    def lag(self, at: int) -> int:
        """How far the time up to which all is known is behind the log's time of this local time."""
        return 0 if self._now is None else max(0, self.estimate(at) - self._now)

    def lift_anchor(self) -> None:
        """Believe log times as they are until the log is caught up with again: much of it may be unread."""
        self._anchor = None
