"""The JetStream backend: one connection, and what is opened over it.

Created without I/O from settings; `open` makes one attempt to connect. All calls run on the loop of `open`. `close`
releases what the sources hold, disconnects, and stops the embedded server if this process started it.
"""

from __future__ import annotations

import asyncio
from secrets import token_hex
from typing import ClassVar, Final

from nats.aio.client import Client

from broker import (
    Capabilities,
    ConfirmedAck,
    ConnectionFailed,
    LeaseMode,
    Limits,
    MessageCapabilities,
    PublishCapabilities,
    RecordCapabilities,
    Unsupported,
)
from broker.driver import (
    AdminSpi,
    Ephemeral,
    Hooks,
    LogReaderSpi,
    MessageSource,
    MessageSubscription,
    NativeName,
    PublishTarget,
    RecordListener,
    RecordSource,
    RecordSubscription,
    SourceListener,
    TableWriterSpi,
    TransactionSpi,
    reads_answer,
)
from broker.driver.settings import BackendSettings
from broker_jetstream import subscriptions
from broker_jetstream.admin import JetStreamAdmin
from broker_jetstream.codec import LETTER_TEXT
from broker_jetstream.connection import Connection
from broker_jetstream.log_follower import FollowingLogReader, JetStreamLogFollower
from broker_jetstream.messages import JetStreamMessageSource
from broker_jetstream.names import consumer_name
from broker_jetstream.publishing import JetStreamPublishTarget, partition_of
from broker_jetstream.records import JetStreamRecordSource
from broker_jetstream.server import EmbeddedServer
from broker_jetstream.settings import JetStreamSettings
from broker_jetstream.storage import StorageWatch
from broker_jetstream.streams import Layouts
from broker_jetstream.tables import MOST_ROWS, JetStreamTableWriter
from broker_jetstream.times import NANOSECONDS

__all__ = ["JetStreamBackend"]

HEADROOM: Final = 6144
"""Bytes of a message reserved for the id, `anybroker-` headers and the headers of a dead letter."""
YEAR: Final = 365 * 86_400.0


_NEEDED: Final = {"records.compacted_topics": (2, 11), "publish.tables": (2, 12)}
"""The servers that have what some capabilities take."""
_OPEN_BATCHES: Final = 8


