"""`StateSignal`: a state that changes, and those who watch it.

*Concurrency.* One event loop. A watcher that does not read delays no other task, and then gets the latest state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, Self, TypeVar
from weakref import WeakSet

__all__ = ["StateSignal"]

S = TypeVar("S")


class StateSignal(Generic[S]):
    """A state.

    :ivar state: as of now.
    """

    def __init__(self, state: S) -> None:
        self.state = state
        self._over = False
        self._watchers: WeakSet[_Watcher[S]] = WeakSet()

    def change(self, state: S) -> None:
        """Change the state, and wake the watchers."""
        self.state = state
        for watcher in tuple(self._watchers):
            watcher.tell(state)

    def end(self) -> None:
        """There will be no other state: watchers end once they have it."""
        self._over = True
        for watcher in tuple(self._watchers):
            watcher.end()

    def watch(self) -> AsyncIterator[S]:
        """The state now, and each that follows."""
        watcher = _Watcher(self.state)
        if self._over:
            watcher.end()
        self._watchers.add(watcher)
        return watcher


class _Watcher(Generic[S]):
    def __init__(self, state: S) -> None:
        self._waiting = [state]
        self._news = asyncio.Event()
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> S:
        while not self._waiting:
            if self._over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._waiting.pop()

    def tell(self, state: S) -> None:
        self._waiting[:] = [state]
        self._news.set()

    def end(self) -> None:
        self._over = True
        self._news.set()
