"""The writer of one partition of a compacted topic: an atomic batch for each write, fenced by a claim.

A claim is an empty message under the subject of the partition, which no reader sees. Opening a writer publishes one,
and each batch carries the condition that this claim is still the last: the server refuses the batch of a writer after
whose claim another came. In a stream that was recreated a claim may have the same number, so each write looks first
when the stream was made. A batch is sent again after a lost connection; its commit has an id, so that the server
reports whether the first copy was stored.

*Concurrency.* The backend's semaphore bounds the batches that are open at once, since a stream takes 50 from all its
clients. *Cancellation.* A cancelled write may leave an open batch, which the server drops after ten seconds. *Failure.*
A refused batch has stored nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from secrets import token_hex
from typing import Final

from broker import (
    BrokerError,
    Closed,
    ConnectionFailed,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    OutboundMessage,
    TransactionAborted,
    TransactionFatal,
    Unsupported,
)
from broker.driver import Backoff, keyless_message, not_compacted, reads_answer, writer_fenced
from broker_jetstream.codec import encode_headers, status_of
from broker_jetstream.connection import Connection
from broker_jetstream.errors import api_error
from broker_jetstream.inbox import NO_RESPONDERS
from broker_jetstream.names import partition_subject
from broker_jetstream.streams import Layout, Layouts, layout_of
from broker_jetstream.times import ttl_seconds
from broker_jetstream.transport import Outgoing
from broker_jetstream.unconfirmed import decode_ack, next_chunk

__all__ = ["MOST_ROWS", "JetStreamTableWriter"]

MOST_ROWS: Final = 999
"""A batch has at most a thousand messages; one is the checkpoint."""
_CHUNK: Final = 500
_WRONG_LAST_SEQUENCE: Final = frozenset({10070, 10071})
_DUPLICATE: Final = 10201
_NOT_ENABLED: Final = 10174
_INCOMPLETE: Final = 10176
_TOO_MANY: Final = 429


class JetStreamTableWriter:
    """Implements `TableWriterSpi`; made by `open`."""

    def __init__(
        self,
        layout: Layout,
        created: str,
        partition: int,
        claim: int,
        connection: Connection,
        layouts: Layouts,
        batches: asyncio.Semaphore,
    ) -> None:
        self._layout = layout
        self._created = created
        self._layouts = layouts
        self._partition = partition
        self._connection = connection
        self._batches = batches
        self._condition = (
            b"Nats-Expected-Last-Subject-Sequence: %d\r\nNats-Expected-Last-Subject-Sequence-Subject: %b\r\n"
            % (claim, partition_subject(layout.stream, partition).encode())
        )
        self._what = f"Writing partition {partition} of table {layout.topic!r}"
        self._closed = False

    @classmethod
    async def open(
        cls, topic: str, partition: int, connection: Connection, layouts: Layouts, batches: asyncio.Semaphore
    ) -> JetStreamTableWriter:
        """Claim a partition.

        :param batches: bounds the batches that are open at once.
        :raises Unsupported: the stream is not compacted, or takes no atomic batches.
        """
        info = await layouts.info(topic)
        with reads_answer(f"Topic {topic!r}"):
            layout, atomic = layout_of(topic, info["config"]), bool(info["config"].get("allow_atomic"))
            created = str(info["created"])
        if not layout.compacted:
            raise not_compacted(topic)
        if not atomic:
            raise Unsupported(
                f"The stream of table {topic!r} takes no atomic batches",
                advice=f"It was made on a nats-server before 2.12; call ensure_topic({topic!r}, compacted=True) again",
            )
        subject, what = (
            partition_subject(layout.stream, partition),
            f"Claiming partition {partition} of table {topic!r}",
        )
        block, data = await connection.request(subject, timeout=connection.settings.publish_timeout)
        if not data and status_of(block)[0] == NO_RESPONDERS:
            raise ConnectionFailed(
                f"{what}: no stream took the claim", advice="Its stream has no leader; repeat the call"
            )
        ack = decode_ack(data)
        if ack.error is not None:
            raise api_error(ack.error, what)
        return cls(layout, created, partition, ack.seq, connection, layouts, batches)

    async def write(self, rows: Sequence[OutboundMessage]) -> None:
        if self._closed:
            raise Closed(f"The writer of partition {self._partition} of table {self._layout.topic!r} is closed")
        connection, backoff = self._connection, Backoff(0.02, 0.5)
        deadline = time.monotonic() + connection.settings.publish_timeout
        commit_id, sent, error = token_hex(12).encode(), False, None
        async with self._batches:
            while (left := deadline - time.monotonic()) > 0:
                try:
                    await connection.wait_connected(left)
                    await self._check_created()
                    sent = True
                    error = await self._write(rows, commit_id, deadline)
                except ConnectionFailed as failure:
                    error = failure
                if error is None:
                    return
                if not error.retriable:
                    raise error
                connection.check_open()
                await asyncio.sleep(min(backoff.next(), max(deadline - time.monotonic(), 0)))
        if isinstance(error, TransactionAborted):
            raise error
        if not sent:
            raise connection.down_error()
        raise OperationTimeout(
            f"{self._what}: the server did not confirm it within {connection.settings.publish_timeout:g} seconds",
            native=error,
            advice="It may have been stored; repeat the write",
        )

    async def close(self) -> None:
        self._closed = True

    async def _check_created(self) -> None:
        """:raises TransactionFatal: the stream is not the one of the claim."""
        topic = self._layout.topic
        info = await self._layouts.info(topic)
        with reads_answer(f"Topic {topic!r}"):
            created = str(info["created"])
        if created != self._created:
            raise TransactionFatal(
                f"The writer of partition {self._partition} of table {topic!r} ended: it was deleted and recreated",
                advice="Open a new writer, and read the table again",
            )

    async def _write(self, rows: Sequence[OutboundMessage], commit_id: bytes, deadline: float) -> BrokerError | None:
        """Send a batch and wait for the answer to its commit.

        :returns: None if it is stored, or the error; a retriable one if it can be sent again.
        :raises ConnectionFailed: the connection broke before all was written.
        """
        connection = self._connection
        epoch = connection.epoch
        with connection.inbox.expect(2) as replies:
            items = self._encode(rows, commit_id, replies.subject(0), replies.subject(1))
            first, last = 0, 1
            if len(items) == 1:
                replies.give_up(first)
            start = 0
            while start < len(items):
                chunk = next_chunk(items, start, _CHUNK)
                await connection.send(chunk)
                start += len(chunk)
            while (answer := replies.answers[last]) is None and (left := deadline - time.monotonic()) > 0:
                early = replies.answers[first]
                if early is not None and early[1]:
                    # The server refused to open the batch.
                    return self._error(early)
                if connection.epoch != epoch or not connection.connected:
                    return ConnectionFailed(f"{self._what}: the connection broke")
                await connection.inbox.next_answer(min(left, 1.0))
            if answer is None:
                return OperationTimeout(f"{self._what}: no answer in time")
            return self._error(answer)

    def _encode(
        self, rows: Sequence[OutboundMessage], commit_id: bytes, first_reply: bytes, last_reply: bytes
    ) -> list[Outgoing]:
        layout, partition, limit = self._layout, self._partition, self._connection.max_payload
        batch = token_hex(12).encode()
        now = time.time_ns() // 1000
        items: list[Outgoing] = []
        for number, row in enumerate(rows, 1):
            if row.key is None:
                raise keyless_message(layout.topic)
            extra = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (batch, number)
            if row.ttl is not None:
                extra += b"Nats-TTL: %ds\r\n" % ttl_seconds(row.ttl)
            elif row.data is None:
                extra += b"Nats-TTL: %ds\r\n" % (layout.tombstone_seconds or 1)
            identity = b""
            if number == len(rows):
                identity, extra = commit_id, b"%bNats-Batch-Commit: 1\r\n%b" % (extra, self._condition)
            block, data = encode_headers(row, identity, now, extra), row.data or b""
            if len(block) + len(data) > limit:
                raise MessageTooLarge(
                    f"Body and headers of a row take {len(block) + len(data)} bytes, and the server takes {limit}",
                    advice="Raise max_payload on the server, or store the body elsewhere",
                )
            reply = last_reply if number == len(rows) else first_reply if number == 1 else b""
            items.append(Outgoing(layout.row_subject(partition, row.key), reply, block, data))
        return items

    def _error(self, answer: tuple[bytes, bytes]) -> BrokerError | None:
        """The error in an answer; None if the batch is stored."""
        block, data = answer
        if not data:
            if status_of(block)[0] == NO_RESPONDERS:
                return ConnectionFailed(f"{self._what}: no stream took it", advice="Its stream has no leader")
            return NotAuthorized(f"{self._what}: the server denies it to this user")
        ack = decode_ack(data)
        if ack.error is None:
            return None
        code = ack.error.get("err_code")
        error = api_error(ack.error, self._what)
        if code == _DUPLICATE:
            # An earlier copy of this batch was stored.
            return None
        if code in _WRONG_LAST_SEQUENCE:
            return writer_fenced(self._layout.topic, self._partition, error)
        if code == _NOT_ENABLED:
            return Unsupported(
                f"{self._what}: {ack.error.get('description')}",
                native=error,
                advice=f"Call ensure_topic({self._layout.topic!r}, compacted=True) again",
            )
        if code == _INCOMPLETE or ack.error.get("code") == _TOO_MANY:
            return TransactionAborted(
                f"{self._what}: {ack.error.get('description')}; nothing was written",
                native=error,
                advice="Repeat the write; fewer writers at once keep below the server's limit of open batches",
            )
        return error
