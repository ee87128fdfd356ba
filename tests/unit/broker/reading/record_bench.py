"""A record consumer over a scripted source, open, with the events of its hooks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from broker.capabilities import RecordCapabilities
from broker.driver.contract import RecordSubscription, TopicPartition
from broker.hooks import Event, Hooks
from broker.reading.record_consumer import RecordConsumer
from tests.unit.broker.reading.record_fakes import FakeBackend, FakeSource

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)


class Bench:
    """An open consumer over a scripted source, and the events of its hooks."""

    def __init__(self, consumer: RecordConsumer[Any], source: FakeSource, backend: FakeBackend) -> None:
        self.consumer = consumer
        self.source = source
        self.backend = backend
        self.events: list[Event] = []
        self.seen = asyncio.Event()

    def note(self, event: Event) -> None:
        self.events.append(event)
        self.seen.set()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if type(event) is kind]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop run until the condition holds, without sleeping."""
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0)

    async def buffered(self, count: int) -> None:
        await self.until(lambda: len(self.consumer._fetcher.buffer) == count)

    async def commit_under_way(self) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A commit that has reached the source, and the event that lets the source answer."""
        self.source.append(1)
        record = await self.consumer.next_record()
        assert record is not None
        self.source.commit_gate = gate = asyncio.Event()
        call = asyncio.create_task(record.commit())
        await asyncio.wait_for(self.source.commit_begun.wait(), 60)
        return call, gate


@asynccontextmanager
async def bench(*partitions: int, records: RecordCapabilities | None = None, **options: Any) -> AsyncGenerator[Bench]:
    source = FakeSource(partitions or (0,))
    backend = FakeBackend(source, records=records)
    hooks = Hooks()
    consumer: RecordConsumer[Any] = RecordConsumer(
        backend,  # pyright: ignore[reportArgumentType]
        RecordSubscription(topics=["orders"], group="audit"),
        hooks=hooks,
        **options,
    )
    made = Bench(consumer, source, backend)
    hooks.listen(made.note)
    async with consumer:
        yield made


async def turns(count: int = 20) -> None:
    """Let other tasks run for `count` turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def drain(consumer: RecordConsumer[Any]) -> list[Any]:
    """The records of an iteration until its end."""
    return [record async for record in consumer]
