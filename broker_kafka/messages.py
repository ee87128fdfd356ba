"""Subscriptions of `bus.messages` as consumer groups, and messages that are settled by offsets (`queue=offsets`).

Of each partition the highest contiguous finished offset is committed, with a map of the finished offsets above it, so
that a restart repeats none of them. A nacked message is redelivered from memory, to this consumer, for as long as it
keeps the partition. While the source is open, a warning reports members of the group that settle by markers.

*Concurrency, cancellation, failure.* As `broker.driver.as_messages`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from broker import TopicPattern
from broker.driver import (
    Backend,
    Ephemeral,
    Hooks,
    MessageSource,
    MessageSubscription,
    RecordsAsMessages,
    RecordSubscription,
    SourceListener,
)
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.group.start_offsets import StartPositions
from broker_kafka.queue.consumer.conflicting_members import watch_for_conflicting_members
from broker_kafka.records import KafkaRecordSource

__all__ = ["ensure_group", "subscribe", "subscribe_to_pattern"]


async def ensure_group(connection: Connection, subscription: MessageSubscription) -> None:
    """Commit the start positions of a new group, so that the subscription exists from now on.

    :raises TopicNotFound: the topic does not exist.
    :raises SubscriptionNotFound: the group has neither members nor positions on the topic, and `create` is off.
    """
    name = subscription.subscription
    if isinstance(name, Ephemeral):
        return
    if subscription.create:
        starts = StartPositions(connection, subscription.start)
        await starts.create_group(name, await partitions_of(connection, subscription.topic))
    else:
        await KafkaAdmin(connection).describe_subscription(subscription.topic, name)


async def subscribe(
    backend: Backend,
    connection: Connection,
    subscription: MessageSubscription,
    listener: SourceListener,
    hooks: Hooks,
) -> MessageSource:
    """Join the group.

    :raises NotFound: as `ensure_group`.
    """
    await ensure_group(connection, subscription)
    source = _Messages(listener, hooks=hooks, retry_topics=subscription.retry_topics)
    wanted = RecordSubscription(topics=(subscription.topic,), group=subscription.subscription, start=subscription.start)
    await source.join(backend, wanted)
    source.move_past_log_ends()
    if not isinstance(wanted.group, Ephemeral):
        source.watch(connection, subscription.topic, wanted.group)
    return source


async def subscribe_to_pattern(
    backend: Backend,
    connection: Connection,
    pattern: TopicPattern,
    subscription: MessageSubscription,
    listener: SourceListener,
    hooks: Hooks,
) -> MessageSource:
    """Join the group for all topics that match.

    :raises SubscriptionNotFound: the group has no positions on one of the topics that exist, and `create` is off.
    """
    if not subscription.create:
        admin = KafkaAdmin(connection)
        for topic in filter(pattern.matches, await admin.list_topics()):
            await ensure_group(connection, replace(subscription, topic=topic))
    source = _Messages(listener, hooks=hooks)
    await source.join(
        backend,
        RecordSubscription(topics=(), pattern=pattern, group=subscription.subscription, start=subscription.start),
    )
    source.move_past_log_ends()
    return source


class _Messages(RecordsAsMessages):
    """Warns, while it is open, of members of the group that settle by markers."""

    _watching: asyncio.Task[None] | None = None

    def move_past_log_ends(self) -> None:
        """Move positions past transaction markers at the end of a log: no transaction commits positions here."""
        if isinstance(self._source, KafkaRecordSource):
            self._source.never_transacts()

    def watch(self, connection: Connection, topic: str, group: str) -> None:
        """Watch for members that settle by markers, until the close."""
        work = watch_for_conflicting_members(connection, topic, group, self._warn)
        self._watching = asyncio.get_running_loop().create_task(work, name="broker-kafka-conflicting-members")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await super().close()
