"""How many messages one tracker may send again now, so that leases which end by the thousand do not bury new messages.

Pure: seconds of a monotonic clock come in, none are looked up. *Concurrency.* On one event loop; all partitions of a
tracker share it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RedeliveryRate"]

_SHARE: Final = 0.05
"""Seconds whose messages are worth a transaction."""


class RedeliveryRate:
    """A bucket that fills by so many messages a second, and holds those of one second.

    :param per_second: at least 1.
    """

    def __init__(self, per_second: float) -> None:
        self._per_second: Final = per_second
        self._tokens = per_second
        self._at: float | None = None

    def room(self, now: float) -> int:
        """How many messages may be sent at this time."""
        if self._at is not None:
            self._tokens = min(self._per_second, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return int(self._tokens)

    def spend(self, count: int) -> None:
        """So many are sent, of those that `room` told."""
        self._tokens -= count

    def pause(self, now: float) -> float:
        """Seconds until it is worth to look for room again; 0 if there is some."""
        if self.room(now) >= 1:
            return 0.0
        return (max(1.0, _SHARE * self._per_second) - self._tokens) / self._per_second
