"""Variants that administer wrongly, or hand records over wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from broker.driver.contract import RecordSubscription, Start, SubscriptionInfo, TopicInfo, TopicPartition
from broker.records import Record
from broker.testing.faults import Wrapped
from tests.broken_variants.breaking import BrokenAdmin, BrokenBackend, BrokenRecords
from tests.broken_variants.registry import breaks


@breaks("admin.retention-is-kept")
class IgnoresRetention(BrokenAdmin):
    """A topic keeps its messages for ever, whatever its retention."""

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        return await self.inner.ensure_topic(name, partitions=partitions, retention=None, options=options)


@breaks("admin.purge-keeps-subscriptions")
class PurgeDeletesSubscriptions(BrokenAdmin):
    """`purge` deletes the subscriptions with the messages."""

    async def purge(self, topic: str) -> int | None:
        for name in await self.inner.list_subscriptions(topic):
            await self.inner.delete_subscription(topic, name)
        return await self.inner.purge(topic)


@breaks("admin.subscription-starts-where-asked")
class ProvisionsFromTheEarliest(BrokenAdmin):
    """A subscription that is made ahead begins at the earliest message, whatever was asked for."""

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        return await self.inner.ensure_subscription(topic, name, start="earliest", options=options)


@breaks("admin.topic-counts-its-messages")
class CountsNothing(BrokenAdmin):
    """Every topic is said to be empty."""

    async def describe_topic(self, name: str) -> TopicInfo:
        return replace(await self.inner.describe_topic(name), messages=0)


@breaks("admin.health-misses-the-server")
class AlwaysInGoodHealth(BrokenBackend):
    """The health check reports a healthy connection without asking the server."""

    async def check_health(self) -> float:
        return 0.001


@breaks("records.buffer-is-bounded")
class FetchesTooManyRecords(BrokenRecords):
    """Four times as many records are fetched as were asked for."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return await self.inner.fetch(4 * max_records, max_bytes, wait)


@breaks("records.buffer-is-bounded")
class FetchesTooManyBytes(BrokenRecords):
    """Records are fetched without a bound on their bytes."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return await self.inner.fetch(max_records, 1 << 40, wait)


@breaks("records.close-ends-the-wait")
class FetchesToTheEnd(BrokenRecords):
    """A fetch of records waits out its time, and cannot be interrupted."""

    def interrupt(self) -> None:
        """Nothing happens."""


@breaks("groups.losses-are-told")
class LosesInSilence(BrokenBackend):
    """Partitions that went to another member are not told as lost."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        return await self.inner.join(subscription, _Deaf(listener))


class _Deaf(Wrapped):
    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Keep it from the core."""


@breaks("groups.after-a-crash-is-not-idle")
class AssignsWhatIsAnothers(BrokenBackend):
    """A member is assigned partitions that a dead member still holds."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        source = await self.inner.join(subscription, listener)
        if not source.assignment():
            listener.assigned([TopicPartition(subscription.topics[0], number) for number in (0, 1)])
        return source
