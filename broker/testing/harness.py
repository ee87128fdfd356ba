"""What the conformance kit must know of a backend: how to reach it, and what can be done to its server.

A harness is made for each test and used from that test's event loop. `stop` closes every bus that the harness opened
and deletes every topic that it made, also after a failed test.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
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
    """The small object that a backend author writes.

    Only `name` and `url` are needed. Every other method is an operation that some tests can use: those tests
    are reported as "needs capability harness.…" where it is not overridden.
    """

    name: ClassVar[str] = "unnamed"
    """The backend's column in the matrix; `backend[configuration]` for one that runs only what differs there."""
    in_matrix: ClassVar[bool] = True
    """Whether the results go into the matrix; False for a second configuration that is to have no column."""
    patience: float = 10.0
    """Seconds within which something that must come has come."""
    quiet: float = 0.25
    """Seconds of silence that prove that nothing comes; a message that is there arrives well within them."""
    lease_seconds: float = 1.0
    """The lease of connections made with `short_lease=True`."""
    shares_restarts: ClassVar[bool] = False
    """Whether the server takes so long to come back that tests are to be run at once around one restart."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._topics: list[str] = []
        self._bus: Bus | None = None

    @abstractmethod
    def url(self, *, short_lease: bool = False) -> str | BackendSettings:
        """Where a new connection goes: a URL or a settings object.

        :param short_lease: messages of this connection are leased for `lease_seconds` only.
        """

    async def start(self) -> None:  # noqa: B027 - most harnesses have nothing to do here
        """Make ready for one test; the server itself belongs to a fixture that lives longer."""

    def twin(self) -> Self:
        """Another harness of the same server, not started; to be overridden where `__init__` has arguments."""
        return type(self)()

    async def restart(self) -> None:
        """Stop the server orderly and start it again at the same address, with all that it had stored."""
        raise Unsupported(f"Harness {self.name!r} cannot restart its server")

    async def kill(self) -> None:
        """End the server without notice (SIGKILL) and start it again likewise."""
        raise Unsupported(f"Harness {self.name!r} cannot kill its server")

    async def pause(self, seconds: float) -> None:
        """Freeze the server (SIGSTOP) for so long."""
        raise Unsupported(f"Harness {self.name!r} cannot pause its server")

    async def crash(self, bus: Bus) -> None:
        """End this connection as the death of its process would: nothing is given back, nothing is said."""
        raise Unsupported(f"Harness {self.name!r} cannot crash a client")

    async def cut(self, bus: Bus) -> None:
        """Break this connection on the wire, now; it may come back at once."""
        raise Unsupported(f"Harness {self.name!r} cannot cut a connection")

    async def isolate(self, bus: Bus) -> None:
        """Keep this connection from the server, in silence, until `heal`; others reach it."""
        raise Unsupported(f"Harness {self.name!r} cannot isolate a connection")

    async def heal(self, bus: Bus) -> None:
        """Let a connection that was isolated reach the server again."""
        raise Unsupported(f"Harness {self.name!r} cannot isolate a connection")

    async def age(self, seconds: float) -> None:
        """Let so much of the broker's time pass, for what it removes by age; it may take as long in real time."""
        raise Unsupported(f"Harness {self.name!r} cannot wait for what the broker removes by age")

    async def advance(self, seconds: float) -> None:
        """Move the broker's clock forward."""
        raise Unsupported(f"Harness {self.name!r} has no clock to move")

    def unreachable_url(self) -> str | BackendSettings:
        """An address of this backend at which no server listens."""
        raise Unsupported(f"Harness {self.name!r} has no address without a server")

    def forbidden_url(self) -> str | BackendSettings:
        """The server's address with credentials that it refuses."""
        raise Unsupported(f"Harness {self.name!r} has no server that asks for credentials")

    async def worker(self, topic: str, subscription: str, *, handle: int, short_lease: bool = True) -> Worker:
        """Start another process that acks `handle` messages, then holds all that it gets."""
        from broker.testing.worker import Worker

        url = self.url(short_lease=short_lease)
        if not isinstance(url, str):
            raise Unsupported(f"Harness {self.name!r} has no URL to give to another process")
        worker = await Worker.start(url, topic, subscription, handle)
        self._stack.push_async_callback(worker.kill)
        return worker

    def can(self, operation: str) -> bool:
        """Whether the harness has this operation (`restart`, `kill`, `pause`, `crash`, `isolate`, `advance`, …)."""
        if operation == "worker":
            return isinstance(self.url(), str)
        return getattr(type(self), operation) is not getattr(Harness, operation)

    async def connect(self, *, short_lease: bool = False, wrap: Callable[[Backend], Backend] | None = None) -> Bus:
        """A connection of its own, closed by `stop`.

        :param wrap: puts something between the facade and the backend, such as `broker.testing.faults.Faults`.
        """
        bus = self.open_bus(self.url(short_lease=short_lease), wrap)
        return await self._stack.enter_async_context(bus)

    def open_bus(self, url: str | BackendSettings, wrap: Callable[[Backend], Backend] | None) -> Bus:
        """Make the bus, without I/O; variants of a harness override this."""
        from broker.bus import Bus
        from broker.hooks import Hooks
        from broker.registry import create_backend

        hooks = Hooks()
        backend = create_backend(url, hooks)
        return Bus(backend if wrap is None else wrap(backend), hooks)

    async def bus(self) -> Bus:
        """The test's first connection, made when first asked for."""
        if self._bus is None:
            self._bus = await self.connect()
        return self._bus

    async def topic(self, *, partitions: int | None = None, **options: Any) -> str:
        """Create a topic of a unique name; `stop` deletes it."""
        return await self.create_topic(unique("topic"), partitions=partitions, **options)

    async def create_topic(self, name: str, *, partitions: int | None = None, **options: Any) -> str:
        """Create a topic of this name; `stop` deletes it."""
        bus = await self.bus()
        await bus.admin.ensure_topic(name, partitions=partitions, **options)
        self._topics.append(name)
        return name

    async def stop(self) -> None:
        """Close what the test opened and delete what it made."""
        try:
            if self._topics:
                try:
                    await self._delete_topics(await self.bus())
                except BrokerError:
                    # The test has closed it, or broken it.
                    await self._delete_topics(await self.connect())
        except BrokerError:
            # What a failed test left behind must not hide why it failed.
            self._topics.clear()
        finally:
            await self._stack.aclose()

    async def _delete_topics(self, bus: Bus) -> None:
        await asyncio.gather(*(bus.admin.delete_topic(name) for name in self._topics))


def unique(kind: str) -> str:
    """A portable name that no other test has."""
    return f"kit-{kind}-{uuid.uuid4().hex[:12]}"
