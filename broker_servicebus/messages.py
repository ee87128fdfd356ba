"""The messages of one queue or subscription without sessions.

One wire brings and settles them; see there what runs at once. Locks count by our own clock from their arrival on: what
was held for longer is told as lost and nothing is asked for it, and what waited here too long is not handed over.
What comes while nobody fetches goes back; what came and had more bytes than were asked for waits here, renewed.
Closing goes on where its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from azure.servicebus import ServiceBusReceivedMessage

from broker import BrokerError, Closed, Message, Outcome
from broker.driver import Settlement, WaitingLeases
from broker_servicebus.codec import VIEW, Raw, body_of, size_of
from broker_servicebus.connection import Connection
from broker_servicebus.receiving import Wire
from broker_servicebus.settling import Settler, deleted_already

__all__ = ["Arrivals", "ServiceBusMessageSource", "received"]

logger = logging.getLogger("broker.servicebus")

_CERTAIN: Final = 0.98
_PARK_SECONDS: Final = 0.1
"""Without a fetch for so long, credit is taken back: what it brings is locked, and nobody works on it."""
_MOST: Final = 2000
"""Messages that are asked for at once."""
_FIRST_SIZE: Final = 2048.0
"""Bytes that a message is taken for before any has come."""
_WEIGHT: Final = 0.5


def received(
    topic: str, natives: Sequence[ServiceBusReceivedMessage], lock_seconds: float, link: Any, dead_of: str | None = None
) -> list[Message[Any]]:
    """These as messages of `broker`."""
    until = monotonic() + _CERTAIN * lock_seconds
    messages: list[Message[Any]] = []
    for native in natives:
        data = body_of(native)
        messages.append(Message(topic, data, Raw(native, until, link, dead_of), VIEW, None, size_of(native, data)))
    return messages


class Arrivals:
    """What came and was more than was asked for."""

    def __init__(self) -> None:
        self._kept: list[Message[Any]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def kept(self) -> list[Message[Any]]:
        """What waits to be taken."""
        return self._kept[:]

    def add(self, messages: Sequence[Message[Any]]) -> None:
        self._kept += messages

    def take(self, max_messages: int, max_bytes: int) -> list[Message[Any]]:
        """The oldest that are still ours, at most so many."""
        now = monotonic()
        self._kept = [message for message in self._kept if message.raw.until > now]
        number = size = 0
        for message in self._kept[:max_messages]:
            size += message.size
            if size > max_bytes and number:
                break
            number += 1
        taken, self._kept = self._kept[:number], self._kept[number:]
        return taken

    def take_all(self) -> list[Message[Any]]:
        taken, self._kept = self._kept, []
        return taken


class ServiceBusMessageSource:
    """A MessageSource over one wire."""

    def __init__(
        self,
        connection: Connection,
        wire: Wire,
        topic: str,
        name: str,
        lock_seconds: float,
        *,
        dead_of: str | None = None,
        at_close: Any = None,
    ) -> None:
        """:param dead_of: the topic whose dead letters these are.
        :param at_close: called when it is closed, to delete what is this consumer's alone."""
        self._connection = connection
        self._wire = wire
        self._topic = topic
        self._name = name
        self._dead_of = dead_of
        self._at_close = at_close
        self._settler = Settler(connection, wire, name, lock_seconds)
        # What was deleted when it was received is ours for good: nobody else gets it.
        self._kept_seconds = math.inf if connection.settings.receive_and_delete else lock_seconds
        self._arrivals = Arrivals()
        self._size = _FIRST_SIZE
        # What was deleted on its way here cannot go back.
        self._parks = connection.fast and not connection.settings.receive_and_delete
        self._parking: asyncio.TimerHandle | None = None
        self._parked: asyncio.Task[None] | None = None
        self._leases = WaitingLeases(name, self._kept_seconds, lambda: self._arrivals.kept, self._settler.extend)
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether `close` is over."""
        return self._closing is not None and self._closing.done()

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        if kept := self._arrivals.take(max_messages, max_bytes):
            return kept
        # Service Bus counts messages alone, so that bytes are bounded by what messages were long so far.
        most = max(1, min(max_messages, _MOST, int(max_bytes / self._size)))
        self._stop_parking()
        try:
            natives = await self._wire.receive(most, wait)
        finally:
            if self._parks and not self._closed:
                self._parking = asyncio.get_running_loop().call_later(_PARK_SECONDS, self._park)
        messages = received(self._topic, natives, self._kept_seconds, self._wire.receiver, self._dead_of)
        if messages:
            self._size += _WEIGHT * (sum(message.size for message in messages) / len(messages) - self._size)
        self._arrivals.add(messages)
        taken = self._arrivals.take(max_messages, max_bytes)
        if self._arrivals:
            self._leases.watch()
        return taken

    def _park(self) -> None:
        self._parking = None
        self._parked = asyncio.get_running_loop().create_task(self._give_back())

    async def _give_back(self) -> None:
        try:
            await self._wire.give_back()
        except BrokerError as error:
            logger.debug("%s: giving back: %s", self._name, error)

    def _stop_parking(self) -> None:
        if self._parking is not None:
            self._parking.cancel()
            self._parking = None

    def interrupt(self) -> None:
        self._wire.interrupt()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        if self._connection.settings.receive_and_delete:
            return [None if each.outcome is Outcome.ACK else deleted_already(self._name) for each in settlements]
        return await self._settler.settle(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._settler.extend(messages)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        # Left half done, the link would go on taking messages that nobody gets.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        left = self._arrivals.take_all()
        if left and not self._connection.closed and not self._connection.settings.receive_and_delete:
            await self._settler.settle([Settlement(message, Outcome.RELEASE) for message in left])
        self._closed = True
        self._stop_parking()
        self._leases.close()
        await self._wire.close()
        if self._at_close is not None and not self._connection.closed:
            await self._at_close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._name} was closed")
        self._connection.check_open()
