"""The Message family: a Shared or Key_Shared subscription.

*Concurrency.* Everything runs on the loop; the consumer's thread only receives. *Settling.* The client sends acks
without confirmation. A nacked or released message is redelivered after `nack_delay`, with a higher delivery count.
*Close.* The broker redelivers received and unacked messages at once, without counting; the subscription stays.
*Failure.* The client reconnects by itself, and the broker redelivers unsettled messages. While disconnected `fetch`
raises ConnectionFailed; a deleted topic or subscription ends the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from broker import BrokerError, Message, Outcome, SettleError
from broker.driver import Ephemeral, MessageSubscription, Settlement, take_from
from broker_pulsar import subscriptions
from broker_pulsar.client import Consumer, extension_of, pulsar
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.codec import MessageView, data_of
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate
from broker_pulsar.names import subscription_name
from broker_pulsar.receiving import Receiver, ReceivingSource, batch_policy

__all__ = ["PulsarMessageSource", "subscribe"]

_VIEW: Final = MessageView()
_OVERHEAD: Final = 64
"""Bytes counted per message besides its body."""
# Enum attributes are slow to look up, and these are read per message.
_ACK: Final = Outcome.ACK
_REJECT: Final = Outcome.REJECT


async def subscribe(
    connection: Connection, subscription: MessageSubscription, *, on_close: Callable[[ReceivingSource], object]
) -> PulsarMessageSource:
    """Open the subscription; a missing one is created first, so it starts at the right position.

    :raises TopicNotFound: the topic does not exist.
    :raises SubscriptionNotFound: the subscription does not exist, and `create` is False.
    """
    topic, ephemeral = subscription.topic, isinstance(subscription.subscription, Ephemeral)
    name = subscription_name(subscription.subscription)
    if ephemeral:
        await subscriptions.create_ephemeral(connection, topic, name, subscription.start)
    elif subscription.create:
        await subscriptions.create(connection, topic, name, subscription.start)
    else:
        await subscriptions.require(connection, topic, name)
    settings = connection.settings
    url, client = connection.topic(topic).url, connection.client
    kind = pulsar.ConsumerType.KeyShared if subscription.ordered_by_key else pulsar.ConsumerType.Shared
    queue = max(1, min(settings.receiver_queue, subscription.max_outstanding))
    # Used only if another process deletes the subscription meanwhile.
    latest = ephemeral and subscription.start == "latest"
    begin = pulsar.InitialPosition.Latest if latest else pulsar.InitialPosition.Earliest
    try:
        consumer = await connection.create(
            lambda: client.subscribe(
                url,
                name,
                consumer_type=kind,
                initial_position=begin,
                receiver_queue_size=queue,
                negative_ack_redelivery_delay_ms=max(1, round(settings.nack_delay * 1000)),
                batch_receive_policy=batch_policy(queue),
                batch_index_ack_enabled=True,
            ),
            # Otherwise it would keep receiving messages that nothing processes.
            lambda consumer: consumer.unsubscribe() if ephemeral else consumer.close(),
        )
    except Exception as error:
        if ephemeral:
            await subscriptions.delete_ephemeral(connection, topic, name)
        raise translate(error, f"Subscription {name!r} of topic {topic!r}") from error
    return PulsarMessageSource(connection, topic, name, consumer, ephemeral=ephemeral, on_close=on_close)


class PulsarMessageSource(ReceivingSource):
    """Implements `MessageSource`."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        name: str,
        consumer: Consumer,
        *,
        ephemeral: bool,
        on_close: Callable[[ReceivingSource], object],
    ) -> None:
        super().__init__(connection, f"Subscription {name!r} of topic {topic!r}", on_close)
        self._topic = topic
        self._name = name
        self._ephemeral = ephemeral
        self._consumer = consumer
        self._buffer: deque[Message[Any]] = deque()
        self._receiver = Receiver(consumer, self, self._what)
        self._unwatch.append(connection.monitor.add(consumer.is_connected))
        if ephemeral:
            self._unwatch.append(connection.cleanup.watch(topic, name))

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        return await self._wait_for(lambda: take_from(self._buffer, max_messages, max_bytes), wait)

    def _is_connected(self) -> bool:
        return bool(self._consumer.is_connected())

    def _request(self) -> None:
        self._receiver.request()

    async def _check_exists(self) -> None:
        await subscriptions.require(self._connection, self._topic, self._name, once=True)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        consumer = extension_of(self._consumer)
        acknowledge = consumer.acknowledge
        outcomes: list[BrokerError | None] = [None] * len(settlements)
        for index, settlement in enumerate(settlements):
            outcome, raw = settlement.outcome, settlement.message.raw
            try:
                if outcome is _ACK or outcome is _REJECT:
                    acknowledge(raw)
                else:
                    consumer.negative_acknowledge(raw)
            except Exception as error:
                outcomes[index] = SettleError(f"{self._what}: the client failed to ack: {error}", native=error)
        return outcomes

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        """No-op: Pulsar has no leases; a message is ours until it is settled or the connection ends."""
        return [None] * len(messages)

    async def close(self) -> None:
        if self._closed:
            return
        self._stop()
        try:
            await self._receiver.close(self._connection)
            if self._ephemeral:
                await subscriptions.delete_ephemeral(self._connection, self._topic, self._name)
        finally:
            self._buffer.clear()
            self._on_close(self)

    def arrived(self, receiver: Receiver, messages: Sequence[NativeMessage]) -> None:
        """Implements `ReceiverListener`."""
        if self._closed:
            return  # Closing the consumer has released them.
        topic, append = self._topic, self._buffer.append
        for raw in messages:
            data = raw.data() or data_of(raw)
            append(Message(topic, data, raw, _VIEW, None, _OVERHEAD + len(data or b"")))
        self._waker.wake()
