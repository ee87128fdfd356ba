"""The thread that receives for a consumer: what a call changes, and when the next batch is received."""

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
"""Seconds that a handler keeps the loop to itself."""


class Consumer:
    """As much of the client's consumer as a receiver uses."""

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


class Host:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.translated = asyncio.Event()

    def arrived(self, receiver: Receiver, messages: Sequence[Any]) -> None:
        self.came += messages
        self.translated.set()

    def failed(self, receiver: Receiver, error: BrokerError) -> None:
        raise AssertionError("nothing fails here") from error


async def test_what_a_call_brings_is_received_when_it_is_asked_for():
    """Else what comes by a seek is taken for what came before it, and is passed over for good."""
    consumer, listener = Consumer(), Host()
    receiver = Receiver(consumer, listener, "orders[0]")
    receiver.request()
    moving = asyncio.ensure_future(receiver.call(lambda: consumer.waiting.put("after the seek")))
    await asyncio.sleep(0)
    time.sleep(2 * BLOCKED)  # noqa: ASYNC251 - the loop is busy while the thread goes on
    await moving
    assert listener.came == []
    receiver.request()
    async with asyncio.timeout(10):
        await listener.translated.wait()
    assert listener.came == ["after the seek"]
    connection = Connection(PulsarSettings(), Hooks())
    await receiver.close(connection)
    await connection.close()
