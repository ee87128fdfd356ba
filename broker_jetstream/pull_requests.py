"""The open pulls of one subscription: what was asked of the server and has not come.

Each pull is told apart by the subject that answers it, so that what ends unused is known exactly, in messages and in
bytes, and never asked for twice. Sending is awaited, everything else returns at once. While the connection is down
nothing is asked; `drop` forgets what a broken one swallowed.

MERGED broker_jetstream.pull_requests: The open pulls of one partition, on an inbox of their own.

Sending is awaited, everything else returns at once; while the connection is down nothing is sent and nothing is open.
`close` drops the inbox, and the server forgets pulls that nobody listens to.
"""

from __future__ import annotations

import asyncio
import time
from itertools import count
from time import monotonic
from typing import Any, Final

import msgspec

from broker import BrokerError, ConnectionFailed
from broker_jetstream.codec import PENDING, header
from broker_jetstream.connection import Connection, Listening
from broker_jetstream.streams import Layout
from broker_jetstream.subscriptions import GROUP, pull_request
from broker_jetstream.transport import Outgoing, RawHandler

__all__ = ["Asking", "Pulls"]


_FULLER: Final = 4
"""How much larger than the last ones the next messages may be before a pull ends early."""
_SERVERS_BYTES: Final = 256
"""About what the server counts of a message besides body and headers: its subjects."""
_LARGEST: Final = 65_536
"""What headers may add to a body of the largest size."""
_ANSWER_STEPS: Final = 250
"""How often the answer to the last pull is looked for."""
_ANSWER_STEP: Final = 0.001


class Asking:
    """Asks for the messages of one consumer; what `arrived` is called with counts by `open`."""

    def __init__(self, connection: Connection, layout: Layout, consumer: str, arrived: RawHandler) -> None:
        self.open: dict[bytes, list[int]] = {}
        """By the subject of the answers: the messages and, at most, the bytes that are to come."""
        self.heard = 0.0
        """When the server was last heard of, or asked."""
        self.given_up = 0
        """How many were given up that may still have been sent, since something came last."""
        self._connection = connection
        self._arrived = arrived
        self._subject = connection.api_subject(f"CONSUMER.MSG.NEXT.{layout.stream}.{consumer}").encode()
        self._listening: Listening | None = None
        self._inbox = b""
        self._numbers = count(1)
        self._size = 0
        self._refused = 0

    @property
    def credit(self) -> int:
        """How many messages were asked for and have not come."""
        if not self.open:
            return 0
        for subject in [subject for subject, pull in self.open.items() if pull[0] <= 0]:
            del self.open[subject]
        return sum([pull[0] for pull in self.open.values()])

    def took(self, number: int, size: int) -> None:
        """So many messages of so many bytes in all have come and were taken."""
        self._size = size // number
        self._refused = 0

    def want(self, room: int, byte_room: int, *, holding: bool) -> tuple[int, int]:
        """How many messages and bytes to ask for now, so that no more comes than there is room for.

        :param holding: messages are there to be taken; else the next one may exceed the bytes.
        """
        credit = self.credit
        if room <= 0 or credit * 2 > room:
            return 0, 0
        left = byte_room - sum([max(pull[1], 0) for pull in self.open.values()])
        if self._refused or left <= self._size + _SERVERS_BYTES:
            # The next message is larger than what was allowed: everything, then it alone.
            if credit or holding:
                return 0, 0
            if left <= max(self._refused, self._size + _SERVERS_BYTES):
                return 1, self._connection.max_payload + _LARGEST
            return room, left
        guess = _FULLER * (room - credit) * (self._size + _SERVERS_BYTES) if self._size else left // 2
        return room - credit, min(left, max(guess, self._size + _SERVERS_BYTES))

    async def ask(self, number: int, max_bytes: int, *, no_wait: bool = False) -> bytes:
        """Ask for so many messages; the subject that answers, in `open` until all is answered.

        :param no_wait: have it answered at once, with a status if there is nothing; bytes are not bounded then.
        """
        connection = self._connection
        if not connection.connected:
            return b""
        if self._listening is None:
            self._inbox = connection.pull_inbox().encode()
            self._listening = await connection.listen(f"{self._inbox.decode()}.*", self._arrived)
        reply = b"%b.%d" % (self._inbox, next(self._numbers))
        self.open[reply] = [number, 0 if no_wait else max_bytes]
        self.heard = monotonic()
        request = msgspec.json.encode(pull_request(connection, number, max_bytes, no_wait=no_wait))
        try:
            await connection.send((Outgoing(self._subject, reply, b"", request),))
        except BrokerError as error:
            self.drop()
            if not isinstance(error, ConnectionFailed):
                raise
        return reply

    def ended(self, subject: bytes, *, too_large: bool) -> None:
        """The server says that nothing more comes for this pull.

        :param too_large: because the next message has more bytes than were left.
        """
        pull = self.open.pop(subject, None)
        if pull is not None and too_large:
            self._refused = max(self._refused, pull[1], 1)

    def is_mine(self, subject: bytes) -> bool:
        """Whether a status came to this inbox, and not to one that was dropped."""
        return subject.startswith(self._inbox)

    @property
    def patience(self) -> float:
        """Seconds in which two heartbeats of the server would have come."""
        return self._connection.settings.pull_heartbeat * 2.5

    def drop(self) -> None:
        """What was asked for does not come; if some of it does, it counts for nothing."""
        self.given_up += self.credit
        self.open.clear()

    async def let_go(self) -> None:
        """Have the open pulls answered, then drop them: what is sent to a dropped one waits for its lease to end."""
        if self.credit > 0 and self._listening is not None and self._connection.connected:
            # The server answers this pull at once, with a message or a status, behind all that it sent for the others.
            last = await self.ask(1, 0, no_wait=True)
            for _ in range(_ANSWER_STEPS):
                pull = self.open.get(last)
                if pull is None or pull[0] <= 0:
                    break
                await asyncio.sleep(_ANSWER_STEP)
        await self.renew()

    async def renew(self) -> None:
        """Let go of all open pulls: the server forgets a pull whose subject nobody listens to."""
        listening, self._listening = self._listening, None
        self.drop()
        if listening is not None:
            await listening.close()


