"""Unconfirmed messages of one topic: the write order, and repetition without reordering.

*Order.* One writer at a time. While the connection is down, or no stream takes the messages (status 503: it has no
leader, or was deleted), nothing new is written. Afterwards all unconfirmed messages are repeated first, in their
original order and under their ids. The oldest one is sent alone until it is confirmed, so the stream cannot return
between two messages of a key. A message fails if a later message of its key was stored meanwhile, because a repetition
would reorder the key. *Cancellation.* A cancelled wait abandons its batch; the next waiter continues.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from broker import BrokerError, ConnectionFailed, OperationTimeout, OutboundMessage
from broker.driver import Backoff
from broker_jetstream.connection import Connection
from broker_jetstream.inbox import Replies
from broker_jetstream.streams import Layout, Layouts
from broker_jetstream.transport import Outgoing

__all__ = ["Batch", "UnconfirmedMessages", "decode_ack", "next_chunk"]


CHUNK: Final = 500
CHUNK_BYTES: Final = 1024 * 1024
_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.2


class UnconfirmedMessages:
    """The batches of one topic, oldest first.

    :param encode_again: encodes one message of a batch for a recreated topic.
    """

    def __init__(
        self, topic: str, connection: Connection, layouts: Layouts, encode_again: Callable[[Batch, int], None]
    ) -> None:
        self._topic = topic
        self._connection = connection
        self._layouts = layouts
        self._encode_again = encode_again
        self._batches: deque[Batch] = deque()
        """An abandoned batch stays until all older ones end, because it shows which of them were overtaken."""
        self.write_lock = asyncio.Lock()
        """To be held during `write`."""
        self._resend_after = connection.settings.publish_resend
        self._epoch = connection.epoch
        self._written = 0
        """Messages written by the waiting calls, answered or not."""
        self._stream_absent = False
        """A message got status 503 and has not been repeated."""
        self._unproven = False
        """No message has been confirmed over this connection yet."""

    def on_no_responders(self) -> None:
        """A message got status 503: write nothing new until the stream is back."""
        self._stream_absent = True

    def abandon(self, batch: Batch) -> None:
        """The caller stopped waiting for this batch."""
        batch.abandoned = True
        self._written -= batch.written
        if not self._stream_absent:
            self._prune()
            return
        self._update_unserved()
        self._connection.inbox.notify()

    def not_stored_error(self, batch: Batch, position: int) -> BrokerError | None:
        """The error of a message that was certainly not stored; None if it may have been stored."""
        if position in batch.replies.unserved or (position >= batch.written and self._stream_absent):
            return ConnectionFailed(
                f"No stream took messages of topic {self._topic!r}", advice="Its stream has no leader; publish again"
            )
        if position >= batch.written and not self._connection.connected:
            return self._connection.down_error()
        return None

    async def write(self, batch: Batch, deadline: float) -> None:
        """Write a batch in chunks, as the window and the connection permit, until the deadline."""
        connection, window = self._connection, self._connection.settings.publish_window
        items, most = batch.items, min(CHUNK, window)
        self._batches.append(batch)
        try:
            while batch.written < len(items):
                if self._is_behind:
                    await self._catch_up(deadline)
                chunk = next_chunk(items, batch.written, 1 if self._unproven else most)
                if (
                    self._written + len(chunk) > window
                    and sum([each.unanswered for each in self._batches]) + len(chunk) > window
                ):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return
                    await connection.inbox.next_answer(min(left, 1.0))
                    connection.check_open()
                    continue
                if not await self._send(chunk):
                    batch.replies.unserved.difference_update(range(batch.written, batch.written + len(chunk)))
                    continue
                batch.written += len(chunk)
                self._written += len(chunk)
                batch.sent_at = time.monotonic()
                if self._unproven:
                    await self._wait_answered(deadline)
                    self._unproven = self._is_behind
        except ConnectionFailed:
            return

    async def wait(self, batch: Batch, deadline: float) -> None:
        """Wait for the answers to written messages, at most until the deadline."""
        replies, unwritten = batch.replies, len(batch.items) - batch.written
        try:
            while replies.missing > unwritten and (left := deadline - time.monotonic()) > 0:
                if not self._stream_absent:
                    await replies.wait(min(left, self._resend_after))
                self._connection.check_open()
                if replies.missing > unwritten and (left := deadline - time.monotonic()) > 0:
                    async with asyncio.timeout(left):
                        await self.write_lock.acquire()
                    try:
                        await self._resend_overdue(batch, deadline)
                    finally:
                        self.write_lock.release()
        except (ConnectionFailed, TimeoutError):
            return

    async def _resend_overdue(self, batch: Batch, deadline: float) -> None:
        if self._is_behind:
            await self._catch_up(deadline)
        elif batch.replies.missing and time.monotonic() - batch.sent_at >= self._resend_after:
            await self._wait_answered(deadline, behind=batch)
            self._fail_overtaken()
            await self._send_unanswered(batch)

    @property
    def _is_behind(self) -> bool:
        connection = self._connection
        return self._stream_absent or self._epoch != connection.epoch or not connection.connected

    async def _catch_up(self, deadline: float) -> None:
        """Wait for connection and stream, then repeat unconfirmed messages, oldest first.

        :raises ConnectionFailed: they are not back at the deadline.
        """
        connection, backoff = self._connection, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        try:
            while self._is_behind:
                await connection.wait_connected(deadline - time.monotonic())
                epoch = connection.epoch
                if epoch != self._epoch:
                    self._unproven = True
                    self._fail_overtaken()
                if (
                    await self._stream_exists(deadline)
                    and await self._probe(deadline)
                    and await self._stream_exists(deadline)
                ):
                    self._stream_absent = False
                    if all([await self._send_unanswered(each) for each in tuple(self._batches)]):
                        self._epoch = epoch
                    self._update_unserved()
                elif self._is_behind and connection.connected:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise ConnectionFailed(f"No stream took messages of topic {self._topic!r}")
                    await asyncio.sleep(min(backoff.next(), left))
        finally:
            if self._is_behind:
                # Let another waiter continue.
                for each in self._batches:
                    each.replies.waker.wake()

    async def _stream_exists(self, deadline: float) -> bool:
        """Look the stream up if a message got status 503, after pending answers; fail overtaken messages.

        Called before and after the probe, because the topic may be recreated in between.
        """
        if not self._stream_absent:
            return True
        if self._epoch == self._connection.epoch:
            await self._wait_answered(deadline)
        self._fail_overtaken()
        self._layouts.forget(self._topic)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                layout = await self._layouts.find(self._topic)
        except TimeoutError:
            return False
        except BrokerError as error:
            if not error.retriable:
                self._fail_unserved(error)
            return False
        for batch in self._batches:
            if batch.layout != layout:
                batch.layout = layout
                for position in batch.open:
                    self._encode_again(batch, position)
        return True

    async def _wait_answered(self, deadline: float, *, behind: Batch | None = None) -> None:
        """Wait until every written message has an answer (or status 503), or the connection breaks.

        :param behind: wait only for messages written after this batch.
        """
        connection, epoch = self._connection, self._connection.epoch
        deadline = min(deadline, time.monotonic() + self._resend_after)
        written = list(self._batches)
        if behind is not None:
            written = written[written.index(behind) + 1 :]
        while any(len(each.replies.unserved) < each.unanswered for each in written):
            left = deadline - time.monotonic()
            if left <= 0 or connection.epoch != epoch or not connection.connected:
                return
            await connection.inbox.next_answer(left)

    def _fail_overtaken(self) -> None:
        """Fail messages that are not confirmed although a later one of their key is stored."""
        overdue = time.monotonic() - self._resend_after
        # With the public calls nats-py writes its buffer after a reconnect, so an unanswered message may still arrive.
        cut = self._epoch != self._connection.epoch and self._connection.forgets_unwritten
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
                elif key in stored and not batch.abandoned:
                    if position in replies.unserved:
                        batch.give_up(position, ConnectionFailed(f"No stream took a message of {self._overtaken_text}"))
                    elif cut or batch.sent_at <= overdue:
                        batch.give_up(
                            position, OperationTimeout(f"The server lost a message of {self._overtaken_text}")
                        )

    @property
    def _overtaken_text(self) -> str:
        return f"topic {self._topic!r}, and a later message of its key is stored: a repetition would be out of order"

    def _fail_unserved(self, error: BrokerError) -> None:
        for batch in self._batches:
            for position in sorted(batch.replies.unserved):
                batch.give_up(position, error)
        self._update_unserved()

    def _update_unserved(self) -> None:
        """Recompute `_stream_absent`; drop finished batches if the stream is back."""
        if self._stream_absent:
            self._stream_absent = any(batch.replies.unserved for batch in self._batches if not batch.abandoned)
        if not self._stream_absent:
            self._prune()

    def _prune(self) -> None:
        """Drop abandoned batches that have no older ones."""
        while self._batches and self._batches[0].abandoned:
            self._batches.popleft()

    async def _probe(self, deadline: float) -> bool:
        """Repeat the oldest unconfirmed message alone; returns True if it was confirmed, or there is none."""
        found = next(((batch, positions[0]) for batch in self._batches if (positions := batch.open)), None)
        if found is None:
            return True
        batch, position = found
        replies = batch.replies
        replies.unserved.discard(position)
        batch.resent = True
        batch.sent_at = time.monotonic()
        if not await self._send([batch.items[position]]):
            return False
        epoch, deadline = self._connection.epoch, min(deadline, time.monotonic() + self._resend_after)
        while replies.answers[position] is None and position not in replies.unserved and not batch.abandoned:
            left = deadline - time.monotonic()
            if left <= 0 or self._connection.epoch != epoch or not self._connection.connected:
                return False
            await self._connection.inbox.next_answer(left)
        if replies.answers[position] is None:
            return False
        self._unproven = False
        return True

    async def _send_unanswered(self, batch: Batch) -> bool:
        """Repeat messages without an answer; returns False if the connection broke."""
        lost = batch.open
        if not lost:
            return True
        batch.resent = True
        batch.sent_at = time.monotonic()
        batch.replies.unserved.difference_update(lost)
        items = [batch.items[each] for each in lost]
        while items:
            chunk = next_chunk(items, 0, CHUNK)
            if not await self._send(chunk):
                return False
            items = items[len(chunk) :]
        return True

    async def _send(self, chunk: list[Outgoing]) -> bool:
        """Write; returns False if the connection broke."""
        try:
            await self._connection.send(chunk)
        except ConnectionFailed:
            await asyncio.sleep(0)  # let the connection learn of it
            return False
        return True


def next_chunk(items: list[Outgoing], start: int, most: int) -> list[Outgoing]:
    """The items from `start` that are written together: bounded in number and bytes."""
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


_decode_ack: Final = msgspec.json.Decoder(PublishAck).decode


def decode_ack(data: bytes) -> PublishAck:
    """The answer to a message; with an error if it is not one, as any subscriber of the subject may answer."""
    try:
        ack = _decode_ack(data)
        if ack.seq > 0 or ack.error is not None:
            return ack
    except (msgspec.DecodeError, RecursionError):
        pass
    return PublishAck(error={"description": "the answer is not one of a stream"})


class Batch:
    """The messages of one `publish` call.

    :ivar indexes: positions in the call of the messages that can be sent.
    :ivar partitions: partition of each; -1 - partition for a scheduled message.
    :ivar written: how many of `items` were written.
    :ivar resent: some messages were written more than once.
    :ivar abandoned: the caller stopped waiting.
    :ivar errors: by position, why a message is not repeated.
    """

    __slots__ = (
        "abandoned",
        "errors",
        "ids",
        "indexes",
        "items",
        "layout",
        "messages",
        "partitions",
        "replies",
        "resent",
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
        self.resent = False
        self.abandoned = False
        self.errors: dict[int, BrokerError] = {}

    @property
    def unanswered(self) -> int:
        return 0 if self.abandoned else self.written - (len(self.items) - self.replies.missing)

    @property
    def open(self) -> list[int]:
        """Positions that were written and have no answer, or status 503."""
        if self.abandoned:
            return []
        return [position for position, answer in enumerate(self.replies.answers[: self.written]) if answer is None]

    def give_up(self, position: int, error: BrokerError) -> None:
        """Fail one message."""
        self.errors[position] = error
        self.replies.give_up(position)

    def is_stored(self, position: int) -> bool:
        """Whether the answer confirms that this copy of the message is in the stream."""
        answer = self.replies.answers[position]
        if answer is None or not answer[1]:
            return False
        ack = decode_ack(answer[1])
        return ack.error is None and (self.resent or not ack.duplicate)
