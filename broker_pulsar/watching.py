"""`Watch`: tells the hooks when the connection breaks and comes back, which the client keeps to itself.

Looks every half second at the consumers that are open; without any, at nothing. Runs on the loop, until it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from broker.driver import Connected, Disconnected, Hooks

__all__ = ["Watch"]

_PAUSE: Final = 0.5


class Watch:
    """One for a connection; `server` is what the events call it."""

    def __init__(self, hooks: Hooks, server: str) -> None:
        self._hooks = hooks
        self._server = server
        self._connected: set[Callable[[], bool]] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, is_connected: Callable[[], bool]) -> Callable[[], None]:
        """Look at this from now on; returns the function that ends it."""
        self._connected.add(is_connected)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look())
        return lambda: self._connected.discard(is_connected)

    def close(self) -> None:
        """Look at nothing any more."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        was = True
        while True:
            await asyncio.sleep(_PAUSE)
            now = all(each() for each in tuple(self._connected))
            if now != was:
                was = now
                event = Connected(server=self._server, again=True) if now else Disconnected(server=self._server)
                self._hooks.emit(event)
