"""The baseline of `receive` on any backend: the same messages over the SPI, in batches of up to 500.

Both include opening and closing.
"""

from __future__ import annotations

from collections.abc import Sequence

import broker
from broker.driver.contract import MessageSubscription, Settlement
from broker.hooks import Event

__all__ = ["BATCH", "over_the_spi", "receive"]

BATCH = 500
_MOST_BYTES = 64 * 1024 * 1024


class _Nobody:
    def lost(self, messages: Sequence[broker.Message[object]]) -> None:
        raise RuntimeError(f"{len(messages)} leases ended during a benchmark")

    def expired(self, messages: Sequence[broker.Message[object]]) -> None: ...

    def event(self, event: Event) -> None: ...


async def over_the_spi(bus: broker.Bus, topic: str, subscription: str, count: int) -> None:
    """Fetch and ack `count` messages.

    :raises RuntimeError: an ack failed, or a lease ended.
    """
    source = await bus.backend.subscribe(MessageSubscription(topic=topic, subscription=subscription), _Nobody())
    while count > 0:
        messages = await source.fetch(BATCH, _MOST_BYTES, 5.0)
        errors = await source.settle([Settlement(message, broker.Outcome.ACK) for message in messages])
        if any(errors):
            raise RuntimeError(f"An ack failed: {errors}")
        count -= len(messages)
    await source.close()


async def receive(bus: broker.Bus, topic: str, subscription: str, count: int) -> None:
    """Handle `count` messages, ten concurrently."""

    async def handle(message: broker.Message) -> None:
        nonlocal count
        count -= 1
        if not count:
            inbox.stop()

    async with bus.messages(topic, subscription=subscription) as inbox:
        await inbox.receive(handle, concurrency=10)
