"""A share group whose broker and workers are killed: every message is handled."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from broker.bus import connect
from broker.messages import Message
from broker.testing.waiting import eventually, numbered
from broker.testing.worker import Worker
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-share")]

PATIENCE = 60.0
LOCK = 4.0


@pytest.mark.timeout(180)
async def test_a_killed_broker_and_a_killed_worker_lose_nothing() -> None:
    server = KafkaServer()
    try:
        await asyncio.to_thread(server.start)
        topic = RawAdmin(server.bootstrap).make_topic(partitions=2)
        url = f"{server.url}?queue=share&share_lock={LOCK}"
        seen: Counter[bytes] = Counter()

        async def handle(message: Message[bytes]) -> None:
            seen[message.data or b""] += 1

        async with connect(url) as bus:
            await bus.admin.ensure_subscription(topic, "readers")
            for body in numbered(50, "first"):
                await bus.topic(topic).publish(body)
            worker = await Worker.start(url, topic, "readers", 5)
            await worker.until_holding(PATIENCE)
            await worker.kill()
            inboxes = [bus.messages(topic, subscription="readers") for _ in range(2)]
            for inbox in inboxes:
                await inbox.__aenter__()
            work = [asyncio.create_task(inbox.receive(handle, concurrency=4)) for inbox in inboxes]
            await eventually(lambda: len(seen) >= 10, PATIENCE, "ten messages")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await bus.topic(topic).publish_batch(numbered(50, "second"))
            wanted = {*numbered(50, "first"), *numbered(50, "second")}
            await eventually(lambda: wanted <= {*seen, *worker.handled}, PATIENCE, "every message")
            for inbox in inboxes:
                await inbox.close()
            await asyncio.gather(*work)
        assert set(seen) <= wanted
    finally:
        await asyncio.to_thread(server.close)
