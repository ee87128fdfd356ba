"""Variants that administer wrongly, or hand records over wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from broker.bus import Bus
from broker.driver.contract import RecordSubscription, Start, SubscriptionInfo, TopicInfo, TopicPartition
from broker.records import Record
from broker.testing.faults import Wrapped
from tests.broken_variants.breaking import BrokenAdmin, BrokenBackend, BrokenRecords
from tests.broken_variants.registry import breaks


@breaks("admin.retention-is-kept")
class IgnoresRetention(BrokenAdmin):
    """Retention is ignored: a topic keeps its messages forever."""

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        return await self.inner.ensure_topic(name, partitions=partitions, retention=None, options=options)


class _TrustingAdmin(Wrapped):
    async def redrive(self, dead_letter_topic: str, *, to: Sequence[str] | None = None, **options: Any) -> Any:
        return await self.inner.redrive(dead_letter_topic, to=to and await self.inner.topics(), **options)


@breaks("dead-letters.redrive-to-named-topics-only", healthy="dead-letters.redrive-restores-messages")
class RedrivesToAnyTopic(Bus):
    """A redrive publishes to whatever topic a letter names."""

    @property
    def admin(self) -> Any:
        return _TrustingAdmin(super().admin)


@breaks("admin.purge-keeps-subscriptions")
class PurgeDeletesSubscriptions(BrokenAdmin):
    """`purge` deletes the subscriptions with the messages."""

    async def purge(self, topic: str) -> int | None:
        for name in await self.inner.list_subscriptions(topic):
            await self.inner.delete_subscription(topic, name)
        return await self.inner.purge(topic)


@breaks("admin.subscription-starts-as-requested")
class AdminStartsAtTheEarliest(BrokenAdmin):
    """`ensure_subscription` ignores `start` and begins at the earliest message."""

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        return await self.inner.ensure_subscription(topic, name, start="earliest", options=options)


@breaks("admin.topic-counts-its-messages")
class ReportsEmptyTopics(BrokenAdmin):
    """Every topic is reported as empty."""

    async def describe_topic(self, name: str) -> TopicInfo:
        return replace(await self.inner.describe_topic(name), messages=0)


@breaks("admin.health-reports-unreachable-server")
class AlwaysHealthy(BrokenBackend):
    """The health check reports a healthy connection without asking the server."""

    async def check_health(self) -> float:
        return 0.001


@breaks("records.buffer-is-bounded")
class FetchesTooManyRecords(BrokenRecords):
    """A fetch returns four times as many records as requested."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return await self.inner.fetch(4 * max_records, max_bytes, wait)


@breaks("records.buffer-is-bounded")
class FetchesTooManyBytes(BrokenRecords):
    """A fetch of records ignores the bound on bytes."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return await self.inner.fetch(max_records, 1 << 40, wait)


@breaks("records.close-ends-the-wait")
class FetchIgnoresInterrupt(BrokenRecords):
    """A fetch of records waits for its full timeout and cannot be interrupted."""

    def interrupt(self) -> None:
        """Nothing happens."""


@breaks("groups.lost-partitions-are-reported")
class HidesLostPartitions(BrokenBackend):
    """Partitions that moved to another member are not reported as lost."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        return await self.inner.join(subscription, _Deaf(listener))


class _Deaf(Wrapped):
    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Keep it from the core."""


@breaks("groups.crash-delays-idle")
class AssignsOwnedPartitions(BrokenBackend):
    """A member is assigned partitions that a dead member still holds."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        source = await self.inner.join(subscription, listener)
        if not source.assignment():
            listener.assigned([TopicPartition(subscription.topics[0], number) for number in (0, 1)])
        return source


@breaks("messages.pattern-follows-topics")
class FindsNoNewTopics(BrokenBackend):
    """The list of topics is that of the first time."""

    found: Sequence[str] | None = None

    def admin(self) -> Any:
        return _FirstList(self.inner.admin(), self)


class _FirstList(BrokenAdmin):
    def __init__(self, inner: Any, backend: FindsNoNewTopics) -> None:
        super().__init__(inner)
        self.backend = backend

    async def list_topics(self) -> Sequence[str]:
        if self.backend.found is None:
            self.backend.found = await self.inner.list_topics()
        return self.backend.found


@breaks("records.pattern-follows-topics")
class ReadsTheFirstTopicsOnly(BrokenBackend):
    """A group with a pattern reads the topics that matched when it joined."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        if subscription.pattern is not None:
            names = [name for name in await self.inner.admin().list_topics() if subscription.pattern.matches(name)]
            subscription = replace(subscription, topics=names, pattern=None)
        return await super().join(subscription, listener)
