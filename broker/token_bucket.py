"""`TokenBucket`: bounds a rate. Pure and synchronous; the caller passes the time."""

from __future__ import annotations

from typing import Final

__all__ = ["TokenBucket"]

_SAVED_SECONDS: Final = 0.1
_WHOLE: Final = 0.999
"""A token counts as whole from here on: the clock is a float, so a timer may end a little early."""
_SHORTEST: Final = 0.001
"""Timers are not more exact, and what they miss is saved up."""


class TokenBucket:
    """At most `rate` tokens per second on average.

    An idle bucket saves up the tokens of a tenth of a second, and one at least. `take` may take more than there are,
    so that a batch need not be split: the next tokens pay for it.

    :param rate: tokens per second.
    :param now: monotonic seconds, as in the other calls.
    """

    __slots__ = ("_at", "_most", "_rate", "_tokens")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate * _SAVED_SECONDS)
        self._tokens = self._most
        self._at = now

    def take(self, count: int, now: float) -> None:
        """Take so many tokens; call it when `delay` is 0."""
        self._fill(now)
        self._tokens -= count

    def delay(self, now: float) -> float:
        """Seconds until there is a token; 0 if there is one."""
        self._fill(now)
        return 0.0 if self._tokens >= _WHOLE else max(_SHORTEST, (1.0 - self._tokens) / self._rate)

    def _fill(self, now: float) -> None:
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now
