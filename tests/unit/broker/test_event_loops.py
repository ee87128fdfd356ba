"""Every public call of a bus and its objects refuses an event loop other than the one that opened the bus."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

import broker
from broker.admin import AdminFacade
from broker.driver.concurrency import check_loop
from broker.publishing.topic import TopicFacade
from broker.publishing.transactions import OpenTransaction, TransactionalPublisherFacade
from broker.reading.log_follower import LogFollower
from broker.reading.log_reader import LogReaderFacade
from broker_inmem import Broker
from broker_inmem.settings import InmemSettings

PLACE = ("orders", 0)
NO_CALLS = {
    "Bus.health": "returns the error",
    "MessageConsumer.runs_in": "looks at a set",
    "TransactionalPublisherFacade.end": "inner",
    "TransactionalPublisherFacade.begin": "inner; by the block",
    "OpenTransaction.begin": "inner",
    "OpenTransaction.end": "inner",
}


async def handle(message: broker.Message) -> None: ...


async def handle_batch(batch: broker.MessageBatch) -> None: ...


class Objects:
    """One object of each kind, all open, of one bus."""

    def __init__(self, bus: broker.Bus) -> None:
        self.bus = bus
        self.topic = bus.topic("orders")

    async def open(self, stack: AsyncExitStack) -> None:
        bus = self.bus
        await bus.admin.ensure_topic("orders", partitions=1)
        await self.topic.publish_batch([b"1", b"2", b"3"])
        self.inbox = await stack.enter_async_context(bus.messages("orders", subscription="billing"))
        self.message = await self.inbox.next_message(timeout=60)
        self.batch = await self.inbox.next_batch(1, timeout=60)
        self.log = await stack.enter_async_context(bus.records("orders", group="audit"))
        self.record = await self.log.next_record(timeout=60)
        self.records = await self.log.next_batch(1, timeout=60)
        self.followed = await stack.enter_async_context(bus.log.follow("orders"))
        self.publisher = await stack.enter_async_context(bus.transactional_publisher("tx-1"))
        self.transaction = await stack.enter_async_context(self.publisher.transaction())

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Every call, by the name of its class and method."""
        bus, topic, inbox, log, admin = self.bus, self.topic, self.inbox, self.log, self.bus.admin
        message, record = self.message, self.record
        assert message is not None
        assert record is not None
        return {
            "Bus.open": bus.open,
            "Bus.close": bus.close,
            "Bus.check_open": bus.check_open,
            "Bus.partition_of": partial(bus.partition_of, "orders", "key"),
            "TopicFacade.publish": partial(topic.publish, b"x"),
            "TopicFacade.publish_batch": partial(topic.publish_batch, [b"x"]),
            "TopicFacade.enqueue": partial(topic.enqueue, b"x"),
            "TopicFacade.flush": topic.flush,
            "TopicFacade.close": topic.close,
            "new TopicFacade.publish": lambda: bus.topic("other").publish(b"x"),
            "MessageConsumer.open": inbox.open,
            "MessageConsumer.stop": inbox.stop,
            "MessageConsumer.close": inbox.close,
            "MessageConsumer.next_message": inbox.next_message,
            "MessageConsumer.next_batch": inbox.next_batch,
            "MessageConsumer.receive": partial(inbox.receive, handle),
            "MessageConsumer.receive_batches": partial(inbox.receive_batches, handle_batch),
            "MessageConsumer.__aiter__": lambda: anext(aiter(inbox)),
            "MessageConsumer.batches": lambda: anext(inbox.batches()),
            "new MessageConsumer.open": lambda: bus.messages("orders", subscription="others").open(),
            "Service.serve": lambda: bus.messages("orders", subscription="others").handled_by(handle).serve(),
            "Message.ack": message.ack,
            "Message.nack": message.nack,
            "Message.reject": message.reject,
            "Message.extend": partial(message.extend, 1),
            "Message.__aenter__": message.__aenter__,
            "Message.__aexit__": lambda: message.__aexit__(None, None, None),
            "MessageBatch.ack": self.batch.ack,
            "MessageBatch.nack": self.batch.nack,
            "RecordConsumer.__aenter__": lambda: bus.records("orders", group="others").__aenter__(),
            "RecordConsumer.close": log.close,
            "RecordConsumer.next_record": log.next_record,
            "RecordConsumer.next_batch": log.next_batch,
            "RecordConsumer.__aiter__": lambda: anext(aiter(log)),
            "RecordConsumer.batches": lambda: anext(log.batches()),
            "RecordConsumer.commit": log.commit,
            "RecordConsumer.commit_positions": lambda: log.commit_positions({PLACE: 0}),
            "RecordConsumer.commit_records": lambda: log.commit_records([record]),
            "RecordConsumer.committed": log.committed,
            "RecordConsumer.seek": lambda: log.seek({PLACE: 0}),
            "RecordConsumer.pause": log.pause,
            "RecordConsumer.resume": log.resume,
            "as_messages": lambda: bus.records("orders", group="others").as_messages().open(),
            "Record.commit": record.commit,
            "RecordBatch.commit": self.records.commit,
            "LogReaderFacade.partitions": partial(bus.log.partitions, "orders"),
            "LogReaderFacade.bounds": partial(bus.log.bounds, "orders"),
            "LogReaderFacade.position_at": partial(bus.log.position_at, "orders", datetime.now(UTC)),
            "LogReaderFacade.spans": partial(bus.log.spans, "orders", 0, 0, 1),
            "LogReaderFacade.read": lambda: anext(bus.log.read("orders", 0)),
            "LogReaderFacade.follow": lambda: bus.log.follow("orders"),
            "LogFollower.__aenter__": lambda: bus.log.follow("orders").__aenter__(),
            "LogFollower.next_batch": self.followed.next_batch,
            "LogFollower.batches": lambda: anext(self.followed.batches()),
            "LogFollower.close": self.followed.close,
            "AdminFacade.ensure_topic": partial(admin.ensure_topic, "other"),
            "AdminFacade.delete_topic": partial(admin.delete_topic, "orders"),
            "AdminFacade.topics": admin.topics,
            "AdminFacade.describe_topic": partial(admin.describe_topic, "orders"),
            "AdminFacade.topic_identity": partial(admin.topic_identity, "orders"),
            "AdminFacade.ensure_subscription": partial(admin.ensure_subscription, "orders", "others"),
            "AdminFacade.delete_subscription": partial(admin.delete_subscription, "orders", "others"),
            "AdminFacade.subscriptions": partial(admin.subscriptions, "orders"),
            "AdminFacade.describe_subscription": partial(admin.describe_subscription, "orders", "billing"),
            "AdminFacade.purge": partial(admin.purge, "orders"),
            "AdminFacade.lag": partial(admin.lag, "orders", "billing"),
            "AdminFacade.groups": admin.groups,
            "AdminFacade.describe_group": partial(admin.describe_group, "audit"),
            "AdminFacade.reset_group": partial(admin.reset_group, "audit", to="earliest"),
            "AdminFacade.delete_group": partial(admin.delete_group, "audit"),
            "AdminFacade.redrive": partial(admin.redrive, "orders", to=["other"]),
            "AdminFacade.list_dead": partial(admin.list_dead, "orders"),
            "new TransactionalPublisherFacade": lambda: bus.transactional_publisher("tx-2").__aenter__(),
            "TransactionalPublisherFacade.transaction": lambda: self.publisher.transaction().__aenter__(),
            "TransactionalPublisherFacade.close": getattr(self.publisher, "close"),  # noqa: B009
            "OpenTransaction.publish": partial(self.transaction.publish, "orders", b"x"),
            "OpenTransaction.publish_batch": partial(self.transaction.publish_batch, "orders", [b"x"]),
            "OpenTransaction.ack": partial(self.transaction.ack, message),
            "OpenTransaction.ack_batch": partial(self.transaction.ack_batch, [message]),
        }


