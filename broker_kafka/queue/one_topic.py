"""Whether V1 markers may be of more than one topic: they name none. Reads only.

*Concurrency.* Any number at once. *Cancellation.* Leaves nothing behind. *Failure.* Errors of the brokers are raised.
"""

from __future__ import annotations

from broker.errors import BrokerError
from broker.spi import TopicPartition
from broker_kafka.connection import Connection
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.positions import bounds_of, partitions_of
from broker_kafka.queue.commit_texts import mark_in
from broker_kafka.queue.marker_topic import marker_topic_name

__all__ = ["other_topics"]


async def other_topics(connection: Connection, subscription: str, topic: str) -> list[str]:
    """The topics but this one that the subscription has read with markers, if its marker topic holds anything.

    :raises BrokerError: the brokers do not tell.
    """
    stored = await GroupOffsetStore(connection).stored(subscription)
    found: set[str] = set()
    for place, position in stored.items():
        if isinstance(position, BrokerError):
            raise position
        if place.topic != topic and isinstance(position, StoredOffset) and mark_in(position.metadata) is not None:
            found.add(place.topic)
    if not found:
        return []
    markers = marker_topic_name(subscription, connection.settings.marker_topic)
    places: list[TopicPartition] = await partitions_of(connection, markers)
    bounds = await bounds_of(connection, places, committed=False)
    return sorted(found) if any(each.first < each.next for each in bounds.values()) else []
