"""Publishing with confirmation: many messages in one write, answers on the connection's inbox.

*Order.* Calls on one topic are written in the order in which they were made. Order per key holds among confirmed
messages. A message that cannot be repeated in its place fails: with ConnectionFailed if it is certainly not stored,
with OperationTimeout if that is unknown. Two exceptions remain: a message whose answer was lost with the connection may
have overtaken one of its key that found no stream right before; and with `fast_path=false` nats-py writes its own
buffer before our repetitions.

*Failure.* Every message has an id, its own or a generated one, and is repeated under it: after a reconnect or the
return of the stream (see `unconfirmed`), else after `publish_resend` seconds. Failures are returned per message; only a
missing topic raises. *Cancellation.* A cancelled call leaves the outcome of its messages unknown and disturbs no other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, MutableSequence, Sequence
from itertools import count
from secrets import token_hex
from zlib import crc32

from broker import (
    BrokerError,
    Closed,
    InvalidMessage,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    OutboundMessage,
    Receipt,
    StorageFailed,
    TopicNotFound,
    Unsupported,
)
from broker.driver import keyless_message
from broker_jetstream.codec import LETTER_ROOM, encode_headers, encode_id, reserved_bytes
from broker_jetstream.connection import Connection
from broker_jetstream.errors import api_error
from broker_jetstream.streams import Layout, Layouts
from broker_jetstream.times import schedule_time, ttl_seconds
from broker_jetstream.transport import Outgoing
from broker_jetstream.unconfirmed import Batch, UnconfirmedMessages, decode_ack

__all__ = ["JetStreamPublishTarget", "partition_of"]


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, the same in all versions."""
    return crc32(key) % partitions


