"""Fetches the messages of one source into the buffer, as many as the consumer's throughput calls for.

`Prefetch` sets the size of the buffer: about two seconds of measured throughput, as in go-cloud. It starts at one
message and at most doubles per fetch, so that a slow consumer does not hoard messages. Pure; the caller passes the
time.

`FetchLoop` is the task that fetches while there is demand. *Cancellation.* The fetch is never cancelled: `stop` ends it
by `interrupt`, and its messages are delivered. *Failure.* A retriable error is reported and the fetch is repeated after
a growing pause; any other error ends the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from broker.driver.concurrency import Backoff, pause
from broker.driver.contract import MessageSource
from broker.errors import BackendError, BrokerError
from broker.messages import Message

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
                # Within a window the last one's rate still counts for the part that has not passed yet.
                measured += self._rate * (1 - elapsed / _WINDOW)
            # Without a request since the last look there is nothing to grow by.
            most = 2 * self.target if self._fresh else self.target
            self._fresh = False
            self.target = max(1, min(self.limit, int(measured * _SECONDS), most))
        return self.target


_WAIT: Final = 5.0
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0


class FetchLoop:
    """One per source.

    :param demand: how many messages and bytes may be fetched now; no messages means wait for `poke`.
    :param deliver: takes what was fetched; called on the loop.
    :param retrying: called with a retriable error and the seconds until the next try.
    :param failed: called once, with the error that ended the loop.
    :param blocked: called every `blocked_after` seconds while there has been no demand for at least that long.
    """

    def __init__(
        self,
        source: MessageSource,
        *,
        demand: Callable[[], tuple[int, int]],
        deliver: Callable[[Sequence[Message[Any]]], None],
        retrying: Callable[[BrokerError, float], None],
        failed: Callable[[BrokerError], None],
        blocked: Callable[[float], None],
        blocked_after: float,
    ) -> None:
        self._source = source
        self._demand = demand
        self._deliver = deliver
        self._retrying = retrying
        self._failed = failed
        self._blocked = blocked
        self._blocked_after = blocked_after
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._no_demand_since: float | None = None
        self._look_every = blocked_after / 4
        self._watch = self._loop.call_later(self._look_every, self._look)
        self._stopped = asyncio.Event()
        self._task = self._loop.create_task(self._run(), name="broker-fetch-loop")

    @property
    def waiting(self) -> bool:
        """Whether it waits for demand, so that a `poke` would matter."""
        return self._wake is not None

    def poke(self) -> None:
        """Demand may have changed."""
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    def stop(self) -> None:
        """Fetch no more; what a running fetch has is still delivered."""
        self._stopped.set()
        self._watch.cancel()
        self._source.interrupt()
        self.poke()

    async def stopped(self, timeout: float) -> None:
        """Wait until the last fetch is over; a source that ignores `interrupt` is cut off after `timeout` seconds."""
        _, late = await asyncio.wait({self._task}, timeout=timeout)
        if late:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._fetch_until_stopped()
        except BrokerError as error:
            self._failed(error)
        except Exception as error:
            self._failed(BackendError(f"The backend failed to fetch: {error}", native=error))

    async def _fetch_until_stopped(self) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while not self._stopped.is_set():
            max_messages, max_bytes = self._demand()
            if max_messages <= 0:
                await self._wait_for_demand()
                continue
            self._no_demand_since = None
            try:
                messages = await self._source.fetch(max_messages, max_bytes, _WAIT)
            except BrokerError as error:
                if self._stopped.is_set():
                    return
                if not error.retriable:
                    raise
                delay = backoff.next()
                self._retrying(error, delay)
                await pause(delay, self._stopped)
                continue
            backoff.reset()
            if messages:
                self._deliver(messages)
            else:
                # A source that answers without suspending must not block the event loop.
                await asyncio.sleep(0)

    async def _wait_for_demand(self) -> None:
        self._wake = wake = self._loop.create_future()
        if self._no_demand_since is None:
            self._no_demand_since = self._loop.time()
        await wake

    def _look(self) -> None:
        """Runs periodically, instead of one timer per wait."""
        now = self._loop.time()
        if self._no_demand_since is not None and now - self._no_demand_since >= self._blocked_after:
            self._blocked(now - self._no_demand_since)
            self._no_demand_since = now
        self._watch = self._loop.call_later(self._look_every, self._look)
