"""Clients whose broker says, while it stops or starts, that there are no brokers: librdkafka alone would be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

import broker
from broker_kafka.lifeline import Lifeline
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("kafka-chaos-lifeline"), pytest.mark.timeout(180)]

RESTARTS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


async def restart(server: KafkaServer) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


class Asking:
    """Asks a client for a topic without a break, so that it is there when the broker tells of none."""

    def __init__(self, client: Any, topic: str) -> None:
        self._client, self._topic = client, topic
        self._over = False
        self._answered = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def answered(self, seconds: float) -> bool:
        """Whether a broker answers anew within the time."""
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

    def _ask(self) -> bool:
        try:
            return bool(self._client.list_topics(self._topic, timeout=0.1).brokers)
        except KafkaException:
            return False


@pytest.mark.parametrize("kind", [Producer, Consumer, AdminClient])
async def test_a_client_that_forgot_all_brokers_finds_them_again(server: KafkaServer, kind: type[Any]) -> None:
    topic = RawAdmin(server.bootstrap).make_topic()
    # Without librdkafka's own recovery it forgets its brokers each time it is told of none, not now and then.
    config = {"bootstrap.servers": server.bootstrap, "metadata.recovery.strategy": "none", "log_level": 0}
    client = kind({**config, "group.id": "lifeline"} if kind is Consumer else config)
    lifeline = Lifeline(config)
    asking = Asking(client, topic)
    try:
        assert await asking.answered(10)
        for _ in range(RESTARTS):
            await restart(server)
            if not await asking.answered(5):
                break
        else:
            pytest.fail(f"no answer without brokers was met in {RESTARTS} restarts")
        lifeline.hold(client)
        assert await asking.answered(20)
    finally:
        await asking.end()
        lifeline.let_go()
        if kind is Consumer:
            client.close()


async def test_many_publishers_outlive_restarts(server: KafkaServer) -> None:
    topic = RawAdmin(server.bootstrap).make_topic(partitions=3)
    buses = [await broker.connect(f"kafka://{server.bootstrap}").__aenter__() for _ in range(6)]
    over = asyncio.Event()
    counts = [0] * len(buses)

    async def publish(index: int) -> None:
        output = buses[index].topic(topic)
        while not over.is_set():
            await output.publish(b"x")
            counts[index] += 1

    try:
        tasks = [asyncio.create_task(publish(index)) for index in range(len(buses))]
        for _ in range(RESTARTS):
            await restart(server)
            before = list(counts)
            async with asyncio.timeout(20):
                while any(count <= was + 1 for count, was in zip(counts, before, strict=True)):
                    assert not any(task.done() for task in tasks)
                    await asyncio.sleep(0.05)
        over.set()
        await asyncio.gather(*tasks)
    finally:
        for bus in buses:
            await bus.close()
