"""Keeps messages in memory until their delay is over, for delays that the broker cannot keep itself.

One timer serves all. Held messages stay outstanding and their leases renewed; the number held is bounded by
the caller. Used on one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from broker.messages import Message

__all__ = ["DelayHolder"]


class DelayHolder:
    """:param due: called on the loop with each message whose delay is over, also if it was lost meanwhile."""

    def __init__(self, due: Callable[[Message[Any]], None]) -> None:
        self._due = due
        self._heap: list[tuple[float, int, Message[Any]]] = []
        self._order = count()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def hold(self, message: Message[Any], seconds: float) -> None:
        """Call `due(message)` after so many seconds."""
        heapq.heappush(self._heap, (self._loop.time() + seconds, next(self._order), message))
        self._arm()

    def close(self) -> None:
        """Forget all of them; giving them back is the owner's."""
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._heap[0][0], self._fire) if self._heap else None

    def _fire(self) -> None:
        now = self._loop.time()
        while self._heap and self._heap[0][0] <= now:
            self._due(heapq.heappop(self._heap)[2])
        self._arm()
