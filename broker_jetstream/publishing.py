"""Publishing with confirmation: many messages in one write, answers on the connection's inbox.

Calls on one topic are written in the order they were made. Every message has an id (its own or one made here), so
that what stayed unconfirmed can be sent again under the same one: when the connection came back, all of it in the
original order and before anything new; else after `publish_resend` seconds. A cancelled call leaves the outcome of its
messages unknown and disturbs no other. Failures are returned per message; only a missing topic raises.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from datetime import UTC
from itertools import count
from secrets import token_hex
from typing import Any, Final
from zlib import crc32

import msgspec

from broker.errors import (
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    TopicNotFound,
    Unsupported,
)
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker_jetstream.connection import Connection
from broker_jetstream.errors import api_error
from broker_jetstream.fastpath import Outgoing
from broker_jetstream.headers import encode_headers, encode_id, status_of
from broker_jetstream.layout import Layout, Layouts
from broker_jetstream.replies import Replies

__all__ = ["JetStreamTarget", "partition_of"]

CHUNK: Final = 500
CHUNK_BYTES: Final = 1024 * 1024


class _Ack(msgspec.Struct, gc=False):
    seq: int = 0
    duplicate: bool = False
    error: dict[str, Any] | None = None


_decode: Final = msgspec.json.Decoder(_Ack).decode


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key: CRC-32 of its bytes, modulo. Stable over versions, so keys stay where they are."""
    return crc32(key) % partitions if partitions > 1 else 0


class _Batch:
    """The messages of one call, as they were written."""

    __slots__ = ("again", "items", "partitions", "replies", "sent", "sent_at")

    def __init__(self, items: list[Outgoing], partitions: list[int], replies: Replies) -> None:
        self.items = items
        self.partitions = partitions
        """Partition of each; -1 - partition for one that waits for its time."""
        self.replies = replies
        self.sent = 0
        self.sent_at = 0.0
        self.again = False

    @property
    def unanswered(self) -> int:
        return self.sent - (len(self.items) - self.replies.missing)