class JetStreamPublishTarget:
    """Implements `PublishTarget`."""

    def __init__(self, topic: str, connection: Connection, layouts: Layouts) -> None:
        self._topic = topic
        self._connection = connection
        self._layouts = layouts
        self._id_prefix = f"{token_hex(8)}-".encode()
        self._numbers = count(1)
        self._spread = count()
        self._unconfirmed = UnconfirmedMessages(topic, connection, layouts, self._encode_again)
        self._closed = False

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        if self._closed:
            raise Closed(f"The publisher of topic {self._topic!r} is closed")
        outcomes: list[Receipt | BrokerError | None] = [None] * len(messages)
        deadline = time.monotonic() + self._connection.settings.publish_timeout
        ids = [b"%b%d" % (self._id_prefix, next(self._numbers)) if message.id is None else b"" for message in messages]
        unconfirmed = self._unconfirmed
        batch: Batch | None = None
        with self._connection.inbox.expect(len(messages)) as replies:
            try:
                # Held during the lookup and all writes, so calls are written in order.
                async with unconfirmed.write_lock:
                    layout = await self._layouts.find(self._topic)
                    batch = Batch(messages, ids, layout, replies)
                    self._encode(batch, range(len(messages)), outcomes)
                    if batch.items:
                        replies.missing = len(batch.items)
                        replies.subjects = frozenset([item.subject for item in batch.items])
                        replies.on_no_responders = unconfirmed.on_no_responders
                        await unconfirmed.write(batch, deadline)
                if batch.items:
                    await unconfirmed.wait(batch, deadline)
                    if replies.missing and self._connection.look_at_storage is not None:
                        await self._connection.look_at_storage()
                    self._read(batch, outcomes)
            finally:
                if batch is not None:
                    unconfirmed.abandon(batch)
        return outcomes  # pyright: ignore[reportReturnType]  # every entry has been filled

    async def close(self) -> None:
        self._closed = True

    def _encode(
        self, batch: Batch, indexes: Iterable[int], outcomes: MutableSequence[Receipt | BrokerError | None]
    ) -> None:
        """Add messages to a batch; an invalid one gets its error as outcome."""
        messages, ids, layout, replies = batch.messages, batch.ids, batch.layout, batch.replies
        items, partitions, sent = batch.items, batch.partitions, batch.indexes
        subjects: dict[int, bytes] = {}
        now = time.time_ns() // 1000
        prefix, limit, number = replies.prefix, self._connection.max_payload, layout.partitions
        near, compacted = limit - LETTER_ROOM, layout.compacted
        for index in indexes:
            message = messages[index]
            try:
                if not ids[index]:
                    ids[index] = encode_id(message.id or "")
                partition = self._choose_partition(message, number)
                if compacted:
                    if message.key is None:
                        raise keyless_message(self._topic)
                    subject = layout.row_subject(partition, message.key)
                else:
                    subject = subjects.get(partition)
                    if subject is None:
                        subject = subjects[partition] = layout.subject(partition)
                if message.deliver_at is None and message.ttl is None and not (compacted and message.data is None):
                    block = encode_headers(message, ids[index], now)
                    place = partition
                else:
                    subject, block, place = self._scheduled_or_expiring(
                        message, ids[index], now, layout, partition, subject
                    )
                data = message.data or b""
                if len(block) + len(data) > near and len(block) + len(data) > limit - reserved_bytes(message):
                    raise MessageTooLarge(
                        f"Body and headers take {len(block) + len(data)} bytes, and the server takes {limit}, of which "
                        f"{reserved_bytes(message)} are reserved for the headers of a dead letter",
                        advice="Raise max_payload on the server, or store the body elsewhere and publish a reference",
                    )
            except BrokerError as error:
                outcomes[index] = error
                continue
            items.append(Outgoing(subject, b"%b.%d" % (prefix, len(items)), block, data))
            partitions.append(place)
            sent.append(index)

    def _encode_again(self, batch: Batch, position: int) -> None:
        """Encode one message of a batch for its recreated topic."""
        index = batch.indexes[position]
        outcomes: list[Receipt | BrokerError | None] = [None] * len(batch.messages)
        alone = Batch(batch.messages, batch.ids, batch.layout, batch.replies)
        self._encode(alone, (index,), outcomes)
        error = outcomes[index]
        if isinstance(error, BrokerError):
            batch.give_up(position, error)
            return
        batch.items[position] = alone.items[0]._replace(reply=batch.items[position].reply)
        batch.partitions[position] = alone.partitions[0]
        batch.replies.subjects |= {alone.items[0].subject}

    def _choose_partition(self, message: OutboundMessage, partitions: int) -> int:
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
            return partition_of(message.key, partitions)
        # A repetition under the same id goes to the same partition.
        return next(self._spread) % partitions if message.id is None else crc32(message.id.encode()) % partitions

    def _scheduled_or_expiring(
        self, message: OutboundMessage, message_id: bytes, now: int, layout: Layout, partition: int, subject: bytes
    ) -> tuple[bytes, bytes, int]:
        """Subject, headers and partition (-1 - partition if scheduled) of a message with `ttl` or `deliver_at`, or of a
        tombstone of a compacted topic."""
        version = self._connection.server_version
        ttl = b"" if message.ttl is None else b"%ds" % ttl_seconds(message.ttl)
        if message.data is None and not ttl and layout.tombstone_seconds is not None:
            ttl = b"%ds" % layout.tombstone_seconds
        if ttl and version < (2, 11):
            raise Unsupported("This server has no ttl per message", advice="Use nats-server 2.11 or newer")
        if message.deliver_at is None or message.deliver_at.timestamp() <= now / 1_000_000:
            return (
                subject,
                encode_headers(message, message_id, now, b"Nats-TTL: %b\r\n" % ttl if ttl else b""),
                partition,
            )
        if layout.compacted:
            raise Unsupported(
                f"Topic {self._topic!r} is compacted and takes no scheduled messages",
                advice="Publish the message when it is due",
            )
        if not layout.scheduled:
            raise Unsupported(
                f"Topic {self._topic!r} takes no scheduled messages",
                advice="Use nats-server 2.12 or newer and a topic made by ensure_topic",
            )
        moment = schedule_time(message.deliver_at).encode()
        extra = b"anybroker-id: %b\r\nNats-Schedule: @at %b\r\nNats-Schedule-Target: %b\r\n" % (
            message_id,
            moment,
            subject,
        )
        if ttl:
            extra += b"Nats-Schedule-TTL: %b\r\n" % ttl
        # One subject per message, because a schedule replaces an earlier one of its subject.
        place = layout.schedule(f"{token_hex(4)}{next(self._numbers)}")
        return place, encode_headers(message, message_id, now, extra), -1 - partition

    def _read(self, batch: Batch, outcomes: list[Receipt | BrokerError | None]) -> None:
        """Turn answers into outcomes.

        :raises TopicNotFound: all messages failed with it.
        """
        messages, ids = batch.messages, batch.ids
        what = f"Publishing to topic {self._topic!r}"
        failure: BrokerError | None = None
        for position, (index, partition, answer) in enumerate(
            zip(batch.indexes, batch.partitions, batch.replies.answers, strict=False)
        ):
            if answer is None:
                error = self._unconfirmed.not_stored_error(batch, position)
                if error is None:
                    error = self._unanswered()
                    failure = error if self._connection.connected else failure
                outcomes[index] = error
                continue
            data = answer[1]
            if not data:
                outcomes[index] = batch.errors.get(position) or NotAuthorized(
                    f"{what}: the server denies it to this user"
                )
                continue
            ack = decode_ack(data)
            if ack.error is not None:
                outcomes[index] = error = api_error(ack.error, what)
                failure = error if isinstance(error, StorageFailed) else failure
                continue
            message_id = messages[index].id or ids[index].decode()
            # After a repetition our own first copy is the original.
            duplicate = ack.duplicate and not batch.resent
            if partition >= 0:
                outcomes[index] = Receipt(message_id, partition, ack.seq, duplicate)
            else:
                outcomes[index] = Receipt(message_id, -1 - partition, None, duplicate)
        if failure is not None or self._connection.publish_failed:
            self._connection.note_publish(self._topic, failure)
        if batch.errors:
            missing = [outcome for outcome in outcomes if isinstance(outcome, TopicNotFound)]
            if len(missing) == len(outcomes):
                raise missing[0]

    def _unanswered(self) -> BrokerError:
        """The error of a message that was written and got no answer."""
        seconds = self._connection.settings.publish_timeout
        text = f"The server did not confirm a message of topic {self._topic!r} within {seconds:g} seconds"
        if (known := self._connection.storage_failure) is not None:
            return StorageFailed(f"{text}: {known.message}", native=known, advice=known.advice)
        return OperationTimeout(
            text,
            advice="It may have been stored; publish again under the same id. If this lasts, look at the server's log: "
            "a server that cannot write does not answer",
        )
