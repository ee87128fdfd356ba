"""The Message family: a subscription is a consumer group, whose records are settled one by one.

*Concurrency, cancellation, failure.* With `queue=offsets` they are those of `broker.driver.as_messages.source`: of each
partition the highest contiguous finished offset is committed, with a map of what is finished above it, so that a
restart repeats nothing of that. A message that is nacked comes again from memory; nobody else gets it while its
partition is here. A warning tells of members of the group that settle by markers. With `queue=markers` they are those
of `broker_kafka.queue.consumer.queue_client`.
"""

from __future__ import annotations

import asyncio

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
from broker_kafka.queue.consumer.subscribing import watch_for_rivals
from broker_kafka.records import KafkaRecordSource

__all__ = ["found", "subscribe"]


async def found(connection: Connection, subscription: MessageSubscription) -> None:
    """Give a new group positions at once, so that the subscription exists from now on.

    :raises TopicNotFound: there is no such topic.
    :raises SubscriptionNotFound: the group has neither members nor positions on the topic, and is not to be made.
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
    """Join the group, with the offsets as what tells what is done.

    :raises NotFound: as `found`.
    """
    await found(connection, subscription)
    source = _Messages(listener, hooks=hooks, retry_topics=subscription.retry_topics)
    wanted = RecordSubscription(topics=(subscription.topic,), group=subscription.subscription, start=subscription.start)
    await source.join(backend, wanted)
    source.go_past_tails()
    if not isinstance(wanted.group, Ephemeral):
        source.watch(connection, subscription.topic, wanted.group)
    return source


class _Messages(RecordsAsMessages):
    """Those of a group that others may consume with markers, which is looked for while it is open."""

    _watching: asyncio.Task[None] | None = None

    def go_past_tails(self) -> None:
        """No transaction commits positions here."""
        if isinstance(self._source, KafkaRecordSource):
            self._source.never_transacts()

    def watch(self, connection: Connection, topic: str, group: str) -> None:
        """Look until the close."""
        work = watch_for_rivals(connection, topic, group, self._warn)
        self._watching = asyncio.get_running_loop().create_task(work, name="broker-kafka-rivals")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await super().close()
