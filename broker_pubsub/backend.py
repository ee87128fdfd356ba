"""The Pub/Sub backend: one channel, and what is opened over it.

Created without I/O from settings; `open` makes one attempt to connect. All calls run on the loop of `open`. The channel
reconnects by itself. `close` releases the messages of the sources, then disconnects.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from broker import Capabilities, ConfirmedAck, LeaseMode, Limits, MessageCapabilities, PublishCapabilities, Unsupported
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
    Warned,
)
from broker.driver.settings import BackendSettings
from broker_pubsub import subscriptions
from broker_pubsub.admin import PubSubAdmin
from broker_pubsub.codec import MAX_ATTRIBUTES, MAX_KEY, MAX_NAME, MAX_VALUE, RESERVED_ATTRIBUTES
from broker_pubsub.connection import Connection
from broker_pubsub.messages import PubSubMessageSource
from broker_pubsub.publishing import MAX_REQUEST, PubSubPublishTarget
from broker_pubsub.settings import PubSubSettings
from broker_pubsub.subscriptions import delivers_history

__all__ = ["PubSubBackend"]

LETTER_TEXT: Final = 4096
LETTER_ATTRIBUTES: Final = 8
HEADROOM: Final = 12_288
"""Bytes of a request reserved for topic, id, `anybroker-` attributes and the attributes of a dead letter."""
LONGEST_DELAY: Final = 600.0


class PubSubBackend:
    """Implements `Backend`."""

    settings_type: ClassVar[type[BackendSettings]] = PubSubSettings

    def __init__(self, settings: PubSubSettings, hooks: Hooks) -> None:
        self._settings = settings
        self._connection = Connection(settings, hooks)
        self._open: set[PubSubMessageSource] = set()
        self._history = settings.topic_retention > 0

    @property
    def capabilities(self) -> Capabilities:
        settings = self._settings
        return Capabilities(
            backend="pubsub",
            publish=PublishCapabilities(
                limits=Limits(
                    body=MAX_REQUEST - HEADROOM,
                    key=MAX_KEY,
                    id=MAX_VALUE,
                    attribute_key=MAX_NAME,
                    attribute_value=MAX_VALUE,
                    attributes=MAX_ATTRIBUTES - RESERVED_ATTRIBUTES - LETTER_ATTRIBUTES,
                    message=MAX_REQUEST - HEADROOM,
                    letter_bytes=LETTER_TEXT,
                    letter_attributes=LETTER_ATTRIBUTES,
                ),
                tombstones=True,
            ),
            messages=MessageCapabilities(
                lease=LeaseMode.RENEW,
                lease_seconds=settings.lease_seconds,
                confirmed_ack=ConfirmedAck.OPTIONAL,
                native_delay=LONGEST_DELAY,
                ordered_delivery=settings.orders_subscriptions,
                key_affinity=settings.orders_subscriptions,
                history=self._history,
                start_time=True,
            ),
            durable=settings.emulator is None,
        )

    @property
    def channel(self) -> Any:
        """The gRPC channel, for calls that this library does not wrap. Do not close it.

        :raises Closed: the backend is not open.
        """
        return self._connection.channel

    async def open(self) -> None:
        try:
            await self._connection.open()
            if self._settings.emulator is not None and self._history:
                # The service's behaviour is documented; an emulator's is tested.
                self._history = await delivers_history(self._connection)
        except BaseException:
            await self.close()
            raise

    def publish_target(self, topic: str) -> PublishTarget:
        return PubSubPublishTarget(topic, self._connection)

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource:
        ephemeral = isinstance(subscription.subscription, Ephemeral)
        made, shown = await self._subscription(subscription)
        try:
            _check(
                made,
                subscription,
                shown,
                emulated=self._settings.emulator is not None and self._settings.ordering != "on",
            )
        except Unsupported:
            if ephemeral:
                await subscriptions.delete(self._connection, made.name, shown)
            raise
        most = made.dead_letter_policy.max_delivery_attempts
        if most and subscription.max_deliveries is not None and most < subscription.max_deliveries:
            listener.event(
                Warned(
                    text=f"Subscription {shown!r} of topic {subscription.topic!r} moves a message to "
                    f"{made.dead_letter_policy.dead_letter_topic} after {most} deliveries, before this consumer's "
                    f"limit of {subscription.max_deliveries}"
                )
            )
        source = PubSubMessageSource(
            self._connection,
            subscription.topic,
            shown,
            made,
            listener,
            max_outstanding=subscription.max_outstanding,
            ephemeral=ephemeral,
            on_close=self._open.discard,
        )
        self._open.add(source)
        return source

    async def _subscription(self, wanted: MessageSubscription) -> tuple[Any, str]:
        """The service's subscription, and its name for messages."""
        connection, topic, name = self._connection, wanted.topic, wanted.subscription
        if isinstance(name, Ephemeral):
            made = subscriptions.temporary(connection, topic)
            made.enable_exactly_once_delivery = wanted.confirm_acks or self._settings.exactly_once
            await subscriptions.create(connection, topic, made, wanted.start)
            return made, "ephemeral()"
        if not wanted.create:
            await subscriptions.check_topic(connection, topic)
            return await subscriptions.find(connection, topic, name), name
        options = {"exactly_once": True} if wanted.confirm_acks else {}
        if wanted.ordered_by_key and self._settings.orders_subscriptions:
            options["ordering"] = True
        return await subscriptions.ensure(connection, topic, name, wanted.start, options), name

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource:
        raise Unsupported("Pub/Sub has no log of records", advice="Use bus.messages(...)")

    async def transaction(self, transactional_id: str) -> TransactionSpi:
        raise Unsupported(
            "Pub/Sub has no transactions over consuming and publishing",
            advice="Publish with message ids and ack afterwards, so a repetition is harmless",
        )

    def log_reader(self) -> LogReaderSpi:
        raise Unsupported("Pub/Sub has no log to read", advice="Seek a subscription, or use another backend")

    def admin(self) -> AdminSpi:
        return PubSubAdmin(self._connection)

    async def check_health(self) -> float:
        return await self._connection.check_health()

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in tuple(self._open)))
        await self._connection.close()


def _check(made: Any, wanted: MessageSubscription, shown: str, *, emulated: bool) -> None:
    """Check properties of the subscription that cannot be changed.

    :param emulated: an emulator delivers in the order of publishing also without message ordering.
    :raises Unsupported: the consumer needs another property.
    """
    name = f"Subscription {shown!r} of topic {wanted.topic!r}"
    if wanted.ordered_by_key and not (made.enable_message_ordering or emulated):
        raise Unsupported(
            f"{name} was created without message ordering, which ordered_by_key=True needs",
            advice="Delete it, or use another one created with ensure_subscription(…, ordering=True)",
        )
    if wanted.confirm_acks and not made.enable_exactly_once_delivery:
        raise Unsupported(
            f"{name} was created without exactly-once delivery, which confirm_acks=True needs",
            advice="Omit confirm_acks, or create another one with ensure_subscription(…, exactly_once=True)",
        )
