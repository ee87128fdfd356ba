"""`SharedResource`: a resource of several users that opens with the first of them and closes with the last.

*Concurrency.* One event loop. Opening and closing never overlap: who acquires during a close waits for its end.
*Cancellation.* A user that is cancelled while the resource opens leaves the opening to the other users. *Failure.* All
users that wait for an opening get its error; the next user tries with a new resource.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from broker.hooks import logger

__all__ = ["SharedResource"]

R = TypeVar("R")


class _Opened(Generic[R]):
    def __init__(self, resource: R, opening: asyncio.Task[None]) -> None:
        self.resource = resource
        self.opening = opening
        self.users = 0


class SharedResource(Generic[R]):
    """Counts the users of one resource.

    :param name: the name of the resource in logs.
    :param create: makes the resource, without I/O.
    :param open: opens what `create` made.
    :param close: closes the resource, also after an opening that failed or was cancelled.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[], R],
        open: Callable[[R], Coroutine[Any, Any, None]],
        close: Callable[[R], Awaitable[None]],
    ) -> None:
        self._name = name
        self._create = create
        self._open = open
        self._close = close
        self._current: _Opened[R] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def unused(self) -> bool:
        """Whether the resource has no users and no close is running."""
        return self._current is None and self._closing is None

    async def acquire(self) -> R:
        """Return the open resource; every call that returns needs one `release`.

        :raises BaseException: the opening failed. Do not call `release`.
        """
        while self._closing is not None:
            await asyncio.wait((self._closing,))
        if (current := self._current) is None:
            resource = self._create()
            opening = asyncio.get_running_loop().create_task(self._open(resource), name=f"broker-open-{self._name}")
            current = self._current = _Opened(resource, opening)
        current.users += 1
        try:
            await asyncio.shield(current.opening)
        except BaseException:
            await self._leave(current)
            raise
        return current.resource

    async def release(self) -> None:
        """End the use of one `acquire`; returns when the resource is closed, if this was its last user."""
        if self._current is not None:
            await self._leave(self._current)

    async def close(self) -> None:
        """Close the resource, whatever users it has. May be called twice; no `acquire` may follow."""
        if self._current is not None:
            self._start_closing(self._current)
        if self._closing is not None:
            await asyncio.wait((self._closing,))

    async def _leave(self, opened: _Opened[R]) -> None:
        opened.users -= 1
        if opened.users == 0 and self._current is opened:
            await asyncio.wait((self._start_closing(opened),))

    def _start_closing(self, opened: _Opened[R]) -> asyncio.Task[None]:
        self._current = None
        closing = asyncio.get_running_loop().create_task(self._end(opened), name=f"broker-close-{self._name}")
        self._closing = closing
        closing.add_done_callback(self._closed)
        return closing

    async def _end(self, opened: _Opened[R]) -> None:
        opened.opening.cancel()
        await asyncio.wait((opened.opening,))
        await self._close(opened.resource)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closing = None
        if not closing.cancelled() and (error := closing.exception()) is not None:
            logger.warning("%s was not closed cleanly: %s", self._name, error)
