"""Opens the queue client of a subscription: its group, its marker topic, its tracker, its producer, its member."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

from broker.errors import ConfigurationError, Unsupported
from broker.hooks import Warned, logger
from broker.names import Ephemeral
from broker.spi import MessageSubscription, RecordListener, RecordSubscription, SourceListener
from broker_kafka.connection import Connection
from broker_kafka.queue.commit_doubts import CommitDoubts
from broker_kafka.queue.fenced_writer import Entry
from broker_kafka.queue.lease_book import LeaseBook
from broker_kafka.queue.marker_format import FORMATS
from broker_kafka.queue.marker_producer import MarkerProducer
from broker_kafka.queue.marker_topic import ensure_marker_topic, marker_topic_name
from broker_kafka.queue.one_topic import other_topics
from broker_kafka.queue.own_records import OwnRecords
from broker_kafka.queue.queue_client import QueueClient
from broker_kafka.queue.rivals import refuse_rivals, watch_for_rivals
from broker_kafka.queue.start_transactions import StartTransactions
from broker_kafka.queue.starting import Starting
from broker_kafka.queue.trackers import Trackers
from broker_kafka.queue.transacted_ends import TransactedEnds
from broker_kafka.records import KafkaRecordSource

__all__ = ["open_queue"]

_HOST: Final = socket.gethostname()


class Host(Protocol):
    """The backend, which closes what is open with it."""

    def attach(self, opened: Any) -> None: ...
    def detach(self, closed: Any) -> None: ...


async def open_queue(
    host: Host,
    connection: Connection,
    trackers: Trackers,
    subscription: MessageSubscription,
    listener: SourceListener,
    *,
    starting: Callable[..., Starting] = Starting,
) -> QueueClient:
    """The open client of a subscription whose group exists.

    :param starting: makes what writes its STARTs; takes what `Starting` does.

    :raises ConfigurationError: its marker topic is not fit for markers, or holds V1 markers of another topic; or
        present members of its group read the topic for other keys.
    :raises BrokerError: one of its clients cannot be opened.
    """
    queue = subscription.subscription
    if isinstance(queue, Ephemeral):
        raise Unsupported(
            "A queue with markers has no ephemeral subscriptions", advice="Name the subscription, or use queue=offsets"
        )
    partitions = await ensure_marker_topic(connection, queue, topics=(subscription.topic,))
    settings = connection.settings
    own = OwnRecords.of(queue, settings)
    await refuse_rivals(connection, subscription.topic, queue, keys=own.mark)
    written = FORMATS[settings.marker_format]

    def warn(text: str) -> None:
        logger.warning(text)
        listener.event(Warned(text=text))

    if written.v1:
        trackers.keep_to_one_topic(queue, subscription.topic)
        for other in await other_topics(connection, queue, subscription.topic):
            warn(
                f"Subscription {queue!r} has read {other!r} with markers, and reads {subscription.topic!r} with "
                f"marker_format=v1, whose markers name no topic: those of both are taken for one another. Delete the "
                f"subscription of {other!r} first, or take another marker_topic, or marker_format=v2-single"
            )
    tracker = await trackers.use(queue, subscription.topic) if settings.queue_tracker else None
    # A process that stood still for longer is not to write what others have done meanwhile.
    lasts = min(settings.lease_seconds, settings.session_timeout_ms / 2000)
    markers = marker_topic_name(queue, settings.marker_topic)
    producer = MarkerProducer(connection, markers, settings.queue_id or queue, lasts=lasts, together=written.together)
    book = LeaseBook(producer, lease_seconds=settings.lease_seconds, format=written)
    starts = starting(
        own,
        partitions,
        lease_ms=book.lease_ms,
        holder=f"{settings.client_id}@{_HOST}:{os.getpid()}",
        format=written,
        max_deliveries=subscription.max_deliveries,
        dead_letter=subscription.dead_letter,
    )
    doubts = CommitDoubts()
    transactions = None
    if settings.queue_transactions:
        transactions = StartTransactions(
            connection,
            queue,
            Entry(markers, (settings.queue_id or queue).encode(), None),
            starts,
            doubts,
            lasts=lasts,
            together=written.together,
        )

    watching: list[asyncio.Task[None]] = []
    at_odds: list[ConfigurationError] = []

    async def ended(closed: QueueClient) -> None:
        for task in watching:
            task.cancel()
        try:
            if tracker is not None:
                await asyncio.shield(trackers.leave(queue))
        finally:
            host.detach(closed)

    wanted = RecordSubscription(topics=(subscription.topic,), group=queue, start=subscription.start)
    client = QueueClient(
        listener,
        member=_member(connection, wanted),
        producer=producer,
        starting=starts,
        transactions=transactions,
        doubts=doubts,
        book=book,
        transacted=TransactedEnds(connection, book, producer),
        trouble=lambda: at_odds[0] if at_odds else None if tracker is None else tracker.failure,
        session_seconds=settings.session_timeout_ms / 1000,
        ended=ended,
    )
    host.attach(client)
    try:
        await client.open()
    except BaseException:
        await client.close()
        raise
    if starts.keys:
        # Who passes over nothing harms nobody, and is told of by the others.

        def give_up(text: str) -> None:
            warn(text)
            at_odds.append(ConfigurationError(text))
            client.interrupt()

        work = watch_for_rivals(connection, subscription.topic, queue, give_up, keys=starts.keys)
        watching.append(asyncio.get_running_loop().create_task(work, name="broker-kafka-rivals"))
    return client


def _member(connection: Connection, wanted: RecordSubscription) -> Callable[[RecordListener], KafkaRecordSource]:
    return lambda listener: KafkaRecordSource(connection, wanted, listener, on_close=lambda _: None)
