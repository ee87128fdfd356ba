"""The brokers, and filled topics. Each broker is a process on loopback that ends with the block."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from itertools import count as counting
from pathlib import Path
from typing import Final

import broker
from benchmarks.streams.works import clicks
from broker import OutboundMessage
from broker_jetstream.server import EmbeddedServer
from tests.servers.kafka import BUSY_OPTIONS, KafkaServer

__all__ = ["PARTITIONS", "Stage", "open_stage", "state_directory"]

PARTITIONS: Final = 4
_FILLED_AT_ONCE: Final = 10_000
_numbers = counting()


class Stage:
    """One broker.

    :ivar url: for further buses.
    """

    def __init__(self, name: str, url: str, bus: broker.Bus) -> None:
        self.name = name
        self.url = url
        self.bus = bus

    @property
    def bootstrap(self) -> str:
        """The address of Kafka, for other clients."""
        return self.url.partition("://")[2]

    def unique(self, what: str = "bench") -> str:
        """A unique name."""
        return f"{what}-{next(_numbers)}"

    async def topic(self, partitions: int = PARTITIONS, *, compacted: bool = False) -> str:
        """A new topic."""
        name = self.unique()
        await self.bus.admin.ensure_topic(name, partitions=partitions, compacted=compacted)
        return name

    @asynccontextmanager
    async def target(self, partitions: int = PARTITIONS) -> AsyncGenerator[str]:
        """A new topic for one run."""
        name = await self.topic(partitions)
        try:
            yield name
        finally:
            await self.bus.admin.delete_topic(name)

    async def filled(self, count: int, *, keys: int, partitions: int = PARTITIONS) -> str:
        """A new topic with so many clicks of so many users."""
        name = await self.topic(partitions)
        await self.fill(name, count, lambda start, stop: clicks(start, stop, keys))
        return name

    async def fill(self, topic: str, count: int, made: Callable[[int, int], list[OutboundMessage]]) -> None:
        """Publish messages.

        :param made: messages from a number on, up to another.
        """
        for start in range(0, count, _FILLED_AT_ONCE):
            messages = made(start, min(count, start + _FILLED_AT_ONCE))
            await self.bus.topic(topic).publish_batch(messages, receipts=False)


@asynccontextmanager
async def open_stage(name: str, options: str = "") -> AsyncGenerator[Stage]:
    """A new broker, and a bus on it.

    :param name: kafka or jetstream.
    :param options: of the URL.
    """
    if name == "kafka":
        server = await asyncio.to_thread(KafkaServer(BUSY_OPTIONS).start)
        try:
            async with broker.connect(server.url + options) as bus:
                yield Stage(name, server.url, bus)
        finally:
            await asyncio.to_thread(server.close)
    else:
        embedded = EmbeddedServer("")
        try:
            place = await embedded.ensure()
            url = place.url.replace("://", f"://{place.token}@")
            async with broker.connect(url + options) as bus:
                yield Stage(name, url, bus)
        finally:
            await embedded.stop()


@contextlib.contextmanager
def state_directory() -> Generator[Path]:
    """A new directory on disk: that for temporary files may be in memory."""
    build = Path(__file__).parents[2] / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as directory:
        yield Path(directory)
