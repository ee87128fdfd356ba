"""Checked by pyright, never run: the facade satisfies every protocol of `broker.protocols`.

Assigning to a name of the protocol's type is the proof; `assert_type` pins what inference gives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_type

import broker
from broker import BlockingMessage, BlockingMessageBatch, blocking, protocols
from broker.admin import AdminFacade
from broker.blocking.topic import ReceiptFuture
from broker.bus import Bus
from broker.codecs import Avro, Bytes, Change, Debezium, Json, Text
from broker.consuming.consumer import MessageConsumer
from broker.driver.contract import TopicPartition
from broker.envelopes import Envelope
from broker.messages import Message, MessageBatch
from broker.outbound import OutboundMessage, OutboundPayload
from broker.publishing.topic import TopicFacade
from broker.reading.log_follower import LogFollower
from broker.reading.log_reader import LogReaderFacade
from broker.reading.record_consumer import RecordConsumer
from broker.receipts import Receipt
from broker.records import Record, RecordBatch
from broker.redrive import Redriven


@dataclass
class Order:
    number: int


@dataclass
class Refund:
    number: int
    reason: str


def facade_satisfies_every_protocol(
    bus: Bus,
    topic: TopicFacade[Order],
    messages: MessageConsumer[Order],
    records: RecordConsumer[Order],
    log: LogReaderFacade,
    follower: LogFollower,
    admin: AdminFacade,
    redriven: Redriven,
) -> None:
    publisher: protocols.Publisher = bus
    typed_topic: protocols.Topic[Order] = topic
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
    reader: protocols.LogReader = log
    followed: protocols.FollowedLog = follower
    administration: protocols.Admin = admin
    groups: protocols.GroupAdmin = admin
    report: protocols.RedriveReport = redriven
    bytes_codec: protocols.Codec[bytes] = Bytes()
    text_codec: protocols.Codec[str] = Text()
    json_codec: protocols.Codec[Order] = Json(Order)
    envelope_codec: protocols.EnvelopeCodec[Order] = Stamped()
    preparing_codec: protocols.PreparesBatches = Stamped()
    _use(publisher, typed_topic, iterator, batched_iterator, stream, batched_stream, receiver, batched_receiver)
    _use(record_iterator, batched_record_iterator, record_stream, batched_record_stream, reader, administration)
    _use(followed, groups, report, bytes_codec, text_codec, json_codec, envelope_codec, preparing_codec)


class Stamped:
    """A codec that sees attributes."""

    def pack(self, payload: Order, message: OutboundMessage, topic: str) -> OutboundMessage:
        return message.replace(data=Json(Order).encode(payload), attributes={"topic": topic})

    def unpack(self, envelope: Envelope) -> Order:
        return Json(Order).decode(envelope.data)

    async def prepare(self, envelopes: Sequence[Envelope]) -> None:
        _use(envelopes)


def envelope_is_shared(message: Message[Order], record: Record[Order]) -> None:
    envelopes: list[Envelope] = [message, record]
    _use([OutboundMessage.from_message(envelope) for envelope in envelopes])


async def types_follow_the_codec(bus: Bus) -> None:
    assert_type(bus.topic("orders"), TopicFacade[bytes])
    assert_type(bus.topic("orders", codec=Json(Order)), TopicFacade[Order])
    assert_type(bus.topic("orders", codec=Avro(Order, "{}")), TopicFacade[Order])
    assert_type(bus.topic("orders", codec=Debezium(Order)), TopicFacade[Change[Order]])
    assert_type(bus.messages("orders", subscription="billing"), MessageConsumer[bytes])
    waiting = broker.RetryTopics((5, 60.0))
    assert_type(bus.messages("orders", subscription="billing", retry_topics=waiting), MessageConsumer[bytes])
    assert_type(waiting.names("orders", "billing"), list[str])
    assert_type(bus.messages("orders", subscription="billing", codec=Text()), MessageConsumer[str])
    assert_type(bus.messages("orders", subscription="billing", codec=Json(Order)), MessageConsumer[Order])
    assert_type(bus.messages("orders", subscription="b.x", codec=Json(Order | Refund)), MessageConsumer[Order | Refund])
    assert_type(bus.messages("orders", subscription="b.x", codec=Json(list[Order])), MessageConsumer[list[Order]])
    assert_type(bus.topic("orders", codec=Stamped()), TopicFacade[Order])
    assert_type(bus.messages("orders", subscription="billing", codec=Stamped()), MessageConsumer[Order])
    assert_type(bus.records("orders", group="audit", codec=Stamped()), RecordConsumer[Order])
    assert_type(bus.records("orders", group="audit"), RecordConsumer[bytes])
    assert_type(bus.records("orders", group="audit", codec=Json(Order)), RecordConsumer[Order])
    assert_type(bus.records("orders", group="audit", codec=Json(Order)).as_messages(), MessageConsumer[Order])


async def payloads_are_typed(bus: Bus) -> None:
    async with bus.messages("orders", subscription="billing", codec=Json(Order)) as inbox:
        message = await inbox.next_message(timeout=1.0)
        assert_type(message, Message[Order] | None)
        async for each in inbox:
            async with each:
                assert_type(each.payload, Order)
                assert_type(each.data, bytes | None)
                assert_type(each.key, bytes | None)
                assert_type(each.attributes, Mapping[str, str])
                assert_type(each.delivery_attempt, int | None)
        async for batch in inbox.batches(10):
            assert_type(batch, MessageBatch[Order])
            assert_type(batch[0].payload, Order)
            await batch.ack()
        await inbox.receive(_handle_order, concurrency=8)
        await inbox.receive(_answer_order)
        await inbox.receive_batches(_handle_orders)
        await inbox.receive(_bill_order, concurrency=8)
        await inbox.receive_batches(_bill_orders)
        inbox.handled_by(_bill_order)
        await inbox.receive(_bill_refund)  # pyright: ignore[reportArgumentType]
        await inbox.receive(_acks_nothing)  # pyright: ignore[reportArgumentType]
    async with bus.records("orders", group="audit") as log:
        async for record in log:
            assert_type(record.payload, bytes)
            assert_type(record.offset, int)
        assert_type(await log.next_batch(), RecordBatch[bytes])


async def publishing_is_typed(bus: Bus) -> None:
    topic = bus.topic("orders", codec=Json(Order))
    assert_type(await topic.publish(Order(1), key="a", attributes={"a": "b"}), Receipt)
    assert_type(await topic.publish_batch([Order(1), OutboundMessage(b"{}")]), list[Receipt])
    assert_type(await topic.publish_batch([Order(1), OutboundMessage(b"{}")], receipts=False), None)
    assert_type(await topic.enqueue(Order(1)), asyncio.Future[Receipt])
    due = datetime.now(UTC)
    assert_type(await topic.publish(Order(1), id="1", deliver_at=due, ttl=60, partition=0), Receipt)
    assert_type(await topic.enqueue(Order(1), id="1", deliver_at=due, ttl=60, partition=0), asyncio.Future[Receipt])
    whole = OutboundPayload(Order(1), key="a", attributes={"a": "b"}, id="1", deliver_at=due, ttl=60, partition=0)
    assert_type(whole, OutboundPayload[Order])
    assert_type(whole.payload, Order)
    assert_type(await topic.publish(whole), Receipt)
    assert_type(await topic.enqueue(whole), asyncio.Future[Receipt])
    assert_type(await topic.publish_batch([Order(1), whole, OutboundMessage(b"{}")]), list[Receipt])
    assert_type(await bus.topic("o.x", codec=Json(Order | Refund)).publish(whole), Receipt)
    assert_type(await bus.topic("orders").publish(OutboundPayload(b"x", id="1")), Receipt)
    assert_type(OutboundMessage(b"{}").replace(key="a", id=None, data=b"x"), OutboundMessage)
    OutboundMessage(b"{}").replace(id=1)  # pyright: ignore[reportArgumentType]
    OutboundMessage(b"{}").replace(topic="orders")  # pyright: ignore[reportCallIssue]
    await topic.publish(OutboundPayload(b"bytes"))  # pyright: ignore[reportArgumentType]
    await topic.publish_batch([OutboundPayload(Refund(1, "late"))])  # pyright: ignore[reportArgumentType]
    await topic.publish(Order(1), id=1)  # pyright: ignore[reportArgumentType]
    await topic.publish(b"bytes")  # pyright: ignore[reportArgumentType]
    await bus.topic("orders").publish(Order(1))  # pyright: ignore[reportArgumentType]


def blocking_publishing_is_typed(bus: blocking.Bus) -> None:
    topic = bus.topic("orders", codec=Json(Order))
    due = datetime.now(UTC)
    assert_type(topic.publish(Order(1), id="1", deliver_at=due, ttl=60, partition=0), Receipt)
    assert_type(topic.enqueue(Order(1), id="1", deliver_at=due, ttl=60, partition=0), ReceiptFuture)
    assert_type(topic.publish(OutboundPayload(Order(1), id="1")), Receipt)
    assert_type(topic.enqueue(OutboundPayload(Order(1), id="1")), ReceiptFuture)
    assert_type(topic.publish_batch([Order(1), OutboundPayload(Order(1), key="a")]), list[Receipt])
    topic.publish(OutboundPayload(b"bytes"))  # pyright: ignore[reportArgumentType]


async def transactions_are_typed(bus: Bus) -> None:
    async with bus.transactional_publisher("mover") as publisher, bus.records("orders", group="mover") as log:
        as_protocol: protocols.TransactionalPublisher = publisher
        async with as_protocol.transaction(log) as transaction:
            open_one: protocols.Transaction = transaction
            assert_type(await open_one.publish("orders.copy", b"x"), Receipt)
        done: dict[TopicPartition, int] = {}
        async with as_protocol.transaction(log, positions=done, rewind=False):
            done[TopicPartition("orders", 0)] = 1
        async with as_protocol.transaction(log, positions=lambda: {("orders", 0): 1}):
            await log.commit_positions({("orders", 0): 1})
            await log.commit_positions(done)


async def callbacks_of_records_are_typed(bus: Bus, blocking_bus: blocking.Bus) -> None:
    async def awaited(partitions: Sequence[TopicPartition]) -> None: ...

    def called(partitions: Sequence[TopicPartition]) -> None: ...

    bus.records("orders", group="mover", on_assigned=awaited, on_revoking=awaited, on_lost=awaited)
    blocking_bus.records("orders", group="mover", on_assigned=called, on_revoking=called, on_lost=called)


async def tables_are_typed(bus: Bus) -> None:
    async with bus.table_writer("balances", 0) as table:
        writer: protocols.TableWriter = table
        assert_type(await writer.write([OutboundMessage(b"1", "ann")], checkpoint=b"1"), None)
    assert_type((await bus.admin.ensure_topic("balances", compacted=True)).compacted, bool)


async def connect_is_typed() -> None:
    async with broker.connect("inmem:") as bus:
        assert_type(bus, Bus)


async def _handle_order(message: Message[Order]) -> None:
    assert_type(message.payload, Order)


async def _answer_order(message: Message[Order]) -> int:
    return message.payload.number


async def _handle_orders(batch: MessageBatch[Order]) -> Sequence[BaseException | None]:
    return [None for _ in batch]


def _bill_order(message: BlockingMessage[Order]) -> int:
    assert_type(message.payload, Order)
    message.ack()
    return message.payload.number


def _bill_orders(batch: BlockingMessageBatch[Order]) -> Sequence[BaseException | None]:
    return [None for _ in batch]


def _bill_refund(message: BlockingMessage[Refund]) -> None: ...


def _acks_nothing(message: Message[Order]) -> None:
    """Its type is that of an async handler's message, whose `ack` a plain function cannot await."""


def handlers_are_of_both_kinds(
    receiver: protocols.Receiver[Order], batched_receiver: protocols.BatchedReceiver[Order]
) -> None:
    handlers: list[protocols.Handler[Order]] = [_handle_order, _bill_order]
    batch_handlers: list[protocols.BatchHandler[Order]] = [_handle_orders, _bill_orders]
    plain: list[protocols.PlainHandler[Order]] = [_bill_order]
    plain_batch: list[protocols.PlainBatchHandler[Order]] = [_bill_orders]
    both: list[protocols.AsyncHandler[Order]] = [_handle_order]
    both_batch: list[protocols.AsyncBatchHandler[Order]] = [_handle_orders]
    _use(plain, plain_batch, both, both_batch)
    _use([receiver.receive(handler) for handler in handlers])
    _use([batched_receiver.receive_batches(handler) for handler in batch_handlers])


def handlers_may_answer(handlers: list[protocols.Handler[Order]]) -> None:
    async def answers(message: Message[Order]) -> str:
        return str(message.payload.number)

    handlers.extend([answers, _handle_order])


def _use(*_: object) -> None: ...
