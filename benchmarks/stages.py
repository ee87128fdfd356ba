"""The brokers for a benchmark: a bus, and a filled topic.

Every message has a key, an attribute and an id, so that on NATS it has all of our headers. Many runs use an open stage,
one after the other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count as counting

import broker
from benchmarks.null_backend import BODY, NullBackend
from broker.hooks import Hooks
from broker_jetstream.server import EmbeddedServer, ServerAddress

__all__ = ["FILLED", "TARGET", "Stage", "open_stage", "outbound"]

FILLED = "bench.filled"
TARGET = "bench.target"
_numbers = counting()


def outbound(index: int, run: int) -> broker.OutboundMessage:
    """A message with key, attribute and id."""
    return broker.OutboundMessage(BODY, b"key-%d" % (index % 1000), {"type": "created"}, id=f"{run}-{index}")


class Stage:
    """One broker.

    :ivar count: number of messages in FILLED.
    """

    def __init__(self, name: str, bus: broker.Bus, count: int, server: ServerAddress | None) -> None:
        self.name = name
        self.bus = bus
        self.count = count
        self._server = server

    def messages(self, count: int) -> list[broker.OutboundMessage]:
        """New messages, never published before."""
        run = next(_numbers)
        return [outbound(index, run) for index in range(count)]

    @asynccontextmanager
    async def subscription(self) -> AsyncGenerator[str]:
        """A subscription of its own to FILLED, from the first message on."""
        name = f"bench-{next(_numbers)}"
        if self.name == "null":
            yield name
            return
        await self.bus.admin.ensure_subscription(FILLED, name)
        try:
            yield name
        finally:
            await self.bus.admin.delete_subscription(FILLED, name)

    async def empty(self) -> None:
        """Recreate TARGET, so that every run starts with an empty topic."""
        if self.name != "null":
            await self.bus.admin.delete_topic(TARGET)
            await self.bus.admin.ensure_topic(TARGET, partitions=1)

    @property
    def server(self) -> ServerAddress:
        """URL and token for other clients of the JetStream stage."""
        if self._server is None:
            raise ValueError(f"The stage {self.name} has no server")
        return self._server


@asynccontextmanager
async def open_stage(name: str, count: int) -> AsyncGenerator[Stage]:
    """A broker with `count` messages in FILLED.

    :param name: null, memory or jetstream.
    """
    if name == "null":
        async with broker.Bus(NullBackend(count), Hooks()) as bus:
            yield Stage(name, bus, count, None)
    elif name == "memory":
        async with broker.connect("inmem://bench") as bus:
            yield await _filled(Stage(name, bus, count, None))
    else:
        server = EmbeddedServer("")
        try:
            place = await server.ensure()
            async with broker.connect(place.url.replace("://", f"://{place.token}@")) as bus:
                yield await _filled(Stage(name, bus, count, place))
        finally:
            await server.stop()


async def _filled(stage: Stage) -> Stage:
    admin, topic = stage.bus.admin, stage.bus.topic(FILLED)
    await admin.delete_topic(FILLED)
    await admin.ensure_topic(FILLED, partitions=1)
    messages = stage.messages(stage.count)
    for start in range(0, stage.count, 2000):
        await topic.publish_batch(messages[start : start + 2000])
    await stage.empty()
    return stage
