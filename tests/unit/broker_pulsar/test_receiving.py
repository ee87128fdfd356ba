"""The receiving thread of a consumer: calls between receives, and what is received after them."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Sequence
from typing import Any

from broker.errors import BrokerError
from broker.hooks import Hooks
from broker_pulsar.client import pulsar
from broker_pulsar.connection import Connection
from broker_pulsar.receiving import Receiver
from broker_pulsar.settings import PulsarSettings

BLOCKED = 0.1
"""Seconds for which a handler blocks the loop."""


class Consumer:
    """The part of the client's consumer that a receiver uses."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def receive(self, milliseconds: int) -> str:
        try:
            return self.waiting.get(timeout=milliseconds / 1000)
        except queue.Empty:
            raise pulsar.Timeout from None

    def batch_receive(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class Listener:
    """Records what arrives."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.arrival = asyncio.Event()

    def arrived(self, receiver: Receiver, messages: Sequence[Any]) -> None:
        self.messages += messages
        self.arrival.set()

    def failed(self, receiver: Receiver, error: BrokerError) -> None:
        raise AssertionError("an unexpected failure") from error


async def test_messages_of_a_call_need_a_new_request():
    """Otherwise messages that follow a seek would be dropped as messages from before it."""
    consumer, listener = Consumer(), Listener()
    receiver = Receiver(consumer, listener, "orders[0]")
    receiver.request()
    seeking = asyncio.ensure_future(receiver.call(lambda: consumer.waiting.put("after the seek")))
    await asyncio.sleep(0)
    time.sleep(2 * BLOCKED)  # noqa: ASYNC251 - the loop is blocked while the thread runs
    await seeking
    assert listener.messages == []
    receiver.request()
    async with asyncio.timeout(60):
        await listener.arrival.wait()
    assert listener.messages == ["after the seek"]
    connection = Connection(PulsarSettings(), Hooks())
    await receiver.close(connection)
    await connection.close()
