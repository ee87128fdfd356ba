"""Claims marker partitions: fences the former owner, looks up the end of the log, and reads the committed position.

In this order: what a former owner wrote lies below that end, and it writes nothing later. *Concurrency.* On the loop;
one claim of a partition at a time. *Failure.* A failed claim leaves no writer open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from broker import TopicPartition
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of
from broker_kafka.fenced_writer import FencedWriter
from broker_kafka.offsets.protocol import FetchResults, positions_in
from broker_kafka.queue.markers.marker_topic import TRACKER

__all__ = ["WRITER_CLOSE", "PartitionClaim", "claim_partitions"]

WRITER_CLOSE = 3.0
"""Seconds for which the close of a writer waits."""


class PartitionClaim(NamedTuple):
    """:ivar start: the offset from which to read.
    :ivar end: nothing may be redelivered before all records below it are read.
    :ivar lost: the committed position, if the log does not hold it any more.
    """

    writer: FencedWriter
    start: int
    end: int
    lost: int | None


class OffsetReader(Protocol):
    """Reads the positions of the trackers' group."""

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults: ...


async def claim_partitions(
    connection: Connection, store: OffsetReader, group: str, partitions: Sequence[TopicPartition]
) -> Mapping[TopicPartition, PartitionClaim]:
    """Claim these partitions.

    :raises BrokerError: one of them failed; none is claimed.
    """
    # The id is the partition, so that a new owner fences the former one and no other writer.
    writers = {place: FencedWriter(connection, f"{place.topic}{TRACKER}-{place.partition}") for place in partitions}
    try:
        opened = await asyncio.gather(*(writer.start() for writer in writers.values()), return_exceptions=True)
        for outcome in opened:
            if isinstance(outcome, BaseException):
                raise outcome
        bounds = await bounds_of(connection, partitions, committed=False)
        stored = positions_in(await store.fetch(group, partitions))
        claims: dict[TopicPartition, PartitionClaim] = {}
        for place in partitions:
            found, (first, end) = stored.get(place), bounds[place]
            start = first if found is None or not first <= found.offset <= end else found.offset
            lost = None if found is None or found.offset == start else found.offset
            claims[place] = PartitionClaim(writers[place], start, end, lost)
        return claims
    except BaseException:
        await asyncio.gather(*(writer.stop(WRITER_CLOSE) for writer in writers.values()))
        raise
