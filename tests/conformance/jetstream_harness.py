"""The harness of the JetStream backend: a real nats-server, which it restarts, kills and pauses."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache

import nats

from broker.bus import Bus
from broker.driver.contract import Backend
from broker.driver.settings import BackendSettings
from broker.testing.harness import unique
from broker_jetstream.names import stream_name
from tests.conformance.server_harness import ServerHarness
from tests.jetstream.support import put
from tests.servers.nats import NatsServer, shared_server
from tests.servers.proxy import Proxy


@cache
def guarded_server() -> NatsServer:
    """A server of this test process that requires a token."""
    server = NatsServer.with_token("right").start()
    atexit.register(server.close)
    return server


class JetStreamHarness(ServerHarness[NatsServer]):
    """One server for all tests of a process; topics have unique names."""

    name = "jetstream"
    quiet = 0.3

    def __init__(self) -> None:
        super().__init__(shared_server())

    def url(self, *, short_lease: bool = False) -> str:
        return f"{self.server.url}?owner_timeout=1{f'&lease_seconds={self.lease_seconds}' if short_lease else ''}"

    def open_bus(self, url: str | BackendSettings, wrap: Callable[[Backend], Backend] | None) -> Bus:
        if not isinstance(url, str) or "lease_seconds" not in url:
            return super().open_bus(url, wrap)
        # Each of these clients has its own proxy, so that it can be cut off alone.
        proxy = Proxy(self.server.port)
        proxy.__enter__()
        bus = super().open_bus(url.replace(self.server.url, proxy.url), wrap)
        self.behind[bus] = proxy
        return bus

    async def compacted_topic(self, *, partitions: int | None = None) -> str:
        return await self.create_topic(
            unique("table"), partitions=partitions, compacted=True, tombstone_retention=timedelta(seconds=1)
        )

    async def compact(self, topic: str) -> None:
        # The server keeps one message of each subject at any time, and a tombstone for a second.
        await asyncio.sleep(1.5)

    async def publish_foreign(self, topic: str, data: bytes, attributes: Sequence[tuple[str, str]]) -> None:
        block = b"NATS/1.0\r\n" + b"".join(f"{name}: {value}\r\n".encode() for name, value in attributes) + b"\r\n"
        client = await nats.connect(self.server.url)
        try:
            await put(client, f"{stream_name(topic)}.0", block, data)
        finally:
            await client.close()

    def unreachable_url(self) -> str:
        return "nats://127.0.0.1:1"

    def forbidden_url(self) -> str:
        return guarded_server().url.replace("//", "//wrong@")

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            for proxy in self.behind.values():
                proxy.__exit__()
