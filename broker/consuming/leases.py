"""Renews the leases of all messages of a source: one ticker, no timer per message.

Renewal begins when a message is fetched. After hand-over a message is renewed for `max_lease` seconds, or for as long
as `extend` requires; then the consumer nacks it, without waiting for the lease to end on the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from broker.capabilities import LeaseMode
from broker.driver.contract import MessageSource
from broker.errors import BackendError, BrokerError, LeaseLost
from broker.hooks import Event, Hooks, LeasesNotRenewed
from broker.messages import Message

__all__ = ["LeaseKeeper", "emit_not_renewed"]

_IDLE_TICK: Final = 30.0


class LeaseKeeper:
    """One per source whose messages have leases.

    :param messages: the live collection of fetched and unsettled messages.
    :param expired: called with messages whose `max_lease` has passed; removes them from `messages`.
    :param lost: called with messages whose leases the broker reports as lost.
    """

    def __init__(
        self,
        source: MessageSource,
        *,
        mode: LeaseMode,
        lease_seconds: float | None,
        max_lease: float,
        messages: Collection[Message[Any]],
        expired: Callable[[Sequence[Message[Any]]], None],
        lost: Callable[[Sequence[Message[Any]]], None],
        hooks: Hooks,
    ) -> None:
        self._source = source
        self._renews = mode is LeaseMode.RENEW
        self._period = lease_seconds / 3 if self._renews and lease_seconds is not None else _IDLE_TICK
        self._max_lease = max_lease
        self._messages = messages
        self._expired = expired
        self._lost = lost
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="broker-lease-keeper")

    async def close(self) -> None:
        """Stop renewing."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        renew_at = self._loop.time() + self._period
        while True:
            now = self._loop.time()
            # Messages that are handed over from now on cannot expire before now + max_lease.
            ends = [message.lease_ends for message in self._messages if message.lease_ends is not None]
            wake_at = min([renew_at, now + self._max_lease, *ends])
            await asyncio.sleep(max(0.001, wake_at - now))
            now = self._loop.time()
            over = [
                message for message in self._messages if message.lease_ends is not None and message.lease_ends <= now
            ]
            if over:
                self._expired(over)
            if now >= renew_at:
                if self._renews and self._messages:
                    await self._renew(list(self._messages))
                renew_at = now + self._period

    async def _renew(self, messages: list[Message[Any]]) -> None:
        try:
            results = await self._source.extend(messages)
        except BrokerError as error:
            results = [error] * len(messages)
        except Exception as error:
            results = [BackendError(f"The backend failed to extend: {error}", native=error)] * len(messages)
        # The next tick tries again, before the lease ends.
        emit_not_renewed(self._hooks.emit, messages, results)
        lost = [message for message, result in zip(messages, results, strict=True) if isinstance(result, LeaseLost)]
        if lost:
            self._lost(lost)


def emit_not_renewed(
    emit: Callable[[Event], object], messages: Sequence[Message[Any]], results: Sequence[BrokerError | None]
) -> None:
    """Report the messages that were not renewed and are not lost, if any."""
    failed = [
        (message, error)
        for message, error in zip(messages, results, strict=True)
        if error is not None and not isinstance(error, LeaseLost)
    ]
    if failed:
        emit(LeasesNotRenewed(messages=[message for message, _ in failed], error=failed[0][1]))
