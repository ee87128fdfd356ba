"""What was written to a topic and is not confirmed yet: the writing order, and sending again without breaking it.

One writer at a time. It writes nothing new while the connection is down or nobody takes the topic's messages (status
503: the stream has no leader, or is gone): first all that stayed unconfirmed is sent again in its original order
under its ids, and of that the oldest message alone until it is confirmed, so that the stream cannot come back between
two messages of a key. Messages that were under way when the first refusal came may have been stored although an
earlier one of their key was refused; that one then fails, since sending it again would put it out of order, and so
does one that the server dropped without a word. Waiting may be cancelled; the batch then counts as left, and whoever
waits next goes on with the rest.

MERGED broker_jetstream.in_flight: The messages of one call to publish on their way, and the stream's answers to them. No I/O.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from broker import BrokerError, ConnectionFailed, OperationTimeout, OutboundMessage
from broker_jetstream.connection import Connection
from broker_jetstream.inbox import Replies
from broker_jetstream.streams import Layout, Layouts
from broker_jetstream.transport import Outgoing

__all__ = ["Batch", "InFlight", "decode_ack"]


CHUNK: Final = 500
CHUNK_BYTES: Final = 1024 * 1024
_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.2


class InFlight:
    """The batches of one topic, oldest first.

    :param renew: encode one message of a batch anew, for a topic that was made anew.
    """

    def __init__(
        self, topic: str, connection: Connection, layouts: Layouts, renew: Callable[[Batch, int], None]
    ) -> None:
        self._topic = topic
        self._connection = connection
        self._layouts = layouts
        self._renew = renew
        self._batches: deque[Batch] = deque()
        """Those that were left stay behind older ones: they tell whom they overtook."""
        self.writing = asyncio.Lock()
        """The place in the writing order; `write` wants it held."""
        self._epoch = connection.epoch
        self._written = 0
        """Of the calls that wait: answered or not."""
        self._refused = False
        """Somebody's message found nobody, and has not been sent again."""
        self._unproven = False
        """Whether the stream takes messages over this connection is not known."""

    def nobody_there(self) -> None:
        """A message found nobody: from now on nothing new is written until the stream is back."""
        self._refused = True

    def leave(self, batch: Batch) -> None:
        """Its caller waits no more."""
        batch.left = True
        self._written -= batch.written
        if not self._refused:
            self._forget()
            return
        self._review()
        self._connection.inbox.stir()

    def unconfirmed(self, batch: Batch, position: int) -> BrokerError | None:
        """Why a message without an answer was certainly not stored; None if it may have been."""
        if position in batch.replies.absent or (position >= batch.written and self._refused):
            return ConnectionFailed(
                f"Nobody answered for topic {self._topic!r}", advice="Its stream has no leader; publish it again"
            )
        if position >= batch.written and not self._connection.connected:
            return self._connection.broken()
        return None

    async def write(self, batch: Batch, deadline: float) -> None:
        """Write a batch, chunk by chunk, as far as the window and the connection let it until the deadline."""
        connection, window = self._connection, self._connection.settings.publish_window
        items, most = batch.items, min(CHUNK, window)
        self._batches.append(batch)
        try:
            while batch.written < len(items):
                if self._is_behind:
                    await self._catch_up(deadline)
                chunk = _chunk(items, batch.written, 1 if self._unproven else most)
                if self._written + len(chunk) > window and self._unanswered + len(chunk) > window:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return
                    await connection.inbox.next_answer(min(left, 1.0))
                    connection.check_open()
                    continue
                if not await self._send(chunk):
                    batch.replies.absent.difference_update(range(batch.written, batch.written + len(chunk)))
                    continue
                batch.written += len(chunk)
                self._written += len(chunk)
                batch.sent_at = time.monotonic()
                if self._unproven:
                    await self._all_told(deadline)
                    self._unproven = self._is_behind
        except ConnectionFailed:
            return

    async def wait(self, batch: Batch, deadline: float) -> None:
        """Wait for the answers to what was written; returns at the deadline with what has come."""
        replies, resend = batch.replies, self._connection.settings.publish_resend
        unwritten = len(batch.items) - batch.written
        try:
            while replies.missing > unwritten and (left := deadline - time.monotonic()) > 0:
                if not self._refused:
                    await replies.wait(min(left, resend))
                self._connection.check_open()
                if replies.missing > unwritten and (left := deadline - time.monotonic()) > 0:
                    async with asyncio.timeout(left):
                        await self.writing.acquire()
                    try:
                        await self._repeat(batch, deadline)
                    finally:
                        self.writing.release()
        except (ConnectionFailed, TimeoutError):
            return

    async def _repeat(self, batch: Batch, deadline: float) -> None:
        if self._is_behind:
            await self._catch_up(deadline)
        elif batch.replies.missing and time.monotonic() - batch.sent_at >= self._connection.settings.publish_resend:
            await self._all_told(deadline, behind=batch)
            self._give_up_overtaken()
            await self._send_again(batch)

    @property
    def _unanswered(self) -> int:
        return sum(each.unanswered for each in self._batches)

    @property
    def _is_behind(self) -> bool:
        connection = self._connection
        return self._refused or self._epoch != connection.epoch or not connection.connected

    async def _catch_up(self, deadline: float) -> None:
        """Wait for connection and stream, and send again what they may have swallowed, oldest first.

        :raises ConnectionFailed: they did not come back until the deadline.
        """
        connection, pause = self._connection, _PAUSE
        try:
            while self._is_behind:
                await connection.wait_connected(deadline - time.monotonic())
                epoch = connection.epoch
                if epoch != self._epoch:
                    self._unproven = True
                    self._give_up_overtaken()
                if await self._is_there(deadline) and await self._probe(deadline) and await self._is_there(deadline):
                    self._refused = False
                    if all([await self._send_again(each) for each in tuple(self._batches)]):
                        self._epoch = epoch
                    self._review()
                elif self._is_behind and connection.connected:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise ConnectionFailed(f"Nobody answered for topic {self._topic!r}")
                    await asyncio.sleep(min(pause, left))
                    pause = min(pause * 2, _LONGEST_PAUSE)
        finally:
            if self._is_behind:
                # Another of those who wait goes on.
                for each in self._batches:
                    each.replies.wake()

    async def _is_there(self, deadline: float) -> bool:
        """Asked before the probe and after it, since the topic may have been made anew between."""
        return not self._refused or await self._look_again(deadline)

    async def _look_again(self, deadline: float) -> bool:
        """Once all answers to what was written are there, give up what was overtaken; whether the stream is there."""
        if self._epoch == self._connection.epoch:
            await self._all_told(deadline)
        self._give_up_overtaken()
        self._layouts.forget(self._topic)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                layout = await self._layouts.find(self._topic)
        except TimeoutError:
            return False
        except BrokerError as error:
            if not error.retriable:
                self._give_up_refused(error)
            return False
        for batch in self._batches:
            if batch.layout != layout:
                batch.layout = layout
                for position in batch.open:
                    self._renew(batch, position)
        return True

    async def _all_told(self, deadline: float, *, behind: Batch | None = None) -> None:
        """Wait until all that was written has its answer, be it that of nobody, or the connection breaks.

        :param behind: only what was written behind this one.
        """
        connection, epoch = self._connection, self._connection.epoch
        deadline = min(deadline, time.monotonic() + connection.settings.publish_resend)
        written = list(self._batches)
        if behind is not None:
            written = written[written.index(behind) + 1 :]
        while any(len(each.replies.absent) < each.unanswered for each in written):
            left = deadline - time.monotonic()
            if left <= 0 or connection.epoch != epoch or not connection.connected:
                return
            await connection.inbox.next_answer(left)

    def _give_up_overtaken(self) -> None:
        """Messages that are not stored, or not told to be in time, although a later one of their key is."""
        overdue = time.monotonic() - self._resend
        # By the public calls nats-py writes after a reconnect what it kept, and only sending again brings the rest.
        cut = self._epoch != self._connection.epoch and self._connection.joins
        stored: set[bytes] = set()
        for batch in reversed(self._batches):
            replies = batch.replies
            for position in range(batch.written - 1, -1, -1):
                key = batch.messages[batch.indexes[position]].key
                if key is None or batch.partitions[position] < 0:
                    continue
                if replies.answers[position] is not None:
                    if key not in stored and batch.is_stored(position):
                        stored.add(key)
                elif key in stored and not batch.left:
                    if position in replies.absent:
                        batch.give_up(position, ConnectionFailed(f"Nobody answered for {self._behind_another}"))
                    elif cut or batch.sent_at <= overdue:
                        batch.give_up(
                            position, OperationTimeout(f"The server lost a message of {self._behind_another}")
                        )

    @property
    def _behind_another(self) -> str:
        return (
            f"topic {self._topic!r}, and stored a later one of the key: "
            "it was not sent again, since it would be out of order"
        )

    def _give_up_refused(self, error: BrokerError) -> None:
        for batch in self._batches:
            for position in sorted(batch.replies.absent):
                batch.give_up(position, error)
        self._review()

    def _review(self) -> None:
        """Whether somebody still found nobody; if not, forget what is over."""
        if self._refused:
            self._refused = any(batch.replies.absent for batch in self._batches if not batch.left)
        if not self._refused:
            self._forget()

    def _forget(self) -> None:
        """Forget what is over and overtook nobody."""
        while self._batches and self._batches[0].left:
            self._batches.popleft()

    async def _probe(self, deadline: float) -> bool:
        """Send the oldest unconfirmed message alone; whether it was confirmed, or there is none."""
        found = next(((batch, positions[0]) for batch in self._batches if (positions := batch.open)), None)
        if found is None:
            return True
        batch, position = found
        replies = batch.replies
        replies.absent.discard(position)
        batch.again = True
        batch.sent_at = time.monotonic()
        if not await self._send([batch.items[position]]):
            return False
        epoch, deadline = self._connection.epoch, min(deadline, time.monotonic() + self._resend)
        while replies.answers[position] is None and position not in replies.absent and not batch.left:
            left = deadline - time.monotonic()
            if left <= 0 or self._connection.epoch != epoch or not self._connection.connected:
                return False
            await self._connection.inbox.next_answer(left)
        if replies.answers[position] is None:
            return False
        self._unproven = False
        return True

    @property
    def _resend(self) -> float:
        return self._connection.settings.publish_resend

    async def _send_again(self, batch: Batch) -> bool:
        """Write again what has no answer; False if the connection broke first."""
        lost = batch.open
        if not lost:
            return True
        batch.again = True
        batch.sent_at = time.monotonic()
        batch.replies.absent.difference_update(lost)
        items = [batch.items[each] for each in lost]
        while items:
            chunk = _chunk(items, 0, CHUNK)
            if not await self._send(chunk):
                return False
            items = items[len(chunk) :]
        return True

    async def _send(self, chunk: list[Outgoing]) -> bool:
        """Write; False if the connection broke first."""
        try:
            await self._connection.send(chunk)
        except ConnectionFailed:
            await asyncio.sleep(0)  # let the connection learn of it
            return False
        return True


