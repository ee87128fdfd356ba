"""Connections to the shared emulator, closed at the end of each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import broker
from tests.servers.pubsub import PubSubServer, shared_server

Connect = Callable[..., Awaitable[broker.Bus]]


@pytest.fixture
def server() -> PubSubServer:
    return shared_server()


@pytest.fixture
async def connect(server: PubSubServer) -> AsyncIterator[Connect]:
    opened: list[broker.Bus] = []

    async def open_one(query: str = "", url: str | None = None) -> broker.Bus:
        bus = broker.connect(f"{url or server.url}&{query}" if query else url or server.url)
        await bus.open()
        opened.append(bus)
        return bus

    yield open_one
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(connect: Connect) -> broker.Bus:
    return await connect()


@pytest.fixture
async def topic(bus: broker.Bus) -> str:
    name = f"topic.{uuid.uuid4().hex[:12]}"
    await bus.admin.ensure_topic(name)
    return name
