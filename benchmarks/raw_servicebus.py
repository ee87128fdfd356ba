"""Loops on azure-servicebus without the library: its public calls, and settling by one request.

Every consuming loop completes each message; every publishing loop waits until all are accepted. Failures end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver, ServiceBusSender
from azure.servicebus.exceptions import MessageSizeExceededError

import broker

__all__ = ["RawServiceBus", "complete_at_once", "complete_in_turn", "publish", "receive_and_complete"]

_MOST = 500
"""Messages of one receive, and of one settlement."""
_SECONDS = 30


class RawServiceBus:
    """A client of the library's namespace."""

    def __init__(self, host: str, key: str) -> None:
        self._client = ServiceBusClient.from_connection_string(
            f"Endpoint=sb://{host};SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey={key};"
            "UseDevelopmentEmulator=true;"
        )

    def receiver(self, topic: str, subscription: str) -> ServiceBusReceiver:
        """Opened by `async with`."""
        return self._client.get_subscription_receiver(topic, subscription)

    def sender(self, topic: str) -> ServiceBusSender:
        """Opened by `async with`."""
        return self._client.get_topic_sender(topic)

    async def close(self) -> None:
        await self._client.close()


async def complete_in_turn(receiver: ServiceBusReceiver, count: int) -> None:
    """By public calls: a request per message, one after the other, which is faster than several concurrently."""
    while count > 0:
        messages = await receiver.receive_messages(min(count, _MOST), max_wait_time=_SECONDS)
        for message in messages:
            b"".join(message.body)
            await receiver.complete_message(message)
        count -= len(messages)


async def complete_at_once(receiver: ServiceBusReceiver, count: int) -> None:
    """By the private call: one request for all messages of a receive."""
    untyped: Any = receiver
    while count > 0:
        messages = await receiver.receive_messages(min(count, _MOST), max_wait_time=_SECONDS)
        for message in messages:
            b"".join(message.body)
        if messages:
            await untyped._settle_message_via_mgmt_link("completed", [message.lock_token for message in messages])
        count -= len(messages)


async def receive_and_complete(receiver: ServiceBusReceiver, arrived: Callable[[bytes | None], object]) -> None:
    """Receive once; report and complete each message in turn."""
    for message in await receiver.receive_messages(_MOST, max_wait_time=_SECONDS):
        arrived(b"".join(message.body))
        await receiver.complete_message(message)


async def publish(sender: ServiceBusSender, messages: Sequence[broker.OutboundMessage]) -> None:
    """In batches as large as the client allows, one after the other, with the same fields as ours."""
    batch = await sender.create_message_batch()
    for message in messages:
        made = ServiceBusMessage(
            message.data or b"", message_id=message.id, application_properties=dict[Any, Any](message.attributes)
        )
        try:
            batch.add_message(made)
        except MessageSizeExceededError:
            await sender.send_messages(batch)
            batch = await sender.create_message_batch()
            batch.add_message(made)
    await sender.send_messages(batch)
