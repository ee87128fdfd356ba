"""`RebalanceCallbacks`: calls the application's `on_assigned`, `on_revoking` and `on_lost`.

*Order.* For each partition: `on_assigned`, then `on_revoking` or `on_lost`, then the next `on_assigned`, which waits
until the earlier call has ended. Calls for different partitions may overlap. *Cancellation.* A running `on_assigned` is
cancelled when one of its partitions is revoked or lost, and begins again with those that stay; the close cancels it,
too. *Failure.* An error of `on_assigned` ends the consumer, since its partitions cannot be read without the work of the
callback; an error of the others is a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from broker.driver.assignments import AssignedPartition
from broker.driver.concurrency import TaskSet
from broker.driver.contract import TopicPartition
from broker.errors import ConfigurationError, LeaseLost, OperationTimeout

__all__ = ["OnPartitions", "RebalanceCallbacks"]

OnPartitions = Callable[[Sequence[TopicPartition]], Awaitable[object]]
"""Awaited with the partitions that were assigned, are about to be revoked, or were lost."""


@dataclass(eq=False, slots=True)
class _Opening:
    """Partitions that wait for `on_assigned`.

    :ivar left: those that have not been revoked or lost since.
    :ivar call: the running call of `on_assigned`.
    """

    partitions: frozenset[TopicPartition]
    left: set[TopicPartition]
    call: asyncio.Task[None] | None = None


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
        earlier = [task for task, opening in self._opening.items() if opening.partitions & partitions]
        opening = _Opening(partitions, set(partitions))
        task = asyncio.get_running_loop().create_task(self._open(opening, new, before, earlier))
        self._opening[task] = opening
        task.add_done_callback(self._opening.pop)

    async def revoking(self, partitions: Sequence[TopicPartition]) -> None:
        """Call `on_revoking`; the caller bounds its time.

        :raises Exception: the error of the callback.
        """
        if stopping := self._stop_opening(partitions):
            await asyncio.wait(stopping)
        if self._on_revoking is not None:
            await _awaited("on_revoking", self._on_revoking, partitions)

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
        calls = [opening.call for opening in self._opening.values()]
        return any(task is each for each in (*calls, *self._losses))

    async def _open(
        self,
        opening: _Opening,
        new: Sequence[AssignedPartition],
        before: OnPartitions | None,
        earlier: Sequence[asyncio.Task[None]],
    ) -> None:
        timeout = asyncio.timeout(self._assign_timeout)
        waits = True
        try:
            async with timeout:
                if ending := (*earlier, *self._losses):
                    await asyncio.wait(ending)
                waits = False
                await self._assign(opening, new, before)
        except Exception as error:
            self._failed(self._too_late(new, waits=waits) if timeout.expired() else error)
            return
        self._opened(new)

    async def _assign(self, opening: _Opening, new: Sequence[AssignedPartition], before: OnPartitions | None) -> None:
        """Call `on_assigned` until it has returned for all partitions that stay."""
        staying = new
        # Those that were revoked or lost before the call are not named in it.
        while asked := [assigned for assigned in staying if not assigned.revoking]:
            partitions = sorted(assigned.partition for assigned in asked)
            opening.call = asyncio.create_task(self._call(partitions, before), name="broker-on-assigned")
            try:
                await opening.call
                return
            except (asyncio.CancelledError, LeaseLost) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                # Some were revoked or lost meanwhile: the call begins again with the others.
                staying = [assigned for assigned in asked if not assigned.revoking]
                if len(staying) < len(asked):
                    continue
                if isinstance(error, LeaseLost):
                    raise
                raise RuntimeError(f"on_assigned of group {self._group!r} raised CancelledError by itself") from error

    async def _call(self, partitions: Sequence[TopicPartition], before: OnPartitions | None) -> None:
        if before is not None:
            await before(partitions)
        if self._on_assigned is not None:
            await _awaited("on_assigned", self._on_assigned, partitions)

    def _too_late(self, new: Sequence[AssignedPartition], *, waits: bool) -> OperationTimeout:
        names = ", ".join(f"{topic!r}[{number}]" for topic, number in sorted(assigned.partition for assigned in new))
        group, limit = f"of group {self._group!r}", f"assign_timeout, {self._assign_timeout:g} s"
        return OperationTimeout(
            f"on_lost {group} did not return within {limit}; on_assigned waits for it, with {names}"
            if waits
            else f"on_assigned {group} did not return within {limit}; it was called with {names}",
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
        await _awaited("on_lost", on_lost, partitions)

    def _stop_opening(self, partitions: Collection[TopicPartition]) -> list[asyncio.Task[None]]:
        """Cancel and return the calls of `on_assigned` with these partitions."""
        stopping: list[asyncio.Task[None]] = []
        for task, opening in self._opening.items():
            if opening.left.isdisjoint(partitions):
                if not opening.left:
                    stopping.append(task)
                continue
            opening.left.difference_update(partitions)
            if not opening.left:
                task.cancel()
                stopping.append(task)
            elif opening.call is not None:
                opening.call.cancel()
                stopping.append(opening.call)
        return stopping


async def _awaited(name: str, callback: OnPartitions, partitions: Sequence[TopicPartition]) -> None:
    """Await a callback of the application.

    :raises ConfigurationError: it is no async function.
    """
    result: object = callback(partitions)
    if not isinstance(result, Awaitable):
        raise ConfigurationError(
            f"{name} is {callback!r}, which returned {result!r} and cannot be awaited",
            advice="Write it with async def, or use broker.blocking",
        )
    await result
