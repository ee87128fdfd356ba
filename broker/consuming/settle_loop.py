"""`SettleLoop`: carries out the settlements of one source in batches.

Settlements that are requested while `settle` runs form the next batch: a single ack is not delayed, and many acks are
batched. *Cancellation.* The loop is a task of the consumer: cancelling a caller does not cancel the settlement.
*Failure.* If `settle` raises a retriable error, the call is repeated until the loop is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from broker.driver.concurrency import Backoff, pause
from broker.driver.contract import MessageSource, Settlement
from broker.errors import BackendError, BrokerError, SettleError

__all__ = ["SettleLoop"]

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0

Results = Sequence[BrokerError | None]


class SettleLoop:
    """One per source.

    :param done: called on the loop with each batch, its results and the seconds that it took, before any waiter
        resumes.
    """

    def __init__(self, source: MessageSource, done: Callable[[Sequence[Settlement], Results, float], None]) -> None:
        self._source = source
        self._done = done
        self._pending: list[Settlement] = []
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        self._task = self._loop.create_task(self._run(), name="broker-settle-loop")

    def put(self, *settlements: Settlement) -> None:
        """Carry these out soon; only `done` gets the results."""
        self._pending += settlements
        if self._wake is not None:
            self._wake_up()

    def put_and_wait(self, settlements: Sequence[Settlement]) -> asyncio.Future[None]:
        """Carry these out; the future raises the first error among them, or an error if the loop is closed.

        Cancelling the future does not affect the settlements.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        start = len(self._pending)
        self._waiters.append((start, start + len(settlements), future))
        self.put(*settlements)
        if self._task.done():
            self._leave_rest()
        return future

    async def close(self, deadline: float) -> None:
        """Carry out the requested settlements, at most until the loop time `deadline`; the rest fails as unanswered."""
        self._closing.set()
        self._wake_up()
        _, late = await asyncio.wait({self._task}, timeout=max(0.0, deadline - self._loop.time()))
        if late:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)

    def _wake_up(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def _run(self) -> None:
        while True:
            if not self._pending:
                if self._closing.is_set():
                    return
                self._wake = self._loop.create_future()
                await self._wake
                continue
            settlements, self._pending = self._pending, []
            waiters, self._waiters = self._waiters, []
            began = self._loop.time()
            try:
                results = await self._carry_out(settlements)
            except asyncio.CancelledError:
                results = [_unanswered()] * len(settlements)
                self._conclude(settlements, results, waiters, self._loop.time() - began)
                self._leave_rest()
                raise
            self._conclude(settlements, results, waiters, self._loop.time() - began)

    def _leave_rest(self) -> None:
        """Fail the pending settlements: the loop has ended."""
        settlements, self._pending = self._pending, []
        waiters, self._waiters = self._waiters, []
        if settlements:
            self._conclude(settlements, [_unanswered()] * len(settlements), waiters, 0.0)

    def _conclude(
        self,
        settlements: Sequence[Settlement],
        results: Results,
        waiters: Sequence[tuple[int, int, asyncio.Future[None]]],
        seconds: float,
    ) -> None:
        self._done(settlements, results, seconds)
        for start, stop, future in waiters:
            if future.done():
                continue
            error = next((result for result in results[start:stop] if result is not None), None)
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                # The caller may be gone; `done` has reported the failure, so asyncio need not log it.
                future.exception()

    async def _carry_out(self, settlements: Sequence[Settlement]) -> Results:
        backoff = None
        while True:
            try:
                return await self._source.settle(settlements)
            except BrokerError as error:
                if not error.retriable or self._closing.is_set():
                    return [error] * len(settlements)
            except Exception as error:
                failure = BackendError(f"The backend failed to settle: {error}", native=error)
                return [failure] * len(settlements)
            backoff = backoff or Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
            await pause(backoff.next(), self._closing)


def _unanswered() -> SettleError:
    return SettleError(
        "The consumer was closed before the broker answered",
        advice="The message may be redelivered; raise close_timeout",
    )
