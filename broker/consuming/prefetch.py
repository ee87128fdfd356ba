"""How many messages to hold ready: about two seconds of measured throughput, so that a slow consumer hoards nothing.

Pure: the caller tells the time. go-cloud sizes its queue by the same rule; ours starts at one message
and at most doubles per fetch, so that a single quick hand-over proves nothing.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Prefetch"]

_SECONDS: Final = 2.0
_WINDOW: Final = 1.0


class Prefetch:
    """The target of one consumer's buffer.

    Demand is measured by requests, not by arrivals: a request for the next message shows that the one before
    is off the consumer's hands. The first requests of idle workers show nothing and are not counted.
    """

    __slots__ = ("_count", "_fresh", "_idle_workers", "_rate", "_started", "limit", "target")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.target = 1
        self._count = 0
        self._fresh = False
        self._idle_workers: int | None = None
        self._started: float | None = None
        self._rate = 0.0

    def requested(self, count: int, workers: int) -> None:
        """The consumer, which works on `workers` messages at once, was given so many."""
        if self._idle_workers is None:
            self._idle_workers = max(count, workers)
        if self._idle_workers:
            known = min(count, self._idle_workers)
            self._idle_workers -= known
            count -= known
        if count:
            self._count += count
            self._fresh = True

    def update(self, now: float) -> int:
        """The number of messages that should be ready, as of now; called before each fetch."""
        if self._started is None:
            self._started = now
            return self.target
        elapsed = now - self._started
        if elapsed > 0:
            measured = self._count / elapsed
            if elapsed >= _WINDOW:
                self._rate = measured
                self._started = now
                self._count = 0
            else:
                # Within a window the last one's rate still counts for the part that has not passed yet.
                measured += self._rate * (1 - elapsed / _WINDOW)
            # Without a request since the last look there is nothing to grow by.
            most = 2 * self.target if self._fresh else self.target
            self._fresh = False
            self.target = max(1, min(self.limit, int(measured * _SECONDS), most))
        return self.target
