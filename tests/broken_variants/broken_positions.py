"""Variants that tell members wrongly of their partitions, or keep positions wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker.bus import Bus
from broker.driver.concurrency import TaskSet
from broker.driver.contract import RecordSubscription, TopicPartition
from broker.errors import NotFound
from broker.testing.faults import Wrapped
from tests.broken_variants.breaking import BrokenBackend, BrokenRecords
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


@breaks("assigning.lost-when-free-again", healthy="assigning.lost-differs-from-revoking")
class ReleasesWhatComesBack(BrokenBackend):
    """Lost partitions that are assigned again at once are reported as being revoked."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        return await self.inner.join(subscription, _Forgiving(listener))


class _Forgiving(Wrapped):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._losses: list[TopicPartition] = []

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._losses.extend(partitions)
        asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        losses, self._losses = self._losses, []
        self.inner.lost(losses)

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        back, self._losses = self._losses, []
        if back:
            DoesNotAwaitAssigned.running.spawn(self._move(back, partitions))
        else:
            self.inner.assigned(partitions)

    async def _move(self, back: Sequence[TopicPartition], partitions: Sequence[TopicPartition]) -> None:
        await self.inner.revoking(back, asyncio.get_running_loop().time() + 1)
        self.inner.assigned(partitions)


@breaks("copartitions.lost-when-free-again", healthy="copartitions.different-counts-are-refused")
class ReleasesNumbersThatComeBack(ReleasesWhatComesBack):
    """Lost numbers that are assigned again at once are reported as being revoked."""


@breaks("records.own-positions-are-committed", healthy="records.no-automatic-commits")
class CommitsOneMore(BrokenRecords):
    """A commit stores one position more."""

    def change(self, partition: TopicPartition, position: int) -> int:
        return position + 1


@breaks("records.own-positions-are-bounded", healthy="records.own-positions-are-committed")
class HidesCommits(BrokenRecords):
    """A member does not see what a former owner of its partitions committed."""

    committing = False

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Any:
        self.committing = True
        return await self.inner.commit(positions)

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        return await self.inner.committed(partitions) if self.committing else dict.fromkeys(partitions)


@breaks("transactions.own-positions-are-atomic", healthy="transactions.commit-shows-all")
class TransactsAheadOfOwnPositions(Wrapped):
    """A transaction commits one position more than it was given."""

    async def check_consumer(self, source: Any) -> None:
        await self.inner.check_consumer(source.inner)

    async def add_offsets(self, source: Any, positions: Mapping[TopicPartition, int]) -> None:
        await self.inner.add_offsets(source.inner, {at: position + 1 for at, position in positions.items()})


@breaks("copartitions.one-owner-per-number", healthy="copartitions.different-counts-are-refused")
class ReleasesNumbersEarly(BrokenBackend):
    """Partitions are released while `on_revoking` still runs."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        return await self.inner.join(subscription, _Hasty(listener))


class _Hasty(Wrapped):
    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        DoesNotAwaitAssigned.running.spawn(self.inner.revoking(partitions, deadline))
        await asyncio.sleep(0)


@breaks("copartitions.crash-moves-whole-numbers", healthy="copartitions.topics-may-grow")
class AssignsTopicsApart(BrokenBackend):
    """The partitions of a number go to any member."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        return await super().join(replace(subscription, copartitioned=False), listener)


@breaks("copartitions.topics-may-grow", healthy="copartitions.different-counts-are-refused")
class OverlooksNewNumbers(BrokenBackend):
    """Partitions that are added to a topic are not assigned."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        return await self.inner.join(subscription, _FirstNumber(listener))


class _FirstNumber(Wrapped):
    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.inner.assigned([partition for partition in partitions if partition.partition == 0])


@breaks("copartitions.recreated-topic-loses-nothing", healthy="copartitions.topics-may-grow")
class NamesNoRecreatedTopic(BrokenRecords):
    """The error of a recreated topic does not tell which one."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Any:
        try:
            return await self.inner.fetch(max_records, max_bytes, wait)
        except NotFound:
            raise NotFound("Something is missing") from None


@breaks("copartitions.different-counts-are-refused", healthy="copartitions.topics-may-grow")
class CountsNoPartitions(BrokenBackend):
    """Every topic is said to have one partition."""

    def log_reader(self) -> Any:
        return _OnePartition(self.inner.log_reader())


class _OnePartition(Wrapped):
    async def partitions(self, topic: str) -> Sequence[int]:
        return [0]
