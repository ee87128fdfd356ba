"""Keeps the leases of what a source has received and no fetch has taken: the core renews only what it was given.

A source that asks for no more than a fetch has room for holds little between fetches, and mostly nothing, so that this
costs it a look at a timer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from broker.errors import BrokerError
from broker.messages import Message

__all__ = ["WaitingLeases"]

logger = logging.getLogger("broker")

_RENEWALS: Final = 3
"""Within the time of a lease, so that two may fail."""


class WaitingLeases:
    """One per source, on its event loop.

    :param name: of the source, for the log.
    :param lease_seconds: that the broker grants; infinity if nothing is ever taken back.
    :param waiting: what waits now.
    :param extend: renews these, as `MessageSource.extend`; what it says of each is logged, and tried again.
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
