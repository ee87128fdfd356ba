"""`Leftovers`: what stays alive of the things that a bus opened and closed.

It holds weak references to what the backend handed out, and counts the objects of our own classes: an object that a
list, a task or a timer still holds is found in either way. For one event loop.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from types import FunctionType
from typing import Any, Final, TypeVar, cast

from broker.driver.contract import Backend
from broker.testing.faults import Wrapped
from broker.testing.waiting import eventually

__all__ = ["Leftovers"]

T = TypeVar("T")

_WARM_UP: Final = 2
"""Cycles that are not counted: they fill caches."""


class Leftovers:
    """Wraps a backend: `harness.connect(wrap=leftovers)`.

    :ivar noted: how many objects are watched, dead or alive.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._refs: list[weakref.ref[Any]] = []
        self._package = "broker"

    def __call__(self, backend: Backend) -> Backend:
        self._package = type(backend).__module__.partition(".")[0]
        return cast("Backend", _NotingBackend(backend, self))

    def note(self, part: T) -> T:
        """Watch an object; returns the object."""
        self._refs.append(weakref.ref(part))
        self.noted += 1
        return part

    def alive(self) -> Counter[str]:
        """The classes of the noted objects that are still alive."""
        gc.collect()
        self._refs = [ref for ref in self._refs if ref() is not None]
        return Counter(type(ref()).__qualname__ for ref in self._refs)

    async def none_of(self, cycle: Callable[[], Awaitable[object]], count: int, patience: float) -> None:
        """Run a cycle `count` times, and assert that nothing of it is left: no object, task or thread.

        :param patience: seconds that background work has to end after the last cycle.
        """
        for _ in range(_WARM_UP):
            await cycle()
        await self._nothing_alive(patience)
        tasks, threads, before, noted = len(asyncio.all_tasks()), threading.active_count(), self._count(), self.noted
        for _ in range(count):
            await cycle()
        assert self.noted - noted >= count, "The cycle noted nothing: the test shows nothing"
        await self._nothing_alive(patience)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks, patience, "the end of all tasks")
        # Pools of threads grow to their size.
        await eventually(lambda: threading.active_count() < threads + count, patience, "the end of all threads")
        try:
            await eventually(lambda: not self._grown(before, count), patience)
        except AssertionError:
            raise AssertionError(f"{count} cycles left objects: {self._grown(before, count)}") from None

    async def _nothing_alive(self, patience: float) -> None:
        try:
            await eventually(lambda: not self.alive(), patience)
        except AssertionError:
            raise AssertionError(f"These are still alive: {dict(self.alive())}") from None

    def _grown(self, before: Counter[str], count: int) -> dict[str, int]:
        """The classes that have at least one more object for each cycle; fewer are caches."""
        return {name: more for name, now in self._count().items() if (more := now - before[name]) >= count}

    def _count(self) -> Counter[str]:
        gc.collect()
        return Counter(name for each in gc.get_objects() if (name := self._name(each)))

    def _name(self, each: object) -> str | None:
        """The class of one of our objects, or the name of one of our functions; None for others."""
        made: Any = each if type(each) is FunctionType else type(each)
        module = made.__module__
        if isinstance(module, str) and (module.startswith("broker") or module.partition(".")[0] == self._package):
            return f"{module}.{made.__qualname__}"
        return None


class _NotingBackend(Wrapped):
    """Notes what the backend opens for consumers and transactions, and whom it calls back."""

    def __init__(self, inner: Backend, leftovers: Leftovers) -> None:
        super().__init__(inner)
        self._note: Callable[[Any], Any] = leftovers.note

    async def subscribe(self, subscription: Any, listener: Any) -> Any:
        return self._note(await self.inner.subscribe(subscription, self._note(listener)))

    async def join(self, subscription: Any, listener: Any) -> Any:
        return self._note(await self.inner.join(subscription, self._note(listener)))

    async def transaction(self, transactional_id: str) -> Any:
        return self._note(await self.inner.transaction(transactional_id))
