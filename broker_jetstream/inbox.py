"""Answers to many requests at once, on the connection's one inbox.

A `Replies` waits for a fixed number of answers, identified by their index in the reply subject. Everything runs on the
event loop; the handler of the inbox never raises. A wait may be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Final

from broker.driver import Waker
from broker_jetstream.codec import status_of

__all__ = ["Inbox", "Replies"]

NO_RESPONDERS: Final = 503
GIVEN_UP: Final = (b"", b"")
"""Stands for an answer that is no longer awaited."""


class Replies:
    """The answers to one batch of messages."""

    __slots__ = ("_inbox", "_waker", "answers", "missing", "on_no_responders", "prefix", "subjects", "unserved")

    def __init__(self, inbox: Inbox, prefix: bytes, number: int, subjects: frozenset[bytes]) -> None:
        self._inbox = inbox
        self._waker = Waker()
        self.prefix = prefix
        self.answers: list[tuple[bytes, bytes] | None] = [None] * number
        """Header block and body of each answer; None until it arrives."""
        self.missing = number
        self.subjects = subjects
        self.on_no_responders: Callable[[], None] | None = None
        """If set, called on status 503 (no responders), which is then no answer: `unserved` gets the index."""
        self.unserved: set[int] = set()

    def subject(self, index: int) -> bytes:
        """The reply subject of message `index`."""
        return b"%b.%d" % (self.prefix, index)

    def arrived(self, index: int, block: bytes, data: bytes) -> None:
        answers = self.answers
        if 0 <= index < len(answers) and answers[index] is None:
            if not data and self.on_no_responders is not None and status_of(block)[0] == NO_RESPONDERS:
                self.unserved.add(index)
                self.on_no_responders()
                self.wake()
                self._inbox.notify()
                return
            answers[index] = (block, data)
            self.missing -= 1
            self._inbox.progress(self)

    def give_up(self, index: int) -> None:
        """Stop waiting for the answer to one message."""
        self.unserved.discard(index)
        if self.answers[index] is None:
            self.answers[index] = GIVEN_UP
            self.missing -= 1
            self._inbox.progress(self)

    def set_missing(self, missing: int) -> None:
        """Expect only `missing` further answers."""
        self.missing = missing

    def wake(self) -> None:
        self._waker.wake()

    async def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all answers or a call of `wake`; returns whether all have arrived."""
        if self.missing and timeout > 0:
            await self._waker.wait(timeout)
        return not self.missing

    def close(self) -> None:
        self._inbox.forget(self)


class Inbox:
    """One subject prefix under which all answers of a connection arrive."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()
        self._numbers = count(1)
        self._waiting: dict[bytes, Replies] = {}
        self._tick: asyncio.Future[None] | None = None

    @property
    def pattern(self) -> str:
        return f"{self.prefix.decode()}.*.*"

    def expect(self, number: int, subjects: frozenset[bytes] = frozenset()) -> Replies:
        """Await `number` answers; call `close` on the result when done.

        :param subjects: subjects of the requests, to match permission errors of the server.
        """
        replies = Replies(self, b"%b.%d" % (self.prefix, next(self._numbers)), number, subjects)
        self._waiting[replies.prefix] = replies
        return replies

    def handle(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        head, _, index = subject.rpartition(b".")
        replies = self._waiting.get(head)
        if replies is not None and index.isdigit():
            replies.arrived(int(index), block, data)

    def progress(self, replies: Replies) -> None:
        if self._tick is not None:
            self.notify()
        if not replies.missing:
            replies.wake()

    def notify(self) -> None:
        """Wake the callers of `next_answer`."""
        if self._tick is not None:
            if not self._tick.done():
                self._tick.set_result(None)
            self._tick = None

    async def next_answer(self, timeout: float) -> None:
        """Wait until any answer arrives or the connection changes, at most `timeout` seconds."""
        tick = self._tick
        if tick is None:
            tick = self._tick = asyncio.get_running_loop().create_future()
        await asyncio.wait((tick,), timeout=timeout)

    def wake_all(self) -> None:
        """Make every waiter check the connection."""
        for replies in tuple(self._waiting.values()):
            replies.wake()
        self.notify()

    def refuse(self, subject: bytes) -> None:
        """The server denied publishing to a subject: answer its requests with status 403."""
        for replies in tuple(self._waiting.values()):
            if any(sent.lower() == subject for sent in replies.subjects):
                for index, answer in enumerate(replies.answers):
                    if answer is None:
                        replies.arrived(index, REFUSED, b"")

    def forget(self, replies: Replies) -> None:
        self._waiting.pop(replies.prefix, None)


REFUSED: Final = b"NATS/1.0 403 Permissions Violation\r\n\r\n"
"""Header block that stands for a permission error, which the server sends outside of the inbox."""
