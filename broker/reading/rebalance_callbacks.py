"""`RebalanceCallbacks`: calls the application's `on_assigned`, `on_revoking` and `on_lost`.

*Order.* For each partition: `on_assigned`, then `on_revoking` or `on_lost`, then the next `on_assigned`, which waits
until the earlier call has ended. Calls for different partitions may overlap. *Cancellation.* A running `on_assigned` is
cancelled when all of its partitions are revoked or lost, and when the consumer closes. *Failure.* An error of
`on_assigned` ends the consumer, since its partitions cannot be read without the work of the callback; an error of the
others is a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, NamedTuple

from broker.driver.assignments import AssignedPartition
from broker.driver.concurrency import TaskSet
from broker.driver.contract import TopicPartition
from broker.errors import LeaseLost, OperationTimeout

__all__ = ["OnPartitions", "RebalanceCallbacks"]

OnPartitions = Callable[[Sequence[TopicPartition]], Awaitable[object]]
"""Awaited with the partitions that were assigned, are about to be revoked, or were lost."""


class _Opening(NamedTuple):
    """A running call of `on_assigned`.

    :ivar left: those that have not been revoked or lost since.
    """

    partitions: frozenset[TopicPartition]
    left: set[TopicPartition]


class RebalanceCallbacks:
    """The callbacks of one member.

    :param assign_timeout: seconds that `on_assigned` may take; None is no limit.
    :param opened: called with partitions for which `on_assigned` has returned.
    :param failed: called with the error of `on_assigned`.
    :param warn: called with a text for the operator.
    """

    def __init__(
        self,
        group: str,
        *,
        on_assigned: OnPartitions | None,
        on_revoking: OnPartitions | None,
        on_lost: OnPartitions | None,
        assign_timeout: float | None,
        opened: Callable[[Sequence[AssignedPartition]], object],
        failed: Callable[[Exception], object],
        warn: Callable[[str], object],
    ) -> None:
        self._group = group
        self._on_assigned = on_assigned
        self._on_revoking = on_revoking
        self._on_lost = on_lost
        self._assign_timeout = assign_timeout
        self._opened = opened
        self._failed = failed
        self._warn = warn
        self._opening: dict[asyncio.Task[None], _Opening] = {}
        self._losses = TaskSet("broker-on-lost", lambda error: warn(f"on_lost failed: {error!r}"))

    @property
    def awaits_assigned(self) -> bool:
        """Whether new partitions wait for `on_assigned`."""
        return self._on_assigned is not None

    def assigned(self, new: Sequence[AssignedPartition], before: OnPartitions | None = None) -> None:
        """Call `on_assigned`; `opened` or `failed` is called when it has ended.

        :param before: awaited before each call, with its partitions.
        """
        partitions = frozenset(assigned.partition for assigned in new)
        # A partition that went may come back while a call with it runs, and what that does must not come later.
        earlier = [task for task, call in self._opening.items() if call.partitions & partitions]
        task = asyncio.get_running_loop().create_task(self._assign(new, before, earlier), name="broker-on-assigned")
        self._opening[task] = _Opening(partitions, set(partitions))
        task.add_done_callback(self._opening.pop)

    async def revoking(self, partitions: Sequence[TopicPartition]) -> None:
        """Call `on_revoking`; the caller bounds its time.

        :raises Exception: the error of the callback.
        """
        if stopping := self._stop_opening(partitions):
            await asyncio.wait(stopping)
        if self._on_revoking is not None:
            await self._on_revoking(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Call `on_lost`, which nothing but the next `on_assigned` and the close wait for."""
        stopping = self._stop_opening(partitions)
        if self._on_lost is not None and partitions:
            self._losses.spawn(self._lose(self._on_lost, partitions, stopping))

    async def close(self, timeout: float) -> None:
        """Cancel `on_assigned`, and wait at most so many seconds for `on_lost`."""
        for task in self._opening:
            task.cancel()
        if self._opening:
            await asyncio.wait(tuple(self._opening), timeout=timeout)
        await self._losses.wait(timeout)

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this task runs a callback."""
        return task in self._opening or any(task is loss for loss in self._losses)

    async def _assign(
        self,
        new: Sequence[AssignedPartition],
        before: OnPartitions | None,
        earlier: Sequence[asyncio.Task[None]],
    ) -> None:
        timeout = asyncio.timeout(self._assign_timeout)
        staying = new
        try:
            async with timeout:
                if ending := (*earlier, *self._losses):
                    await asyncio.wait(ending)
                # Those that were revoked or lost before the call are not named in it.
                while asked := [assigned for assigned in staying if not assigned.revoking]:
                    partitions = sorted(assigned.partition for assigned in asked)
                    try:
                        if before is not None:
                            await before(partitions)
                        if self._on_assigned is not None:
                            await self._on_assigned(partitions)
                        break
                    except LeaseLost:
                        # Some were revoked or lost meanwhile: the call begins again with the others.
                        staying = [assigned for assigned in asked if not assigned.revoking]
                        if len(staying) == len(asked):
                            raise
        except Exception as error:
            self._failed(self._too_late(new) if timeout.expired() else error)
            return
        self._opened(new)

    def _too_late(self, new: Sequence[AssignedPartition]) -> OperationTimeout:
        names = ", ".join(f"{topic!r}[{number}]" for topic, number in sorted(assigned.partition for assigned in new))
        return OperationTimeout(
            f"on_assigned of group {self._group!r} did not return within assign_timeout, {self._assign_timeout:g} s; "
            f"it was called with {names}",
            retriable=False,
            advice="Return earlier, or give bus.records a longer assign_timeout; None is no limit",
        )

    async def _lose(
        self,
        on_lost: OnPartitions,
        partitions: Sequence[TopicPartition],
        stopping: Collection[asyncio.Task[None]],
    ) -> None:
        if stopping:
            await asyncio.wait(stopping)
        await on_lost(partitions)

    def _stop_opening(self, partitions: Collection[TopicPartition]) -> list[asyncio.Task[None]]:
        """Cancel and return the calls of `on_assigned` of whose partitions none is left."""
        stopping: list[asyncio.Task[None]] = []
        for task, call in self._opening.items():
            if call.left:
                call.left.difference_update(partitions)
                if not call.left:
                    task.cancel()
            if not call.left:
                stopping.append(task)
        return stopping
