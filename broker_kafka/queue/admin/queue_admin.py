"""`QueueAdmin`: the administration of topics and groups, where subscriptions are queues with markers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from broker import Bounds, Lag, NotFound, TopicPartition
from broker.driver import REDRIVE_SUBSCRIPTION, LogReaderSpi
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, high_watermarks, partitions_of
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.queue.admin.inspecting import open_leases, read_backlog
from broker_kafka.queue.markers.marker_topic import marker_topic_name, tracker_group
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.settings import KafkaSettings

__all__ = ["QueueAdmin", "redrives_by_offsets"]

_COUNTED: Final = 1000
"""Records that are read to be counted."""
_PATIENCE: Final = 1.0
"""Seconds; a transaction of a tracker that lives is over by then."""
_PAUSE: Final = 0.05


class QueueAdmin(KafkaAdmin):
    """As `KafkaAdmin`; it knows of messages that are held or wait for their time, and removes the marker topic."""

    def __init__(self, connection: Connection, log: LogReaderSpi) -> None:
        super().__init__(connection)
        self._connection = connection
        self._log = log

    async def lag(self, topic: str, subscription: str) -> Lag:
        """`unsettled` counts the messages of the topic that are held by somebody, or wait to come again.

        `waiting` and `partitions` count messages where there are few: no marks of transactions, and nothing that is
        another queue's. What an open transaction hides, such as that of a tracker that was killed, counts as if each
        record were one.
        That of redrives without markers is as with offsets.
        """
        if subscription == REDRIVE_SUBSCRIPTION and redrives_by_offsets(self._connection.settings):
            return await super().lag(topic, subscription)
        own = QueueFilter.of(subscription, self._connection.settings)
        loop = asyncio.get_running_loop()
        until = loop.time() + _PATIENCE
        markers = marker_topic_name(own.queue, self._connection.settings.marker_topic)
        while True:
            lag, unsettled = await self._look(topic, subscription)
            hidden = await self._hidden(topic)
            hidden_markers = sum((await self._hidden(markers)).values()) if is_topic_name(markers) else 0
            # Messages go from waiting to held and back while they are counted; none is to be in neither number.
            lag_then, unsettled_then = await self._look(topic, subscription)
            if not (hidden or hidden_markers) or loop.time() >= until:
                break
            await asyncio.sleep(_PAUSE)
        lag = max(lag, lag_then, key=lambda each: each.waiting)
        return replace(
            lag,
            waiting=lag.waiting + sum(hidden.values()),
            unsettled=max(unsettled, unsettled_then) + hidden_markers,
            partitions={each: behind + hidden.get(each, 0) for each, behind in lag.partitions.items()},
        )

    async def _hidden(self, topic: str) -> dict[int, int]:
        """Of each partition that has some, the records that a transaction hides which has not ended."""
        try:
            places = await partitions_of(self._connection, topic)
            # Asked first, so that what is written meanwhile does not seem to be hidden.
            ends = await high_watermarks(self._connection, places, self._connection.settings.request_timeout)
            seen = await bounds_of(self._connection, places)
        except NotFound:
            return {}
        return {place.partition: end - seen[place].next for place, end in ends.items() if end > seen[place].next}

    async def _look(self, topic: str, subscription: str) -> tuple[Lag, int]:
        """The messages that wait, and how many are held."""
        lag = await super().lag(topic, QueueFilter.of(subscription, self._connection.settings).queue)
        if 0 < lag.waiting <= _COUNTED:
            counted = await self._count(topic, subscription)
            lag = Lag(waiting=sum(counted.values()), partitions=counted)
        leases = await open_leases(self._connection, self._log, subscription)
        # V1's markers name no topic, and are then of one topic alone.
        return lag, sum(lease.id.topic in ("", topic) for lease in leases)

    async def _count(self, topic: str, subscription: str) -> dict[int, int]:
        """The messages of the subscription that lie behind its positions, in each partition."""
        own = QueueFilter.of(subscription, self._connection.settings)
        positions = (await self.describe_group(own.queue)).positions
        counted: dict[int, int] = {}
        for partition, (first, following) in (await self._log.bounds(topic)).items():
            place = TopicPartition(topic, partition)
            bounds = Bounds(max(first, positions.get(place, first)), following)
            batches = [len(records) async for records in read_backlog(self._log, own, place, bounds, _COUNTED)]
            counted[partition] = sum(batches)
        return counted

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Its marker topic goes with it, unless it is shared, and what the trackers have committed; no consumer may be
        open, nor tracker.
        """
        await super().delete_subscription(topic, name)
        try:
            await self.describe_group(name)
        except NotFound:
            pass
        else:
            return  # it reads other topics, and never read this one
        if self._connection.settings.marker_topic is not None:
            return
        # It is refused while a tracker runs, which is to have its markers then.
        await self.delete_group(tracker_group(name))
        markers = marker_topic_name(name)
        if is_topic_name(markers):
            await self.delete_topic(markers)


def redrives_by_offsets(settings: KafkaSettings) -> bool:
    """Whether redrives consume dead letters by offsets on a bus whose queues have markers, or are share groups.

    Letters that are given back stay as they are then. V1's markers would take their origins from them, a `queue_id`
    would pass over those of others for good, and others may track a marker topic that is shared.
    Else markers know letters that another reader gave back from those that lie there. A share group drops what it was
    handed ten times, and redrives and lists hand letters out and back.
    """
    if settings.queue != "markers":
        return settings.queue == "share"
    return settings.queue_id is not None or settings.marker_topic is not None or settings.marker_format == "v1"
