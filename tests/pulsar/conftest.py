"""The standalone that the tests of one process share, and connections to it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

import broker
from broker.bus import Bus
from tests.servers.proxy import Proxy
from tests.servers.pulsar import PulsarServer, shared_server


@pytest.fixture
def pulsar_server() -> PulsarServer:
    """The shared broker: not to be stopped; tests that stop one start their own."""
    return shared_server()


@pytest.fixture
def web(pulsar_server: PulsarServer) -> Iterator[Proxy]:
    """A proxy in front of the HTTP API."""
    with Proxy(pulsar_server.ports["web"]) as proxy:
        yield proxy


@pytest.fixture
async def bus(pulsar_server: PulsarServer) -> AsyncIterator[Bus]:
    async with broker.connect(pulsar_server.url) as bus:
        yield bus


@pytest.fixture
async def topic(bus: Bus) -> AsyncIterator[str]:
    """A new topic with one partition."""
    name = f"own-{uuid.uuid4().hex[:12]}"
    await bus.admin.ensure_topic(name)
    yield name
    await bus.admin.delete_topic(name)
