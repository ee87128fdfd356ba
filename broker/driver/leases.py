"""Leases on the side of a message source: optional protocols, the clock, and the renewal of fetched messages.

The core looks whether a source implements `ExpiresLeases` or `ReportsLeaseLeft`, and calls them on the loop. The core
renews only what it was given: `LeaseRenewer` renews what a source has received and no `fetch` has returned.
`lease_time` is safe from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

from broker.errors import BrokerError
from broker.messages import Message

__all__ = ["ExpiresLeases", "LeaseRenewer", "ReportsLeaseLeft", "lease_time"]


@runtime_checkable
class ExpiresLeases(Protocol):
    """A source that knows when leases end, also of what was not renewed in time; optional."""

    def expire_leases(self, messages: Sequence[Message[Any]]) -> None:
        """Called before hand-over: report messages whose leases are over, and others with them, to `listener.lost`.

        Called for each hand-over, of one message or many; must be quick and do no I/O.
        """
        ...


@runtime_checkable
class ReportsLeaseLeft(Protocol):
    """A source in lease mode `fixed` that knows when each lease ends; optional."""

    def lease_left(self, message: Message[Any]) -> float:
        """The seconds for which the message is still ours; not above 0 if it is not."""
        ...


# Without a frame of its own: it is called for each hand-over.
lease_time: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic
)
"""Seconds by a clock that goes on while the machine is suspended, as that of the brokers does.

The clock of an event loop stops meanwhile: after a suspension an expired lease would look valid. On other systems than
Linux it is `time.monotonic`.
"""


logger = logging.getLogger("broker")

_RENEWALS: Final = 3
"""Within the time of a lease, so that two may fail."""


class LeaseRenewer:
    """One per source, on its event loop.

    :param name: of the source, for the log.
    :param lease_seconds: that the broker grants; infinity if nothing is ever taken back.
    :param waiting: what waits now.
    :param extend: renews these, as `MessageSource.extend`; failures are logged, and the next tick tries again.
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
        """Something waits: renew it from a third of a lease on, until nothing does. Returns at once."""
        if self._timer is None and self._task is None and self._period < math.inf and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._period, self._begin)

    def close(self) -> None:
        """Renew nothing more; a renewal that is under way is cancelled."""
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
                logger.debug("%s: renewing the leases of what waits: %s", self._name, error)
                break

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s: renewing the leases of what waits failed", self._name, exc_info=error)
        if self._waiting():
            self.watch()
