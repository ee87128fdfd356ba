"""Opens the queue client of a subscription: its marker topic, tracker, producers and member of the group."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

from broker import BrokerError, ConfigurationError, TopicPartition, Unsupported
from broker.driver import Ephemeral, MessageSubscription, RecordSubscription, SourceListener, Warned, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, partitions_of
from broker_kafka.fenced_writer import OutgoingRecord
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import positions_in
from broker_kafka.queue.consumer.conflicting_members import (
    refuse_conflicting_members,
    watch_for_conflicting_members,
)
from broker_kafka.queue.consumer.lease_manager import LeaseManager
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.consumer.start_builder import StartBuilder
from broker_kafka.queue.consumer.start_transactions import StartTransactions
from broker_kafka.queue.consumer.unknown_commits import UnknownCommits
from broker_kafka.queue.markers.commit_text import topic_mark_in
from broker_kafka.queue.markers.marker_producer import MarkerProducer
from broker_kafka.queue.markers.marker_topic import ensure_marker_topic, marker_topic_name
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.wire import FORMATS
from broker_kafka.queue.tracker.shared_trackers import SharedTrackers
from broker_kafka.records import KafkaRecordSource

__all__ = ["open_queue"]

_HOST: Final = socket.gethostname()


async def open_queue(
    connection: Connection, trackers: SharedTrackers, subscription: MessageSubscription, listener: SourceListener
) -> QueueClient:
    """The open client of a subscription whose group exists.

    :raises ConfigurationError: the marker topic has unfit settings, or holds V1 markers of another topic; or live
        members of the group read the topic for other keys.
    :raises BrokerError: one of the clients cannot be opened.
    """
    queue = subscription.subscription
    if isinstance(queue, Ephemeral):
        raise Unsupported(
            "A queue with markers has no ephemeral subscriptions", advice="Name the subscription, or use queue=offsets"
        )
    partitions = await ensure_marker_topic(connection, queue, topics=(subscription.topic,))
    settings = connection.settings
    queue_filter = QueueFilter.of(queue, settings)
    await refuse_conflicting_members(connection, subscription.topic, queue, key_mark=queue_filter.key_mark)
    written = FORMATS[settings.marker_format]

    def warn(text: str) -> None:
        logger.warning(text)
        listener.event(Warned(text=text))

    if written.v1:
        trackers.keep_to_one_topic(queue, subscription.topic)
        for other in await _other_v1_topics(connection, queue_filter, subscription.topic):
            warn(
                f"Subscription {queue!r} has read {other!r} with markers, and reads {subscription.topic!r} with "
                "marker_format=v1, whose markers name no topic: markers of one count as markers of the other. "
                f"Delete the subscription of {other!r} first, or use another marker_topic, or marker_format=v2-single"
            )
    tracker = await trackers.use(queue, subscription.topic) if settings.queue_tracker else None
    # After a longer suspension this process must not write markers: others have handled its messages meanwhile.
    timeout = min(settings.lease_seconds, settings.session_timeout_ms / 2000)
    markers = marker_topic_name(queue, settings.marker_topic)
    key = settings.queue_id or queue
    producer = MarkerProducer(connection, markers, key, timeout=timeout, max_markers=written.markers_per_record)
    leases = LeaseManager(producer, lease_seconds=settings.lease_seconds, format=written)
    start_builder = StartBuilder(
        queue_filter,
        partitions,
        lease_ms=leases.lease_ms,
        holder=f"{settings.client_id}@{_HOST}:{os.getpid()}",
        format=written,
        max_deliveries=subscription.max_deliveries,
        dead_letter=subscription.dead_letter,
    )
    unknown_commits = UnknownCommits()
    transactions = None
    if settings.queue_transactions:
        transactions = StartTransactions(
            connection,
            queue,
            OutgoingRecord(markers, key.encode(), None),
            start_builder,
            unknown_commits,
            timeout=timeout,
            max_markers=written.markers_per_record,
        )

    watching: list[asyncio.Task[None]] = []
    conflict: list[ConfigurationError] = []

    def failure() -> BrokerError | None:
        return conflict[0] if conflict else None if tracker is None else tracker.failure

    async def on_close(closed: QueueClient) -> None:
        for task in watching:
            task.cancel()
        try:
            if tracker is not None:
                await asyncio.shield(trackers.leave(queue))
        finally:
            connection.detach(closed)

    records = RecordSubscription(topics=(subscription.topic,), group=queue, start=subscription.start)
    client = QueueClient(
        listener,
        connection=connection,
        member=lambda reports_to: KafkaRecordSource(connection, records, reports_to, on_close=lambda _: None),
        producer=producer,
        start_builder=start_builder,
        transactions=transactions,
        unknown_commits=unknown_commits,
        leases=leases,
        failure=failure,
        session_seconds=settings.session_timeout_ms / 1000,
        on_close=on_close,
    )
    connection.attach(client)
    try:
        await client.open()
    except BaseException:
        await client.close()
        raise
    if queue_filter.key_mark:
        # A consumer that skips no records harms no other member; those with a queue_id report the conflict.

        def fail(text: str) -> None:
            warn(text)
            conflict.append(ConfigurationError(text))
            client.interrupt()

        work = watch_for_conflicting_members(
            connection, subscription.topic, queue, fail, key_mark=queue_filter.key_mark
        )
        watching.append(asyncio.get_running_loop().create_task(work, name="broker-kafka-conflicting-members"))
    return client


async def _other_v1_topics(connection: Connection, queue_filter: QueueFilter, topic: str) -> list[str]:
    """Other topics that the subscription has read with this marker topic, if that holds anything.

    :raises BrokerError: the positions or the marker topic cannot be read.
    """
    stored = positions_in(await GroupOffsetStore(connection).stored(queue_filter.queue))
    found = {
        place.topic
        for place, position in stored.items()
        if place.topic != topic and topic_mark_in(position.metadata) == queue_filter.topic_mark
    }
    if not found:
        return []
    places: list[TopicPartition] = await partitions_of(connection, queue_filter.marker_topic)
    bounds = await bounds_of(connection, places, committed=False)
    return sorted(found) if any(each.first < each.next for each in bounds.values()) else []
