"""Fetches from one source: `FetchLoop` for messages and records, and `Prefetch`, the size of a message buffer.

`FetchLoop` is the task that fetches while there is demand. *Cancellation.* A fetch is never cancelled: `stop` and
`interrupted` end it by `interrupt`, and its result is delivered. *Failure.* A retriable error is reported and the fetch
is repeated after a growing pause; any other error ends the loop.

`Prefetch` sets the size of the buffer: about two seconds of measured throughput, as in go-cloud. It starts at one
message and at most doubles per fetch, so that a slow consumer does not hoard messages. Pure; the caller passes the
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from broker.driver.concurrency import Backoff, pause
from broker.errors import BackendError, BrokerError

__all__ = ["FetchLoop", "Prefetch"]


_SECONDS: Final = 2.0
_WINDOW: Final = 1.0


class Prefetch:
    """The target of one consumer's buffer.

    Demand is measured by requests, not by arrivals: a request for the next message shows that the previous one is done.
    The first requests of idle workers are not counted.
    """

    __slots__ = ("_count", "_fresh", "_idle_workers", "_rate", "_started", "limit", "target")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.target = 1
        self._count = 0
        self._fresh = False
        self._idle_workers: int | None = None
        self._started: float | None = None
        self._rate = 0.0

    def requested(self, count: int, workers: int) -> None:
        """A consumer that works on `workers` messages at once got `count` messages."""
        if self._idle_workers is None:
            self._idle_workers = max(count, workers)
        if self._idle_workers:
            known = min(count, self._idle_workers)
            self._idle_workers -= known
            count -= known
        if count:
            self._count += count
            self._fresh = True

    def update(self, now: float) -> int:
        """The number of messages that should be ready at the time `now`; called before each fetch."""
        if self._started is None:
            self._started = now
            return self.target
        elapsed = now - self._started
        if elapsed > 0:
            measured = self._count / elapsed
            if elapsed >= _WINDOW:
                self._rate = measured
                self._started = now
                self._count = 0
            else:
                # Until a window is over, the rate of the last window stands for the rest of it.
                measured += self._rate * (1 - elapsed / _WINDOW)
            # The target grows only if there was a request since the last update.
            most = 2 * self.target if self._fresh else self.target
            self._fresh = False
            self.target = max(1, min(self.limit, int(measured * _SECONDS), most))
        return self.target


T = TypeVar("T")


class FetchLoop(Generic[T]):
    """One per source.

    :param fetch: `fetch` of the source, whose calls return within `wait` seconds.
    :param interrupt: `interrupt` of the source.
    :param demand: returns how many items and bytes may be fetched now; without items the loop waits for `poke`.
    :param deliver: called on the loop with the result of each fetch, also an empty one.
    :param retrying: called with a retriable error and the seconds until the next fetch.
    :param failed: called once, with the error that ended the loop.
    :param backoff: the pauses after retriable errors.
    :ivar failing: the last fetch ended with a retriable error.
    :ivar waiting: the loop waits for `poke`; no property, since consumers read it per message or record.
    :ivar no_demand_since: the loop time since which there has been no demand; None if there is demand.
    """

    def __init__(
        self,
        fetch: Callable[[int, int, float], Awaitable[Sequence[T]]],
        interrupt: Callable[[], None],
        *,
        demand: Callable[[], tuple[int, int]],
        deliver: Callable[[Sequence[T]], None],
        retrying: Callable[[BrokerError, float], None],
        failed: Callable[[BrokerError], None],
        backoff: Backoff,
        wait: float,
    ) -> None:
        self._fetch = fetch
        self._interrupt = interrupt
        self._demand = demand
        self._deliver = deliver
        self._retrying = retrying
        self._failed = failed
        self._backoff = backoff
        self._wait = wait
        self.failing = False
        self.waiting = False
        self.no_demand_since: float | None = None
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._fetch_ended: asyncio.Future[None] | None = None
        """Set while a fetch runs."""
        self._stopped = asyncio.Event()
        self._task = self._loop.create_task(self._run(), name="broker-fetch-loop")

    def poke(self) -> None:
        """Demand may have changed."""
        self.waiting = False
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def interrupted(self) -> None:
        """End the running fetch, if any; returns when its result is delivered."""
        if self._fetch_ended is not None:
            self._interrupt()
            await asyncio.wait((self._fetch_ended,))

    def stop(self) -> None:
        """Start no further fetch; the result of a running one is still delivered."""
        self._stopped.set()
        self._interrupt()
        self.poke()

    async def stopped(self, timeout: float) -> None:
        """Wait until the last fetch is over, at most `timeout` seconds."""
        await asyncio.wait((self._task,), timeout=timeout)

    def cancel(self) -> None:
        """Cut off a fetch that ignores `interrupt`."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                max_items, max_bytes = self._demand()
                if max_items <= 0:
                    await self._wait_for_demand()
                    continue
                self.no_demand_since = None
                self._fetch_ended = self._loop.create_future()
                try:
                    items = await self._fetch(max_items, max_bytes, self._wait)
                except BrokerError as error:
                    if self._stopped.is_set():
                        return
                    if not error.retriable:
                        raise
                    self.failing = True
                    delay = self._backoff.next()
                    self._retrying(error, delay)
                    self._end_fetch()
                    await pause(delay, self._stopped)
                    continue
                self.failing = False
                self._deliver(items)
                self._end_fetch()
                self._backoff.reset()
                if not items:
                    # A source that returns without suspending must not block the event loop.
                    await asyncio.sleep(0)
        except BrokerError as error:
            self._failed(error)
        except Exception as error:
            self._failed(BackendError(f"The backend failed to fetch: {error}", native=error))
        finally:
            self._end_fetch()

    def _end_fetch(self) -> None:
        ended, self._fetch_ended = self._fetch_ended, None
        if ended is not None:
            ended.set_result(None)

    async def _wait_for_demand(self) -> None:
        self._wake = wake = self._loop.create_future()
        if self.no_demand_since is None:
            self.no_demand_since = self._loop.time()
        self.waiting = True
        await wake
