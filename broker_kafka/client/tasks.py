"""`Tasks`: work that is begun on the loop and awaited by nobody; what it raises is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from broker import BrokerError
from broker_kafka.errors import translate

__all__ = ["Tasks"]


class Tasks:
    """:param what: whose work it is, for the errors. :param failed: is told of them."""

    def __init__(self, what: str, failed: Callable[[BrokerError], object]) -> None:
        self._what = what
        self._failed = failed
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin this; until it is over, or `cancel` is called."""
        task = asyncio.get_running_loop().create_task(work, name=f"broker-kafka: {self._what}")
        self._running.add(task)
        task.add_done_callback(self._over)

    def cancel(self) -> None:
        """End all that runs; nobody waits for it."""
        for task in self._running:
            task.cancel()

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(translate(error, self._what))
