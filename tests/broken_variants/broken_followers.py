"""Variants whose followed logs skip, repeat, or tell too early that they have caught up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from broker.bus import Bus
from broker.driver.contract import TopicInfo
from broker.errors import BrokerError, OffsetOutOfRange, TopicRecreated
from broker.reading.log_follower import LogFollower
from broker.records import Record, RecordBatch
from broker.testing.faults import Wrapped
from tests.broken_variants.breaking import BrokenAdmin, BrokenBackend
from tests.broken_variants.registry import breaks


class _Follower(Wrapped):
    """A follower; variants override what they break.

    :ivar reader: opens another one.
    """

    def __init__(self, inner: Any, reader: Any, topic: str) -> None:
        super().__init__(inner)
        self.reader = reader
        self.topic = topic


class _Reader(Wrapped):
    follower_class: type[_Follower]

    def __init__(self, inner: Any, follower_class: type[_Follower]) -> None:
        super().__init__(inner)
        self.follower_class = follower_class

    async def follow(self, topic: str, positions: Mapping[int, int]) -> Any:
        return self.follower_class(await self.inner.follow(topic, positions), self.inner, topic)


class _Following(BrokenBackend):
    follower_class: ClassVar[type[_Follower]] = _Follower

    def log_reader(self) -> Any:
        return _Reader(self.inner.log_reader(), self.follower_class)


class _FromTheStart(_Reader):
    async def follow(self, topic: str, positions: Mapping[int, int]) -> Any:
        bounds = await self.inner.bounds(topic)
        return await self.inner.follow(topic, {number: bounds[number].first for number in positions})


@breaks("follow.begins-at-the-positions")
class FollowsFromTheStart(_Following):
    """A follower begins at the first record of its partitions."""

    def log_reader(self) -> Any:
        return _FromTheStart(self.inner.log_reader(), _Follower)


class _EndsAtTheEnd(_Follower):
    ended = False

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        records = await self.inner.fetch(max_records, max_bytes, 0.05)
        self.ended = self.ended or not records
        return [] if self.ended else records


@breaks("follow.new-records-arrive")
class FollowsToTheEndOnly(_Following):
    """A follower that has found no record returns none any more."""

    follower_class = _EndsAtTheEnd


class _ReachedBeforehand(_Follower):
    def reached(self, partition: int) -> int:
        return 1 << 62


@breaks("follow.tells-caught-up")
class CatchesUpTooEarly(_Following):
    """A partition counts as read to its end before its records are fetched."""

    follower_class = _ReachedBeforehand


class _ReachesLastRecord(_Follower):
    last: int = -1

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        records = await self.inner.fetch(max_records, max_bytes, wait)
        self.last = max([self.last, *(record.offset for record in records)])
        return records

    def reached(self, partition: int) -> int:
        return self.last + 1


@breaks("follow.catches-up-behind-transactions")
class CatchesUpByRecordsOnly(_Following):
    """Only a record at the end of the log tells that a follower has caught up."""

    follower_class = _ReachesLastRecord


class _ForgetsPosition(_Follower):
    broken = False

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        try:
            records = await self.inner.fetch(max_records, max_bytes, wait)
        except BrokerError:
            self.broken = True
            raise
        if self.broken and records:
            self.broken = False
            return []
        return records


@breaks("follow.survives-reconnects")
class SkipsAfterAReconnect(_Following):
    """A follower goes on at the end of the log after a reconnect."""

    follower_class = _ForgetsPosition


class _NeverAdds(_Follower):
    async def add(self, positions: Mapping[int, int]) -> None:
        """Nothing happens."""


@breaks("follow.new-partitions-are-followed")
class FollowsTheFirstPartitions(_Following):
    """A follower does not read partitions that were added later."""

    follower_class = _NeverAdds


class _GoesOn(_Follower):
    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        try:
            return await self.inner.fetch(max_records, max_bytes, wait)
        except TopicRecreated:
            await self.inner.close()
            self.inner = await self.reader.follow(self.topic, {0: 0})
            return []
        except OffsetOutOfRange:
            await self.inner.close()
            bounds = await self.reader.bounds(self.topic)
            self.inner = await self.reader.follow(self.topic, {0: bounds[0].first})
            return []


class _OneIdentity(BrokenAdmin):
    async def describe_topic(self, name: str) -> TopicInfo:
        found = await self.inner.describe_topic(name)
        return TopicInfo(name=name, partitions=found.partitions, identity="the same")


@breaks("follow.recreated-topic-raises")
class FollowsTheNewTopic(_Following):
    """A follower of a recreated topic begins at its first record."""

    follower_class = _GoesOn
    admin_class = _OneIdentity


@breaks("follow.removed-records-are-not-skipped")
class FollowerSkipsRemovedRecords(_Following):
    """A follower whose next record was removed goes on with the first that remains."""

    follower_class = _GoesOn


class _Clamping(_Reader):
    async def follow(self, topic: str, positions: Mapping[int, int]) -> Any:
        bounds = await self.inner.bounds(topic)
        return await self.inner.follow(
            topic, {n: min(max(at, bounds[n].first), bounds[n].next) for n, at in positions.items()}
        )


@breaks("follow.removed-position-raises")
class FollowsFromTheNearestPosition(_Following):
    """A position that the log does not hold becomes the nearest one that it holds."""

    def log_reader(self) -> Any:
        return _Clamping(self.inner.log_reader(), _Follower)


class _Hasty(LogFollower):
    async def next_batch(self, max_records: int = 1000, timeout: float | None = None) -> RecordBatch[bytes]:
        batch = await super().next_batch(max_records, timeout)
        await asyncio.sleep(0)
        return batch


@breaks("follow.cancelling-and-closing")
class CancelledBatchesAreLost(Bus):
    """A call suspends once more between taking a batch and returning it."""

    @property
    def log(self) -> Any:
        facade = super().log
        return _HastyLog(facade)


class _HastyLog(Wrapped):
    def follow(self, *args: Any, **options: Any) -> Any:
        follower = self.inner.follow(*args, **options)
        follower.__class__ = _Hasty
        return follower
