"""The harness of the Pulsar backend: a real standalone, which it restarts, kills and pauses.

A client that a test cuts off alone connects through two proxies, one for each port of the broker. Pulsar advertises its
address to clients, so each pair has a listener of its own that advertises the proxy's port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Self

from broker.bus import Bus
from broker.driver.contract import Backend
from broker.driver.settings import BackendSettings
from broker.testing import Harness
from broker.testing.waiting import eventually
from broker_pulsar.backend import PulsarBackend
from broker_pulsar.client import pulsar
from tests.conformance.server_harness import ServerHarness
from tests.servers.proxy import Proxy
from tests.servers.pulsar import PulsarServer
from tests.servers.server_process import Servers
from tests.servers.shared import Shared

WIRES = 4
"""The most clients of one test with proxies of their own."""


class Wire(Proxy):
    """The proxies of one client: to the broker, and to its HTTP API."""

    def __init__(self, server: PulsarServer) -> None:
        super().__init__(server.port)
        self.web = Proxy(server.ports["web"])

    def open(self) -> None:
        self.__enter__()
        self.web.__enter__()

    def close(self) -> None:
        self.__exit__()
        self.web.__exit__()

    def cut(self, after_bytes: int = 0, *, for_good: bool = False) -> None:
        super().cut(after_bytes, for_good=for_good)
        self.web.cut(for_good=for_good)

    def hold(self, holding: bool = True) -> None:
        super().hold(holding)
        self.web.hold(holding)


class Wired(Servers):
    """The broker of this test process, and its proxies."""

    def __init__(self) -> None:
        self.server = PulsarServer()
        self.wires = {f"wire{number}": Wire(self.server) for number in range(WIRES)}
        for name, wire in self.wires.items():
            wire.open()
            self.server.wires[name] = wire.port

    def start(self) -> Self:
        self.server.start()
        return self

    def close(self) -> None:
        self.server.close()
        for wire in self.wires.values():
            wire.close()


wired = Shared.in_groups(Wired)
"""The broker of the running group of tests."""


class PulsarHarness(ServerHarness[PulsarServer]):
    """One broker for all tests of a process; topics have unique names."""

    name = "pulsar"
    quiet = 0.4
    cycles = 3
    shares_restarts = True
    # Pulsar counts retention in minutes.
    age = Harness.age

    def __init__(self) -> None:
        self.wired = wired()
        super().__init__(self.wired.server)
        self._free = count()

    def url(self, *, short_lease: bool = False) -> str:
        return f"{self.server.url}{'&listener_name=wire' if short_lease else ''}"

    def open_bus(self, url: str | BackendSettings, wrap: Callable[[Backend], Backend] | None) -> Bus:
        if not isinstance(url, str) or "listener_name=wire" not in url:
            return super().open_bus(url, wrap)
        name = f"wire{next(self._free) % WIRES}"
        wire = self.wired.wires[name]
        bus = super().open_bus(
            f"pulsar://127.0.0.1:{wire.port}?admin_url=http://127.0.0.1:{wire.web.port}&listener_name={name}", wrap
        )
        self.behind[bus] = wire
        return bus

    async def compact(self, topic: str) -> None:
        bus = await self.bus()
        assert isinstance(bus.backend, PulsarBackend)
        connection = bus.backend.connection
        for log in await connection.logs(topic):
            resource = f"{log.path}/compaction"
            await connection.http.request("PUT", resource, "Compacting", allow=(409,))

            async def done(resource: str = resource) -> bool:
                found = await connection.http.get(resource, "Compacting")
                assert found["status"] != "ERROR", found
                return found["status"] == "SUCCESS"

            await eventually(done, self.patience, "the compaction")

    async def publish_foreign(self, topic: str, data: bytes, attributes: Sequence[tuple[str, str]]) -> None:
        def publish() -> None:
            client = pulsar.Client(
                f"pulsar://127.0.0.1:{self.server.port}", logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
            )
            try:
                client.create_producer(topic).send(data, properties=dict(attributes))
            finally:
                client.close()

        await asyncio.to_thread(publish)

    def unreachable_url(self) -> str:
        return f"pulsar://127.0.0.1:1?admin_url={self.server.admin_url}&connect_timeout=1"

    async def stop(self) -> None:
        for wire in self.behind.values():
            wire.hold(False)
        await super().stop()
