"""`Waker`: lets a client's call sleep until the server wakes it, across event loops and threads.

The server calls `Waker.wake` from any thread, under its lock; it returns at once. All other methods belong to the
waker's loop, and only one call waits at a time.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from broker_inmem.clock import Clock

__all__ = ["Waker"]


class Waker:
    """Wakes one sleeping call on one event loop."""

    __slots__ = ("_future", "_thread", "loop")

    def __init__(self) -> None:
        self.loop: Final = asyncio.get_running_loop()
        self._thread: Final = threading.get_ident()
        self._future: asyncio.Future[None] | None = None

    def prepare(self) -> None:
        """A `wake` from now on ends the next `wait`. Call it under the server's lock."""
        self._future = self.loop.create_future()

    def wake(self) -> bool:
        """End the sleep; returns whether a call was sleeping on a running loop."""
        if self._future is None or self.loop.is_closed():
            return False
        if threading.get_ident() == self._thread:
            self._end()
        else:
            self.call(self._end)
        return True

    def call(self, callback: object, *args: object) -> None:
        """Schedule a callback on the waker's loop, if that is still open."""
        try:
            if threading.get_ident() == self._thread:
                self.loop.call_soon(callback, *args)  # pyright: ignore[reportArgumentType]
            else:
                self.loop.call_soon_threadsafe(callback, *args)  # pyright: ignore[reportArgumentType]
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    async def wait(self, clock: Clock, due: float | None, until: float) -> None:
        """Sleep until woken, until the clock reaches `due`, or until the loop time `until`."""
        future = self._future
        if future is None:
            return
        timeout = self.loop.call_at(until, self.wake)
        timer = clock.call_at(due, self.wake, self.loop) if due is not None else None
        try:
            await future
        finally:
            timeout.cancel()
            if timer is not None:
                timer.cancel()
            self._future = None

    def _end(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)
