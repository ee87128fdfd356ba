"""What is on its way through a publishing pipeline, and which message of a key has overtaken which. One event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Container, Sequence

import msgspec

from broker.errors import BrokerError
from broker.outbound import OutboundMessage
from broker.receipts import Receipt

__all__ = ["Caller", "Entry", "LaterKeys", "is_unseen", "overtaken"]


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

    entry: Entry
    admitted: asyncio.Future[None]


class LaterKeys:
    """Which keys were sent after a batch that has no answer yet, where messages of a key do not wait.

    A batch that gets no answer for long has later messages of its keys wait, so that what is kept here is bounded.

    :param hold: has later messages wait for the keys of a batch.
    :param most: so many batches may be sent after one that has no answer.
    """

    def __init__(self, hold: Callable[[int, Sequence[Entry]], None], most: int) -> None:
        self._hold = hold
        self._most = most
        self._recent: deque[tuple[int, Sequence[Entry]]] = deque()
        """From the first that has no answer on."""
        self._held: dict[int, set[bytes | None]] = {}

    def note(self, number: int, batch: Sequence[Entry], unanswered: Container[int]) -> None:
        """A batch is sent; its number is above all before."""
        recent = self._recent
        recent.append((number, batch))
        while recent[0][0] not in unanswered:
            recent.popleft()
        if len(recent) > self._most:
            earliest, entries = recent.popleft()
            self._held[earliest] = self.after(earliest)
            self._hold(earliest, entries)

    def after(self, number: int) -> set[bytes | None]:
        """The keys of messages that were sent after this batch and may have arrived."""
        if number in self._held:
            return self._held[number]
        return {entry.message.key for later, batch in self._recent if later > number for entry in batch}

    def forget(self, number: int) -> None:
        """This batch is over."""
        self._held.pop(number, None)


def overtaken(
    batch: Sequence[Entry], outcomes: Sequence[Receipt | BrokerError], later: Collection[bytes | None]
) -> set[int]:
    """The entries, by identity, that a later message of their key has overtaken.

    :param later: keys of messages that were sent after the batch.
    """
    passed: set[int] = set()
    published = set(later)
    for entry, outcome in zip(reversed(batch), reversed(outcomes), strict=True):
        key = entry.message.key
        if key is None:
            continue
        if not isinstance(outcome, BrokerError):
            published.add(key)
        elif key in published:
            passed.add(id(entry))
    return passed


def is_unseen(future: asyncio.Future[Receipt]) -> bool:
    """Whether nobody has asked for the future's exception; asyncio keeps this for its own warning."""
    return future.cancelled() or bool(getattr(future, "_log_traceback", True))
