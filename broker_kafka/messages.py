"""The Message family: a subscription is a consumer group, whose records are settled one by one in memory.

*Concurrency, cancellation, failure* are those of `broker.reading.as_messages`: of each partition the highest contiguous
finished offset is committed, with a map of what is finished above it, so that a restart repeats nothing of that. A
message that is nacked comes again from memory; nobody else gets it while its partition is here.
"""

from __future__ import annotations

from broker.hooks import Hooks
from broker.names import Ephemeral
from broker.reading.as_messages import RecordsAsMessages
from broker.spi import Backend, MessageSource, MessageSubscription, RecordSubscription, SourceListener
from broker_kafka.admin import KafkaAdmin
from broker_kafka.connection import Connection
from broker_kafka.positions import partitions_of
from broker_kafka.starts import StartPositions

__all__ = ["subscribe"]


async def subscribe(
    backend: Backend,
    connection: Connection,
    subscription: MessageSubscription,
    listener: SourceListener,
    hooks: Hooks,
) -> MessageSource:
    """Join the group. A new one gets positions at once, so that the subscription exists from now on.

    :raises TopicNotFound: there is no such topic.
    :raises SubscriptionNotFound: the group has neither members nor positions on the topic, and is not to be made.
    """
    name = subscription.subscription
    if not isinstance(name, Ephemeral):
        if subscription.create:
            starts = StartPositions(connection, subscription.start)
            await starts.found(name, await partitions_of(connection, subscription.topic))
        else:
            await KafkaAdmin(connection).describe_subscription(subscription.topic, name)
    source = RecordsAsMessages(listener, hooks=hooks, retry_topics=subscription.retry_topics)
    wanted = RecordSubscription(topics=(subscription.topic,), group=name, start=subscription.start)
    return await source.join(backend, wanted)
