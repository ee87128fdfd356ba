"""A server with a manual clock, and one connection to it with one topic."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from broker_inmem import Broker, BrokerOptions, ManualClock
from tests.inmem.clients import Client


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> Broker:
    return Broker(BrokerOptions(seed=7), clock=clock)


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[Client]:
    async with Client(broker) as client:
        await client.topic()
        yield client
