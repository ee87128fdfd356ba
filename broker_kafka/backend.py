"""`KafkaBackend`: one connection to one Kafka cluster.

Used on the event loop that opened it. `open` tries once. Producers and consumers are clients of their own, each in its
thread; they open when they are first needed and end with `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import ClassVar, Final, Literal

from broker import (
    Capabilities,
    ConfirmedAck,
    LeaseMode,
    Limits,
    MessageCapabilities,
    PublishCapabilities,
    RecordCapabilities,
    TopicPattern,
)
from broker.driver import (
    REDRIVE_SUBSCRIPTION,
    AdminSpi,
    Ephemeral,
    Hooks,
    LogReaderSpi,
    MessageSource,
    MessageSubscription,
    OpenLease,
    PublishTarget,
    PurgedQueue,
    QueuedMessage,
    QueueTracker,
    RecordListener,
    RecordSource,
    RecordSubscription,
    SourceListener,
    TransactionSpi,
    message_capabilities,
)
from broker.driver.settings import BackendSettings
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.admin.topics import KafkaTopics
from broker_kafka.client.partitioner import choose_partition, partition_of_key
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.requests import read_metadata
from broker_kafka.codec.headers import LONGEST_DELAY
from broker_kafka.log_reader import KafkaLogReader
from broker_kafka.messages import ensure_group, subscribe, subscribe_to_pattern
from broker_kafka.old_times import OldPublishTimes
from broker_kafka.publishing import KafkaPublishTarget, SharedProducer
from broker_kafka.queue.admin.inspecting import list_open_leases, queued_messages
from broker_kafka.queue.admin.purging import purge_queue
from broker_kafka.queue.admin.queue_admin import QueueAdmin, redrives_by_offsets
from broker_kafka.queue.admin.standalone_tracker import KafkaQueueTracker
from broker_kafka.queue.consumer.subscribing import open_queue
from broker_kafka.queue.markers.marker_topic import check_names
from broker_kafka.queue.tracker.shared_trackers import SharedTrackers
from broker_kafka.queue.tracker.tracker_state import TrackerOptions
from broker_kafka.records import KafkaRecordSource
from broker_kafka.settings import KafkaSettings
from broker_kafka.share.admin import ShareAdmin
from broker_kafka.share.group_config import share_capabilities
from broker_kafka.share.messages import subscribe as subscribe_to_share_group
from broker_kafka.transactions import KafkaTransaction

__all__ = ["KafkaBackend"]


_HEADROOM: Final = 4_096
"""Bytes of a record besides the message: batch, header lengths, the id, and the attributes of a dead letter."""
_MOST_ID_BYTES: Final = 1_024
_DEAD_LETTER_BYTES: Final = 2_048
_MOST_ATTRIBUTES: Final = 512


class KafkaBackend:
    """Implements `Backend`, `PartitionsKeys`, `SubscribesToPatterns` and `TracksQueues`."""

    settings_type: ClassVar[type[BackendSettings]] = KafkaSettings

    def __init__(self, settings: KafkaSettings, hooks: Hooks) -> None:
        self._hooks = hooks
        self.connection: Final = Connection(settings, hooks)
        self._old_times = OldPublishTimes(
            lambda topic: KafkaTopics(self.connection).retention(topic), self.connection.warn
        )
        self._producer = SharedProducer(self.connection, self._old_times.published)
        self._log = KafkaLogReader(self.connection)
        self._trackers = SharedTrackers(self.connection, hooks)
        largest = settings.message_max_bytes - _HEADROOM
        needed = _settings_needed(settings)
        bare = Capabilities(
            backend="kafka",
            publish=PublishCapabilities(
                limits=Limits(
                    body=largest,
                    id=_MOST_ID_BYTES,
                    attributes=_MOST_ATTRIBUTES,
                    message=largest,
                    letter_bytes=_DEAD_LETTER_BYTES,
                    letter_attributes=8,
                ),
                tombstones=True,
                partitions=True,
                partition_of="publish.partition_of" not in needed,
                transactions=True,
                tables=True,
                atomic_tables=True,
                ordered_calls=True,
                # Trackers of queues keep a message until it is due.
                deliver_at=settings.queue == "markers",
            ),
            records=RecordCapabilities(
                rebalance=True,
                start_time=True,
                follow=True,
                position_at=True,
                read_committed=True,
                topic_patterns=True,
                group_admin=True,
                compacted_topics=True,
                copartitioned=True,
            ),
            durable=True,
        )
        self._capabilities = Capabilities(
            backend=bare.backend,
            publish=bare.publish,
            messages=_queue_capabilities(settings, bare),
            records=bare.records,
            durable=True,
            settings_needed=needed,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def open(self) -> None:
        try:
            await self.connection.open()
        except BaseException:
            await self.close()
            raise

    def publish_target(self, topic: str) -> PublishTarget:
        return KafkaPublishTarget(topic, self._producer)

    def partition_of(self, topic: str, key: bytes, partitions: int) -> int:
        settings = self.connection.settings
        if settings.partition_function is not None:
            return choose_partition(settings.partition_function, topic, key, partitions)
        return partition_of_key(_partitioner(settings), topic, key, partitions)

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource:
        match self._engine(subscription.subscription):
            case "markers":
                await check_names(self.connection, subscription)
                await ensure_group(self.connection, subscription)
                return await open_queue(self.connection, self._trackers, subscription, listener)
            case "share":
                source = await subscribe_to_share_group(self.connection, subscription, listener, self.connection.detach)
                self.connection.attach(source)
                return source
            case "offsets":
                return await subscribe(self, self.connection, subscription, listener, self._hooks)

    async def subscribe_to_pattern(
        self, pattern: TopicPattern, subscription: MessageSubscription, listener: SourceListener
    ) -> MessageSource:
        # `capabilities.messages.topic_patterns` is set for queue=offsets alone.
        return await subscribe_to_pattern(self, self.connection, pattern, subscription, listener, self._hooks)

    def _engine(self, subscription: str | Ephemeral) -> Literal["offsets", "markers", "share"]:
        settings = self.connection.settings
        return "offsets" if subscription == REDRIVE_SUBSCRIPTION and redrives_by_offsets(settings) else settings.queue

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource:
        source = KafkaRecordSource(self.connection, subscription, listener, on_close=self.connection.detach)
        self.connection.attach(source)
        try:
            await source.open()
        except BaseException:
            await source.close()
            raise
        return source

    async def transaction(self, transactional_id: str) -> TransactionSpi:
        transaction = KafkaTransaction(
            self.connection, transactional_id, self.connection.detach, self._old_times.published
        )
        self.connection.attach(transaction)
        try:
            await transaction.open()
        except BaseException:
            await transaction.close()
            raise
        return transaction

    def log_reader(self) -> LogReaderSpi:
        return self._log

    def admin(self) -> AdminSpi:
        match self.connection.settings.queue:
            case "markers":
                return QueueAdmin(self.connection, self._log)
            case "share":
                return ShareAdmin(self.connection)
            case "offsets":
                return KafkaAdmin(self.connection)

    def queue_tracker(self, subscription: str, *, topics: Sequence[str] = (), unnamed: str = "") -> QueueTracker:
        options = TrackerOptions(topics=topics, topic=unnamed)
        tracker = KafkaQueueTracker(self.connection, subscription, self._hooks, options, self.connection.detach)
        self.connection.attach(tracker)
        return tracker

    async def open_leases(self, subscription: str) -> Sequence[OpenLease]:
        return await list_open_leases(self.connection, self._log, subscription)

    async def queued_messages(self, subscription: str, limit: int) -> Sequence[QueuedMessage]:
        return await queued_messages(self.connection, self._log, subscription, limit)

    async def purge_queue(self, subscription: str, *, dry_run: bool = False) -> PurgedQueue:
        return await purge_queue(self.connection, self._log, subscription, dry_run=dry_run)

    async def check_health(self) -> float:
        started = monotonic()
        await read_metadata(self.connection, "Checking health", self.connection.settings.request_timeout)
        return monotonic() - started

    async def close(self) -> None:
        await self.connection.close_attached()
        await self._trackers.close()
        await self._log.close()
        await self._producer.close()
        await self._old_times.close()
        await self.connection.close()


def _partitioner(settings: KafkaSettings) -> str:
    return str(settings.properties.get("partitioner", settings.partitioner))


def _settings_needed(settings: KafkaSettings) -> dict[str, str]:
    """The capabilities that these settings prevent, and what they need."""
    needed: dict[str, str] = {}
    if settings.queue != "markers":
        needed["publish.deliver_at"] = f"queue=markers, and queue is {settings.queue} here"
    if settings.partition_function is None and _partitioner(settings) == "random":
        needed["publish.partition_of"] = "another partitioner than random"
    return needed


def _queue_capabilities(settings: KafkaSettings, bare: Capabilities) -> MessageCapabilities:
    """The capabilities of the queue that the settings choose.

    :param bare: the backend's capabilities, without the Message family.
    """
    if settings.queue == "markers":
        return MessageCapabilities(
            lease=LeaseMode.RENEW,
            lease_seconds=settings.lease_seconds,
            confirmed_ack=ConfirmedAck.OPTIONAL,
            # V1 markers have no field for attempts: the consumer keeps a failed message and counts its attempts.
            native_delay=0.0 if settings.marker_format == "v1" else LONGEST_DELAY,
            delivery_attempt=settings.marker_format != "v1",
            release_keeps_attempt=True,
            key_affinity=False,
            shared_by_message=False,
            # A redelivery is at the end of the log, and its key waits for it; with V1, a lost lease breaks the order.
            ordered_delivery=settings.marker_format != "v1",
            creates_subscriptions=True,
            start_latest=True,
            start_time=True,
            # Nothing would delete the marker topic of an ephemeral subscription.
            ephemeral=False,
            acks_in_transactions=True,
        )
    if settings.queue == "share":
        return share_capabilities(settings)
    return message_capabilities(bare)
