"""What one task waits on until something has happened or time is up, as a source's `fetch` does."""

from __future__ import annotations

import asyncio

__all__ = ["Waker"]


class Waker:
    """For one waiting task at a time. Everything on one event loop; cancelling the wait leaves nothing behind.

    An `asyncio.Event` within an `asyncio.timeout` does the same for half as much CPU time again, at every burst.

    :ivar waiter: None while nobody waits; paths that run for every message look here before they call `wake`.
    """

    __slots__ = ("waiter",)

    def __init__(self) -> None:
        self.waiter: asyncio.Future[None] | None = None

    async def wait(self, seconds: float) -> None:
        """Until the next `wake`, or for so many seconds. What was woken before does not count: look, then wait."""
        loop = asyncio.get_running_loop()
        self.waiter = loop.create_future()
        timer = loop.call_later(seconds, self.wake)
        try:
            await self.waiter
        finally:
            timer.cancel()
            self.waiter = None

    def wake(self) -> None:
        """End the wait; nothing happens if nobody waits."""
        if (waiter := self.waiter) is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)
