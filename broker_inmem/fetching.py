"""The common part of both kinds of consumers: a fetch that sleeps, and a connection that breaks.

A fetch does not poll: the server, the server's clock and its own `wait` wake it. When the connection breaks, the
running or next fetch raises; later ones work again once the server is reachable. The listener gets an event for both.
Used on one event loop, unless stated otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from broker import BrokerError, Closed, ConnectionFailed
from broker.driver import Connected, Disconnected, Event
from broker_inmem.connection import Connection
from broker_inmem.server import Broker
from broker_inmem.waker import Waker

__all__ = ["Fetching"]

R = TypeVar("R")


class Fetching(ABC, Generic[R]):
    """The base of both sources; abstract methods are called under the server's lock."""

    def __init__(self, broker: Broker, connection: Connection, emit: Callable[[Event], object]) -> None:
        self._broker = broker
        self._connection = connection
        self._emit = emit
        self._waker = Waker()
        self._fetching = False
        self._interrupted = False
        self._closed = False
        self._broken: BrokerError | None = None
        self._disconnected = False

    @abstractmethod
    def _closed_error(self) -> Closed:
        """The error of a call after `close`."""

    @abstractmethod
    def _take(self, most: int, max_bytes: int, now: float) -> Sequence[R] | None:
        """Available items; None if notices must be processed first."""

    @abstractmethod
    def _watch(self) -> float | None:
        """Register the waker for arrivals; returns the next time that the clock must wake it."""

    @abstractmethod
    def _stop_watching(self) -> None: ...

    def _process_notices(self) -> None:
        """Process notices of the server; called without its lock."""

    async def _fetch(self, most: int, max_bytes: int, wait: float) -> Sequence[R]:
        broker, waker, clock = self._broker, self._waker, self._broker.clock
        self._fetching, self._interrupted = True, False
        until = waker.loop.time() + wait
        slow = broker.faults.fetch_delay
        try:
            if slow > 0:
                await self._pause(clock.time() + slow)
            while True:
                self._process_notices()
                with broker.lock:
                    self._check_reachable()
                    found = self._take(most, max_bytes, clock.time())
                    if found is None:
                        continue
                    if found or self._interrupted or waker.loop.time() >= until:
                        return found
                    waker.prepare()
                    due = self._watch()
                try:
                    await waker.wait(clock, due, until)
                finally:
                    with broker.lock:
                        self._stop_watching()
        except Closed:
            if self._interrupted:
                return []
            raise
        finally:
            self._fetching = False

    async def _pause(self, due: float) -> None:
        while not self._interrupted and not self._closed and self._broker.clock.time() < due:
            self._waker.prepare()
            await self._waker.wait(self._broker.clock, due, self._waker.loop.time() + 3600.0)

    def interrupt(self) -> None:
        if self._fetching:
            self._interrupted = True
            self._waker.wake()

    def broken(self, *, lost: bool) -> None:
        """The connection broke; called by the server, under its lock and from any thread."""
        self._broken = ConnectionFailed(f"The connection to the in-memory broker {self._broker.name!r} broke")
        self._waker.call(self._report_break)

    def _report_break(self) -> None:
        self._waker.wake()
        if not self._closed and not self._disconnected:
            self._disconnected = True
            self._emit(Disconnected(server=self._broker.url, error=self._broken))

    def _check_reachable(self) -> None:
        """Check that a fetch can reach the server; report a reconnect."""
        if self._closed:
            raise self._closed_error()
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken if self._connection.usable else self._connection.error()
        self._connection.check()
        if self._disconnected:
            self._disconnected = False
            self._waker.call(self._emit, Connected(server=self._broker.url, again=True))

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()
        self._connection.check()
