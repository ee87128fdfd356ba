"""The open pulls of one partition, on an inbox of their own.

Sending is awaited, everything else returns at once; while the connection is down nothing is sent and nothing is open.
`close` drops the inbox, and the server forgets pulls that nobody listens to.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import msgspec

from broker import ConnectionFailed
from broker_jetstream.connection import Connection, Listening
from broker_jetstream.consumers import GROUP, pull_request
from broker_jetstream.fastpath import Outgoing, RawHandler
from broker_jetstream.headers import PENDING, header
from broker_jetstream.layout import Layout

__all__ = ["Pulls"]


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
