"""Opens messages of a share group: makes the group where it is missing, and joins it.

*Cancellation* leaves no member, and the group's configuration as it is by then. *Failure.* As told by `subscribe`. A
group of its own, shorter lock than the connection counts with is told by a `Warned` event.
"""

from __future__ import annotations

from collections.abc import Callable

from broker import Unsupported
from broker.driver import Ephemeral, MessageSubscription, SourceListener, Warned, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.cluster.names import group_id
from broker_kafka.share.group_config import counted_lock, prepare, require
from broker_kafka.share.messages import ShareMessageSource

__all__ = ["subscribe"]


async def subscribe(
    connection: Connection,
    subscription: MessageSubscription,
    listener: SourceListener,
    on_close: Callable[[ShareMessageSource], object],
) -> ShareMessageSource:
    """Join the group; a new one has a member when this returns.

    :raises TopicNotFound: there is no such topic.
    :raises SubscriptionNotFound: nobody has made the group, and it is not to be made.
    :raises InvalidName: a consumer group has the name of the group.
    :raises Unsupported: the brokers have no share groups, or retry topics are asked for.
    """
    if subscription.retry_topics:
        raise Unsupported("A share group has no retry topics", advice="Leave out retry_topics, or queue=share")
    partitions = await partitions_of(connection, subscription.topic)
    group, ephemeral = group_id(subscription.subscription), isinstance(subscription.subscription, Ephemeral)
    waits = False
    if subscription.create or ephemeral:
        before, config = await prepare(connection, group, subscription.start)
        waits = not before.exists
    else:
        config = await require(connection, subscription.topic, group)
    source = ShareMessageSource(
        connection,
        subscription,
        listener,
        group=group,
        lock=config.lock_seconds,
        limit=config.delivery_limit,
        partitions=len(partitions),
        on_close=on_close,
    )
    try:
        await source.open(waits=waits)
    except BaseException:
        await source.close()
        raise
    counted = counted_lock(connection.settings)
    if config.lock_seconds < counted:
        text = (
            f"Share group {group!r} locks its messages for {config.lock_seconds:g} s, and delays and retries of this "
            f"connection are measured by {counted:g} s, so that what waits here may be lost to others before its time. "
            f"Connect with share_lock={config.lock_seconds:g}"
        )
        logger.warning(text)
        listener.event(Warned(text=text))
    return source
