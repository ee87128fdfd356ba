"""The harness of the Pub/Sub backend: Google's emulator, with a proxy for each client.

The emulator loses everything in a restart, so the harness cannot restart it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from google.pubsub_v1.types import PublishRequest, PublishResponse, PubsubMessage

from broker.bus import Bus
from broker.driver.contract import Backend
from broker.driver.settings import BackendSettings
from broker.testing import Harness
from tests.conformance.server_harness import ServerHarness
from tests.servers.proxy import Proxy
from tests.servers.pstest import shared_pstest
from tests.servers.pubsub import PROJECT, PubSubServer, new_server
from tests.servers.shared import Shared

_kit_server = Shared.in_groups(new_server)
"""An emulator of the kit's own, which its tests freeze."""


class PubSubHarness(ServerHarness[PubSubServer]):
    """One emulator for all tests of the kit; topics have unique names."""

    name = "pubsub"
    quiet = 0.3
    options = ""

    restart = Harness.restart
    kill = Harness.kill
    age = Harness.age

    def __init__(self) -> None:
        super().__init__(_kit_server())

    def url(self, *, short_lease: bool = False) -> str:
        return f"{self.server.url}{self.options}{f'&lease_seconds={self.lease_seconds:g}' if short_lease else ''}"

    def open_bus(self, url: str | BackendSettings, wrap: Callable[[Backend], Backend] | None) -> Bus:
        if not isinstance(url, str) or "lease_seconds" not in url:
            return super().open_bus(url, wrap)
        # Each has a proxy of its own, so that a test can cut one client only.
        proxy = Proxy(self.server.port)
        proxy.__enter__()
        bus = super().open_bus(url.replace(self.server.host, f"127.0.0.1:{proxy.port}"), wrap)
        self.behind[bus] = proxy
        return bus

    async def publish_foreign(self, topic: str, data: bytes, attributes: Sequence[tuple[str, str]]) -> None:
        request = PublishRequest(
            topic=f"projects/{PROJECT}/topics/{topic}",
            messages=[PubsubMessage(data=data, attributes=dict(attributes))],
        )
        async with grpc.aio.insecure_channel(self.server.host) as channel:
            publish = channel.unary_unary(
                "/google.pubsub.v1.Publisher/Publish",
                request_serializer=PublishRequest.serialize,
                response_deserializer=PublishResponse.deserialize,
            )
            await publish(request)

    def unreachable_url(self) -> str:
        return "pubsub://anybroker-tests?emulator_host=127.0.0.1:1"

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            for proxy in self.behind.values():
                proxy.__exit__()


class PstestHarness(PubSubHarness):
    """Google's pstest with ordered subscriptions; it is optional, so it has no column in the matrix."""

    name = "pubsub[pstest]"
    in_matrix = False
    options = "&ordering=on&pull_mode=stream"

    def __init__(self) -> None:
        ServerHarness.__init__(self, shared_pstest())
