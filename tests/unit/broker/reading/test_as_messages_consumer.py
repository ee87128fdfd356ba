"""`RecordConsumer.as_messages`: a whole message consumer over records, scripted and in memory."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

import broker
from broker.codecs import Json
from broker.consuming.factory import ConsumerFactory
from broker.consuming.retry.policy import Retry
from broker.driver.contract import RecordSubscription, TopicPartition
from broker.errors import Closed, ConfigurationError, LeaseLost, Unsupported
from broker.hooks import Event, Hooks, LeaseExpired, PartitionsRevoked
from broker.outbound import OutboundMessage
from broker.reading.record_consumer import RecordConsumer
from tests.unit.broker.reading.record_fakes import FakeBackend, FakeSource

P0 = TopicPartition("orders", 0)
QUICK = Retry(max_attempts=3, initial=0.01, maximum=0.02)


class FakeBus:
    """The part of a bus that the factory of message consumers needs."""

    def __init__(self) -> None:
        self.hooks = Hooks()

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    def topic(self, name: str) -> Any:
        raise AssertionError("no dead letters in these tests")


def scripted(source: FakeSource, hooks: Hooks) -> RecordConsumer[bytes]:
    backend: Any = FakeBackend(source)
    bus = FakeBus()
    bus.hooks = hooks
    return RecordConsumer(
        backend,
        RecordSubscription(topics=["orders"], group="billing"),
        hooks=hooks,
        make_messages=ConsumerFactory(bus, backend).make_over,
    )


def name() -> str:
    return f"orders-{uuid4().hex[:8]}"


async def fill(bus: broker.Bus, topic: str, count: int, *, keys: int = 5, partitions: int = 3) -> None:
    await bus.admin.ensure_topic(topic, partitions=partitions)
    await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % n, key=b"%d" % (n % keys)) for n in range(count)])


async def test_a_message_in_its_retry_pause_is_lost_with_its_partition() -> None:
    source = FakeSource()
    hooks = Hooks()
    expired = asyncio.Event()
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        if isinstance(event, LeaseExpired):
            expired.set()

    hooks.listen(note)
    retry = Retry(max_attempts=5, initial=30, maximum=30)
    async with scripted(source, hooks).as_messages(retry=retry) as inbox:
        source.append(1)
        async for message in inbox:
            async with message:
                raise ZeroDivisionError
            break
        source.lose(0)
        await asyncio.wait_for(expired.wait(), 60)
        source.assign(0)
        again = await inbox.next_message(timeout=60)
        assert again is not None
        await again.ack()
    assert source.stored == {P0: 2}


async def test_a_key_is_not_blocked_by_records_that_another_member_finished() -> None:
    source = FakeSource()
    async with scripted(source, Hooks()).as_messages(ordered_by_key=True) as inbox:
        source.append(1, 2)  # of one key
        first = await inbox.next_message(timeout=60)
        assert first is not None
        source.lose(0)
        source.stored[P0] = 3  # the owner in between has done both
        source.append(3)
        source.assign(0)
        third = await inbox.next_message(timeout=60)
        assert third is not None
        assert third.data == b"3"
        await third.ack()
    assert source.stored == {P0: 4}


async def test_an_ack_after_the_partition_was_lost_raises() -> None:
    source = FakeSource()
    async with scripted(source, Hooks()).as_messages() as inbox:
        source.append(1)
        message = await inbox.next_message(timeout=60)
        assert message is not None
        source.lose(0)
        assert message.lease_lost
        with pytest.raises(LeaseLost):
            await message.ack()
    assert source.stored == {}


async def test_a_revocation_lets_the_handler_end() -> None:
    source = FakeSource()
    async with scripted(source, Hooks()).as_messages() as inbox:
        source.append(1)
        message = await inbox.next_message(timeout=60)
        assert message is not None
        revoking = asyncio.create_task(source.revoke(0))
        await asyncio.sleep(0)
        await message.ack()
        await asyncio.wait_for(revoking, 60)
        assert source.stored == {P0: 2}


def test_as_messages_replaces_a_consumer_that_is_not_open() -> None:
    backend: Any = FakeBackend()
    subscription = RecordSubscription(topics=["orders"], group="g")
    with pytest.raises(Unsupported, match="without a bus"):
        RecordConsumer(backend, subscription, hooks=Hooks()).as_messages()
    consumer = scripted(FakeSource(), Hooks())
    with pytest.raises(ConfigurationError, match="max_gap is 0"):
        consumer.as_messages(max_gap=0)
    consumer.as_messages()
    with pytest.raises(Closed, match="before"):
        consumer.as_messages()
    poison = RecordConsumer(backend, subscription, hooks=Hooks(), on_decode_error="orders.dead")
    with pytest.raises(ConfigurationError, match="dead_letter="):
        poison.as_messages()


async def test_keys_keep_their_order_through_failures_in_memory() -> None:
    topic = name()
    async with broker.connect("inmem:") as bus:
        await fill(bus, topic, 100)
        seen: dict[bytes, list[int]] = {}
        failed: set[int] = set()

        async def handle(message: broker.Message[bytes]) -> None:
            number = int(message.data or b"")
            if number % 7 == 0 and number not in failed:
                failed.add(number)
                raise ZeroDivisionError
            seen.setdefault(message.key or b"", []).append(number)

        inbox = bus.records(topic, group="billing").as_messages(retry=QUICK, ordered_by_key=True, stop_when_idle=0.1)
        async with inbox:
            await inbox.receive(handle, concurrency=8)
        assert sum(map(len, seen.values())) == 100
        assert all(numbers == sorted(numbers) for numbers in seen.values())


async def test_exhausted_and_undecodable_records_are_dead_lettered_in_memory() -> None:
    topic, dead = name(), name()
    async with broker.connect("inmem:") as bus:
        await bus.admin.ensure_topic(dead)
        await bus.admin.ensure_topic(topic, partitions=1)
        for body in (b"1", b"{", b"3"):
            await bus.topic(topic).publish(body)

        async def handle(message: broker.Message[Any]) -> None:
            if message.payload == 3:
                raise ZeroDivisionError

        inbox = bus.records(topic, group="billing", codec=Json(int)).as_messages(
            retry=QUICK, dead_letter=dead, stop_when_idle=0.1
        )
        async with inbox:
            await inbox.receive(handle)
        async with bus.records(dead, group="check", stop_when_idle=0.1) as letters:
            found = {r.data: r.attributes async for r in letters}
        assert set(found) == {b"{", b"3"}
        assert found[b"3"]["dead-letter-attempts"] == "3"
        assert found[b"3"]["dead-letter-subscription"] == "billing"
        assert (await bus.admin.lag(topic, "billing")).waiting == 0


async def test_two_members_share_and_rebalance_without_loss_in_memory() -> None:
    topic = name()
    async with broker.connect("inmem:") as bus, broker.connect("inmem:") as other:
        await fill(bus, topic, 400, partitions=4, keys=40)
        seen: list[int] = []
        revoked = asyncio.Event()
        bus.hooks.listen(lambda event: revoked.set() if isinstance(event, PartitionsRevoked) else None)
        half = asyncio.Event()

        async def handle(message: broker.Message[bytes]) -> None:
            await asyncio.sleep(0)
            seen.append(int(message.data or b""))
            if len(seen) == 100:
                half.set()

        async def serve(host: broker.Bus) -> None:
            inbox = host.records(topic, group="billing").as_messages(
                max_outstanding=20, commit_every=10, stop_when_idle=0.5
            )
            async with inbox:
                await inbox.receive(handle, concurrency=4)

        first = asyncio.create_task(serve(bus))
        await asyncio.wait_for(half.wait(), 10)
        second = asyncio.create_task(serve(other))
        await asyncio.wait_for(asyncio.gather(first, second), 30)
        assert revoked.is_set()
        assert set(seen) == set(range(400))
        assert len(seen) == 400, "a rebalance in peace repeats nothing"
        assert (await bus.admin.lag(topic, "billing")).waiting == 0
