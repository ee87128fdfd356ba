"""Loops on Google's clients without the library: the documented way, and raw protobuf over grpc.aio.

Every consuming loop acks each message; every publishing loop gets each message's id. Failures end the run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import grpc

import broker
from broker_pubsub.protocol import AcknowledgeRequest, Method, Methods, PublishRequest, PubsubMessage, PullRequest

__all__ = ["RawPubSub", "high_level"]

REQUEST = 1000
"""Messages of one request."""


class RawPubSub:
    """A gRPC channel to the library's emulator."""

    def __init__(self, host: str) -> None:
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel: Any = grpc.aio.insecure_channel(host, options=unlimited)
        self._pull = self._method(Methods.PULL)
        self._acknowledge = self._method(Methods.ACKNOWLEDGE)
        self._publish = self._method(Methods.PUBLISH)

    def _method(self, method: Method) -> Any:
        return self._channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )

    async def close(self) -> None:
        await self._channel.close()

    async def pull_and_acknowledge(self, subscription: str, count: int) -> None:
        """One request after the other; reads each message's body."""
        while count > 0:
            count -= await self.take(subscription, len)

    async def take(self, subscription: str, arrived: Callable[[bytes], object]) -> int:
        """Pull once, report and acknowledge the messages. Returns their number."""
        response = await self._pull(PullRequest(subscription=subscription, max_messages=REQUEST), timeout=30)
        ack_ids: list[str] = []
        for received in response.received_messages:
            arrived(received.message.data)
            ack_ids.append(received.ack_id)
        if ack_ids:
            await self._acknowledge(AcknowledgeRequest(subscription=subscription, ack_ids=ack_ids), timeout=30)
        return len(ack_ids)

    async def publish(self, topic: str, messages: Sequence[broker.OutboundMessage]) -> None:
        """A thousand per request, one request after the other, with the same fields as ours."""
        for start in range(0, len(messages), REQUEST):
            request = PublishRequest(
                topic=topic,
                messages=[
                    PubsubMessage(data=message.data, attributes={**message.attributes, "id": message.id or ""})
                    for message in messages[start : start + REQUEST]
                ],
            )
            response = await self._publish(request, timeout=30)
            if len(response.message_ids) != len(request.messages):
                raise RuntimeError("A message has no id")

    async def publish_body(self, topic: str, body: bytes) -> None:
        """One message in a request of its own."""
        await self._publish(PublishRequest(topic=topic, messages=[PubsubMessage(data=body)]), timeout=30)


def high_level(host: str, subscription: str, count: int) -> None:
    """The documented way to consume: a callback in threads of the client; blocking."""
    os.environ["PUBSUB_EMULATOR_HOST"] = host
    # Its package has no types.
    pubsub: Any = import_module("google.cloud.pubsub_v1")
    subscriber = pubsub.SubscriberClient()
    left, done, lock = count, threading.Event(), threading.Lock()

    def take(message: Any) -> None:
        nonlocal left
        message.ack()
        with lock:
            left -= 1
            if not left:
                done.set()

    streaming = subscriber.subscribe(subscription, callback=take)
    try:
        if not done.wait(120):
            raise RuntimeError("The high-level client got too few messages")
    finally:
        streaming.cancel()
        streaming.result()
        subscriber.close()
        del os.environ["PUBSUB_EMULATOR_HOST"]
