"""A Kafka broker for benchmarks: a bus, raw confluent-kafka clients, and filled topics.

Every record has a key; in topics that are filled with headers, every second one has a header. The broker is a process
on loopback that ends with the block. Used on one event loop; filling blocks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count as counting
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer

import broker
from benchmarks.null_backend import BODY
from tests.servers.kafka import BUSY_OPTIONS, KafkaServer
from tests.servers.kafka_client import RawAdmin

__all__ = ["BODY", "KEYS", "KafkaStage", "open_kafka"]

KEYS = [b"key-%d" % number for number in range(1000)]
_HEADERS = [("type", b"created")]
_numbers = counting()


class KafkaStage:
    """One broker.

    :ivar url: for further buses of a benchmark.
    """

    def __init__(self, server: KafkaServer, bus: broker.Bus) -> None:
        self.bus = bus
        self.url = server.url
        self.bootstrap = server.bootstrap
        self.admin = RawAdmin(server.bootstrap)

    def name(self, what: str = "bench") -> str:
        """A unique name."""
        return f"{what}-{next(_numbers)}"

    def topic(self, partitions: int = 1) -> str:
        """A new topic."""
        return self.admin.make_topic(self.name(), partitions)

    @asynccontextmanager
    async def target(self, partitions: int = 1) -> AsyncGenerator[str]:
        """A new topic for one run, deleted after it, so that all runs start alike."""
        topic = self.topic(partitions)
        try:
            yield topic
        finally:
            await asyncio.to_thread(self.admin.delete_topic, topic)

    def filled(
        self, count: int, *, partitions: int = 1, headers: bool = True, body: Callable[[int], bytes] = lambda _: BODY
    ) -> str:
        """A new topic with `count` records, spread evenly over its partitions.

        :param body: of a record by its number.
        """
        topic = self.topic(partitions)
        producer = self.producer()
        lost: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                lost.append(error)

        for index in range(count):
            more: dict[str, Any] = {"headers": _HEADERS} if headers and index % 2 else {}
            producer.produce(
                topic, body(index), KEYS[index % 1000], index // 500 % partitions, on_delivery=delivered, **more
            )
            if index % 500 == 499:
                producer.poll(0)
        if producer.flush(60) or lost:
            raise RuntimeError(f"The topic could not be filled: {lost[:1]}")
        return topic

    def producer(self, **more: Any) -> Producer:
        """A raw producer in its best form."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 5,
                "batch.num.messages": 10_000,
                "queue.buffering.max.messages": 1_000_000,
                "retry.backoff.ms": 10,
                **more,
            }
        )
        if "transactional.id" not in more:
            # Otherwise an idempotent producer starts half a second later.
            producer.list_topics(timeout=10)
        return producer

    def consumer(self, group: str | None = None, **more: Any) -> Consumer:
        """A raw consumer in its best form."""
        return Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": group or self.name("raw"),
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
                "fetch.queue.backoff.ms": 10,
                "retry.backoff.ms": 10,
                **more,
            }
        )


@asynccontextmanager
async def open_kafka() -> AsyncGenerator[KafkaStage]:
    """A new broker, and a bus on it."""
    server = await asyncio.to_thread(KafkaServer(BUSY_OPTIONS).start)
    try:
        async with broker.connect(server.url) as bus:
            yield KafkaStage(server, bus)
    finally:
        await asyncio.to_thread(server.close)
