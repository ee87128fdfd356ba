"""`QueueAdmin`: administration of topics and groups on a connection with queue=markers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from broker import Bounds, Lag, NotFound, TopicPartition
from broker.driver import REDRIVE_SUBSCRIPTION, LogReaderSpi
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, high_watermarks, partitions_of
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.cluster.requests import retry_while
from broker_kafka.queue.admin.inspecting import open_leases, read_backlog
from broker_kafka.queue.markers.marker_topic import marker_topic_name, tracker_group
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.settings import KafkaSettings

__all__ = ["QueueAdmin", "redrives_by_offsets"]

_MAX_COUNTED: Final = 1000
"""A longer backlog is counted by offsets, not read."""
_TRANSACTION_SECONDS: Final = 1.0
"""A transaction of a live tracker ends within this."""


class QueueAdmin(KafkaAdmin):
    """As `KafkaAdmin`; counts open messages, and deletes the marker topic of a subscription with it."""

    def __init__(self, connection: Connection, log: LogReaderSpi) -> None:
        super().__init__(connection)
        self._log = log

    async def lag(self, topic: str, subscription: str) -> Lag:
        """`unsettled` counts open messages of the topic: held ones, and those that wait to be redelivered.

        `waiting` and `partitions` count messages if these are few, without records of other queues and of transaction
        ends. Records that an open transaction hides count as one message each. Redrives by offsets have the lag of
        `KafkaAdmin`.
        """
        if subscription == REDRIVE_SUBSCRIPTION and redrives_by_offsets(self._connection.settings):
            return await super().lag(topic, subscription)

        lag, _ = await retry_while(
            _TRANSACTION_SECONDS, lambda: self._count(topic, subscription), lambda counted: counted[1]
        )
        return lag

    async def _count(self, topic: str, subscription: str) -> tuple[Lag, bool]:
        """The lag, and whether an open transaction hides records."""
        markers = marker_topic_name(subscription, self._connection.settings.marker_topic)
        lag, unsettled = await self._count_all(topic, subscription)
        hidden = await self._hidden(topic)
        hidden_markers = sum((await self._hidden(markers)).values()) if is_topic_name(markers) else 0
        # Messages move between the backlog and leases while they are counted; none may be missing from both.
        lag_then, unsettled_then = await self._count_all(topic, subscription)
        lag = max(lag, lag_then, key=lambda each: each.waiting)
        counted = replace(
            lag,
            waiting=lag.waiting + sum(hidden.values()),
            unsettled=max(unsettled, unsettled_then) + hidden_markers,
            partitions={each: behind + hidden.get(each, 0) for each, behind in lag.partitions.items()},
        )
        return counted, bool(hidden or hidden_markers)

    async def _hidden(self, topic: str) -> dict[int, int]:
        """By partition, the number of records that an open transaction hides, if any."""
        try:
            places = await partitions_of(self._connection, topic)
            # Looked up first: records that are written meanwhile must not seem hidden.
            ends = await high_watermarks(self._connection, places, self._connection.settings.request_timeout)
            seen = await bounds_of(self._connection, places)
        except NotFound:
            return {}
        return {place.partition: end - seen[place].next for place, end in ends.items() if end > seen[place].next}

    async def _count_all(self, topic: str, subscription: str) -> tuple[Lag, int]:
        """The lag of the group, and the number of open messages of the topic."""
        lag = await super().lag(topic, subscription)
        if 0 < lag.waiting <= _MAX_COUNTED:
            counted = await self._count_backlog(topic, subscription)
            lag = Lag(waiting=sum(counted.values()), partitions=counted)
        leases = await open_leases(self._connection, self._log, subscription)
        # V1 markers name no topic, and belong to one topic only.
        return lag, sum(lease.id.topic in ("", topic) for lease in leases)

    async def _count_backlog(self, topic: str, subscription: str) -> dict[int, int]:
        """The number of messages behind the positions of the group, by partition."""
        queue_filter = QueueFilter.of(subscription, self._connection.settings)
        positions = (await self.describe_group(subscription)).positions
        counted: dict[int, int] = {}
        for partition, (first, following) in (await self._log.bounds(topic)).items():
            place = TopicPartition(topic, partition)
            bounds = Bounds(max(first, positions.get(place, first)), following)
            batches = [
                len(records) async for records in read_backlog(self._log, queue_filter, place, bounds, _MAX_COUNTED)
            ]
            counted[partition] = sum(batches)
        return counted

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Delete its marker topic too, unless that is shared, and the positions of its trackers.

        All of its consumers and trackers must be closed.
        """
        await super().delete_subscription(topic, name)
        try:
            await self.describe_group(name)
        except NotFound:
            pass
        else:
            return  # the group reads other topics only
        if self._connection.settings.marker_topic is not None:
            return
        # Refused while a tracker runs, so that it keeps its markers.
        await self.delete_group(tracker_group(name))
        markers = marker_topic_name(name)
        if is_topic_name(markers):
            await self.delete_topic(markers)


def redrives_by_offsets(settings: KafkaSettings) -> bool:
    """Whether redrives consume dead letters by offsets, on a bus whose queues have markers or are share groups.

    | setting | why markers would not do |
    |---|---|
    | queue=share | a share group drops a message after ten deliveries, and each redrive counts one |
    | queue_id | redrives would skip the letters of other queues for good |
    | marker_topic | trackers of other queues may read its markers |
    | marker_format=v1 | the letters would lose their origins |

    Letters that a redrive releases then stay where they are; with markers, another redrive finds them too.
    """
    if settings.queue != "markers":
        return settings.queue == "share"
    return settings.queue_id is not None or settings.marker_topic is not None or settings.marker_format == "v1"
