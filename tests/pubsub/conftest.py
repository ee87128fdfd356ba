"""Connections to the shared emulator, closed at the end of each test, and a front of it that demands tokens."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import broker
from tests.pubsub.guarded import Front, TokenGiver
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
def giver() -> Iterator[TokenGiver]:
    giver = TokenGiver()
    yield giver
    giver.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def front(server: PubSubServer, authority: Authority) -> AsyncIterator[Front]:
    front = Front(server.url.partition("emulator_host=")[2], authority)
    await front.start()
    yield front
    await front.stop()


@pytest.fixture
def endpoint(front: Front, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of the front, which lacks credentials."""
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    return (
        f"pubsub://{PROJECT}?endpoint=localhost:{front.port}&tls_ca={authority.file}"
        "&ordering=off&settle_timeout=5&pull_timeout=2"
    )
