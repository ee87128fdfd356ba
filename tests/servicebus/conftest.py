"""Connections to the shared double, or to the namespace of `ANYBROKER_SERVICEBUS`, closed at the end of each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from broker.bus import Bus
from broker.hooks import Event, Hooks
from broker_servicebus import ServiceBusSettings
from broker_servicebus.backend import ServiceBusBackend
from tests.servers.servicebus import ServiceBusDouble, missing, shared_double

NAMESPACE = os.environ.get("ANYBROKER_SERVICEBUS", "")
Open = Callable[..., Any]


class Listener:
    def lost(self, messages: object) -> None:
        raise AssertionError("an unexpected loss")

    def expired(self, messages: object) -> None: ...

    def event(self, event: Event) -> None:
        pass


@pytest.fixture
def double() -> Iterator[ServiceBusDouble]:
    """The double, for faults that a namespace does not make on demand; without faults afterwards."""
    if NAMESPACE:
        pytest.skip("needs the double: a real namespace does not fail on demand")
    if (reason := missing()) is not None:
        pytest.skip(reason)
    found = shared_double()
    found.fault()
    yield found
    found.fault()


@pytest.fixture
def topic() -> str:
    return f"topic.{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def open_bus() -> AsyncIterator[Open]:
    """Opens a bus with these settings."""
    opened: list[Bus] = []

    async def open_one(url: str | None = None, **values: Any) -> Bus:
        if url is None and not NAMESPACE:
            if (reason := missing()) is not None:
                pytest.skip(reason)
            url = shared_double().url
        if url is None:
            settings = ServiceBusSettings(connection_string=SecretStr(NAMESPACE), **values)
        else:
            more = "".join(f"&{name}={str(value).lower()}" for name, value in values.items())
            settings = ServiceBusSettings.from_url(url + more)
        hooks = Hooks()
        bus = Bus(ServiceBusBackend(settings, hooks), hooks)
        await bus.open()
        opened.append(bus)
        return bus

    yield open_one
    for bus in opened:
        await bus.close()


@pytest.fixture(params=[pytest.param("true", id="private"), pytest.param("false", id="public", marks=pytest.mark.deep)])
async def both_ways(open_bus: Open, request: pytest.FixtureRequest) -> Bus:
    """A bus that uses the client's private calls, and one that has them switched off."""
    return await open_bus(private_calls=request.param, deduplication_window=0)
