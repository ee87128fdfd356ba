"""Clients whose broker reports an empty cluster while it starts or stops, which librdkafka alone does not survive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

import broker
from broker_kafka.client.rebootstrap import Rebootstrapper
from tests.chaos.test_kafka_server import over
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-rebootstrap")]

RESTARTS = 3

FORGETFUL = {"broker.session.timeout.ms": "1000", "broker.heartbeat.interval.ms": "3000"}
"""A broker that is fenced one second after each heartbeat, until the next; meanwhile its metadata has no brokers."""

FORGETFUL_SECONDS = 5.0
"""Long enough to hear from it once, for a client that still knows it."""


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


async def restart(server: KafkaServer) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


class Asking:
    """Requests a topic all the time, so that one request gets the empty list of brokers."""

    def __init__(self, client: Any, topic: str) -> None:
        self._client, self._topic = client, topic
        self._over = False
        self._answered = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def answered(self, seconds: float) -> bool:
        """Whether a broker answers again within the time."""
        self._answered.clear()
        try:
            await asyncio.wait_for(self._answered.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def end(self) -> None:
        self._over = True
        await self._task

    async def _run(self) -> None:
        while not self._over:
            if await asyncio.to_thread(self._ask):
                self._answered.set()
                await asyncio.sleep(0.005)

    def _ask(self) -> bool:
        try:
            return bool(self._client.list_topics(self._topic, timeout=0.1).brokers)
        except KafkaException:
            return False


async def test_clients_without_brokers_rebootstrap(server: KafkaServer) -> None:
    topic = RawAdmin(server.bootstrap).make_topic()
    # Without librdkafka's own recovery it drops its brokers with every empty list.
    config: dict[str, Any] = {
        "bootstrap.servers": server.bootstrap,
        "metadata.recovery.strategy": "none",
        "log_level": 0,
    }
    consumer = Consumer({**config, "group.id": "rebootstrap"})
    clients = [Producer(config), consumer, AdminClient(config)]
    rebootstrappers = [Rebootstrapper(config) for _ in clients]
    asking = [Asking(client, topic) for client in clients]

    async def answered(requested: list[Asking], seconds: float) -> list[bool]:
        return await asyncio.gather(*(each.answered(seconds) for each in requested))

    steady = dict(server.options)
    try:
        assert all(await answered(asking, 10))
        server.options.update(FORGETFUL)
        await restart(server)
        async with asyncio.timeout(60):
            while any(await answered(asking, FORGETFUL_SECONDS)):
                pass
        server.options = steady
        await restart(server)
        for rebootstrapper, client in zip(rebootstrappers, clients, strict=True):
            rebootstrapper.watch(client)
        assert all(await answered(asking, 20))
    finally:
        server.options = steady
        for each in asking:
            await each.end()
        for rebootstrapper in rebootstrappers:
            rebootstrapper.unwatch()
        consumer.close()


@pytest.mark.deep
async def test_many_publishers_survive_restarts(server: KafkaServer) -> None:
    topic = RawAdmin(server.bootstrap).make_topic(partitions=3)
    enough = asyncio.Event()
    # An empty list is rare per client: many clients need fewer restarts.
    counts = [0] * 12

    async def publish(index: int, output: broker.Topic) -> None:
        while not enough.is_set():
            await output.publish(b"x")
            counts[index] += 1
            await asyncio.sleep(0.03)

    async with AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(broker.connect(f"kafka://{server.bootstrap}")) for _ in counts]
        tasks = [asyncio.create_task(publish(index, bus.topic(topic))) for index, bus in enumerate(buses)]
        for _ in range(RESTARTS):
            await restart(server)
            before = list(counts)
            async with asyncio.timeout(20):
                while any(count <= was + 1 for count, was in zip(counts, before, strict=True)):
                    assert not over(*tasks)
                    await asyncio.sleep(0.05)
        enough.set()
        await asyncio.gather(*tasks)
