"""Features and limits of Pulsar's subscriptions, and what closed consumers leave on the broker."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from datetime import timedelta

import pytest

import broker
from broker.bus import Bus
from broker.consuming.consumer import MessageConsumer
from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, OffsetOutOfRange, TopicNotFound
from broker.hooks import Warned
from broker.names import ephemeral
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, numbered
from broker_pulsar.client import pulsar
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")


async def test_ephemeral_subscriptions_are_deleted_at_close(bus: Bus, pulsar_server: PulsarServer, topic: str) -> None:
    path = f"/admin/v2/persistent/public/default/{topic}/subscriptions"
    async with bus.messages(topic, subscription=ephemeral()), bus.records(topic, group=ephemeral()):
        assert (await asyncio.to_thread(pulsar_server.request, "GET", path))[1].count(b"ephemeral") == 2
        assert await bus.admin.subscriptions(topic) == []
    assert (await asyncio.to_thread(pulsar_server.request, "GET", path))[1] == b"[]"


async def test_a_key_stays_with_one_consumer(bus: Bus, topic: str) -> None:
    messages = [OutboundMessage(b"%d" % number, key=f"k{number % 20}") for number in range(200)]
    owners: defaultdict[bytes | None, set[int]] = defaultdict(set)
    order: defaultdict[bytes | None, list[int]] = defaultdict(list)
    async with (
        bus.messages(topic, subscription="billing", ordered_by_key=True) as one,
        bus.messages(topic, subscription="billing", ordered_by_key=True) as two,
    ):
        await bus.topic(topic).publish_batch(messages)

        done = asyncio.Event()

        async def drain(number: int, inbox: MessageConsumer[bytes]) -> None:
            async for message in inbox:
                async with message:
                    owners[message.key].add(number)
                    order[message.key].append(int(message.payload))
                    if sum(map(len, order.values())) == 200:
                        done.set()

        draining = [asyncio.ensure_future(drain(1, one)), asyncio.ensure_future(drain(2, two))]
        async with asyncio.timeout(60):
            await done.wait()
    await asyncio.gather(*draining)
    assert {len(found) for found in owners.values()} == {1}
    assert {number for found in owners.values() for number in found} == {1, 2}
    assert all(numbers == sorted(numbers) for numbers in order.values())


async def test_ordered_and_unordered_consumers_do_not_mix(bus: Bus, topic: str) -> None:
    async with bus.messages(topic, subscription="billing"):
        with pytest.raises(BrokerError, match="separate subscriptions"):
            async with bus.messages(topic, subscription="billing", ordered_by_key=True):
                pass


async def test_attempts_are_counted_per_consumer(bus: Bus, topic: str) -> None:
    await bus.topic(topic).publish(b"x")
    async with bus.messages(topic, subscription="billing") as inbox:
        for attempt in (1, 2, 3):
            message = await inbox.next_message(timeout=60)
            assert message is not None
            assert message.delivery_attempt == attempt
            await message.nack(0)
    async with bus.messages(topic, subscription="billing") as inbox:
        message = await inbox.next_message(timeout=60)
        assert message is not None
        assert message.delivery_attempt == 1
        await message.ack()


async def test_a_foreign_message_is_read(bus: Bus, pulsar_server: PulsarServer, topic: str) -> None:
    def publish() -> None:
        logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null")
        client = pulsar.Client(pulsar_server.service_url, logger=logger)
        producer = client.create_producer(f"persistent://public/default/{topic}")
        odd = {"": "no name", "anybroker-time": "soon", "anybroker-future": "1", "fine": "yes"}
        producer.send(b"x", properties=odd, partition_key="anybroker-64:!!", ordering_key="o", event_timestamp=12)
        client.close()

    await asyncio.to_thread(publish)
    async with bus.messages(topic, subscription="billing") as inbox:
        message = await inbox.next_message(timeout=60)
        assert message is not None
        assert (message.key, dict(message.attributes)) == (b"anybroker-64:!!", {"fine": "yes"})
        assert message.publish_time is not None
        assert message.native.event_timestamp() == 12
        await message.ack()


@pytest.mark.parametrize("wrapped", [False, True], ids=["extension", "wrapped"])
async def test_messages_come_without_the_clients_wrapper(
    bus: Bus, topic: str, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    if wrapped:  # as with a client without the private name
        for module in ("messages", "receiving"):
            monkeypatch.setattr(f"broker_pulsar.{module}.extension_of", lambda consumer: consumer)
    await bus.topic(topic).publish_batch([b"x", b"y"])
    async with bus.messages(topic, subscription="billing") as inbox:
        for body in (b"x", b"y"):
            message = await inbox.next_message(timeout=60)
            assert message is not None
            assert isinstance(message.raw, pulsar.Message) is wrapped
            assert message.native.value() == body
            await message.ack()

    async def settled() -> bool:
        lag = await bus.admin.lag(topic, "billing")
        return not lag.waiting and not lag.unsettled

    await eventually(settled, 60)


@pytest.mark.deep
async def test_waiting_consumers_use_little_cpu_time(bus: Bus, topic: str) -> None:
    async with bus.messages(topic, subscription="billing") as inbox, bus.records(topic, group="audit") as log:
        assert await inbox.next_message(timeout=0.5) is None
        spent: list[float] = []
        for _ in range(3):
            began = time.process_time()
            waiting = asyncio.ensure_future(log.next_record(timeout=1))
            assert await inbox.next_message(timeout=1) is None
            assert await waiting is None
            spent.append(time.process_time() - began)
    # The least of three: other threads of this process may belong to other tests.
    assert min(spent) < 0.1, spent


async def test_a_log_without_retention_is_reported_once(bus: Bus, topic: str) -> None:
    warned: list[str] = []
    bus.hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    await bus.admin.ensure_topic(topic, retention=timedelta(hours=1))
    await bus.log.bounds(topic)
    assert warned == []
    other = f"{topic}-short"
    await bus.admin.ensure_topic(other)
    connection = bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
    nothing = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}

    async def is_set() -> bool:
        path = connection.topic(other).path
        await connection.http.request("POST", f"{path}/retention", "", nothing)
        return await connection.http.get(f"{path}/retention?applied=true", "") == nothing

    await eventually(is_set, 20, "the policy of the topic")
    for _ in range(2):
        await bus.log.bounds(other)
    (text,) = warned
    assert "no retention" in text and other in text
    await bus.admin.delete_topic(other)


@pytest.mark.deep
async def test_a_deleted_topic_ends_its_consumers(bus: Bus, topic: str) -> None:
    async with bus.messages(topic, subscription="billing") as inbox, bus.records(topic, group="audit") as log:
        await bus.topic(topic).publish(b"x")
        message = await inbox.next_message(timeout=60)
        assert message is not None
        await message.ack()
        assert await log.next_record(timeout=60) is not None
        await bus.admin.delete_topic(topic)
        with pytest.raises(TopicNotFound):
            async with asyncio.timeout(60):
                await log.next_record()
        with pytest.raises(TopicNotFound):
            async with asyncio.timeout(60):
                await inbox.next_message()


async def test_part_of_a_batch_can_be_committed(pulsar_server: PulsarServer, topic: str) -> None:
    async with broker.connect(f"{pulsar_server.url}&batching=default&linger=0.3") as bus:
        await bus.topic(topic).publish(b"open")
        receipts = await bus.topic(topic).publish_batch([b"%d" % number for number in range(10)])
        assert len({(receipt.offset or 0) >> 12 for receipt in receipts}) == 1
        async with bus.records(topic, group="audit") as log:
            seen = [await log.next_record(timeout=60) for _ in range(5)]
            assert seen[-1] is not None
            await seen[-1].commit()
        async with bus.records(topic, group="audit") as log:
            record = await log.next_record(timeout=60)
            assert record is not None
            assert record.data == b"4"


async def test_a_position_of_another_topic_is_refused(bus: Bus, topic: str) -> None:
    other = f"own-{uuid.uuid4().hex[:12]}"
    await bus.admin.ensure_topic(other)
    await bus.topic(other).publish(b"x")
    await bus.topic(topic).publish(b"x")
    first = (await bus.log.bounds(other))[0].first
    async with bus.records(topic, group="audit") as log:
        assert await log.next_record(timeout=60) is not None
        with pytest.raises(OffsetOutOfRange):
            await log.seek({TopicPartition(topic, 0): first})
    await bus.admin.delete_topic(other)


async def test_a_commit_after_a_seek_backwards_counts(bus: Bus, topic: str) -> None:
    await bus.topic(topic).publish_batch([OutboundMessage(body, partition=0) for body in numbered(2)])
    await bus.topic(topic).publish_batch(numbered(2, "later"))
    async with bus.records(topic, group="audit") as log:
        seen = [record for _ in range(4) if (record := await log.next_record(timeout=60)) is not None]
        await seen[3].commit()
        await log.seek({TopicPartition(topic, 0): seen[0].offset})
        again = [record for _ in range(2) if (record := await log.next_record(timeout=60)) is not None]
        assert [record.offset for record in again] == [record.offset for record in seen[:2]]
        await again[1].commit()
        assert (await log.committed())[TopicPartition(topic, 0)] == seen[1].offset + 1
    async with bus.records(topic, group="audit") as log:
        record = await log.next_record(timeout=60)
        assert record is not None
        assert record.offset == seen[2].offset
