"""`Harness`: how the conformance kit connects to a backend and controls its server.

Each test has its own harness, used on the test's event loop. `stop` closes every bus that the harness opened and
deletes every topic that it created, also after a failed test.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Self

from broker.driver.contract import Backend
from broker.driver.settings import BackendSettings
from broker.errors import BrokerError, Unsupported

if TYPE_CHECKING:
    from broker.bus import Bus
    from broker.testing.worker import Worker

__all__ = ["Harness"]


class Harness(ABC):
    """Base class of the harness of a backend.

    Only `name` and `url` are required. The other methods are operations on the server: tests that need one which is not
    overridden are skipped with "needs capability harness.…".
    """

    name: ClassVar[str] = "unnamed"
    """The column of the matrix: the backend, or `backend[configuration]` for a configuration that runs fewer tests."""
    in_matrix: ClassVar[bool] = True
    """Whether the results have a column in the matrix."""
    patience: float = 10.0
    """Seconds to wait for something that must happen."""
    quiet: float = 0.25
    """Seconds without messages that prove that no message comes; an available message arrives well within them."""
    lease_seconds: float = 1.0
    """The lease of connections with `short_lease=True`."""
    cycles: ClassVar[int] = 5
    """How often the tests of leaks open and close what they test."""
    shares_restarts: ClassVar[bool] = False
    """Whether tests share restarts, because the server restarts slowly; see `broker.testing.shared_restart`."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._topics: list[str] = []
        self._bus: Bus | None = None

    @abstractmethod
    def url(self, *, short_lease: bool = False) -> str | BackendSettings:
        """The target of a new connection: a URL or a settings object.

        :param short_lease: messages of this connection have a lease of `lease_seconds`.
        """

    async def start(self) -> None:  # noqa: B027 - most harnesses have nothing to do here
        """Prepare for one test. The server itself belongs to a fixture with a wider scope."""

    def twin(self) -> Self:
        """A new harness of the same server, not started. Override it if `__init__` has arguments."""
        return type(self)()

    async def restart(self) -> None:
        """Stop the server gracefully and start it again, with its address and data."""
        raise Unsupported(f"Harness {self.name!r} cannot restart its server")

    async def kill(self) -> None:
        """Kill the server (SIGKILL) and start it again, with its address and data."""
        raise Unsupported(f"Harness {self.name!r} cannot kill its server")

    async def pause(self, seconds: float) -> None:
        """Freeze the server (SIGSTOP) for `seconds`."""
        raise Unsupported(f"Harness {self.name!r} cannot pause its server")

    async def crash(self, bus: Bus) -> None:
        """End the connection as if its process had died: without releasing or saying anything."""
        raise Unsupported(f"Harness {self.name!r} cannot crash a client")

    async def cut(self, bus: Bus) -> None:
        """Break the network connection; the client may reconnect at once."""
        raise Unsupported(f"Harness {self.name!r} cannot cut a connection")

    async def isolate(self, bus: Bus) -> None:
        """Drop all traffic of this connection until `heal`; other connections are not affected."""
        raise Unsupported(f"Harness {self.name!r} cannot isolate a connection")

    async def heal(self, bus: Bus) -> None:
        """End the isolation of a connection."""
        raise Unsupported(f"Harness {self.name!r} cannot isolate a connection")

    async def age(self, seconds: float) -> None:
        """Let `seconds` of the broker's time pass, for retention; may take as long in real time."""
        raise Unsupported(f"Harness {self.name!r} cannot wait for retention")

    async def advance(self, seconds: float) -> None:
        """Move the broker's clock forward."""
        raise Unsupported(f"Harness {self.name!r} has no clock to move")

    async def compact(self, topic: str) -> None:
        """Compact a topic made by `compacted_topic`; return when old values, deleted keys and tombstones are gone."""
        raise Unsupported(f"Harness {self.name!r} cannot compact a topic")

    async def publish_foreign(self, topic: str, data: bytes, attributes: Sequence[tuple[str, str]]) -> None:
        """Publish a message as another client may: names of attributes may be reserved or empty, or occur twice.

        Where the protocol has a name once, the last value counts.
        """
        raise Unsupported(f"Harness {self.name!r} has no other client")

    def unreachable_url(self) -> str | BackendSettings:
        """An address of this backend at which no server listens."""
        raise Unsupported(f"Harness {self.name!r} has no address without a server")

    def forbidden_url(self) -> str | BackendSettings:
        """The address of the server with wrong credentials."""
        raise Unsupported(f"Harness {self.name!r} has no server that requires credentials")

    async def worker(self, topic: str, subscription: str, *, handle: int, short_lease: bool = True) -> Worker:
        """Start a process that acks `handle` messages, then holds all further ones."""
        from broker.testing.worker import Worker

        url = self.url(short_lease=short_lease)
        if not isinstance(url, str):
            raise Unsupported(f"Harness {self.name!r} has no URL to give to another process")
        worker = await Worker.start(url, topic, subscription, handle)
        self._stack.push_async_callback(worker.kill)
        return worker

    def can(self, operation: str) -> bool:
        """Whether the harness supports an operation: `restart`, `kill`, `pause`, `crash`, `isolate`, `advance`, …"""
        if operation == "worker":
            return isinstance(self.url(), str)
        return getattr(type(self), operation) is not getattr(Harness, operation)

    async def connect(self, *, short_lease: bool = False, wrap: Callable[[Backend], Backend] | None = None) -> Bus:
        """A new connection, closed by `stop`.

        :param wrap: wraps the backend, for instance in `broker.testing.faults.Faults`.
        """
        bus = self.open_bus(self.url(short_lease=short_lease), wrap)
        return await self._stack.enter_async_context(bus)

    def open_bus(self, url: str | BackendSettings, wrap: Callable[[Backend], Backend] | None) -> Bus:
        """Create a bus, without I/O. Variants of a harness override this method."""
        from broker.bus import Bus
        from broker.hooks import Hooks
        from broker.registry import create_backend

        hooks = Hooks()
        backend = create_backend(url, hooks)
        return Bus(backend if wrap is None else wrap(backend), hooks)

    async def bus(self) -> Bus:
        """The main connection of the test, opened by the first call."""
        if self._bus is None:
            self._bus = await self.connect()
        return self._bus

    async def topic(self, *, partitions: int | None = None, **options: Any) -> str:
        """Create a topic with a unique name; `stop` deletes it."""
        return await self.create_topic(unique("topic"), partitions=partitions, **options)

    async def create_topic(self, name: str, *, partitions: int | None = None, **options: Any) -> str:
        """Create a topic with this name; `stop` deletes it."""
        bus = await self.bus()
        await bus.admin.ensure_topic(name, partitions=partitions, **options)
        self._topics.append(name)
        return name

    async def compacted_topic(self, *, partitions: int | None = None) -> str:
        """Create a compacted topic, whose tombstones go as soon as the broker allows; `stop` deletes it."""
        return await self.create_topic(unique("table"), partitions=partitions, compacted=True)

    async def stop(self) -> None:
        """Close the connections and delete the topics of the test."""
        try:
            if self._topics:
                try:
                    await self._delete_topics(await self.bus())
                except BrokerError:
                    # The test may have closed or broken the main connection.
                    await self._delete_topics(await self.connect())
        except BrokerError:
            # A failed clean-up must not hide the failure of the test.
            self._topics.clear()
        finally:
            await self._stack.aclose()

    async def _delete_topics(self, bus: Bus) -> None:
        await asyncio.gather(*(bus.admin.delete_topic(name) for name in self._topics))


def unique(kind: str) -> str:
    """A unique portable name."""
    return f"kit-{kind}-{uuid.uuid4().hex[:12]}"
