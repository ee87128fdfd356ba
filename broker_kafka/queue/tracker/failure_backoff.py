"""`RepeatedDoubts`: how long a partition rests after doubts that nobody can explain, and when people are told of them.

A doubt now and then is that of a broker that went away, or of another tracker that took the partition. What comes again
and again has a cause that a new writer does not mend: without a rest it would keep the brokers busy, and nobody would
see it. Pure: it is told the local monotonic time in seconds.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RepeatedDoubts"]

_FREE: Final = 2
"""So many in a row cost no rest."""
_TOLD: Final = 5
_FIRST: Final = 0.5
_LONGEST: Final = 60.0
_QUIET: Final = 30.0
"""Seconds without a doubt, beside the rest, after which the next one is the first again."""


class RepeatedDoubts:
    """Those of one partition."""

    def __init__(self) -> None:
        self._count = 0
        self._quiet_at = 0.0
        self._reason = ""

    def add(self, reason: str, now: float) -> float:
        """There was one more; for how many seconds the partition is to rest."""
        if now >= self._quiet_at:
            self._count = 0
        self._count += 1
        self._reason = reason
        over = self._count - _FREE
        rest = min(_LONGEST, _FIRST * 2.0 ** min(over - 1, 16)) if over > 0 else 0.0
        self._quiet_at = now + rest + _QUIET
        return rest

    @property
    def is_news(self) -> bool:
        """Whether the last one is the one that people are to be told of: once for all in a row."""
        return self._count == _TOLD

    def trouble(self, now: float) -> str:
        """What is wrong, for people; empty if nothing is."""
        return self._reason if self._count >= _TOLD and now < self._quiet_at else ""
