"""Where the application waits for records, and who works on what.

*Concurrency.* One loop, any number of readers. Waiters are woken and then take without suspending, so that no record is
on its way in between. *Cancellation.* A cancelled wait has taken nothing. *In flight* is what a reader handed out and
did not come back from: the body of an `async for` that runs, in a task that is not done. *Failure.* `fail` is raised by
every reader, once what came before it is handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final, Protocol
from weakref import ref

from broker import BrokerError
from broker_kafka.group.held import Held

__all__ = ["Delivery", "Worker"]

_LOOK_AGAIN: Final = 0.5


class Worker(Protocol):
    """A reader.

    :ivar holding: what its last step handed out, until the next.
    :ivar task: who took that step.
    """

    holding: Collection[Held]
    task: asyncio.Task[Any] | None


class Delivery:
    """:param stop_when_idle: end the iterations after so many seconds without a record; None is never.
    :param is_idle: asked then, with the seconds: whether no record means that there is none.
    """

    def __init__(self, stop_when_idle: float | None, is_idle: Callable[[float], Awaitable[bool]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_when_idle = stop_when_idle
        self._is_idle = is_idle
        self._idle_since = self._loop.time()
        self._waiters: set[asyncio.Future[None]] = set()
        self._workers: set[ref[Any]] = set()
        self._returns: set[asyncio.Future[None]] = set()
        self.ended = False
        self.error: BrokerError | None = None

    # -- for readers ---------------------------------------------------------------------------------------

    async def more(self) -> bool:
        """Wait until something may have changed; False if nothing ever will, or it has been idle for long.

        :raises BrokerError: the consumer has failed.
        """
        if self.error is not None:
            raise self.error
        if self.ended:
            return False
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        timer: asyncio.TimerHandle | None = None
        try:
            if self._stop_when_idle is not None:
                until, now = self._idle_since + self._stop_when_idle, self._loop.time()
                if until <= now:
                    # What comes while this is asked resolves the waiter.
                    if await self._is_idle(now - self._idle_since) and not waiter.done():
                        return False
                    until = self._loop.time() + _LOOK_AGAIN
                timer = self._loop.call_at(until, _wake, waiter)
            await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()
        return True

    def joins(self, worker: Worker) -> None:
        """A reader begins."""
        self._workers.add(ref(worker, self._leaves))

    def came_back(self) -> None:
        """A reader is done with what it had handed out."""
        for returned in self._returns:
            _wake(returned)

    # -- for the member ------------------------------------------------------------------------------------

    def active(self) -> None:
        """Something came."""
        self._idle_since = self._loop.time()

    def joined(self) -> None:
        """The group has given us partitions, whose records may follow."""
        self.active()
        self.changed()

    def changed(self) -> None:
        """Have every reader look again."""
        for waiter in self._waiters:
            _wake(waiter)

    def end(self) -> None:
        """Nothing is handed over any more."""
        self.ended = True
        self.changed()

    def fail(self, error: BrokerError) -> None:
        """Nothing more comes, for this reason."""
        self.error = self.error or error
        self.changed()

    async def settled(
        self, going: Iterable[Held], finished: Callable[[], bool], exempt: asyncio.Task[Any] | None
    ) -> None:
        """Wait until nobody works on these any more.

        :param finished: whether the records that were handed over one by one are finished.
        :param exempt: a task that waits for this itself.
        """
        asked = set(going)
        while True:
            working = self._working(asked, exempt)
            if not working and finished():
                return
            returned: asyncio.Future[None] = self._loop.create_future()
            self._returns.add(returned)
            try:
                await asyncio.wait({returned, *working}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._returns.discard(returned)

    def _working(self, asked: set[Held], exempt: asyncio.Task[Any] | None) -> set[asyncio.Task[Any]]:
        tasks: set[asyncio.Task[Any]] = set()
        for each in self._workers:
            worker: Worker | None = each()
            if worker is None or not asked.intersection(worker.holding):
                continue
            task = worker.task
            if task is not None and task is not exempt and not task.done():
                tasks.add(task)
        return tasks

    def _leaves(self, gone: ref[Any]) -> None:
        self._workers.discard(gone)
        self.came_back()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
