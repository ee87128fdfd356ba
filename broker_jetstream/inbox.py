"""Answers to many requests at once, on the connection's one inbox.

A `Replies` waits for a fixed number of answers, identified by their index in the reply subject, until its `with` block
ends. Everything runs on the event loop; the handler of the inbox never raises. A wait may be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Final, Self

from broker.driver import Waker
from broker_jetstream.codec import status_of

__all__ = ["Inbox", "Replies"]

NO_RESPONDERS: Final = 503


class Replies:
    """The answers to one batch of messages."""

    __slots__ = ("_inbox", "answers", "missing", "on_no_responders", "prefix", "subjects", "unserved", "waker")

    def __init__(self, inbox: Inbox, prefix: bytes, number: int, subjects: frozenset[bytes]) -> None:
        self._inbox = inbox
        self.waker = Waker()
        """Ends a `wait` early."""
        self.prefix = prefix
        self.answers: list[tuple[bytes, bytes] | None] = [None] * number
        """Header block and body of each answer; None until it arrives."""
        self.missing = number
        """How many answers are still awaited; a caller that sends fewer messages lowers it."""
        self.subjects = subjects
        self.on_no_responders: Callable[[], None] | None = None
        """If set, called on status 503 (no responders), which is then no answer: `unserved` gets the index."""
        self.unserved: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.waiting.pop(self.prefix, None)

    def subject(self, index: int) -> bytes:
        """The reply subject of message `index`."""
        return b"%b.%d" % (self.prefix, index)

    def arrived(self, index: int, block: bytes, data: bytes) -> None:
        answers = self.answers
        if 0 <= index < len(answers) and answers[index] is None:
            if not data and self.on_no_responders is not None and status_of(block)[0] == NO_RESPONDERS:
                self.unserved.add(index)
                self.on_no_responders()
                self.waker.wake()
            else:
                answers[index] = (block, data)
                self.missing -= 1
                if not self.missing:
                    self.waker.wake()
            if self._inbox.any_answer is not None:
                self._inbox.notify()

    def give_up(self, index: int) -> None:
        """Stop waiting for the answer to one message; an empty answer takes its place."""
        self.unserved.discard(index)
        self.arrived(index, b"", b"")

    async def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all answers or a call of `waker`; returns whether all have arrived."""
        if self.missing and timeout > 0:
            await self.waker.wait(timeout)
        return not self.missing


class Inbox:
    """One subject prefix under which all answers of a connection arrive."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()
        self._numbers = count(1)
        self.waiting: dict[bytes, Replies] = {}
        """By prefix of the reply subjects."""
        self.any_answer: asyncio.Future[None] | None = None
        """Set while a task waits in `next_answer`."""

    @property
    def pattern(self) -> str:
        return f"{self.prefix.decode()}.*.*"

    def expect(self, number: int, subjects: frozenset[bytes] = frozenset()) -> Replies:
        """Await `number` answers, within the `with` block of the result.

        :param subjects: subjects of the requests, to match permission errors of the server.
        """
        replies = Replies(self, b"%b.%d" % (self.prefix, next(self._numbers)), number, subjects)
        self.waiting[replies.prefix] = replies
        return replies

    def handle(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        head, _, index = subject.rpartition(b".")
        replies = self.waiting.get(head)
        if replies is not None and index.isdigit():
            replies.arrived(int(index), block, data)

    def notify(self) -> None:
        """Wake the callers of `next_answer`."""
        if self.any_answer is not None:
            if not self.any_answer.done():
                self.any_answer.set_result(None)
            self.any_answer = None

    async def next_answer(self, timeout: float) -> None:
        """Wait until any answer arrives or the connection changes, at most `timeout` seconds."""
        if self.any_answer is None:
            self.any_answer = asyncio.get_running_loop().create_future()
        await asyncio.wait((self.any_answer,), timeout=timeout)

    def wake_all(self) -> None:
        """Make every waiter check the connection."""
        for replies in tuple(self.waiting.values()):
            replies.waker.wake()
        self.notify()

    def refuse(self, subject: bytes) -> None:
        """The server denied publishing to a subject: answer its requests with status 403."""
        for replies in tuple(self.waiting.values()):
            if any(sent.lower() == subject for sent in replies.subjects):
                for index, answer in enumerate(replies.answers):
                    if answer is None:
                        replies.arrived(index, REFUSED, b"")


REFUSED: Final = b"NATS/1.0 403 Permissions Violation\r\n\r\n"
"""Header block that stands for a permission error, which the server sends outside of the inbox."""