@pytest.fixture
async def objects() -> AsyncIterator[Objects]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(broker.connect(InmemSettings(broker=Broker())))
        found = Objects(bus)
        await found.open(stack)
        yield found


def elsewhere(call: Callable[[], object]) -> BaseException | None:
    """Make the call on a new event loop of this thread; return its error."""

    async def work() -> None:
        async with asyncio.timeout(10):
            result = call()
            if inspect.isawaitable(result):
                await result

    try:
        asyncio.run(work())
    except Exception as error:
        return error
    return None


async def test_every_call_refuses_another_event_loop(objects: Objects):
    for name, call in objects.calls().items():
        error = await asyncio.to_thread(elsewhere, call)
        assert isinstance(error, broker.WrongEventLoop), f"{name}: {error!r}"
        assert not error.retriable
        assert "broker.connect" in error.advice
    # None of the calls did anything.
    assert objects.message is not None
    await objects.transaction.publish("orders", b"4")
    await objects.message.ack()
    await objects.batch.ack()
    await objects.records.commit()
    rest = await objects.inbox.next_message(timeout=60)
    assert rest is not None
    assert {objects.message.data, objects.batch[0].data, rest.data} == {b"1", b"2", b"3"}
    assert await objects.bus.admin.topics() == ["orders"]


