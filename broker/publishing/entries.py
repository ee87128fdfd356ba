"""What is on its way through a publishing pipeline. Everything on one event loop.

Most messages leave with those that were let in beside them, and all of these are published: such a burst is two lists,
and a message has an entry of its own only where something sets it apart.
"""

from __future__ import annotations

import asyncio

import msgspec

from broker.driver.limits import message_size
from broker.errors import BrokerError
from broker.outbound import OutboundMessage
from broker.receipts import Receipt

__all__ = ["Burst", "Caller", "Entry", "is_unseen"]


class Entry(msgspec.Struct, eq=False, gc=False):
    """A message that was let in."""

    message: OutboundMessage
    size: int
    future: asyncio.Future[Receipt]
    done: bool = False
    error: BrokerError | None = None
    """Why it was not published the last time it was tried."""


class Caller(msgspec.Struct, eq=False):
    """Who waits to be let in."""

    message: OutboundMessage
    size: int
    future: asyncio.Future[Receipt]
    admitted: asyncio.Future[None]


class Burst:
    """Messages that leave together, or did until something set them apart.

    :ivar size: bytes of all of them.
    :ivar entries: None as long as all have the same fate.
    """

    __slots__ = ("_done", "entries", "futures", "messages", "size")

    def __init__(self, messages: list[OutboundMessage], futures: list[asyncio.Future[Receipt]], size: int = 0) -> None:
        self.messages = messages
        self.futures = futures
        self.size = size
        self.entries: list[Entry] | None = None
        self._done = False

    @classmethod
    def of(cls, entries: list[Entry]) -> Burst:
        """Messages that something has set apart, and that leave together."""
        burst = cls([entry.message for entry in entries], [entry.future for entry in entries])
        burst.entries = entries
        return burst

    def apart(self) -> list[Entry]:
        """An entry for each message."""
        if self.entries is None:
            self.entries = [
                Entry(message, message_size(message), future, self._done)
                for message, future in zip(self.messages, self.futures, strict=True)
            ]
        return self.entries

    def end(self) -> None:
        """All have their outcome; to be called of what has no entries."""
        self._done = True

    @property
    def done(self) -> bool:
        """Whether each message has its outcome."""
        return self._done if self.entries is None else all(entry.done for entry in self.entries)


def is_unseen(future: asyncio.Future[Receipt]) -> bool:
    """Whether nobody has asked for the future's exception; asyncio keeps this for its own warning."""
    return future.cancelled() or bool(getattr(future, "_log_traceback", True))