class Pulls:
    """Asks for the records of a pinned durable, and says that we are there."""

    def __init__(self, connection: Connection, layout: Layout, consumer: str, arrived: RawHandler) -> None:
        self.credit = 0
        """How many records were asked for and have not come."""
        self.heard = time.monotonic()
        """When the server was last heard of on the inbox."""
        self._connection = connection
        self._arrived = arrived
        self._subject = connection.api_subject(f"CONSUMER.MSG.NEXT.{layout.stream}.{consumer}").encode()
        self._listening: Listening | None = None
        self._inbox = b"-"
        self._numbers = count(1)
        self._asked: dict[bytes, float] = {}

    async def ask(self, number: int, max_bytes: int, pin: bytes) -> None:
        """Ask for so many records; with a pin only as the one who is pinned."""
        if self._listening is None:
            self._inbox = self._connection.pull_inbox().encode()
            self._listening = await self._connection.listen(f"{self._inbox.decode()}.*", self._arrived)
        self.credit += number
        # Never less than one record of the largest size, which a smaller bound would hold up for ever.
        enough = max(max_bytes, self._connection.max_payload) + 65_536
        await self._send(pull_request(self._connection, number, enough), b"p%d" % next(self._numbers), pin)

    async def stay(self, pin: bytes) -> None:
        """Keep the pin alive by a pull that takes nothing; `kept` tells its answer."""
        if self._listening is not None:
            token = b"k%d" % next(self._numbers)
            self._asked[token] = time.monotonic()
            # No message fits into one byte.
            await self._send({"batch": 1, "max_bytes": 1, "no_wait": True}, token, pin)

    async def _send(self, body: dict[str, Any], token: bytes, pin: bytes) -> None:
        body["group"] = GROUP
        if pin:
            body["id"] = pin.decode()
        line = Outgoing(self._subject, b"%b.%b" % (self._inbox, token), b"", msgspec.json.encode(body))
        try:
            await self._connection.send((line,))
        except ConnectionFailed:
            self.credit = 0

    def is_mine(self, subject: bytes) -> bool:
        """Whether a status came to this inbox, and not to one that was dropped."""
        return subject.startswith(self._inbox)

    def kept(self, subject: bytes) -> float | None:
        """When the `stay` that a status answers was sent; None for the status of another pull."""
        token = subject[len(self._inbox) + 1 :]
        return self._asked.pop(token, 0.0) if token.startswith(b"k") else None

    def ended(self, block: bytes) -> None:
        """A pull is over: what it did not bring is not on its way any more."""
        unused = header(block, PENDING)
        self.credit = max(0, self.credit - int(unused)) if unused is not None and unused.isdigit() else 0

    def are_silent(self) -> bool:
        """Whether two heartbeats were missed, so that the pulls must be gone."""
        patience = self._connection.settings.pull_heartbeat * 2.5
        return bool(self.credit) and time.monotonic() - self.heard > patience

    async def close(self) -> None:
        """Drop all open pulls; the next `ask` begins anew."""
        listening, self._listening = self._listening, None
        self._inbox = b"-"
        self.credit = 0
        self._asked.clear()
        if listening is not None:
            await listening.close()
