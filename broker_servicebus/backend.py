"""The Service Bus backend: the clients of one namespace, and what is opened over them.

Created without I/O from settings; `open` makes one attempt to connect. All calls run on the loop of `open`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from secrets import token_hex
from typing import Any, ClassVar, Final

from azure.servicebus import ServiceBusReceiveMode, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver

from broker import (
    BrokerError,
    Capabilities,
    ConfirmedAck,
    LeaseMode,
    Limits,
    MessageCapabilities,
    PublishCapabilities,
    SubscriptionNotFound,
    TopicNotFound,
    Unsupported,
)
from broker.driver import (
    AdminSpi,
    Ephemeral,
    Hooks,
    LogReaderSpi,
    MessageSource,
    MessageSubscription,
    PublishTarget,
    RecordListener,
    RecordSource,
    RecordSubscription,
    SourceListener,
    TransactionSpi,
)
from broker.driver.settings import BackendSettings
from broker_servicebus import subscriptions
from broker_servicebus.admin import ServiceBusAdmin
from broker_servicebus.connection import Connection
from broker_servicebus.messages import ServiceBusMessageSource
from broker_servicebus.publishing import ServiceBusTarget
from broker_servicebus.receiving import ReceiverLink
from broker_servicebus.sessions import SessionSource
from broker_servicebus.settings import ServiceBusSettings
from broker_servicebus.subscriptions import Place

__all__ = ["ServiceBusBackend"]

HEADROOM: Final = 16_384
"""Bytes of a message reserved for id, `anybroker-` properties, those of a dead letter, and framing."""
_SHORTEST_LOCK: Final = 5.0
"""Seconds; the service's minimum."""


class ServiceBusBackend:
    """Azure Service Bus behind the SPI."""

    settings_type: ClassVar[type[BackendSettings]] = ServiceBusSettings

    def __init__(self, settings: ServiceBusSettings, hooks: Hooks) -> None:
        self._settings = settings
        self._connection = Connection(settings, hooks)
        self._sources: list[ServiceBusMessageSource | SessionSource] = []
        self._targets: list[ServiceBusTarget] = []

    @property
    def capabilities(self) -> Capabilities:
        settings = self._settings
        largest = settings.max_message_bytes - HEADROOM
        deleted = settings.receive_and_delete
        return Capabilities(
            backend="servicebus",
            publish=PublishCapabilities(
                limits=Limits(
                    body=largest,
                    key=4096,
                    id=1024,
                    attribute_key=512,
                    attribute_value=16_384,
                    attributes=200,
                    message=largest,
                    letter_bytes=2048,
                    letter_attributes=8,
                ),
                deduplication=settings.deduplication_window > 0,
                deliver_at=True,
                ttl=True,
                tombstones=True,
            ),
            messages=MessageCapabilities(
                lease=LeaseMode.NONE if deleted else LeaseMode.RENEW,
                lease_seconds=None if deleted else settings.lease_seconds or _SHORTEST_LOCK,
                confirmed_ack=ConfirmedAck.NEVER if deleted else ConfirmedAck.ALWAYS,
                delivery_attempt=True,
                release_keeps_attempt=self._connection.fast and not deleted,
                key_affinity=True,
                ordered_delivery=True,
                history=False,
            ),
            durable=True,
        )

    @property
    def client(self) -> ServiceBusClient:
        """The client of azure-servicebus, for calls that this library does not wrap: browsing, deferral, session state.

        Do not close it: it is the backend's.

        :raises Closed: the backend is not open.
        """
        return self._connection.client

    async def open(self) -> None:
        try:
            await self._connection.open()
        except BaseException:
            await self.close()
            raise

    def publish_target(self, topic: str) -> PublishTarget:
        target = ServiceBusTarget(topic, self._connection)
        self._targets = [each for each in self._targets if not each.closed]
        self._targets.append(target)
        return target

    async def cancel_scheduled(self, topic: str, numbers: Sequence[int]) -> None:
        """Cancel messages that were published with `deliver_at`.

        :param numbers: the `offset` of each one's receipt.
        :raises ConfigurationError: one is no such offset.
        :raises BrokerError: one is not there any more; then it may be that none was dropped.
        """
        target = ServiceBusTarget(topic, self._connection)
        try:
            await target.cancel_scheduled(numbers)
        finally:
            await target.close()

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource:
        mine = isinstance(subscription.subscription, Ephemeral)
        name = (
            f"ephemeral-{token_hex(8)}"
            if isinstance(subscription.subscription, Ephemeral)
            else subscription.subscription
        )
        found = await subscriptions.subscribe(
            self._connection,
            subscription.topic,
            name,
            create=subscription.create or mine,
            sessions=subscription.ordered_by_key,
            only_mine=mine,
        )
        if self._settings.receive_and_delete and found.sessions:
            raise Unsupported(
                f"Subscription {name!r} of topic {subscription.topic!r} has sessions, which exclude receive_and_delete",
                advice="Omit receive_and_delete",
            )
        shown = f"Subscription {name!r} of topic {subscription.topic!r}"
        place = found.place
        missing = TopicNotFound if place.subscription is None else SubscriptionNotFound
        at_close = (
            partial(subscriptions.forget, self._connection, place.entity, place.subscription)
            if mine and place.subscription
            else None
        )
        source: ServiceBusMessageSource | SessionSource
        if found.sessions:
            source = SessionSource(
                self._connection,
                partial(self._receiver, place),
                subscription.topic,
                shown,
                found.lock_seconds,
                missing,
                listener,
                max_outstanding=subscription.max_outstanding,
                at_close=at_close,
            )
        else:
            link = ReceiverLink(self._connection, partial(self._receiver, place), shown, missing)
            source = ServiceBusMessageSource(
                self._connection,
                link,
                subscription.topic,
                shown,
                found.lock_seconds,
                dead_letters_of=place.entity if place.dead else None,
                at_close=at_close,
            )
            try:
                await link.open()
            except BrokerError as error:
                # The first fetch retries a transient error.
                if not error.retriable:
                    await source.close()
                    raise
        self._sources = [each for each in self._sources if not each.closed]
        self._sources.append(source)
        return source

    def _receiver(self, place: Place, **options: Any) -> ServiceBusReceiver:
        settings = self._settings
        options |= {
            "receive_mode": ServiceBusReceiveMode.RECEIVE_AND_DELETE
            if settings.receive_and_delete
            else ServiceBusReceiveMode.PEEK_LOCK,
            "sub_queue": ServiceBusSubQueue.DEAD_LETTER if place.dead else None,
            "socket_timeout": settings.socket_timeout,
        }
        client = self._connection.client
        if place.subscription is None:
            return client.get_queue_receiver(place.entity, **options)
        return client.get_subscription_receiver(place.entity, place.subscription, **options)

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource:
        raise Unsupported("Service Bus has no log of records", advice="Use bus.messages(...)")

    async def transaction(self, transactional_id: str) -> TransactionSpi:
        raise Unsupported(
            "azure-servicebus has no transactions",
            advice="Publish with message ids and ack afterwards, so a repetition is harmless",
        )

    def log_reader(self) -> LogReaderSpi:
        raise Unsupported("Service Bus has no log to read", advice="Use bus.messages(...)")

    def admin(self) -> AdminSpi:
        return ServiceBusAdmin(self._connection)

    async def check_health(self) -> float:
        self._connection.check_open()
        return await self._connection.check_health()

    async def close(self) -> None:
        sources, self._sources = self._sources, []
        targets, self._targets = self._targets, []
        await asyncio.gather(*(source.close() for source in sources))
        await asyncio.gather(*(target.close() for target in targets))
        await self._connection.close()
