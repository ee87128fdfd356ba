"""`Deferrals`: messages that are done later than their callbacks, each with a deadline.

*Concurrency.* One event loop. *Cancellation.* `changed` may be cancelled at any time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

__all__ = ["Deferral", "Deferrals"]


class Deferral:
    """What `ctx.defer` returns: the first call ends the deferral.

    :ivar cause: what the deferral belongs to.
    """

    __slots__ = ("_owner", "cause", "deadline", "timeout")

    def __init__(self, owner: Deferrals, cause: Any, timeout: float, deadline: float) -> None:
        self._owner = owner
        self.cause: Final = cause
        self.timeout: Final = timeout
        self.deadline: Final = deadline

    def __call__(self, error: BaseException | None = None, /) -> None:
        self._owner.finish(self, error)


class Deferrals:
    """The deferrals of a partition.

    :ivar failed: ended with an error, or with their deadlines, and not dealt with yet.
    """

    def __init__(self, now: Callable[[], float], sleep: Callable[[float], Awaitable[None]]) -> None:
        self._now = now
        self._sleep = sleep
        self._open: dict[Deferral, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self.failed: deque[tuple[Deferral, BaseException]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, cause: Any, timeout: float) -> Deferral:
        deferral = Deferral(self, cause, timeout, self._now() + timeout)
        self._open[deferral] = None
        return deferral

    def finish(self, deferral: Deferral, error: BaseException | None) -> None:
        """End a deferral; does nothing if it has ended, or was dropped."""
        if deferral not in self._open:
            return
        del self._open[deferral]
        if error is not None:
            self.failed.append((deferral, error))
        self._wake()

    def drop(self, deferrals: Iterable[Deferral]) -> None:
        """Forget deferrals of a message whose callback failed."""
        gone = set(deferrals)
        for deferral in gone:
            self._open.pop(deferral, None)
        self.failed = deque(each for each in self.failed if each[0] not in gone)

    def clear(self) -> None:
        """Forget all deferrals."""
        self._open.clear()
        self.failed.clear()
        self._wake()

    def deadline(self) -> float | None:
        """The earliest deadline."""
        return min((each.deadline for each in self._open), default=None)

    def expire(self) -> None:
        """Fail what is past its deadline."""
        now = self._now()
        for deferral in [each for each in self._open if each.deadline <= now]:
            self.finish(deferral, TimeoutError(f"done() was not called within {deferral.timeout:g} s"))

    async def changed(self) -> None:
        """Return when a deferral has ended or is past its deadline, or at once if there is none."""
        deadline = self.deadline()
        if deadline is None or self.failed:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        timer = asyncio.ensure_future(self._sleep(max(0.0, deadline - self._now())))
        try:
            await asyncio.wait((self._waiter, timer), return_when=asyncio.FIRST_COMPLETED)
            if timer.done():
                timer.result()
        finally:
            self._waiter = None
            timer.cancel()
        self.expire()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
