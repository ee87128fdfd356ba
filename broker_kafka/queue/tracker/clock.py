"""The clock of one marker partition: the time of its log, which advances between markers while the log is being read.

Pure: milliseconds come in, none are looked up. The wall clock of this machine plays no part. Log times should be the
broker's (`message.timestamp.type=LogAppendTime`); with others the clock still never runs backwards, and a marker
from the future cannot take it further ahead than `max_jump_ms` in all.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LogClock"]


class LogClock:
    """:param at: the local monotonic time.
    :param max_jump_ms: how far log times may run ahead of this machine's monotonic clock once the clock is anchored.
    :param stall_ms: a longer silence does not count as time: while this process is cut off from the brokers, others may
        write.
    :ivar jumps: how many log times were cut back.
    :ivar stalls: how many silences were left out.
    """

    def __init__(self, at: int, *, max_jump_ms: int = 10_000, stall_ms: int = 10_000) -> None:
        self._max_jump: Final = max_jump_ms
        self._stall: Final = stall_ms
        self._now: int | None = None
        self._lead = 0
        """How far the log's time is ahead of the local one, at least: a marker is read after it is written."""
        self._alive = at
        """The local time at which a marker was last read, or the log was last caught up with."""
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
        """The log is read to its end at this local time."""
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
        """The log's time at this local time, at least; tells when to ask the brokers for it."""
        return self._lead + at

    def lag(self, at: int) -> int:
        """How far `now` is behind the log's time at this local time."""
        return 0 if self._now is None else max(0, self.estimate(at) - self._now)

    def lift_anchor(self) -> None:
        """Accept any log time until the log is caught up with again: much of it may be unread."""
        self._anchor = None