class JetStreamTarget:
    """Publishes to one topic."""

    def __init__(self, topic: str, connection: Connection, layouts: Layouts) -> None:
        self._topic = topic
        self._connection = connection
        self._layouts = layouts
        self._id_prefix = f"{token_hex(8)}-".encode()
        self._numbers = count(1)
        self._spread = count()
        self._writing = asyncio.Lock()
        self._in_flight: dict[_Batch, None] = {}
        self._epoch = connection.epoch
        self._closed = False

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        if self._closed:
            raise Closed(f"Topic {self._topic!r} was closed")
        outcomes: list[Receipt | BrokerError | None] = [None] * len(messages)
        deadline = time.monotonic() + self._connection.settings.publish_timeout
        ids = [b"%b%d" % (self._id_prefix, next(self._numbers)) if message.id is None else b"" for message in messages]
        pending: Sequence[int] = range(len(messages))
        while pending:
            try:
                pending = await self._attempt(messages, ids, pending, outcomes, deadline)
            except TopicNotFound as error:
                if len(pending) == len(messages):
                    raise
                for index in pending:
                    outcomes[index] = error
                break
            if pending:
                # Nobody answered for the stream: it is gone, or not ready yet after a start of the server.
                self._layouts.forget(self._topic)
                if time.monotonic() > deadline:
                    for index in pending:
                        outcomes[index] = ConnectionFailed(f"Nobody answered for topic {self._topic!r}")
                    break
                await asyncio.sleep(0.05)
        return outcomes  # pyright: ignore[reportReturnType]  # every entry has been filled

    async def close(self) -> None:
        self._closed = True

    async def _attempt(
        self,
        messages: Sequence[OutboundMessage],
        ids: list[bytes],
        indexes: Sequence[int],
        outcomes: list[Receipt | BrokerError | None],
        deadline: float,
    ) -> list[int]:
        """Publish these once; the indexes of those that found nobody."""
        replies = self._connection.inbox.expect(len(indexes))
        batch: _Batch | None = None
        try:
            # Held from before the look-up until all is written, so that calls are written in their order.
            async with self._writing:
                layout = await self._layouts.find(self._topic)
                batch, sent = self._encode(messages, ids, indexes, outcomes, layout, replies)
                if not batch.items:
                    return []
                replies.expect_only(len(batch.items))
                replies.subjects = frozenset(item.subject for item in batch.items)
                self._in_flight[batch] = None
                await self._write(batch, deadline)
            await self._wait(batch, deadline)
            return self._read(batch, sent, messages, ids, outcomes)
        finally:
            replies.close()
            if batch is not None:
                self._in_flight.pop(batch, None)

    def _encode(
        self,
        messages: Sequence[OutboundMessage],
        ids: list[bytes],
        indexes: Sequence[int],
        outcomes: list[Receipt | BrokerError | None],
        layout: Layout,
        replies: Replies,
    ) -> tuple[_Batch, list[int]]:
        items: list[Outgoing] = []
        partitions: list[int] = []
        sent: list[int] = []
        subjects: dict[int, bytes] = {}
        now = time.time_ns() // 1000
        prefix, limit, number = replies.prefix, self._connection.max_payload, layout.partitions
        for index in indexes:
            message = messages[index]
            try:
                if not ids[index]:
                    ids[index] = encode_id(message.id or "")
                partition = self._choose(message, number)
                subject = subjects.get(partition)
                if subject is None:
                    subject = subjects[partition] = layout.subject(partition)
                if message.deliver_at is None and message.ttl is None:
                    block = encode_headers(message, ids[index], now)
                    place = partition
                else:
                    subject, block, place = self._special(message, ids[index], now, layout, partition, subject)
                data = message.data or b""
                if len(block) + len(data) > limit:
                    raise MessageTooLarge(
                        f"Body and headers take {len(block) + len(data)} bytes, and the server takes {limit}",
                        advice="Raise max_payload of the server, or store the body elsewhere and publish a reference",
                    )
            except BrokerError as error:
                outcomes[index] = error
                continue
            items.append(Outgoing(subject, b"%b.%d" % (prefix, len(items)), block, data))
            partitions.append(place)
            sent.append(index)
        return _Batch(items, partitions, replies), sent

    def _choose(self, message: OutboundMessage, partitions: int) -> int:
        if message.partition is not None:
            if message.partition >= partitions:
                raise InvalidMessage(
                    f"Topic {self._topic!r} has no partition {message.partition}",
                    advice=f"It has 0 to {partitions - 1}",
                )
            return message.partition
        if partitions == 1:
            return 0
        if message.key is not None:
            return crc32(message.key) % partitions
        # A repetition under the same id goes to the same place.
        return next(self._spread) % partitions if message.id is None else crc32(message.id.encode()) % partitions

    def _special(
        self, message: OutboundMessage, message_id: bytes, now: int, layout: Layout, partition: int, subject: bytes
    ) -> tuple[bytes, bytes, int]:
        """Subject, headers and place of a message with a time to live or a time to be delivered."""
        version = self._connection.server_version
        # The server counts whole seconds; rounding up keeps a message rather longer than shorter.
        ttl = b"" if message.ttl is None else b"%ds" % math.ceil(message.ttl)
        if ttl and version < (2, 11):
            raise Unsupported("This server has no time to live per message", advice="Use nats-server 2.11 or newer")
        if message.deliver_at is None or message.deliver_at.timestamp() <= now / 1_000_000:
            return (
                subject,
                encode_headers(message, message_id, now, b"Nats-TTL: %b\r\n" % ttl if ttl else b""),
                partition,
            )
        if not layout.scheduled:
            raise Unsupported(
                f"Topic {self._topic!r} takes no scheduled messages",
                advice="It takes nats-server 2.12 and a topic made by ensure_topic",
            )
        moment = message.deliver_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode()
        extra = b"anybroker-id: %b\r\nNats-Schedule: @at %b\r\nNats-Schedule-Target: %b\r\n" % (
            message_id,
            moment,
            subject,
        )
        if ttl:
            extra += b"Nats-Schedule-TTL: %b\r\n" % ttl
        # Each waits under a subject of its own, because a later schedule of one subject replaces the former.
        place = layout.schedule(f"{token_hex(4)}{next(self._numbers)}")
        return place, encode_headers(message, message_id, now, extra), -1 - partition

    async def _write(self, batch: _Batch, deadline: float) -> None:
        """Write a batch, chunk by chunk, as far as the window and the connection let it until the deadline."""
        connection, window = self._connection, self._connection.settings.publish_window
        try:
            for chunk in _chunks(batch.items, min(CHUNK, window)):
                await self._catch_up(deadline)
                while sum(each.unanswered for each in self._in_flight) + len(chunk) > window:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return
                    await connection.inbox.next_answer(min(left, 1.0))
                    connection.check_open()
                    await self._catch_up(deadline)
                while not await self._send(chunk):
                    await self._catch_up(deadline)
                batch.sent += len(chunk)
                batch.sent_at = time.monotonic()
        except ConnectionFailed:
            return

    async def _wait(self, batch: _Batch, deadline: float) -> None:
        """Wait for the answers to what was written; returns at the deadline with what has come."""
        replies, resend = batch.replies, self._connection.settings.publish_resend
        unwritten = len(batch.items) - batch.sent
        try:
            while replies.missing > unwritten and (left := deadline - time.monotonic()) > 0:
                await replies.wait(min(left, resend))
                self._connection.check_open()
                if replies.missing > unwritten:
                    async with self._writing:
                        await self._repeat(batch, deadline)
        except ConnectionFailed:
            return

    async def _repeat(self, batch: _Batch, deadline: float) -> None:
        if self._connection.epoch != self._epoch or not self._connection.connected:
            await self._catch_up(deadline)
        elif batch.replies.missing and time.monotonic() - batch.sent_at >= self._connection.settings.publish_resend:
            await self._send_again(batch)

    async def _catch_up(self, deadline: float) -> None:
        """Wait for the connection, and send again what a broken one may have swallowed, oldest first."""
        connection = self._connection
        while self._epoch != connection.epoch or not connection.connected:
            await connection.wait_connected(deadline - time.monotonic())
            epoch = connection.epoch
            if all([await self._send_again(batch) for batch in tuple(self._in_flight)]):
                self._epoch = epoch

    async def _send_again(self, batch: _Batch) -> bool:
        answers = batch.replies.answers
        batch.again = True
        batch.sent_at = time.monotonic()
        lost = [item for item, answer in zip(batch.items[: batch.sent], answers, strict=False) if answer is None]
        return all([await self._send(chunk) for chunk in _chunks(lost, CHUNK)])

    async def _send(self, chunk: list[Outgoing]) -> bool:
        """Write; False if the connection broke first."""
        try:
            await self._connection.send(chunk)
        except ConnectionFailed:
            return False
        return True

    def _read(
        self,
        batch: _Batch,
        sent: list[int],
        messages: Sequence[OutboundMessage],
        ids: list[bytes],
        outcomes: list[Receipt | BrokerError | None],
    ) -> list[int]:
        """Turn answers into outcomes; the indexes of those that found nobody."""
        absent: list[int] = []
        what = f"Publishing to topic {self._topic!r}"
        for position, (index, partition, answer) in enumerate(
            zip(sent, batch.partitions, batch.replies.answers, strict=False)
        ):
            if answer is None:
                outcomes[index] = self._unanswered(position < batch.sent)
                continue
            block, data = answer
            if not data:
                if status_of(block)[0] == 403:
                    outcomes[index] = NotAuthorized(f"{what}: the server refused it to this user")
                else:
                    absent.append(index)
                continue
            ack = _decode(data)
            if ack.error is not None:
                outcomes[index] = api_error(ack.error, what)
                continue
            message_id = messages[index].id or ids[index].decode()
            # After a repetition the server calls our own first copy the original.
            duplicate = ack.duplicate and not batch.again
            if partition >= 0:
                outcomes[index] = Receipt(message_id, partition, ack.seq, duplicate)
            else:
                outcomes[index] = Receipt(message_id, -1 - partition, None, duplicate)
        return absent

    def _unanswered(self, sent: bool) -> BrokerError:
        if not sent and not self._connection.connected:
            return self._connection.broken()
        return OperationTimeout(
            f"The server did not confirm a message of topic {self._topic!r} "
            f"within {self._connection.settings.publish_timeout:g} seconds",
            advice="It may have been stored; publish it again under the same id",
        )


def _chunks(items: list[Outgoing], most: int) -> Iterator[list[Outgoing]]:
    """Runs of items that are written together: bounded in number and in bytes."""
    chunk: list[Outgoing] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += len(item.data) + len(item.block)
        if len(chunk) >= most or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
