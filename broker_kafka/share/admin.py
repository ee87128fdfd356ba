"""`ShareAdmin`: administration of a connection with queue=share, whose subscriptions are share groups.

*Concurrency, cancellation, failure* are those of `KafkaAdmin`, which serves topics, groups of records, and the
subscription of redrives. The Kafka client neither lists nor describes share groups, and does not report their lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker import Lag, SubscriptionInfo, Unsupported
from broker.driver import REDRIVE_SUBSCRIPTION, Start
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.share.group_config import configure_group, delete_group, read_config, require_group

__all__ = ["ShareAdmin"]


class ShareAdmin(KafkaAdmin):
    """As `KafkaAdmin`, with share groups for subscriptions."""

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        """Create the group, by its configuration.

        :raises Unsupported: the start is another than the earliest.
        """
        if options or name == REDRIVE_SUBSCRIPTION:
            return await super().ensure_subscription(topic, name, start=start, options=options)
        await partitions_of(self._connection, topic)
        await configure_group(self._connection, name, start)
        return await self.describe_subscription(topic, name)

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Delete the group from all topics; that of redrives from this one."""
        if name == REDRIVE_SUBSCRIPTION:
            await super().delete_subscription(topic, name)
        else:
            await partitions_of(self._connection, topic)
            await delete_group(self._connection, name)

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        """:raises Unsupported: always."""
        await partitions_of(self._connection, topic)
        raise _cannot("list share groups", "kafka-share-groups --list")

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        """The configuration of the group, whatever topics it reads.

        :raises SubscriptionNotFound: the group does not exist.
        """
        if name == REDRIVE_SUBSCRIPTION:
            return await super().describe_subscription(topic, name)
        await partitions_of(self._connection, topic)
        config = await require_group(self._connection, topic, name)
        return SubscriptionInfo(topic=topic, name=name, native={"type": "share", "config": dict(config.values)})

    async def lag(self, topic: str, subscription: str) -> Lag:
        """The lag of a consumer group.

        :raises Unsupported: the subscription is a share group.
        """
        await partitions_of(self._connection, topic)
        if subscription != REDRIVE_SUBSCRIPTION and (await read_config(self._connection, subscription)).exists:
            raise _cannot("report the lag of a share group", f"kafka-share-groups --describe --group {subscription}")
        return await super().lag(topic, subscription)


def _cannot(what: str, instead: str) -> Unsupported:
    return Unsupported(f"The Kafka client cannot {what}", advice=f"Use Kafka's own tool: {instead}")
