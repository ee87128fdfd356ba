"""Whether V1 markers may be of more than one topic: they name none. Reads only.

*Concurrency.* Any number at once. *Cancellation.* Leaves nothing behind. *Failure.* Errors of the brokers are raised.

Finds the members of a group that are at odds with one of its consumers: they settle its messages by markers, and it
does not; or both do so, for other keys, and each passes over what is the other's.

Such a member has a mark of its id stored beside the positions that it committed; if that id is in the group now, it
consumes now. What earlier members have left is no sign: nobody alive has their ids. *Failure.* What the brokers do not
tell is asked again later.


Opens the queue client of a subscription: its group, its marker topic, its tracker, its producer, its member.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable
from typing import Final

from broker import BrokerError, ConfigurationError, TopicPartition, Unsupported
from broker.driver import (
    Ephemeral,
    GroupMember,
    MessageSubscription,
    RecordListener,
    RecordSubscription,
    SourceListener,
    Warned,
    logger,
)
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, partitions_of
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.queue.consumer.lease_manager import LeaseBook
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.consumer.start_builder import Starting
from broker_kafka.queue.consumer.start_transactions import StartTransactions
from broker_kafka.queue.consumer.transacted_ends import TransactedEnds
from broker_kafka.queue.consumer.unknown_commits import CommitDoubts
from broker_kafka.queue.markers.commit_text import keys_in, mark_in, mark_of
from broker_kafka.queue.markers.fenced_writer import Entry
from broker_kafka.queue.markers.marker_producer import MarkerProducer
from broker_kafka.queue.markers.marker_topic import ensure_marker_topic, marker_topic_name
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.wire import FORMATS
from broker_kafka.queue.tracker.shared_trackers import Trackers
from broker_kafka.records import KafkaRecordSource

__all__ = ["open_queue", "other_topics", "refuse_rivals", "rivals_of", "watch_for_rivals"]


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


_BROKERS_SESSION: Final = 60.0
"""Seconds, and more than brokers keep a member of KIP-848 that was killed, unless they are told to."""

_OFFSETS: Final = (
    "Subscription {group!r} of {topic!r} is consumed here with queue=offsets, and with queue=markers by {who}: leases, "
    "delays, attempts and queue_id hold for a part of the messages only. Stop one of the two, or give it a "
    "subscription of its own"
)
_SHARED: Final = (
    "The messages of {topic!r} are shared by the group {group!r} with {who}, whose queue_id differs: each side "
    "passes over the messages of the other for good"
)
_MEND: Final = "Stop one of the two, and give each queue_id a subscription of its own"
_OTHER_KEYS: Final = f"{_SHARED}. {_MEND}"


async def watch_for_rivals(
    connection: Connection, topic: str, group: str, tell: Callable[[str], object], *, keys: str | None = None
) -> None:
    """Look for such members now and then, until some are found or this is cancelled.

    A member that was killed before is forgotten by the first look, so that a group may change over.

    :param tell: given what to do, when some are found; a consumer that passes messages over is to stop then.
    :param keys: see `rivals_of`.
    """
    settings = connection.settings
    session = settings.session_timeout_ms / 1000 if settings.group_protocol == "classic" else _BROKERS_SESSION
    while True:
        await asyncio.sleep(max(settings.topic_metadata_refresh_interval_ms / 1000, session))
        try:
            rivals = await rivals_of(connection, topic, group, keys=keys)
        except BrokerError as error:
            logger.debug("Who else consumes group %r is asked again: %s", group, error)
            continue
        if rivals:
            tell((_OFFSETS if keys is None else _OTHER_KEYS).format(group=group, topic=topic, who=_named(rivals)))
            return


async def refuse_rivals(connection: Connection, topic: str, group: str, *, keys: str) -> None:
    """To be asked before the group is joined. Those that have committed nothing yet are found by `watch_for_rivals`.

    :raises ConfigurationError: present members read the topic for other keys.
    """
    try:
        rivals = await rivals_of(connection, topic, group, keys=keys)
    except BrokerError as error:
        logger.debug("Who else consumes group %r is asked later: %s", group, error)
        return
    if rivals:
        raise ConfigurationError(
            _SHARED.format(group=group, topic=topic, who=_named(rivals)),
            advice=f"{_MEND}. One that was killed is a member until its session is over (session_timeout_ms)",
        )


def _named(members: Iterable[GroupMember]) -> str:
    return ", ".join(sorted({f"{member.client} at {member.host}" for member in members})[:3])


async def rivals_of(connection: Connection, topic: str, group: str, *, keys: str | None = None) -> list[GroupMember]:
    """The present members of the group that have committed with markers.

    :param keys: what stands for the keys of who asks, and of whom it is not at odds with; None if it has no markers.
    :raises BrokerError: the brokers do not tell.
    """
    stored = await GroupOffsetStore(connection).fetch(group, await partitions_of(connection, topic))
    for position in stored.values():
        if isinstance(position, BrokerError):
            raise position
    texts = [position.metadata for position in stored.values() if isinstance(position, StoredOffset)]
    marks = {mark for text in texts if (mark := mark_in(text)) is not None and keys_in(text) != keys}
    if not marks:
        return []
    info = await KafkaGroups(connection).state(group)
    return [member for member in info.members if mark_of(member.id) in marks] if info is not None else []


_HOST: Final = socket.gethostname()


async def open_queue(
    connection: Connection,
    trackers: Trackers,
    subscription: MessageSubscription,
    listener: SourceListener,
) -> QueueClient:
    """The open client of a subscription whose group exists.

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
    own = QueueFilter.of(queue, settings)
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
    starts = Starting(
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
            connection.detach(closed)

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
    connection.attach(client)
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
