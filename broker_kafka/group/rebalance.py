"""`Rebalance`, which a callback of a `GroupConsumer` gets, and the calls of the callbacks.

*Concurrency.* Each call is a task of its own on the loop. *Failure.* An exception of a callback is logged: it must not
keep a partition from its next owner. *Cancellation.* A callback that runs past the deadline is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from broker import TopicPartition
from broker.driver import logger

__all__ = ["Callbacks", "OnRebalance", "Rebalance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """A change of the partitions of this member.

    :ivar assigned: new partitions.
    :ivar revoked: partitions that are about to be released; their work can still be finished and committed.
    :ivar lost: partitions that went to another member, which may read them already.
    :ivar current: all partitions after the change.
    :ivar deadline: the loop time until which work on revoked partitions can be finished.
    """

    assigned: tuple[TopicPartition, ...] = ()
    revoked: tuple[TopicPartition, ...] = ()
    lost: tuple[TopicPartition, ...] = ()
    current: tuple[TopicPartition, ...] = ()
    deadline: float | None = None


OnRebalance = Callable[[Rebalance], Awaitable[object] | object]


class Callbacks:
    """The running callbacks of one consumer."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __contains__(self, task: asyncio.Task[Any] | None) -> bool:
        return task in self._running

    def run(self, callback: OnRebalance, event: Rebalance) -> asyncio.Task[None]:
        """Call it, in a task that never fails."""
        task = asyncio.get_running_loop().create_task(self._run(callback, event), name="broker-kafka-rebalance")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _run(self, callback: OnRebalance, event: Rebalance) -> None:
        try:
            answer = callback(event)
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            logger.exception("A rebalance callback failed on %s", event)

    def cancel(self) -> None:
        """Cancel all, except the one that calls this."""
        here = asyncio.current_task()
        for task in tuple(self._running):
            if task is not here:
                task.cancel()
