"""An in-memory bus with a topic and its retry topics, for tests of retries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import broker
from broker import RetryTopics
from broker.bus import Bus
from broker.messages import Message
from broker.reading.record_consumer import RecordConsumer
from broker_inmem import Broker, InmemSettings

DELAYS = RetryTopics((5, 60, 600))
GROUP = "billing"
Handle = Callable[[Message[bytes]], Awaitable[object]]


def connect(server: Broker) -> Bus:
    return broker.connect(InmemSettings(broker=server))


async def ready(bus: Bus, *, partitions: int = 2, topics: RetryTopics = DELAYS) -> None:
    for name in ("orders", "orders.dead", *topics.names("orders", GROUP)):
        await bus.admin.ensure_topic(name, partitions=partitions)


def log(bus: Bus, **options: Any) -> RecordConsumer[bytes]:
    return bus.records("orders", group=GROUP, **options)


async def all_of(bus: Bus, topic: str) -> list[Any]:
    found: list[Any] = []
    for partition in await bus.log.partitions(topic):
        async for batch in bus.log.read(topic, partition):
            found += batch
    return found


async def until(condition: Callable[[], object], seconds: float = 10_000) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "It did not happen"
        await asyncio.sleep(0.5)


async def handled(inbox: Any, handle: Handle, condition: Callable[[], object], concurrency: int = 1) -> None:
    """Receive until the condition holds."""
    work = asyncio.ensure_future(inbox.receive(handle, concurrency=concurrency))
    await until(condition)
    await inbox.close()
    await work
