"""`KafkaAdmin`: provisioning of topics and groups. Stateless; `KafkaBackend.admin` makes one for each use.

*Concurrency.* Any number of calls, also from several processes. *Cancellation.* A cancelled call may have taken effect,
and can be repeated. *Failure.* Errors name the option or the group and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from broker import GroupInfo, InvalidSetting, Lag, PositionChange, SubscriptionInfo, TopicInfo, UnknownSetting
from broker.driver import GroupReset, Start
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.admin.topics import KafkaTopics, read_options
from broker_kafka.cluster.connection import Connection

__all__ = ["KafkaAdmin"]


class KafkaAdmin:
    """Implements `AdminSpi` and `GroupAdminSpi`; a subscription is a consumer group."""

    def __init__(self, connection: Connection) -> None:
        self._topics = KafkaTopics(connection)
        self._groups = KafkaGroups(connection)

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Options: any topic configuration, by Kafka's name with dots or `_`, and `replication_factor`."""
        if partitions is not None and partitions < 1:
            raise InvalidSetting(f"partitions is {partitions}", advice="Give a whole number of 1 or more")
        if retention is not None and retention <= timedelta(0):
            raise InvalidSetting(f"retention is {retention}", advice="Give a time above 0")
        return await self._topics.ensure(name, partitions, read_options(retention, options))

    async def delete_topic(self, name: str) -> None:
        await self._topics.delete(name)

    async def list_topics(self) -> Sequence[str]:
        return await self._topics.list()

    async def describe_topic(self, name: str) -> TopicInfo:
        return await self._topics.describe(name)

    async def topic_identity(self, name: str) -> str:
        """In one request, where a description takes four."""
        return await self._topics.identity(name)

    async def purge(self, topic: str) -> int | None:
        """Delete all records, and move groups behind them to the end, except groups with members."""
        removed = await self._topics.purge(topic)
        await self._groups.skip_purged(topic)
        return removed

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        """Commit the start as the group's position, so that the group exists before its first member."""
        if options:
            raise UnknownSetting(
                f"A Kafka group has no option {min(options)!r}",
                advice="Use the settings of the connection for the behaviour of members",
            )
        return await self._groups.ensure_on(topic, name, start)

    async def delete_subscription(self, topic: str, name: str) -> None:
        await self._groups.delete_on(topic, name)

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        return await self._groups.list_on(topic)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        return await self._groups.describe_on(topic, name)

    async def lag(self, topic: str, subscription: str) -> Lag:
        """`waiting` counts the records that the group has not finished, as far as it has committed that; `partitions`
        counts those behind its position. Both end at the last stable offset, and count transaction markers."""
        return await self._groups.lag_on(topic, subscription)

    async def list_groups(self) -> Sequence[GroupInfo]:
        return await self._groups.list()

    async def describe_group(self, name: str) -> GroupInfo:
        return await self._groups.describe(name)

    async def reset_group(self, name: str, reset: GroupReset, *, dry_run: bool) -> Sequence[PositionChange]:
        return await self._groups.reset(name, reset, dry_run=dry_run)

    async def delete_group(self, name: str) -> None:
        await self._groups.delete(name)
