"""A group of processors with topics of its own, and what tests do with it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from broker import Bus, Json, OutboundMessage, Record
from broker_streams.context import Context
from broker_streams.graph import Edge, Group, Input, Output, Persist
from broker_streams.processor import Processor
from broker_streams.stats import ProcessorState
from broker_streams.stores.memory import Memory
from broker_streams.view import View
from tests.streams.brokers import StreamBroker

__all__ = ["PARTITIONS", "SECONDS", "Stream", "ones", "published", "total", "until"]

SECONDS = 120.0
PARTITIONS = 4

counts = Persist(Json(int))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def ones(number: int, keys: int = 10) -> list[tuple[str, int]]:
    return [(f"key-{n % keys}", 1) for n in range(number)]


def total(view: View[int]) -> int:
    return sum(value for _, value in view.items())


async def read_all(bus: Bus, topic: str) -> list[Record[bytes]]:
    """What a reader of a topic sees."""
    found: list[Record[bytes]] = []
    for partition in await bus.log.partitions(topic):
        async for batch in bus.log.read(topic, partition):
            found += list(batch)
    return found


async def published(bus: Bus, topic: str) -> list[str]:
    """The ids of what was published to a topic, and committed."""
    return [record.id for record in await read_all(bus, topic)]


class Stream:
    """The topics of a group that sums the values of each key, and publishes each sum.

    :ivar clicks: the name of its input.
    :ivar alerts: its output.
    """

    def __init__(self, server: StreamBroker, bus: Bus) -> None:
        self.server = server
        self.bus = bus
        self.name = f"s{uuid.uuid4().hex[:8]}"
        self.clicks = f"{self.name}-clicks"
        self.table = f"{self.name}-table"
        self.counts = counts
        self.alerts = Output(f"{self.name}-alerts", Json(int))

    async def prepare(self, partitions: int = PARTITIONS) -> None:
        # The table before there is a processor, so that views can be opened first.
        for end in ("clicks", "alerts", "table"):
            await self.topic(end, partitions=partitions, compacted=end == "table")

    async def topic(self, end: str, *, partitions: int = PARTITIONS, compacted: bool = False) -> str:
        """Create another topic of this group; return its name."""
        name = f"{self.name}-{end}"
        await self.bus.admin.ensure_topic(name, partitions=partitions, compacted=compacted)
        return name

    def count(self, ctx: Context, value: int) -> None:
        """The callback."""
        found = ctx[counts] = (ctx[counts] or 0) + value
        ctx.emit(self.alerts, key=ctx.key, value=found)

    def group(self, callback: Callable[..., Any] | None = None, *edges: Edge) -> Group:
        codec = Json(int)
        return Group(self.name, Input(self.clicks, codec, callback or self.count), counts, self.alerts, *edges)

    def processing(self, group: Group | None = None, bus: Bus | None = None, **options: Any) -> Processor:
        options = {"store": Memory(), "checkpoint_interval": 0.05, **options}
        return Processor(bus or self.bus, group or self.group(), **options)

    async def handle(self, group: Group, done: Callable[[], object], **options: Any) -> None:
        """Run a processor until it is done, or has failed, which raises."""
        async with self.processing(group, **options) as processor:
            await until(lambda: done() or processor.state is ProcessorState.STOPPED)

    async def publish(self, values: Sequence[tuple[str, int | None]], topic: str | None = None) -> None:
        messages = [OutboundMessage(None if value is None else b"%d" % value, key) for key, value in values]
        await self.bus.topic(topic or self.clicks).publish_batch(messages)

    async def publish_to_each(self, *values: int) -> None:
        """Publish these to every partition of the input, in this order."""
        numbers = range(PARTITIONS)
        messages = [OutboundMessage(b"%d" % value, f"key-{n}", partition=n) for value in values for n in numbers]
        await self.bus.topic(self.clicks).publish_batch(messages)

    @asynccontextmanager
    async def viewing(self, bus: Bus | None = None) -> AsyncGenerator[View[int]]:
        """A view of the table, ready."""
        async with View(bus or self.bus, self.table, Json(int)) as view:
            async with asyncio.timeout(SECONDS):
                await view.ready()
            yield view

    async def records(self, topic: str) -> list[Record[bytes]]:
        """What a reader of a topic sees."""
        return await read_all(self.bus, topic)

    async def outputs(self) -> list[str]:
        """The ids of what was published to `alerts`."""
        return await published(self.bus, self.alerts.topic)

    async def waiting(self) -> int:
        """How many messages of the input are not committed."""
        return (await self.bus.admin.lag(self.clicks, self.name)).waiting
