"""Helpers for a message source: the wait of `fetch`, its buffer, and the leases of the messages in the buffer.

Everything runs on one event loop, except `lease_time`, which any thread may call.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from broker.errors import BrokerError
from broker.hooks import logger
from broker.messages import Message

__all__ = ["LeaseRenewer", "Waker", "lease_time", "take_from"]


class Waker:
    """Wakes one waiting task; used on one event loop. Cancelling the wait has no effect on the waker.

    An `asyncio.Event` within an `asyncio.timeout` takes 50 % more CPU time at every burst.

    :ivar waiter: None while no task waits; hot paths check this before they call `wake`.
    """

    __slots__ = ("waiter",)

    def __init__(self) -> None:
        self.waiter: asyncio.Future[None] | None = None

    async def wait(self, seconds: float) -> None:
        """Wait for the next `wake`, at most `seconds`. An earlier `wake` does not count: check first, then wait."""
        loop = asyncio.get_running_loop()
        self.waiter = loop.create_future()
        timer = loop.call_later(seconds, self.wake)
        try:
            await self.waiter
        finally:
            timer.cancel()
            self.waiter = None

    def wake(self) -> None:
        """End the wait; does nothing if no task waits."""
        if (waiter := self.waiter) is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)


def take_from(buffer: deque[Message[Any]], max_messages: int, max_bytes: int) -> list[Message[Any]]:
    """Remove and return the first messages: at most `max_messages`, and `max_bytes` unless the first is larger."""
    if len(buffer) <= max_messages and sum([message.size for message in buffer]) <= max_bytes:
        everything = list(buffer)
        buffer.clear()
        return everything
    messages: list[Message[Any]] = []
    size = 0
    while buffer and len(messages) < max_messages:
        size += buffer[0].size
        if messages and size > max_bytes:
            break
        messages.append(buffer.popleft())
    return messages


# Not a function, to save a frame: it is called at each hand-over.
lease_time: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic
)
"""Seconds of a clock that continues while the machine is suspended, as the clock of the broker does.

The clock of an event loop stops: after a suspension an expired lease would look valid. Outside Linux this is
`time.monotonic`.
"""


_RENEWALS: Final = 3
"""Renewals per lease, so that two may fail."""


class LeaseRenewer:
    """Renews the leases of received messages that no `fetch` has returned; the core renews the others.

    :param name: the name of the source, for the log.
    :param lease_seconds: the length of a lease; infinity if leases do not end.
    :param waiting: returns the received messages.
    :param extend: renews leases, as `MessageSource.extend` does; failures are logged, and the next renewal follows.
    """

    def __init__(
        self,
        name: str,
        lease_seconds: float,
        waiting: Callable[[], Sequence[Message[Any]]],
        extend: Callable[[Sequence[Message[Any]]], Awaitable[Sequence[BrokerError | None]]],
    ) -> None:
        self._name = name
        self._period = lease_seconds / _RENEWALS
        self._waiting = waiting
        self._extend = extend
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def watch(self) -> None:
        """A message was received: renew after each third of a lease while messages wait. Returns at once."""
        if self._timer is None and self._task is None and self._period < math.inf and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._period, self._begin)

    def close(self) -> None:
        """Stop, and cancel a running renewal."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._timer = None
        if waiting := list(self._waiting()):
            self._task = asyncio.get_running_loop().create_task(self._renew(waiting), name="broker-renew-waiting")
            self._task.add_done_callback(self._ended)

    async def _renew(self, messages: Sequence[Message[Any]]) -> None:
        for error in await self._extend(messages):
            if error is not None:
                logger.debug("%s: renewing the leases of received messages: %s", self._name, error)
                break

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s: renewing the leases of received messages failed", self._name, exc_info=error)
        if self._waiting():
            self.watch()
