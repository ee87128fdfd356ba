"""Delays between the attempts of an operation that fails: they double up to a bound, and always have jitter.

The jitter comes from a private random source: an application may have seeded `random`, and may count on its state.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

__all__ = ["Backoff", "jitter", "pause"]

jitter: Final = Random()
"""The random source of backoff jitter. Safe to use from any thread."""

_SPREAD: Final = 0.2


class Backoff:
    """The delays of one retry loop: `first` seconds, doubled after each failure up to `longest`, each ± 20 %."""

    __slots__ = ("_delay", "_first", "_longest")

    def __init__(self, first: float, longest: float) -> None:
        self._first = self._delay = first
        self._longest = longest

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        delay = self._delay
        self._delay = min(self._longest, 2 * delay)
        return delay * jitter.uniform(1 - _SPREAD, 1 + _SPREAD)

    def reset(self) -> None:
        """Start at `first` again: the operation succeeded."""
        self._delay = self._first


async def pause(seconds: float, stopped: asyncio.Event) -> None:
    """Sleep, but return at once when `stopped` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stopped.wait()
    except TimeoutError:
        return
