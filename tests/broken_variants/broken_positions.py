"""Variants that tell members wrongly of their partitions, or keep positions wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from broker.bus import Bus
from broker.driver.concurrency import TaskSet
from broker.driver.contract import RecordSubscription, TopicPartition
from broker.testing.faults import Wrapped
from tests.broken_variants.breaking import BrokenBackend
from tests.broken_variants.registry import breaks


@breaks("assigning.waits-for-on-assigned")
class DoesNotAwaitAssigned(Bus):
    """Records are handed over while `on_assigned` still runs."""

    running = TaskSet("running", lambda error: None)

    def records(self, *args: Any, on_assigned: Any = None, **options: Any) -> Any:
        async def begin(partitions: Sequence[TopicPartition]) -> None:
            self.running.spawn(on_assigned(partitions))

        return super().records(*args, on_assigned=begin if on_assigned else None, **options)


@breaks("assigning.lost-differs-from-revoking", healthy="groups.stale-commit-is-refused")
class RevokesLostPartitions(BrokenBackend):
    """Partitions that moved to another member are reported as being revoked."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        return await self.inner.join(subscription, _Polite(listener))


class _Polite(Wrapped):
    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        asyncio.get_running_loop().create_task(self.inner.revoking(partitions, asyncio.get_running_loop().time() + 1))
