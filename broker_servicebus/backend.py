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
from broker_servicebus.names import EntityPath
from broker_servicebus.publishing import ServiceBusPublishTarget
from broker_servicebus.receiving import ReceiverLink
from broker_servicebus.sessions import ServiceBusSessionSource
from broker_servicebus.settings import SHORTEST_LOCK, ServiceBusSettings

__all__ = ["ServiceBusBackend"]

HEADROOM: Final = 16_384
"""Bytes of a message reserved for id, `anybroker-` properties, those of a dead letter, and framing."""


class ServiceBusBackend:
    """Implements `Backend`."""

    settings_type: ClassVar[type[BackendSettings]] = ServiceBusSettings

    def __init__(self, settings: ServiceBusSettings, hooks: Hooks) -> None:
        self._settings = settings
        self._connection = Connection(settings, hooks)
        self._sources: set[ServiceBusMessageSource | ServiceBusSessionSource] = set()
        self._targets: set[ServiceBusPublishTarget] = set()

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
                lease_seconds=None if deleted else settings.lease_seconds or SHORTEST_LOCK,
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

        Do not close it.

        :raises Closed: the backend is not open.
        """
        return self._connection.client

    async def open(self) -> None:
        try:
            await self._connection.open()
        except BaseException:
            await self.close()
            raise

    def publish_target(self, topic: str) -> ServiceBusPublishTarget:
        target = ServiceBusPublishTarget(topic, self._connection, on_close=self._targets.discard)
        self._targets.add(target)
        return target

    async def cancel_scheduled(self, topic: str, numbers: Sequence[int]) -> None:
        """Cancel messages that were published with `deliver_at`.

        :param numbers: the `offset` of each one's receipt.
        :raises ConfigurationError: a number is not such an offset.
        :raises BrokerError: a message no longer exists; possibly none was cancelled.
        """
        target = self.publish_target(topic)
        try:
            await target.cancel_scheduled(numbers)
        finally:
            await target.close()

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource:
        name, ephemeral = subscription.subscription, False
        if isinstance(name, Ephemeral):
            name, ephemeral = f"ephemeral-{token_hex(8)}", True
        found = await subscriptions.subscribe(
            self._connection,
            subscription.topic,
            name,
            create=subscription.create or ephemeral,
            sessions=subscription.ordered_by_key,
            ephemeral=ephemeral,
        )
        if self._settings.receive_and_delete and found.sessions:
            raise Unsupported(
                f"Subscription {name!r} of topic {subscription.topic!r} has sessions, which exclude receive_and_delete",
                advice="Omit receive_and_delete",
            )
        shown = f"Subscription {name!r} of topic {subscription.topic!r}"
        path = found.path
        missing = TopicNotFound if path.subscription is None else SubscriptionNotFound
        at_close = None
        if ephemeral and path.subscription is not None:
            at_close = partial(subscriptions.delete_ephemeral, self._connection, path.entity, path.subscription)
        source: ServiceBusMessageSource | ServiceBusSessionSource
        if found.sessions:
            source = ServiceBusSessionSource(
                self._connection,
                partial(self._receiver, path),
                subscription.topic,
                shown,
                found.lock_seconds,
                missing,
                listener,
                max_outstanding=subscription.max_outstanding,
                at_close=at_close,
                on_close=self._sources.discard,
            )
        else:
            link = ReceiverLink(self._connection, partial(self._receiver, path), shown, missing)
            source = ServiceBusMessageSource(
                self._connection,
                link,
                subscription.topic,
                shown,
                found.lock_seconds,
                dead_letters_of=path.entity if path.dead else None,
                at_close=at_close,
                on_close=self._sources.discard,
            )
            try:
                await link.open()
            except BrokerError as error:
                # The first fetch retries a transient error.
                if not error.retriable:
                    await source.close()
                    raise
        self._sources.add(source)
        return source

    def _receiver(self, path: EntityPath, **options: Any) -> ServiceBusReceiver:
        settings = self._settings
        options |= {
            "receive_mode": ServiceBusReceiveMode.RECEIVE_AND_DELETE
            if settings.receive_and_delete
            else ServiceBusReceiveMode.PEEK_LOCK,
            "sub_queue": ServiceBusSubQueue.DEAD_LETTER if path.dead else None,
            "socket_timeout": settings.socket_timeout,
        }
        client = self._connection.client
        if path.subscription is None:
            return client.get_queue_receiver(path.entity, **options)
        return client.get_subscription_receiver(path.entity, path.subscription, **options)

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
        await asyncio.gather(*(source.close() for source in tuple(self._sources)))
        await asyncio.gather(*(target.close() for target in tuple(self._targets)))
        await self._connection.close()
