"""A harness for a real server in a subprocess, with a proxy for each client."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

from broker.bus import Bus
from broker.testing import Harness
from tests.servers.proxy import Proxy

__all__ = ["Process", "ServerHarness"]


class Process(Protocol):
    """The operations of every server of `tests.servers`; the calls block."""

    def start(self) -> object: ...
    def restart(self) -> object: ...
    def kill(self) -> object: ...
    def pause(self) -> object: ...
    def resume(self) -> object: ...


S = TypeVar("S", bound=Process)


class ServerHarness(Harness, Generic[S]):
    """Restarts, kills and pauses the server; cuts the connections in `behind`."""

    # Below the usual limit of a promise: a test that waits in vain says for what.
    patience = 60.0
    lease_seconds = 2.0

    def __init__(self, server: S) -> None:
        super().__init__()
        self.server = server
        self.behind: dict[Bus, Proxy] = {}

    async def cut(self, bus: Bus) -> None:
        self.behind[bus].cut()

    async def crash(self, bus: Bus) -> None:
        self.behind[bus].hold()

    async def isolate(self, bus: Bus) -> None:
        self.behind[bus].hold()

    async def heal(self, bus: Bus) -> None:
        self.behind[bus].hold(False)

    async def age(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def restart(self) -> None:
        await asyncio.to_thread(self.server.restart)

    async def kill(self) -> None:
        await asyncio.to_thread(self.server.kill)
        await asyncio.to_thread(self.server.start)

    async def pause(self, seconds: float) -> None:
        self.server.pause()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.server.resume()
