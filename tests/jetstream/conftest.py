"""Connections to the shared server, closed at the end of each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from broker.hooks import Event, Hooks
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings
from tests.servers.nats import NatsServer, shared_server

Open = Callable[..., Awaitable[JetStreamBackend]]


@pytest.fixture
def nats_server() -> NatsServer:
    return shared_server()


@pytest.fixture
def topic() -> str:
    return f"topic.{uuid.uuid4().hex[:12]}"


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
async def open_backend(nats_server: NatsServer, events: list[Event]) -> AsyncIterator[Open]:
    opened: list[JetStreamBackend] = []

    async def open_one(url: str | None = None, **values: Any) -> JetStreamBackend:
        defaults: dict[str, Any] = {"servers": (nats_server.url,)}
        settings = JetStreamSettings.from_url(url) if url else JetStreamSettings(**{**defaults, **values})
        hooks = Hooks()
        hooks.listen(events.append)
        backend = JetStreamBackend(settings, hooks)
        await backend.open()
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        await backend.close()


@pytest.fixture(params=[True, False], ids=["fast", "public"])
async def both_ways(open_backend: Open, request: pytest.FixtureRequest) -> JetStreamBackend:
    """A backend that uses the private calls of nats-py, and one that uses only the public ones."""
    return await open_backend(fast_path=request.param)


@pytest.fixture
async def backend(open_backend: Open) -> JetStreamBackend:
    return await open_backend()
