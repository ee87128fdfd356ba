"""The Pulsar backend: one connection, and what is opened over it.

Created without I/O from settings; `open` makes one attempt to connect. All calls run on the loop of `open`. The client
reconnects by itself. `close` closes the sources, which returns unsettled messages to the broker, then disconnects. No
durable subscription is ever unsubscribed.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

from broker import (
    Capabilities,
    LeaseMode,
    Limits,
    MessageCapabilities,
    PublishCapabilities,
    RecordCapabilities,
    Unsupported,
)
from broker.driver import (
    AdminSpi,
    Hooks,
    LogReaderSpi,
    MessageSource,
    MessageSubscription,
    PublishTarget,
    RecordListener,
    RecordSource,
    RecordSubscription,
    SourceListener,
    TableWriterSpi,
    TransactionSpi,
)
from broker.driver.settings import BackendSettings
from broker_pulsar.admin import PulsarAdmin
from broker_pulsar.client import Client
from broker_pulsar.connection import Connection
from broker_pulsar.log_follower import FollowingLogReader
from broker_pulsar.messages import subscribe
from broker_pulsar.publishing import PulsarPublishTarget
from broker_pulsar.receiving import ReceivingSource
from broker_pulsar.records import PulsarRecordSource
from broker_pulsar.settings import PulsarSettings
from broker_pulsar.tables import PulsarTableWriter

__all__ = ["PulsarBackend"]

_HEADROOM: Final = 8_192
"""Bytes of a message reserved for the id, the client's fields and the properties of a dead letter."""
_LETTER: Final = 4_096


class PulsarBackend:
    """Implements `Backend`."""

    settings_type: ClassVar[type[BackendSettings]] = PulsarSettings

    def __init__(self, settings: PulsarSettings, hooks: Hooks) -> None:
        self.connection: Final = Connection(settings, hooks)
        self._open: set[ReceivingSource] = set()
        largest = settings.max_message_bytes - _HEADROOM
        # A named or exclusive producer has all partitions; a second one for a single partition is refused.
        alone = _settings_against_partitions(settings)
        self._capabilities = Capabilities(
            backend="pulsar",
            publish=PublishCapabilities(
                limits=Limits(
                    body=largest,
                    key=65_536,
                    id=1024,
                    attributes=512,
                    message=largest,
                    letter_bytes=_LETTER,
                    letter_attributes=8,
                ),
                deliver_at=True,
                reports_duplicates=True,
                tombstones=True,
                partitions=not alone,
                tables=True,
                ordered_calls=True,
            ),
            messages=MessageCapabilities(
                lease=LeaseMode.NONE,
                delivery_attempt=True,
                key_affinity=True,
                # A published batch goes to one consumer as a whole.
                shared_by_message=False,
                ordered_delivery=True,
                start_time=True,
                topic_patterns=True,
            ),
            records=RecordCapabilities(
                rebalance=True,
                copartitioned=True,
                start_time=True,
                follow=True,
                position_at=True,
                counting_offsets=False,
                topic_patterns=True,
                compacted_topics=True,
            ),
            durable=True,
            settings_needed={"publish.partitions": alone} if alone else {},
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def client(self) -> Client:
        """The client of pulsar-client, for calls that this library does not wrap; do not close it.

        :raises Closed: the backend is not open.
        """
        return self.connection.client

    async def open(self) -> None:
        try:
            await self.connection.open()
        except BaseException:
            await self.close()
            raise

    def publish_target(self, topic: str) -> PublishTarget:
        return PulsarPublishTarget(topic, self.connection)

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource:
        source = await subscribe(self.connection, subscription, on_close=self._open.discard)
        self._open.add(source)
        return source

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource:
        source = PulsarRecordSource(
            self.connection, subscription, listener, self.admin().list_topics, on_close=self._open.discard
        )
        self._open.add(source)
        try:
            await source.open()
        except BaseException:
            await source.close()
            raise
        return source

    async def table_writer(self, topic: str, partition: int) -> TableWriterSpi:
        """Implements `WritesTables`."""
        return await PulsarTableWriter.open(topic, partition, self.connection)

    async def transaction(self, transactional_id: str) -> TransactionSpi:
        raise Unsupported(
            "pulsar-client has no transactions",
            advice="Publish with message ids and commit afterwards, so a repetition is harmless",
        )

    def log_reader(self) -> LogReaderSpi:
        return FollowingLogReader(self.connection, self._open)

    def admin(self) -> AdminSpi:
        return PulsarAdmin(self.connection)

    async def check_health(self) -> float:
        return await self.connection.check_health()

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in tuple(self._open)))
        await self.connection.close()


def _settings_against_partitions(settings: PulsarSettings) -> str:
    """The settings that prevent a choice of partitions; empty if none does."""
    needed: list[str] = []
    if settings.producer_name is not None:
        needed.append(f"no producer_name (it is {settings.producer_name!r})")
    if settings.access_mode != "shared":
        needed.append(f"access_mode=shared (it is {settings.access_mode!r})")
    return " and ".join(needed)
