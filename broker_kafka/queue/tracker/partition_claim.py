"""How a marker partition is taken over: fence who had it, ask where the log ends by then, begin where was committed.

In this order: what an earlier owner wrote lies below that end, and nothing of it comes later. *Concurrency.* On the
loop; one claim of a partition at a time. *Failure.* A claim that fails leaves no writer open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from broker import BrokerError, TopicPartition
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of
from broker_kafka.offsets.protocol import FetchResults
from broker_kafka.queue.markers.fenced_writer import FencedWriter
from broker_kafka.queue.markers.marker_topic import TRACKER

__all__ = ["WRITER_CLOSE", "Claim", "claim"]

WRITER_CLOSE = 3.0
"""Seconds in which a writer ends."""


class Claim(NamedTuple):
    """:ivar start: from where to read.
    :ivar end: nothing is to be redelivered before all below it was read.
    :ivar lost: the committed position, if the log does not hold it any more.
    """

    writer: FencedWriter
    start: int
    end: int
    lost: int | None


class Positions(Protocol):
    """Where the positions of the trackers are stored."""

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults: ...


async def claim(
    connection: Connection, store: Positions, group: str, partitions: Sequence[TopicPartition]
) -> Mapping[TopicPartition, Claim]:
    """Take these over.

    :raises BrokerError: one of them could not be; then none is.
    """
    # By the partition itself, so that whoever tracks it fences who did before, and nobody else.
    writers = {place: FencedWriter(connection, f"{place.topic}{TRACKER}-{place.partition}") for place in partitions}
    try:
        opened = await asyncio.gather(*(writer.start() for writer in writers.values()), return_exceptions=True)
        for outcome in opened:
            if isinstance(outcome, BaseException):
                raise outcome
        bounds = await bounds_of(connection, partitions, committed=False)
        stored = await store.fetch(group, partitions)
        claims: dict[TopicPartition, Claim] = {}
        for place in partitions:
            found, (first, end) = stored[place], bounds[place]
            if isinstance(found, BrokerError):
                raise found
            start = first if found is None or not first <= found.offset <= end else found.offset
            lost = None if found is None or found.offset == start else found.offset
            claims[place] = Claim(writers[place], start, end, lost)
        return claims
    except BaseException:
        await asyncio.gather(*(writer.stop(WRITER_CLOSE) for writer in writers.values()))
        raise
