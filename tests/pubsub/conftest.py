"""Connections to the shared emulator, closed at the end of each test, and a secured server in front of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import broker
from tests.pubsub.secured import SecuredServer, TokenServer
from tests.servers.certificates import Authority
from tests.servers.pubsub import PROJECT, PubSubServer, shared_server

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


@pytest.fixture
def token_server() -> Iterator[TokenServer]:
    token_server = TokenServer()
    yield token_server
    token_server.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def secured(server: PubSubServer, authority: Authority) -> AsyncIterator[SecuredServer]:
    secured = SecuredServer(server.url.partition("emulator_host=")[2], authority)
    await secured.start()
    yield secured
    await secured.stop()


@pytest.fixture
def endpoint(secured: SecuredServer, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the secured server, without credentials."""
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    return (
        f"pubsub://{PROJECT}?endpoint=localhost:{secured.port}&tls_ca={authority.file}"
        "&ordering=off&settle_timeout=5&pull_timeout=2"
    )
