"""Answers that are awaited, many at a time, on the connection's one inbox.

A `Replies` waits for a fixed number of answers, each told apart by its index in the reply subject. All runs on
the event loop; the handler of the inbox never raises. Waiting may be cancelled; the entry is then dropped.
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
NOTHING: Final = (b"", b"")
"""Stands for the answer that is not waited for any more."""


class Replies:
    """The answers to one batch of messages."""

    __slots__ = ("_inbox", "_waker", "absent", "answers", "missing", "nobody_there", "prefix", "subjects")

    def __init__(self, inbox: Inbox, prefix: bytes, number: int, subjects: frozenset[bytes]) -> None:
        self._inbox = inbox
        self._waker = Waker()
        self.prefix = prefix
        self.answers: list[tuple[bytes, bytes] | None] = [None] * number
        """Header block and body of each answer; None until it has come."""
        self.missing = number
        self.subjects = subjects
        self.nobody_there: Callable[[], None] | None = None
        """Called when a message found nobody; if set, that is no answer, and `absent` has the indexes of such."""
        self.absent: set[int] = set()

    def subject(self, index: int) -> bytes:
        """Where the answer to message `index` is to be sent."""
        return b"%b.%d" % (self.prefix, index)

    def arrived(self, index: int, block: bytes, data: bytes) -> None:
        answers = self.answers
        if 0 <= index < len(answers) and answers[index] is None:
            if not data and self.nobody_there is not None and status_of(block)[0] == NO_RESPONDERS:
                self.absent.add(index)
                self.nobody_there()
                self.wake()
                self._inbox.stir()
                return
            answers[index] = (block, data)
            self.missing -= 1
            self._inbox.progress(self)

    def give_up(self, index: int) -> None:
        """Wait no more for the answer to one message; what it has instead is for the caller to know."""
        self.absent.discard(index)
        if self.answers[index] is None:
            self.answers[index] = NOTHING
            self.missing -= 1
            self._inbox.progress(self)

    def expect_only(self, missing: int) -> None:
        """So many are still to come; the rest was given up."""
        self.missing = missing

    def wake(self) -> None:
        self._waker.wake()

    async def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until all are there or somebody calls `wake`. Whether all are there."""
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

        :param subjects: where the questions go, so that a refusal of the server finds who asked.
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
            self.stir()
        if not replies.missing:
            replies.wake()

    def stir(self) -> None:
        """Wake who waits for the next answer."""
        if self._tick is not None:
            if not self._tick.done():
                self._tick.set_result(None)
            self._tick = None

    async def next_answer(self, timeout: float) -> None:
        """Wait until any answer comes or the connection changes, at most `timeout` seconds."""
        tick = self._tick
        if tick is None:
            tick = self._tick = asyncio.get_running_loop().create_future()
        await asyncio.wait((tick,), timeout=timeout)

    def wake_all(self) -> None:
        """Let everybody who waits look at the connection again."""
        for replies in tuple(self._waiting.values()):
            replies.wake()
        self.stir()

    def refuse(self, subject: bytes) -> None:
        """The server refused what was sent to a subject: who awaits its answer is told by an empty status line."""
        for replies in tuple(self._waiting.values()):
            if any(asked.lower() == subject for asked in replies.subjects):
                for index, answer in enumerate(replies.answers):
                    if answer is None:
                        replies.arrived(index, REFUSED, b"")

    def forget(self, replies: Replies) -> None:
        self._waiting.pop(replies.prefix, None)


REFUSED: Final = b"NATS/1.0 403 Permissions Violation\r\n\r\n"
"""The header block that stands for a refusal of the server, which it sends on another way."""
