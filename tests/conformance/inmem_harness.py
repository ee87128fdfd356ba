"""The harness of the in-memory broker: a new server for every test, and a clock that can be advanced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from broker.bus import Bus
from broker.testing import Harness
from broker_inmem import Broker, BrokerOptions, InmemSettings
from broker_inmem.clock import SystemClock, Timer


class MovableClock(SystemClock):
    """Real time that can be advanced; timers that become due fire at once."""

    def __init__(self) -> None:
        super().__init__()
        self._moved = 0.0
        self._timers: list[tuple[float, asyncio.TimerHandle, Callable[[], object]]] = []

    def time(self) -> float:
        return super().time() + self._moved

    def call_at(self, when: float, callback: Callable[[], object], loop: asyncio.AbstractEventLoop) -> Timer:
        timer = loop.call_later(max(0.0, when - self.time()), callback)
        self._timers = [item for item in self._timers if item[0] > self.time() and not item[1].cancelled()]
        self._timers.append((when, timer, callback))
        return timer

    def advance(self, seconds: float) -> None:
        self._moved += seconds
        for when, timer, callback in self._timers:
            if when <= self.time() and not timer.cancelled():
                timer.cancel()
                callback()


class InmemHarness(Harness):
    """Restarts and crashes are injected faults of the broker."""

    name = "inmem"
    patience = 5.0
    quiet = 0.1
    lease_seconds = 1.0
    options: ClassVar[BrokerOptions] = BrokerOptions(session_seconds=1.0, rebalance_seconds=2.0, tombstone_seconds=0.0)

    def __init__(self) -> None:
        super().__init__()
        self.clock = MovableClock()
        self.broker = Broker(self.options, clock=self.clock)

    def url(self, *, short_lease: bool = False) -> InmemSettings:
        return InmemSettings(broker=self.broker, lease_seconds=self.lease_seconds if short_lease else None)

    async def restart(self) -> None:
        self.broker.faults.restart()

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def age(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def compact(self, topic: str) -> None:
        self.broker.compact(topic)

    async def isolate(self, bus: Bus) -> None:
        self.broker.faults.isolate(bus)

    async def heal(self, bus: Bus) -> None:
        self.broker.faults.heal(bus)

    async def cut(self, bus: Bus) -> None:
        self.broker.faults.isolate(bus)
        self.broker.faults.heal(bus)

    async def crash(self, bus: Bus) -> None:
        self.broker.faults.kill(bus)
