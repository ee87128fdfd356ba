"""A broker and a group for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from broker import Bus
from tests.streams.brokers import ALL, StreamBroker, opened, parameters
from tests.streams.support import Stream


@pytest.fixture(params=parameters(ALL))
async def server(request: pytest.FixtureRequest) -> AsyncIterator[StreamBroker]:
    async with opened(request.param) as server:
        yield server


@pytest.fixture
async def bus(server: StreamBroker) -> Bus:
    return await server.connect()


@pytest.fixture
async def stream(server: StreamBroker, bus: Bus) -> Stream:
    stream = Stream(server, bus)
    await stream.prepare()
    return stream
