"""The harness of the Service Bus backend: the project's own double of it, or a real namespace.

With a connection string in `ANYBROKER_SERVICEBUS` the tests run against that namespace; it cannot be restarted, and its
locks last at least five seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage

from broker.bus import Bus
from broker.driver.contract import Backend
from broker.driver.settings import BackendSettings
from broker.testing import Harness
from broker_servicebus import ServiceBusSettings
from tests.conformance.server_harness import ServerHarness
from tests.servers.proxy import Proxy
from tests.servers.servicebus import ServiceBusDouble, missing, shared_double

__all__ = ["NAMESPACE", "AzureHarness", "DoubleHarness"]

NAMESPACE = os.environ.get("ANYBROKER_SERVICEBUS", "")


async def send_foreign(bus: Bus, topic: str, data: bytes, attributes: Sequence[tuple[str, str]]) -> None:
    """Send a message with these application properties, by the client alone."""
    backend: Any = bus.backend
    async with backend.client.get_topic_sender(topic) as sender:
        await sender.send_messages(ServiceBusMessage(data, application_properties=dict(attributes)))


class DoubleHarness(ServerHarness[ServiceBusDouble]):
    """One double for all tests of a process; topics have unique names."""

    name = "servicebus"
    quiet = 0.3

    def __init__(self) -> None:
        if (reason := missing()) is not None:
            pytest.skip(reason)
        super().__init__(shared_double())

    def url(self, *, short_lease: bool = False) -> str:
        return f"{self.server.url}&connect_timeout=5{f'&lease_seconds={self.lease_seconds}' if short_lease else ''}"

    def open_bus(self, url: str | BackendSettings, wrap: Callable[[Backend], Backend] | None) -> Bus:
        if not isinstance(url, str) or "lease_seconds" not in url:
            return super().open_bus(url, wrap)
        # Each has a proxy of its own, so that a test can cut one client only.
        proxy = Proxy(self.server.port)
        proxy.__enter__()
        bus = super().open_bus(url.replace(f":{self.server.port}?", f":{proxy.port}?"), wrap)
        self.behind[bus] = proxy
        return bus

    async def publish_foreign(self, topic: str, data: bytes, attributes: Sequence[tuple[str, str]]) -> None:
        await send_foreign(await self.bus(), topic, data, attributes)

    def unreachable_url(self) -> str:
        return "servicebus://name:key@127.0.0.1:1?emulator=true&admin_endpoint=http://127.0.0.1:1"

    def forbidden_url(self) -> str:
        return self.server.url_at(self.server.port, key="wrong")

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            for proxy in self.behind.values():
                proxy.__exit__()


class AzureHarness(Harness):
    """A real namespace."""

    name = "servicebus"
    patience = 60.0
    quiet = 3.0
    lease_seconds = 5.0

    async def publish_foreign(self, topic: str, data: bytes, attributes: Sequence[tuple[str, str]]) -> None:
        await send_foreign(await self.bus(), topic, data, attributes)

    def url(self, *, short_lease: bool = False) -> BackendSettings:
        values: dict[str, Any] = {"connection_string": NAMESPACE}
        if short_lease:
            values["lease_seconds"] = self.lease_seconds
        return ServiceBusSettings(**values)
