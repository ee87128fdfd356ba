"""The messages of one queue or subscription without sessions, over one receiver link.

A lock's time is measured by our own clock from the arrival: a later settlement is reported lost without a request, and
a message whose lock ended before a fetch is dropped. Messages that arrive without a fetch are released; messages beyond
the bytes of a fetch are buffered, with their locks renewed. A cancelled `close` continues in the background.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Final

from azure.servicebus import ServiceBusReceivedMessage

from broker import BrokerError, Closed, Message, Outcome
from broker.driver import LeaseRenewer, Settlement, TaskSet, logger, take_from
from broker_servicebus.codec import VIEW, Raw, body_of, size_of
from broker_servicebus.connection import Connection
from broker_servicebus.receiving import ReceiverLink
from broker_servicebus.settling import SAFE_PART, Settler, already_deleted

__all__ = ["ServiceBusMessageSource", "as_messages", "take_locked"]

_RELEASE_AFTER: Final = 0.1
"""Seconds without a fetch after which the link credit is withdrawn, so no message is locked idly."""
_MOST: Final = 2000
"""Messages per request."""
_FIRST_SIZE: Final = 2048.0
"""Assumed size of a message, in bytes, before any has arrived."""
_WEIGHT: Final = 0.5


def as_messages(
    topic: str,
    natives: Sequence[ServiceBusReceivedMessage],
    lock_seconds: float,
    link: Any,
    dead_letters_of: str | None = None,
) -> list[Message[Any]]:
    """Native messages as messages of `broker`."""
    until = monotonic() + SAFE_PART * lock_seconds
    messages: list[Message[Any]] = []
    for native in natives:
        data = body_of(native)
        messages.append(
            Message(topic, data, Raw(native, until, link, dead_letters_of), VIEW, None, size_of(native, data))
        )
    return messages


def take_locked(buffer: deque[Message[Any]], max_messages: int, max_bytes: int) -> list[Message[Any]]:
    """As `take_from`; drops messages whose lock ended while they waited."""
    now = monotonic()
    if any(message.raw.until <= now for message in buffer):
        locked = [message for message in buffer if message.raw.until > now]
        buffer.clear()
        buffer.extend(locked)
    return take_from(buffer, max_messages, max_bytes)


class ServiceBusMessageSource:
    """Implements `MessageSource` and `ReportsLeaseLeft` over one link."""

    def __init__(
        self,
        connection: Connection,
        link: ReceiverLink,
        topic: str,
        name: str,
        lock_seconds: float,
        *,
        dead_letters_of: str | None = None,
        at_close: Callable[[], Awaitable[None]] | None = None,
        on_close: Callable[[ServiceBusMessageSource], object],
    ) -> None:
        """:param dead_letters_of: the topic whose dead letters these are.
        :param at_close: called at close, to delete an ephemeral subscription."""
        self._connection = connection
        self._link = link
        self._topic = topic
        self._name = name
        self._dead_letters_of = dead_letters_of
        self._at_close = at_close
        self._on_close = on_close
        self._settler = Settler(connection, link, name, lock_seconds)
        # With receive_and_delete a message has no lock.
        self._lease_seconds = math.inf if connection.settings.receive_and_delete else lock_seconds
        self._buffer: deque[Message[Any]] = deque()
        """Messages that arrived beyond the bytes of a fetch."""
        self._size = _FIRST_SIZE
        # With receive_and_delete a message cannot be released.
        self._releases = connection.fast and not connection.settings.receive_and_delete
        self._release_timer: asyncio.TimerHandle | None = None
        self._tasks = TaskSet("broker-servicebus-release", lambda error: logger.debug("%s: releasing: %s", name, error))
        self._leases = LeaseRenewer(name, self._lease_seconds, lambda: self._buffer, self._settler.extend)
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether `close` has finished."""
        return self._closing is not None and self._closing.done()

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        if messages := take_locked(self._buffer, max_messages, max_bytes):
            return messages
        # Service Bus bounds only the number of messages, so bytes are converted by the mean size.
        most = max(1, min(max_messages, _MOST, int(max_bytes / self._size)))
        self._stop_release()
        try:
            natives = await self._link.receive(most, wait)
        finally:
            if self._releases and not self._closed:
                self._release_timer = asyncio.get_running_loop().call_later(_RELEASE_AFTER, self._schedule_release)
        messages = as_messages(self._topic, natives, self._lease_seconds, self._link.receiver, self._dead_letters_of)
        if messages:
            self._size += _WEIGHT * (sum(message.size for message in messages) / len(messages) - self._size)
        self._buffer.extend(messages)
        found = take_locked(self._buffer, max_messages, max_bytes)
        if self._buffer:
            self._leases.watch()
        return found

    def _schedule_release(self) -> None:
        self._release_timer = None
        self._tasks.spawn(self._link.release_prefetched())

    def _stop_release(self) -> None:
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None

    def interrupt(self) -> None:
        self._link.interrupt()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        if self._connection.settings.receive_and_delete:
            return [None if each.outcome is Outcome.ACK else already_deleted(self._name) for each in settlements]
        return await self._settler.settle(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._settler.extend(messages)

    def lease_left(self, message: Message[Any]) -> float:
        return message.raw.until - monotonic()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
            self._closing.add_done_callback(lambda _: self._on_close(self))
        # Shielded: a half-closed link would keep receiving messages.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        left = [Settlement(message, Outcome.RELEASE) for message in self._buffer]
        self._buffer.clear()
        if left and not self._connection.closed and not self._connection.settings.receive_and_delete:
            await self._settler.settle(left)
        self._closed = True
        self._stop_release()
        self._leases.close()
        await self._link.close()
        if self._at_close is not None and not self._connection.closed:
            await self._at_close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._name} was closed")
        self._connection.check_open()
