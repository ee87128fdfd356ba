"""Checked by pyright, never run: fakes that an application writes for its own tests satisfy every protocol.

Assigning to a name of the protocol's type is the proof.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from broker import protocols
from broker.driver.contract import Bounds, Lag, Start, SubscriptionInfo, TopicInfo
from broker.driver.group_admin import GroupInfo, PositionChange
from broker.envelopes import Envelope
from broker.messages import Message, MessageBatch
from broker.outbound import OutboundMessage, OutboundPayload
from broker.receipts import Receipt
from broker.records import Record, RecordBatch
from broker.testing import call_handler


@dataclass
class Order:
    number: int


class FakeTopic:
    """Remembers what was published."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.published: list[Order | OutboundMessage | OutboundPayload[Order]] = []

    @property
    def name(self) -> str:
        return self._name

    async def publish(self, payload: Order | OutboundMessage | OutboundPayload[Order], **fields: Any) -> Receipt:
        self.published.append(payload)
        return Receipt(str(len(self.published)))

    async def publish_batch(
        self, payloads: Sequence[Order | OutboundMessage | OutboundPayload[Order]], *, receipts: bool = True
    ) -> Any:
        found = [await self.publish(payload) for payload in payloads]
        return found if receipts else None

    async def enqueue(
        self,
        payload: Order | OutboundMessage | OutboundPayload[Order],
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[Receipt]:
        return asyncio.ensure_future(self.publish(payload))

    async def flush(self) -> None: ...


class FakePublisher:
    def topic(self, name: str) -> protocols.Topic[bytes]:
        raise LookupError(name)


class FakeMessages:
    """A scripted inbox, in all shapes."""

    def __init__(self, messages: Sequence[Message[Order]]) -> None:
        self._messages = list(messages)

    async def next_message(self, timeout: float | None = None) -> Message[Order] | None:
        return self._messages.pop(0) if self._messages else None

    async def next_batch(
        self, max_messages: int = 100, timeout: float | None = None, *, max_wait: float | None = None
    ) -> MessageBatch[Order]:
        return MessageBatch(self._messages[:max_messages])

    async def __aiter__(self) -> AsyncIterator[Message[Order]]:
        for message in self._messages:
            yield message

    async def batches(
        self, max_messages: int = 100, *, max_wait: float | None = None
    ) -> AsyncIterator[MessageBatch[Order]]:
        yield MessageBatch(self._messages[:max_messages])

    async def receive(self, handler: protocols.Handler[Order], *, concurrency: int = 1) -> None:
        for message in self._messages:
            await call_handler(handler, message)

    async def receive_batches(
        self,
        handler: protocols.BatchHandler[Order],
        *,
        max_messages: int = 100,
        max_wait: float | None = None,
        concurrency: int = 1,
    ) -> None:
        await call_handler(handler, MessageBatch(self._messages))


class FakeRecords:
    """A scripted log, in all shapes."""

    def __init__(self, records: Sequence[Record[Order]]) -> None:
        self._records = list(records)

    async def next_record(self, timeout: float | None = None) -> Record[Order] | None:
        return self._records.pop(0) if self._records else None

    async def next_batch(
        self, max_records: int = 5000, timeout: float | None = None, *, max_wait: float | None = None
    ) -> RecordBatch[Order]:
        return RecordBatch(self._records[:max_records])

    async def __aiter__(self) -> AsyncIterator[Record[Order]]:
        for record in self._records:
            yield record

    async def batches(
        self, max_records: int = 5000, *, max_wait: float | None = None
    ) -> AsyncIterator[RecordBatch[Order]]:
        yield RecordBatch(self._records[:max_records])


class FakeLog:
    async def partitions(self, topic: str) -> Sequence[int]:
        return [0]

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        return {0: Bounds(0, 0)}

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        return {0: 0}

    async def read(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None, *, max_records: int = 1000
    ) -> AsyncIterator[RecordBatch[bytes]]:
        yield RecordBatch([])

    @asynccontextmanager
    async def follow(
        self,
        topic: str,
        positions: Mapping[int, int] | None = None,
        *,
        others: Literal["earliest", "latest"] | None = None,
    ) -> AsyncGenerator[FakeFollower]:
        yield FakeFollower()


class FakeFollower:
    behind: frozenset[int] = frozenset()

    async def next_batch(self, max_records: int = 1000, timeout: float | None = None) -> RecordBatch[bytes]:
        return RecordBatch([])

    async def batches(self, max_records: int = 1000) -> AsyncIterator[RecordBatch[bytes]]:
        yield RecordBatch([])


class FakeTransaction:
    async def publish(
        self,
        topic: str,
        payload: bytes | OutboundMessage | None,
        **fields: Any,
    ) -> Receipt:
        return Receipt("1")

    async def publish_batch(
        self, topic: str, payloads: Sequence[bytes | OutboundMessage], *, receipts: bool = True
    ) -> Any:
        return [Receipt("1") for _ in payloads] if receipts else None

    async def ack(self, message: Message[Any]) -> None:
        await message.ack()

    async def ack_batch(self, messages: Iterable[Message[Any]]) -> None:
        for message in messages:
            await message.ack()


class FakeTableWriter:
    async def write(self, rows: Sequence[OutboundMessage], *, checkpoint: bytes) -> None:
        pass


class FakeTransactionalPublisher:
    def transaction(
        self,
        consumer: protocols.BatchedRecordStream[Any] | None = None,
        *,
        positions: protocols.OwnPositions | Callable[[], protocols.OwnPositions] | None = None,
        rewind: bool = True,
    ) -> AbstractAsyncContextManager[protocols.Transaction]:
        raise LookupError


@dataclass
class FakeReport:
    moved: int
    by_topic: Mapping[str, int]
    skipped: int


class FakeGroupAdmin:
    async def groups(self) -> list[GroupInfo]:
        return []

    async def describe_group(self, name: str) -> GroupInfo:
        return GroupInfo(name=name)

    async def reset_group(
        self,
        name: str,
        *,
        to: Start | int | None = None,
        shift: int | None = None,
        topics: Sequence[str] = (),
        partitions: Sequence[int] = (),
        dry_run: bool = False,
    ) -> list[PositionChange]:
        return []

    async def delete_group(self, name: str) -> None: ...


class FakeAdmin:
    async def ensure_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        retention: timedelta | None = None,
        compacted: bool | None = None,
        **options: Any,
    ) -> TopicInfo:
        return TopicInfo(name=name)

    async def delete_topic(self, name: str) -> None: ...
    async def topics(self) -> list[str]:
        return []

    async def describe_topic(self, name: str) -> TopicInfo:
        return TopicInfo(name=name)

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start = "earliest", **options: Any
    ) -> SubscriptionInfo:
        return SubscriptionInfo(topic=topic, name=name)

    async def delete_subscription(self, topic: str, name: str) -> None: ...
    async def subscriptions(self, topic: str) -> list[str]:
        return []

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        return SubscriptionInfo(topic=topic, name=name)

    async def purge(self, topic: str) -> int | None:
        return None

    async def lag(self, topic: str, subscription: str) -> Lag:
        return Lag(waiting=0)

    async def redrive(
        self,
        dead_letter_topic: str,
        *,
        to: Sequence[str] | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> protocols.RedriveReport:
        return FakeReport(0, {}, 0)


class Rot13:
    """A codec of one's own."""

    def encode(self, payload: str) -> bytes | None:
        return payload.encode("rot13")

    def decode(self, data: bytes | None) -> str:
        return (data or b"").decode("rot13")


class Signed:
    def pack(self, payload: str, message: OutboundMessage, topic: str) -> OutboundMessage:
        return message.replace(data=payload.encode())

    def unpack(self, envelope: Envelope) -> str:
        return (envelope.data or b"").decode()

    async def prepare(self, envelopes: Sequence[Envelope]) -> None:
        _use(envelopes)


def fakes_satisfy_every_protocol(messages: FakeMessages, records: FakeRecords) -> None:
    topic: protocols.Topic[Order] = FakeTopic("orders")
    publisher: protocols.Publisher = FakePublisher()
    iterator: protocols.MessageIterator[Order] = messages
    batched_iterator: protocols.BatchedMessageIterator[Order] = messages
    stream: protocols.MessageStream[Order] = messages
    batched_stream: protocols.BatchedMessageStream[Order] = messages
    receiver: protocols.Receiver[Order] = messages
    batched_receiver: protocols.BatchedReceiver[Order] = messages
    record_iterator: protocols.RecordIterator[Order] = records
    batched_record_iterator: protocols.BatchedRecordIterator[Order] = records
    record_stream: protocols.RecordStream[Order] = records
    batched_record_stream: protocols.BatchedRecordStream[Order] = records
    reader: protocols.LogReader = FakeLog()
    followed: protocols.FollowedLog = FakeFollower()
    transaction: protocols.Transaction = FakeTransaction()
    transactional: protocols.TransactionalPublisher = FakeTransactionalPublisher()
    table: protocols.TableWriter = FakeTableWriter()
    admin: protocols.Admin = FakeAdmin()
    groups: protocols.GroupAdmin = FakeGroupAdmin()
    report: protocols.RedriveReport = FakeReport(0, {}, 0)
    codec: protocols.Codec[str] = Rot13()
    envelope_codec: protocols.EnvelopeCodec[str] = Signed()
    preparing_codec: protocols.PreparesBatches = Signed()
    _use(topic, publisher, iterator, batched_iterator, stream, batched_stream, receiver, batched_receiver)
    _use(record_iterator, batched_record_iterator, record_stream, batched_record_stream, reader, transaction)
    _use(transactional, table, admin, groups, report, codec, envelope_codec, preparing_codec, followed)


def _use(*_: object) -> None: ...
