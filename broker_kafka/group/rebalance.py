"""What an application is told of a rebalance, and the calls that tell it.

*Concurrency.* Each call is a task of its own on the loop. *Failure.* What a callback raises is a warning: it must not
keep a partition from its next owner. *Cancellation.* One that is not done when its time is over is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from broker import TopicPartition
from broker.driver import logger

__all__ = ["OnRebalance", "Rebalance", "Teller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """A change of what this member of the group holds.

    :ivar assigned: partitions that are its own from now on.
    :ivar revoked: partitions that it is about to give up; their work can still be finished and committed.
    :ivar lost: partitions that it could not give up in time: somebody else may read them already.
    :ivar current: all that it holds once the change is over.
    :ivar deadline: the loop time until which what is revoked can be committed.
    """

    assigned: tuple[TopicPartition, ...] = ()
    revoked: tuple[TopicPartition, ...] = ()
    lost: tuple[TopicPartition, ...] = ()
    current: tuple[TopicPartition, ...] = ()
    deadline: float | None = None


OnRebalance = Callable[[Rebalance], Awaitable[object] | object]


class Teller:
    """Calls the application, and knows which tasks are its callbacks."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def calls_from(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this task is one of the callbacks."""
        return task in self._running

    def begin(self, callback: OnRebalance, event: Rebalance) -> asyncio.Task[None]:
        """Call it, in a task that never fails."""
        task = asyncio.get_running_loop().create_task(self._call(callback, event), name="broker-kafka-rebalance")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _call(self, callback: OnRebalance, event: Rebalance) -> None:
        try:
            answer = callback(event)
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            logger.exception("A rebalance callback failed on %s", event)

    def cancel(self) -> None:
        """End what still runs, but for the caller itself."""
        here = asyncio.current_task()
        for task in tuple(self._running):
            if task is not here:
                task.cancel()
