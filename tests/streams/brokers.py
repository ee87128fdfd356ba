"""The brokers on which the promises of stream processing are tested.

`memory` and `jetstream` run in `make test`, but for the tests that are deep there; `kafka` and `pulsar` are deep, and
`tests/kafka/test_streams.py` has what is most of all Kafka's. The variants of `memory` write checkpoints in other ways.
Tests that cut a connection take the brokers of `CUT`: there a client that is cut off alone goes through a proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, Self

import pytest

from broker import Bus, connect
from broker_inmem import Broker, InmemSettings
from tests.conformance.kafka_harness import wired as wired_kafka
from tests.conformance.pulsar_harness import wired as wired_pulsar
from tests.servers import kafka, nats, pulsar
from tests.servers.proxy import Proxy
from tests.unit.broker_streams.brokers import Limited

__all__ = ["ALL", "CUT", "RECIPES", "StreamBroker", "on", "opened"]

RECIPES: Final = {
    "memory": Limited(session_seconds=1.0),
    "memory-atomic": Limited(transactions=False),
    "memory-10-rows": Limited(transactions=False, rows=10),
    "memory-fenced": Limited(transactions=False, atomic=False),
    "memory-plain": Limited(transactions=False, tables=False),
}
ALL: Final = ("memory", "jetstream", "kafka", "pulsar")
CUT: Final = ("memory", "jetstream", "kafka-cut", "pulsar-cut")

# A member that is gone is replaced soon, and a busy machine does not end the session of one that lives.
_KAFKA: Final = "session_timeout_ms=6000&heartbeat_interval_ms=300"
_MARKS: Final[Mapping[str, list[pytest.MarkDecorator]]] = {
    "kafka": [pytest.mark.deep],
    "pulsar": [pytest.mark.deep, pytest.mark.xdist_group("pulsar")],
    "kafka-cut": [pytest.mark.deep, pytest.mark.xdist_group("kafka-streams")],
    "pulsar-cut": [pytest.mark.deep, pytest.mark.xdist_group("pulsar-streams")],
}


def parameters(names: tuple[str, ...], deep: tuple[str, ...] = ()) -> list[Any]:
    """Parameters of the fixture `server`."""
    return [
        pytest.param(name, marks=[*_MARKS.get(name, ()), *([pytest.mark.deep] if name in deep else ())])
        for name in names
    ]


def on(*names: str, deep: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Run a test on these brokers only; in `make test` not on those in `deep`."""
    return pytest.mark.parametrize("server", parameters(names, deep), indirect=True)


class StreamBroker:
    """A broker of a test, and its connections, which are closed with the test.

    :ivar name: as in the id of the test.
    """

    def __init__(self, name: str, url: Callable[[], str | InmemSettings]) -> None:
        self.name = name
        self._url = url
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def connect(self) -> Bus:
        """Another connection."""
        return await self._stack.enter_async_context(connect(self._url()))

    async def connect_alone(self) -> Bus:
        """A connection that `cut` cuts off."""
        raise NotImplementedError

    def cut(self, bus: Bus) -> None:
        """Break the connection, and refuse new ones until `heal`."""
        raise NotImplementedError

    def heal(self, bus: Bus) -> None:
        """Undo `cut`."""
        raise NotImplementedError


class MemoryBroker(StreamBroker):
    """A server of this process."""

    def __init__(self, name: str) -> None:
        self.server = Broker(RECIPES[name])
        super().__init__(name, lambda: InmemSettings(broker=self.server))

    async def connect_alone(self) -> Bus:
        return await self.connect()

    def cut(self, bus: Bus) -> None:
        self.server.faults.isolate(bus)

    def heal(self, bus: Bus) -> None:
        self.server.faults.heal(bus)


class ProxiedBroker(StreamBroker):
    """A server with a proxy in front of a client.

    :param proxied: gives a proxy, and the URL through it. One connection of a test has it.
    """

    def __init__(
        self, name: str, url: Callable[[], str | InmemSettings], proxied: Callable[[AsyncExitStack], tuple[Proxy, str]]
    ) -> None:
        super().__init__(name, url)
        self._proxied = proxied
        self._proxies: dict[Bus, Proxy] = {}

    async def connect_alone(self) -> Bus:
        proxy, url = self._proxied(self._stack)
        bus = await self._stack.enter_async_context(connect(url))
        # Closing the connection takes the server.
        self._stack.callback(proxy.refuse, False)
        self._proxies[bus] = proxy
        return bus

    def cut(self, bus: Bus) -> None:
        self._proxies[bus].refuse()

    def heal(self, bus: Bus) -> None:
        self._proxies[bus].refuse(False)


def _before_nats(stack: AsyncExitStack) -> tuple[Proxy, str]:
    proxy = stack.enter_context(Proxy(nats.shared_server().port))
    return proxy, f"{proxy.url}?owner_timeout=2"


def _before_kafka(_: AsyncExitStack) -> tuple[Proxy, str]:
    proxy = wired_kafka().proxies[0]
    return proxy, f"kafka://127.0.0.1:{proxy.port}?{_KAFKA}"


def _before_pulsar(_: AsyncExitStack) -> tuple[Proxy, str]:
    wire = wired_pulsar().wires["wire0"]
    options = f"admin_url=http://127.0.0.1:{wire.web.port}&listener_name=wire0"
    return wire, f"pulsar://127.0.0.1:{wire.port}?{options}"


_OPENED: Final[Mapping[str, Callable[[str], StreamBroker]]] = {
    **dict.fromkeys(RECIPES, MemoryBroker),
    "jetstream": lambda name: ProxiedBroker(name, lambda: nats.shared_server().url, _before_nats),
    "kafka": lambda name: StreamBroker(name, lambda: f"{kafka.shared_server().url}?{_KAFKA}"),
    "kafka-cut": lambda name: ProxiedBroker(name, lambda: f"{wired_kafka().server.url}?{_KAFKA}", _before_kafka),
    "pulsar": lambda name: StreamBroker(name, lambda: pulsar.shared_server().url),
    "pulsar-cut": lambda name: ProxiedBroker(name, lambda: wired_pulsar().server.url, _before_pulsar),
}


def opened(name: str) -> StreamBroker:
    """The broker of this name."""
    return _OPENED[name](name)
