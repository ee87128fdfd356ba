"""What nobody has taken of a queue: the records of its topics behind the positions of its group. Reads only.

*Concurrency.* Any number at once. *Cancellation.* Leaves nothing behind. *Failure.* Errors of the brokers are raised;
a topic that is gone holds nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from broker.errors import NotFound
from broker.records import Record
from broker.spi import Bounds, LogReaderSpi, TopicPartition
from broker_kafka.connection import Connection
from broker_kafka.groups_admin import KafkaGroups
from broker_kafka.queue.own_records import OwnRecords
from broker_kafka.record_headers import headers_of

__all__ = ["read_untaken", "untaken_ranges"]


async def untaken_ranges(connection: Connection, log: LogReaderSpi, subscription: str) -> dict[TopicPartition, Bounds]:
    """From where to where nobody has taken anything, for every partition of the topics that the group reads.

    :raises SubscriptionNotFound: there is no such group.
    """
    positions = (await KafkaGroups(connection).describe(subscription)).positions
    found: dict[TopicPartition, Bounds] = {}
    for topic in sorted({place.topic for place in positions}):
        try:
            bounds = await log.bounds(topic)
        except NotFound:
            continue
        for partition, (first, following) in bounds.items():
            place = TopicPartition(topic, partition)
            found[place] = Bounds(min(following, max(first, positions.get(place, first))), following)
    return found


async def read_untaken(
    log: LogReaderSpi, own: OwnRecords, place: TopicPartition, bounds: Bounds, batch: int
) -> AsyncGenerator[list[Record[Any]]]:
    """The records of a range that are messages of the queue, in batches of at most so many."""
    if bounds.first < bounds.next:
        async for records in log.read(*place, bounds.first, bounds.next, batch):
            yield [record for record in records if own.has(record.key, headers_of(record.native) or ())]
