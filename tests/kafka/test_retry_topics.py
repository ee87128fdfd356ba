"""Retry topics on Kafka: headers, size limits, and where a group starts on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from confluent_kafka import Producer

from broker import RetryTopics
from broker.bus import Bus, connect
from broker.outbound import OutboundMessage
from broker.testing.waiting import take
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer

PATIENCE = 60.0
TOPICS = RetryTopics((0.3, 0.6))


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with connect(kafka.url) as bus:
        yield bus


@pytest.fixture
async def topic(bus: Bus, make_topic: MakeTopic, group: str) -> str:
    """A topic, and its retry topics."""
    topic = make_topic(partitions=2)
    for name in TOPICS.names(topic, group):
        await bus.admin.ensure_topic(name, partitions=2)
    return topic


async def test_retry_topics_keep_foreign_headers(kafka: KafkaServer, bus: Bus, topic: str, group: str) -> None:
    foreign: Any = [("colour", b"green"), ("colour", b"red"), ("binary", b"\xff\xfe"), ("null", None)]
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(topic, b"body", b"key", headers=foreign)
    assert producer.flush(PATIENCE) == 0
    async with bus.messages(topic, subscription=group, retry_topics=TOPICS) as inbox:
        ids: set[str] = set()
        for attempt in (1, 2, 3):
            (message,) = await take(inbox, 1, PATIENCE)
            ids.add(message.id)
            assert (message.topic, message.key, message.data, message.delivery_attempt) == (
                topic,
                b"key",
                b"body",
                attempt,
            )
            assert dict(message.attributes) == {"colour": "red"}
            headers = [pair for pair in message.native.headers() if not pair[0].startswith(("retry-", "anybroker-"))]
            assert sorted(headers, key=repr) == sorted(foreign, key=repr)
            await (message.nack() if attempt < 3 else message.ack())
        assert len(ids) == 1


async def test_the_largest_message_fits_on_a_retry_topic(bus: Bus, topic: str, group: str) -> None:
    limits = bus.capabilities.publish.limits
    assert limits.body is not None
    assert limits.id is not None
    assert limits.attributes is not None
    name, filled = "n", {f"a{number}": "" for number in range(limits.attributes - 1)}
    size = limits.body - sum(map(len, filled)) - len(name) - len(b"key")
    sent = OutboundMessage(b"x" * size, key=b"key", attributes=filled | {name: ""}, id="i" * limits.id)
    await bus.topic(topic).publish(sent)
    async with bus.messages(topic, subscription=group, retry_topics=TOPICS) as inbox:
        for attempt in (1, 2, 3):
            (message,) = await take(inbox, 1, PATIENCE)
            assert (message.id, len(message.data or b""), message.delivery_attempt) == (sent.id, size, attempt)
            assert message.attributes == sent.attributes
            await (message.nack() if attempt < 3 else message.ack())


@pytest.mark.parametrize("kind", ["messages", "records"])
async def test_a_group_starting_at_the_end_reads_its_retry_topics_from_the_start(
    bus: Bus, topic: str, group: str, kind: str
) -> None:
    await bus.topic(topic).publish(b"old")
    await bus.topic(TOPICS.names(topic, group)[1]).publish(b"waits already")
    inbox = (
        bus.messages(topic, subscription=group, start="latest", retry_topics=TOPICS)
        if kind == "messages"
        else bus.records(topic, group=group, start="latest").as_messages(retry_topics=TOPICS)
    )
    async with inbox:
        async with asyncio.timeout(PATIENCE):
            (message,) = await take(inbox, 1, PATIENCE)
        assert (message.data, message.topic) == (b"waits already", topic)
        await message.ack()
        await bus.topic(topic).publish(b"new")
        (message,) = await take(inbox, 1, PATIENCE)
        assert message.data == b"new"
        await message.ack()
