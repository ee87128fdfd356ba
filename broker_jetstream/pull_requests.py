"""Open pull requests of one consumer: what was requested from the server and has not arrived.

Each request has a reply subject of its own, so the messages and bytes that it still owes are known exactly. While the
connection is down nothing is requested. Closing the inbox cancels every open request on the server.
"""

from __future__ import annotations

import asyncio
from itertools import count
from time import monotonic
from typing import Any, Final

import msgspec

from broker import BrokerError, ConnectionFailed
from broker_jetstream.connection import Connection, Listener
from broker_jetstream.streams import Layout
from broker_jetstream.subscriptions import GROUP, pull_request
from broker_jetstream.transport import Outgoing, RawHandler

__all__ = ["MessagePulls", "OrderedPulls", "PinnedPulls"]

_GROWTH: Final = 4
"""How many times larger than the last messages the next ones may be before a pull ends early."""
_SERVER_OVERHEAD: Final = 256
"""Bytes that the server counts per message besides body and headers: its subjects, roughly."""
_MAX_HEADERS: Final = 65_536
_DRAIN_POLLS: Final = 250
_DRAIN_INTERVAL: Final = 0.001


class _Pulls:
    """Requests that are open on one inbox."""

    def __init__(self, connection: Connection, layout: Layout, consumer: str, arrived: RawHandler) -> None:
        self.open: dict[bytes, list[int]] = {}
        """By reply subject: the messages, and at most the bytes, still to arrive. The handler of arrivals subtracts."""
        self.last_heard = monotonic()
        """When the server last answered on the inbox, or the last request was sent."""
        self.patience: Final = 2.5 * connection.settings.pull_heartbeat
        """Seconds in which the server would have sent two heartbeats."""
        self.dropped = 0
        """Messages of dropped requests that the server may have sent, since the last arrival."""
        self._connection = connection
        self._arrived = arrived
        self._subject = connection.api_subject(f"CONSUMER.MSG.NEXT.{layout.stream}.{consumer}").encode()
        self._listener: Listener | None = None
        self._inbox = b"-"
        self._numbers = count(1)

    @property
    def credit(self) -> int:
        """How many requested messages have not arrived."""
        if not self.open:
            return 0
        for subject in [subject for subject, pull in self.open.items() if pull[0] <= 0]:
            del self.open[subject]
        return sum([pull[0] for pull in self.open.values()])

    @property
    def silent(self) -> bool:
        """Whether two heartbeats are missing, so the open requests must be lost."""
        return monotonic() - self.last_heard > self.patience and self.credit > 0

    def owns(self, subject: bytes) -> bool:
        """Whether a status came to the current inbox, not to a closed one."""
        return subject.startswith(self._inbox)

    def drop(self) -> None:
        """Forget the open requests: the connection broke, or the server ended them all."""
        self.dropped += self.credit
        self.open.clear()

    async def cancel(self) -> None:
        """Close the inbox: the server cancels a request when its reply subject has no subscriber."""
        listener, self._listener = self._listener, None
        self._inbox = b"-"
        self.drop()
        if listener is not None:
            await self._connection.unlisten(listener)

    async def _reply_subject(self) -> bytes:
        if self._listener is None:
            inbox = self._connection.pull_inbox()
            self._inbox = inbox.encode()
            self._listener = await self._connection.listen(f"{inbox}.*", self._arrived)
        return b"%b.%d" % (self._inbox, next(self._numbers))

    async def _send(self, reply: bytes, body: dict[str, Any]) -> None:
        try:
            await self._connection.send((Outgoing(self._subject, reply, b"", msgspec.json.encode(body)),))
        except BrokerError as error:
            self.drop()
            if not isinstance(error, ConnectionFailed):
                raise


