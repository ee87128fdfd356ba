"""Keys go where Kafka's Java client would send them, or where the user's function says."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import broker
from broker.errors import InvalidMessage, PublishError, Unsupported
from broker.outbound import OutboundMessage
from broker_kafka.client.partitioner import partition_of
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin
from tests.unit.broker.test_partitioners import OF_THE_JAVA_CLIENT


async def test_keys_are_sent_where_the_java_client_sends_them(kafka: KafkaServer, make_topic: MakeTopic) -> None:
    dice = random.Random(1)
    topic = make_topic(partitions=7)
    keys = [b"", b"\0", b"\xff\xfe\xfd", *OF_THE_JAVA_CLIENT, *(dice.randbytes(n % 23) for n in range(200))]
    async with broker.connect(kafka.url) as bus:
        receipts = await bus.topic(topic).publish_batch([OutboundMessage(b"", key) for key in keys])
        receipts += await bus.topic(topic).publish_batch([OutboundMessage(b"", key, {"a": "b"}) for key in keys])
    assert [receipt.partition for receipt in receipts] == 2 * [partition_of(key, 7) for key in keys]


@pytest.mark.parametrize(
    "partitioner", ["murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a", "random"]
)
async def test_partition_of_agrees_with_librdkafka(kafka: KafkaServer, make_topic: MakeTopic, partitioner: Any) -> None:
    topic = make_topic(partitions=7)
    keys = [b"\0", b"\xff\xfe\xfd", *OF_THE_JAVA_CLIENT, b"1468509572224", *(b"%d" % n for n in range(50))]
    async with broker.connect(KafkaSettings(servers=(kafka.bootstrap,), partitioner=partitioner)) as bus:
        if partitioner == "random":
            with pytest.raises(Unsupported, match="another partitioner than random"):
                await bus.partition_of(topic, b"key")
            return
        if partitioner == "consistent_random":
            with pytest.raises(Unsupported, match="any partition"):
                await bus.partition_of(topic, b"")
        else:
            keys.append(b"")
        receipts = await bus.topic(topic).publish_batch([OutboundMessage(b"", key) for key in keys])
        assert [receipt.partition for receipt in receipts] == [await bus.partition_of(topic, key) for key in keys]


async def test_unkeyed_messages_reach_every_partition(kafka: KafkaServer, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=3)
    used: set[int | None] = set()
    async with broker.connect(kafka.url) as bus:
        for _ in range(200):
            used.add((await bus.topic(topic).publish(b"x")).partition)
            if len(used) == 3:
                return
    pytest.fail(f"Only {used} were used")


async def test_a_partition_function_decides(kafka: KafkaServer, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=4)
    calls: list[tuple[str, bytes | None, int]] = []

    def by_last_digit(name: str, key: bytes | None, partitions: int) -> int:
        calls.append((name, key, partitions))
        return 0 if key is None else int(key[-1:]) % partitions

    settings = KafkaSettings(servers=(kafka.bootstrap,), partition_function=by_last_digit)
    async with broker.connect(settings) as bus:
        messages = [OutboundMessage(b"", key) for key in (b"a1", b"a2", b"a7", None)]
        receipts = await bus.topic(topic).publish_batch([*messages, OutboundMessage(b"", b"a1", partition=3)])
        assert [receipt.partition for receipt in receipts] == [1, 2, 3, 0, 3]
        assert await bus.partition_of(topic, "a2") == 2
        assert calls.pop() == (topic, b"a2", 4)
    assert calls == [(topic, b"a1", 4), (topic, b"a2", 4), (topic, b"a7", 4), (topic, None, 4)]


async def test_a_failing_partition_function_fails_the_message(kafka: KafkaServer, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)

    def odd(_: str, key: bytes | None, __: int) -> int:
        return {b"one": 1, b"none": None, b"far": 2, b"true": True}[key or b""]  # type: ignore[return-value]

    async with broker.connect(KafkaSettings(servers=(kafka.bootstrap,), partition_function=odd)) as bus:
        keys = [b"one", b"none", b"one", b"far", b"true", b"missing", b"one"]
        with pytest.raises(PublishError) as raised:
            await bus.topic(topic).publish_batch([OutboundMessage(b"", key) for key in keys])
    outcomes = raised.value.outcomes
    assert [index for index, outcome in enumerate(outcomes) if isinstance(outcome, InvalidMessage)] == [1, 3, 4, 5]
    assert "partition_function returned None" in str(outcomes[1])
    assert "0 to 1" in str(outcomes[3])
    assert "KeyError" in str(outcomes[5])


async def test_a_partition_function_may_return_new_partitions(
    kafka: KafkaServer, make_topic: MakeTopic, admin: RawAdmin
) -> None:
    topic = make_topic(partitions=2)
    wanted = 1
    settings = KafkaSettings(servers=(kafka.bootstrap,), partition_function=lambda topic, key, partitions: wanted)
    async with broker.connect(settings) as bus, asyncio.timeout(60):
        await bus.topic(topic).publish(b"a")
        await asyncio.to_thread(admin.add_partitions, topic, 4)
        wanted = 3
        assert (await bus.topic(topic).publish(b"b")).partition == 3
        wanted = 4
        with pytest.raises(InvalidMessage, match="partition_function returned 4") as raised:
            await bus.topic(topic).publish(b"c")
        assert "0 to 3" in raised.value.advice


@pytest.mark.parametrize("in_transactions", [False, True])
async def test_a_partition_function_gets_the_partitions_that_the_bus_added(
    kafka: KafkaServer, name: str, in_transactions: bool
) -> None:
    settings = KafkaSettings(
        servers=(kafka.bootstrap,), partition_function=lambda topic, key, partitions: partitions - 1
    )
    async with broker.connect(settings) as bus, bus.transactional_publisher(f"tx-{name}") as publisher:

        async def publish() -> int | None:
            if not in_transactions:
                return (await bus.topic(name).publish(b"a")).partition
            async with publisher.transaction() as tx:
                return (await tx.publish(name, b"a")).partition

        await bus.admin.ensure_topic(name, partitions=2)
        assert await publish() == 1
        await bus.admin.ensure_topic(name, partitions=4)
        assert await publish() == 3