class JetStreamBackend:
    """Implements `Backend` and `PartitionsKeys`."""

    settings_type: ClassVar[type[BackendSettings]] = JetStreamSettings

    def __init__(self, settings: JetStreamSettings, hooks: Hooks) -> None:
        self._settings = settings
        self._connection = Connection(settings, hooks)
        self._layouts = Layouts(self._connection)
        self._server = EmbeddedServer(settings.embedded) if settings.embedded is not None else None
        self._storage: StorageWatch | None = None
        self._batches = asyncio.Semaphore(_OPEN_BATCHES)
        self._open: set[JetStreamMessageSource | JetStreamRecordSource | JetStreamLogFollower] = set()

    @property
    def capabilities(self) -> Capabilities:
        version, largest = self._connection.server_version, self._connection.max_payload
        settings = self._settings
        return Capabilities(
            backend="jetstream",
            publish=PublishCapabilities(
                limits=Limits(
                    body=largest - HEADROOM,
                    key=16_384,
                    id=1024,
                    attribute_key=512,
                    attribute_value=16_384,
                    attributes=512,
                    message=largest - HEADROOM,
                    letter_bytes=LETTER_TEXT,
                    letter_attributes=8,
                ),
                deduplication=True,
                reports_duplicates=True,
                deliver_at=version >= (2, 12),
                ttl=version >= (2, 11),
                tombstones=True,
                partitions=True,
                partition_of=True,
                tables=version >= (2, 12),
                atomic_tables=version >= (2, 12),
                table_rows=MOST_ROWS,
            ),
            messages=MessageCapabilities(
                lease=LeaseMode.RENEW,
                lease_seconds=settings.lease_seconds,
                confirmed_ack=ConfirmedAck.OPTIONAL,
                native_delay=YEAR,
                delivery_attempt=True,
                release_keeps_attempt=True,
                ordered_delivery=True,
                start_time=True,
                topic_patterns=True,
            ),
            records=RecordCapabilities(
                rebalance=True,
                start_time=True,
                follow=True,
                position_at=True,
                shared_offsets=True,
                topic_patterns=True,
                # Tombstones have a ttl.
                compacted_topics=version >= (2, 11),
                copartitioned=True,
            ),
            settings_needed={
                name: f"nats-server {needed[0]}.{needed[1]} or newer"
                for name, needed in _NEEDED.items()
                if version < needed
            },
            durable=settings.embedded != "",
            shared=settings.embedded != "",
        )

    @property
    def client(self) -> Client:
        """The current client of nats-py, for calls that this library does not wrap; a reconnect may replace it.

        Do not close or drain it.

        :raises Closed: the backend is not open.
        """
        return self._connection.client

    async def open(self) -> None:
        try:
            if self._server is not None:
                await self._locate()
                self._connection.restart_server = self._locate
            await self._connection.open()
            await self._check_jetstream()
            if self._server is not None and self._server.directory is not None:
                self._storage = StorageWatch(self._connection, self._server, self._server.directory)
                self._storage.start()
                self._connection.look_at_storage = self._storage.look
        except BaseException:
            await self.close()
            raise

    async def _locate(self) -> None:
        assert self._server is not None  # only set for embedded servers
        address = await self._server.ensure()
        self._connection.servers = (address.url,)
        self._connection.token = address.token

    async def _check_jetstream(self) -> None:
        try:
            await self._connection.api("INFO", what="JetStream")
        except ConnectionFailed as error:
            if not self._connection.connected:
                raise
            raise Unsupported(
                f"The server {self._connection.server} has no JetStream for this account",
                native=error.native,
                advice="Start nats-server with -js, and enable JetStream for the account",
            ) from None

    def publish_target(self, topic: str) -> PublishTarget:
        return JetStreamPublishTarget(topic, self._connection, self._layouts)

    def partition_of(self, topic: str, key: bytes, partitions: int) -> int:
        return partition_of(key, partitions)

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource:
        layout = await self._layouts.find(subscription.topic, fresh=True)
        ephemeral = isinstance(subscription.subscription, Ephemeral)
        if isinstance(subscription.subscription, Ephemeral):
            shown, name = "ephemeral()", f"+{token_hex(8)}"
        else:
            shown, name = subscription.subscription, consumer_name(subscription.subscription)
        info = await subscriptions.ensure_message_consumer(
            self._connection,
            layout,
            shown,
            name,
            start=subscription.start,
            create_missing=subscription.create or ephemeral,
            ephemeral=ephemeral,
            max_deliveries=subscription.max_deliveries,
        )
        with reads_answer(f"Subscription {shown!r} of topic {subscription.topic!r}"):
            lease = info["config"]["ack_wait"] / NANOSECONDS
            redeliveries = min(info.get("num_ack_pending", 0), subscription.max_outstanding)
        source = JetStreamMessageSource(
            self._connection,
            layout,
            shown,
            name,
            lease,
            listener,
            confirm_acks=subscription.confirm_acks,
            ephemeral=ephemeral,
            last_delivery=subscriptions.last_delivery(info) if subscription.ordered_by_key else None,
            redeliveries=redeliveries if subscription.ordered_by_key else 0,
            on_close=self._open.discard,
        )
        self._open.add(source)
        return source

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource:
        ephemeral = isinstance(subscription.group, Ephemeral)
        pattern = subscription.pattern

        async def find_topics() -> list[str]:
            return [name for name in await self.admin().list_topics() if pattern is not None and pattern.matches(name)]

        group = NativeName(f"+{token_hex(8)}") if isinstance(subscription.group, Ephemeral) else subscription.group
        source = JetStreamRecordSource(
            self._connection,
            self._layouts,
            group,
            subscription.start,
            listener,
            ephemeral=ephemeral,
            whole=subscription.whole,
            on_close=self._open.discard,
            find_topics=None if pattern is None else find_topics,
            copartitioned=subscription.copartitioned,
        )
        self._open.add(source)
        try:
            await source.open(subscription.topics)
        except BaseException:
            await source.close()
            raise
        return source

    async def table_writer(self, topic: str, partition: int) -> TableWriterSpi:
        """Implements `WritesTables`."""
        return await JetStreamTableWriter.open(topic, partition, self._connection, self._layouts, self._batches)

    async def transaction(self, transactional_id: str) -> TransactionSpi:
        raise Unsupported(
            "NATS JetStream has no transactions over consuming and publishing",
            advice="Publish with message ids and ack afterwards, so a repetition is harmless",
        )

    def log_reader(self) -> LogReaderSpi:
        return FollowingLogReader(self._connection, self._layouts, self._open)

    def admin(self) -> AdminSpi:
        return JetStreamAdmin(self._connection, self._layouts)

    async def check_health(self) -> float:
        seconds = await self._connection.flush(self._settings.request_timeout)
        if self._connection.look_at_storage is not None:
            await self._connection.look_at_storage()
        self._connection.check_writes()
        return seconds

    async def close(self) -> None:
        if self._storage is not None:
            self._storage.close()
        try:
            await asyncio.gather(*(source.close() for source in tuple(self._open)))
        finally:
            try:
                await self._connection.close()
            finally:
                if self._server is not None:
                    await self._server.stop()