class MessagePulls(_Pulls):
    """The pulls of a message subscription, bounded in messages and in bytes."""

    def __init__(self, connection: Connection, layout: Layout, consumer: str, arrived: RawHandler) -> None:
        super().__init__(connection, layout, consumer, arrived)
        self._size = 0
        self._too_small = 0

    def note_size(self, number: int, size: int) -> None:
        """Learn the size of messages from `number` messages of `size` bytes in all."""
        self._size = size // number
        self._too_small = 0

    def next_request(self, room: int, byte_room: int, *, buffered: bool) -> tuple[int, int]:
        """The messages and bytes to request now, so that no more arrives than there is room for.

        :param buffered: some messages have arrived; if none has, the next one may exceed the bytes.
        """
        credit = self.credit
        if room <= 0 or credit * 2 > room:
            return 0, 0
        left = byte_room - sum([max(pull[1], 0) for pull in self.open.values()])
        if self._too_small or left <= self._size + _SERVER_OVERHEAD:
            # The next message is larger than the last bound: request with all bytes, then that message alone.
            if credit or buffered:
                return 0, 0
            if left <= max(self._too_small, self._size + _SERVER_OVERHEAD):
                return 1, self._connection.max_payload + _MAX_HEADERS
            return room, left
        guess = _GROWTH * (room - credit) * (self._size + _SERVER_OVERHEAD) if self._size else left // 2
        return room - credit, min(left, max(guess, self._size + _SERVER_OVERHEAD))

    async def request(self, number: int, max_bytes: int, *, no_wait: bool = False) -> bytes:
        """Request `number` messages; returns the reply subject, empty while the connection is down.

        :param no_wait: the server answers at once, with a status if it has no message; bytes are unbounded.
        """
        connection = self._connection
        if not connection.connected:
            return b""
        reply = await self._reply_subject()
        self.open[reply] = [number, 0 if no_wait else max_bytes]
        self.last_heard = monotonic()
        await self._send(reply, pull_request(connection, number, max_bytes, no_wait=no_wait))
        return reply

    def end(self, subject: bytes, *, too_large: bool) -> None:
        """The server ended a request.

        :param too_large: the next message has more bytes than the request had left.
        """
        pull = self.open.pop(subject, None)
        if pull is not None and too_large:
            self._too_small = max(self._too_small, pull[1], 1)

    async def drain(self) -> None:
        """Receive what the server has sent, then cancel: a message sent to a cancelled pull waits for its lease."""
        try:
            if self.credit > 0 and self._listener is not None and self._connection.connected:
                # The server answers this request at once, after everything that it sent for the others.
                last = await self.request(1, 0, no_wait=True)
                for _ in range(_DRAIN_POLLS):
                    pull = self.open.get(last)
                    if pull is None or pull[0] <= 0:
                        break
                    await asyncio.sleep(_DRAIN_INTERVAL)
        finally:
            # Also when the caller gives up: the connection would keep the listener.
            await self.cancel()


class OrderedPulls(_Pulls):
    """The pulls of one partition of a followed log."""

    async def request(self, number: int, max_bytes: int) -> None:
        """Request `number` records; `max_bytes` is raised to the largest possible record."""
        reply = await self._reply_subject()
        # A bound below the largest record would block that record for ever.
        enough = max(max_bytes, self._connection.max_payload) + _MAX_HEADERS
        self.open[reply] = [number, enough]
        self.last_heard = monotonic()
        await self._send(reply, pull_request(self._connection, number, enough))

    def arrived(self) -> None:
        """A record came; the server serves requests in their order, and a record does not name its request."""
        self.last_heard = monotonic()
        for pull in self.open.values():
            if pull[0] > 0:
                pull[0] -= 1
                return

    def end(self, subject: bytes) -> None:
        """The server ended a request."""
        self.open.pop(subject, None)


class PinnedPulls(_Pulls):
    """The pulls of one partition of a record group, which the server pins to one client."""

    def __init__(self, connection: Connection, layout: Layout, consumer: str, arrived: RawHandler) -> None:
        super().__init__(connection, layout, consumer, arrived)
        self._keep_alives: dict[bytes, float] = {}

    async def request(self, number: int, max_bytes: int, pin: bytes) -> None:
        """Request `number` records; with a pin, only as the pinned client."""
        reply = await self._reply_subject()
        # A bound below the largest record would block that record for ever.
        enough = max(max_bytes, self._connection.max_payload) + _MAX_HEADERS
        self.open[reply] = [number, enough]
        self.last_heard = monotonic()
        await self._send_pinned(reply, pull_request(self._connection, number, enough), pin)

    async def keep_alive(self, pin: bytes) -> None:
        """Keep the pin alive by a pull that no message fits into; see `keep_alive_sent`."""
        if self._listener is not None:
            reply = await self._reply_subject()
            self._keep_alives[reply] = monotonic()
            await self._send_pinned(reply, {"batch": 1, "max_bytes": 1, "no_wait": True}, pin)

    async def _send_pinned(self, reply: bytes, body: dict[str, Any], pin: bytes) -> None:
        body["group"] = GROUP
        if pin:
            body["id"] = pin.decode()
        await self._send(reply, body)

    def keep_alive_sent(self, subject: bytes) -> float | None:
        """When the keep-alive that a status answers was sent; None for the status of a request."""
        return self._keep_alives.pop(subject, None)

    def end(self, subject: bytes) -> None:
        """The server ended a request."""
        self.open.pop(subject, None)

    async def cancel(self) -> None:
        self._keep_alives.clear()
        await super().cancel()