def _chunk(items: list[Outgoing], start: int, most: int) -> list[Outgoing]:
    """What is written together from a place on: bounded in number and in bytes."""
    size = 0
    for end, item in enumerate(items[start : start + most], start + 1):
        size += len(item.data) + len(item.block)
        if size >= CHUNK_BYTES:
            return items[start:end]
    return items[start : start + most]


class PublishAck(msgspec.Struct, gc=False):
    """The stream's answer to a message."""

    seq: int = 0
    duplicate: bool = False
    error: dict[str, Any] | None = None


decode_ack: Final = msgspec.json.Decoder(PublishAck).decode


class Batch:
    """The messages of one call, as they are written.

    :ivar indexes: which of the call's messages are in it; those that cannot be sent are not.
    :ivar partitions: partition of each; -1 - partition for one that waits for its time.
    :ivar written: how many of `items` were written.
    :ivar again: some were written more than once.
    :ivar left: its caller waits no more.
    :ivar errors: by position, why a message is not sent any more.
    """

    __slots__ = (
        "again",
        "errors",
        "ids",
        "indexes",
        "items",
        "layout",
        "left",
        "messages",
        "partitions",
        "replies",
        "sent_at",
        "written",
    )

    def __init__(self, messages: Sequence[OutboundMessage], ids: list[bytes], layout: Layout, replies: Replies) -> None:
        self.messages = messages
        self.ids = ids
        self.layout = layout
        self.replies = replies
        self.items: list[Outgoing] = []
        self.indexes: list[int] = []
        self.partitions: list[int] = []
        self.written = 0
        self.sent_at = 0.0
        self.again = False
        self.left = False
        self.errors: dict[int, BrokerError] = {}

    @property
    def unanswered(self) -> int:
        return 0 if self.left else self.written - (len(self.items) - self.replies.missing)

    @property
    def open(self) -> list[int]:
        """The positions that were written and have no answer, or that of nobody."""
        if self.left:
            return []
        return [position for position, answer in enumerate(self.replies.answers[: self.written]) if answer is None]

    def give_up(self, position: int, error: BrokerError) -> None:
        """Send this one no more."""
        self.errors[position] = error
        self.replies.give_up(position)

    def is_stored(self, position: int) -> bool:
        """Whether the answer says that this copy of the message is in the stream."""
        answer = self.replies.answers[position]
        if answer is None or not answer[1]:
            return False
        ack = decode_ack(answer[1])
        return ack.error is None and (self.again or not ack.duplicate)