async def test_no_public_call_is_left_out(objects: Objects):
    listed = objects.calls().keys() | NO_CALLS.keys()
    kinds: list[type] = [
        broker.Bus,
        TopicFacade,
        broker.MessageConsumer,
        broker.Service,
        broker.Message,
        broker.MessageBatch,
        broker.RecordConsumer,
        broker.Record,
        broker.RecordBatch,
        LogReaderFacade,
        LogFollower,
        AdminFacade,
        TransactionalPublisherFacade,
        OpenTransaction,
    ]
    found = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, member in vars(kind).items()
        if not name.startswith("_") and inspect.iscoroutinefunction(member)
    }
    assert found - listed == set()


async def test_a_call_outside_any_loop_is_refused_too(objects: Objects):
    with pytest.raises(broker.WrongEventLoop):
        await asyncio.to_thread(objects.inbox.stop)


async def test_health_tells_of_the_wrong_loop(objects: Objects):
    def health() -> broker.Health:
        return asyncio.run(objects.bus.health())

    told = await asyncio.to_thread(health)
    assert not told.ok
    assert "event loop" in told.detail


def test_a_bus_whose_loop_has_ended_is_refused():
    bus = broker.connect(InmemSettings(broker=Broker()))

    async def publish() -> None:
        await bus.open()
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"1")

    asyncio.run(publish())
    for _ in range(2):
        with pytest.raises(broker.WrongEventLoop, match="which has ended"):
            asyncio.run(publish())


def test_a_closed_bus_is_closed_on_every_loop():
    bus = broker.connect(InmemSettings(broker=Broker()))

    async def use() -> None:
        async with bus:
            pass

    asyncio.run(use())
    with pytest.raises(broker.Closed, match="The bus is closed"):
        asyncio.run(use())
    asyncio.run(bus.close())


def test_a_bus_that_could_not_open_may_open_on_another_loop():
    server = Broker()
    server.faults.fail("open", broker.ConnectionFailed("no route"))
    bus = broker.connect(InmemSettings(broker=server))
    with pytest.raises(broker.ConnectionFailed):
        asyncio.run(bus.open())

    async def use() -> None:
        async with bus:
            await bus.admin.topics()

    asyncio.run(use())


async def test_an_object_without_a_loop_admits_every_loop():
    check_loop(None)
    check_loop(asyncio.get_running_loop())
    waiting: Awaitable[None] = asyncio.to_thread(check_loop, None)
    await waiting
