"""Consumers of the topics that match a pattern, which come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import broker
from broker import Message, TopicPattern
from broker.errors import ConfigurationError
from broker_inmem import Broker, InmemSettings
from tests.unit.broker.consuming.warp import warped

PATTERN = TopicPattern(r"orders-.*", exclude=r".*-dead")


async def bodies(inbox: broker.MessageConsumer[bytes], count: int) -> list[tuple[str, bytes | None]]:
    found: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        message = await inbox.next_message(timeout=60)
        assert message is not None, f"Only {found} arrived"
        await message.ack()
        found.append((message.topic, message.data))
    return sorted(found)


def test_topics_that_match_are_consumed_and_new_ones_within_ten_seconds() -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            for name in ("orders-eu", "orders-us", "orders-dead", "invoices"):
                await bus.admin.ensure_topic(name)
                await bus.topic(name).publish(name.encode())
            time = asyncio.get_running_loop().time
            async with bus.messages(PATTERN, subscription="billing") as inbox:
                assert await bodies(inbox, 2) == [("orders-eu", b"orders-eu"), ("orders-us", b"orders-us")]
                assert await inbox.next_message(timeout=1) is None
                await bus.admin.ensure_topic("orders-asia")
                await bus.topic("orders-asia").publish(b"early")
                created = time()
                assert await bodies(inbox, 1) == [("orders-asia", b"early")]
                assert time() - created <= 10.1
                await bus.topic("orders-asia").publish(b"later")
                assert await bodies(inbox, 1) == [("orders-asia", b"later")]
            async with bus.messages(PATTERN, subscription="billing") as inbox:
                assert await inbox.next_message(timeout=30) is None

    warped(test)


def test_a_new_topic_is_read_in_full_though_the_others_begin_at_the_latest() -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            await bus.admin.ensure_topic("orders-eu")
            await bus.topic("orders-eu").publish(b"history")
            async with bus.messages(PATTERN, subscription="billing", start="latest") as inbox:
                await bus.admin.ensure_topic("orders-us")
                await bus.topic("orders-us").publish(b"first")
                assert await bodies(inbox, 1) == [("orders-us", b"first")]

    warped(test)


def test_a_deleted_topic_is_dropped_and_its_successor_consumed() -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            for name in ("orders-eu", "orders-us"):
                await bus.admin.ensure_topic(name)
            async with bus.messages(PATTERN, subscription="billing") as inbox:
                await bus.topic("orders-us").publish(b"held")
                held = await inbox.next_message(timeout=60)
                assert held is not None
                await bus.admin.delete_topic("orders-us")
                await asyncio.sleep(30)
                assert held.lease_lost
                await bus.topic("orders-eu").publish(b"1")
                assert await bodies(inbox, 1) == [("orders-eu", b"1")]
                await bus.admin.ensure_topic("orders-us")
                await bus.topic("orders-us").publish(b"again")
                assert await bodies(inbox, 1) == [("orders-us", b"again")]

    warped(test)


def test_no_topic_matches_yet() -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            handled: list[bytes | None] = []
            async with bus.messages(PATTERN, subscription="billing", stop_when_idle=30) as inbox:

                async def handle(message: Message[bytes]) -> None:
                    handled.append(message.data)

                work = asyncio.create_task(inbox.receive(handle, concurrency=2))
                await asyncio.sleep(5)
                await bus.admin.ensure_topic("orders-eu")
                await bus.topic("orders-eu").publish(b"1")
                await work
            assert handled == [b"1"]

    warped(test)


def test_the_bounds_hold_while_topics_are_added() -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            await bus.admin.ensure_topic("orders-a")
            await bus.topic("orders-a").publish_batch([b"a"] * 10)
            async with bus.messages(PATTERN, subscription="billing", max_outstanding=4) as inbox:
                held = [await inbox.next_message(timeout=60) for _ in range(4)]
                await bus.admin.ensure_topic("orders-b")
                await bus.topic("orders-b").publish_batch([b"b"] * 10)
                assert await inbox.next_message(timeout=60) is None
                for message in held[:2]:
                    assert message is not None
                    await message.ack()
                more = [await inbox.next_message(timeout=60) for _ in range(2)]
                assert [message.topic for message in more if message is not None] == ["orders-b", "orders-b"]
                assert await inbox.next_message(timeout=60) is None
                for message in (*held[2:], *more):
                    assert message is not None
                    await message.ack()
                assert len(await bodies(inbox, 14)) == 14

    warped(test)


def test_more_topics_than_messages_are_refused_or_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            for name in ("orders-a", "orders-b"):
                await bus.admin.ensure_topic(name)
            with pytest.raises(ConfigurationError, match="max_outstanding is 1, and 2 topics match"):
                async with bus.messages(PATTERN, subscription="billing", max_outstanding=1):
                    pass
            async with bus.messages(PATTERN, subscription="billing", max_outstanding=2) as inbox:
                await bus.admin.ensure_topic("orders-c")
                await asyncio.sleep(60)
                await bus.topic("orders-a").publish(b"1")
                assert await bodies(inbox, 1) == [("orders-a", b"1")]
        assert caplog.text.count("Topic 'orders-c' matches") == 1

    warped(test)


def test_a_failed_look_is_repeated() -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            await bus.admin.ensure_topic("orders-a")
            async with bus.messages(PATTERN, subscription="billing") as inbox:
                admin = bus.backend.admin
                looks = 0

                def failing() -> object:
                    nonlocal looks
                    looks += 1
                    if looks == 1:
                        raise broker.ConnectionFailed("cut")
                    return admin()

                bus.backend.admin = failing  # type: ignore[method-assign, assignment]
                await asyncio.sleep(1)
                await _create(bus, admin, "orders-b")
                assert await bodies(inbox, 1) == [("orders-b", b"orders-b")]
                assert looks == 2

    warped(test)


async def _create(bus: broker.Bus, admin: Callable[[], object], name: str) -> None:
    await admin().ensure_topic(name, partitions=None, retention=None, options={})  # type: ignore[attr-defined]
    await bus.topic(name).publish(name.encode())


def test_a_close_ends_the_looks_and_leaves_nothing() -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            await bus.admin.ensure_topic("orders-a")
            before = asyncio.all_tasks()
            async with bus.messages(PATTERN, subscription="billing") as inbox:
                await asyncio.sleep(25)
                inbox.stop()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == before

    warped(test)


def test_records_of_topics_that_match() -> None:
    async def test(server: Broker) -> None:
        async with broker.connect(InmemSettings(broker=server)) as bus:
            for name in ("orders-eu", "orders-dead"):
                await bus.admin.ensure_topic(name, partitions=2)
                await bus.topic(name).publish(b"old")
            async with bus.records(PATTERN, group="audit", start="latest") as log:
                assert await log.next_record(timeout=1) is None
                await bus.admin.ensure_topic("orders-us", partitions=2)
                await bus.topic("orders-us").publish(b"1")
                record = await log.next_record(timeout=60)
                assert record is not None
                assert (record.topic, record.data) == ("orders-us", b"1")
                await record.commit()
                await bus.admin.delete_topic("orders-us")
                await bus.topic("orders-eu").publish(b"2")
                record = await log.next_record(timeout=60)
                assert record is not None
                assert (record.topic, record.data) == ("orders-eu", b"2")
                await record.commit()
            messages = bus.records(PATTERN, group="audit").as_messages(stop_when_idle=5)
            async with messages as inbox:
                assert await inbox.next_message(timeout=1) is None
                await bus.admin.ensure_topic("orders-asia")
                await bus.topic("orders-asia").publish(b"3")
                assert await bodies(inbox, 1) == [("orders-asia", b"3")]

    warped(test)
