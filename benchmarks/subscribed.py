"""Shared by the benchmarks of brokers without a log: messages, and our consuming and publishing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count as counting

import broker
from benchmarks.measure import Variant
from benchmarks.null_backend import BODY

__all__ = [
    "FILLED",
    "TARGET",
    "consume",
    "enqueue",
    "messages_of",
    "new_name",
    "publish_batches",
    "subscription_with",
    "with_messages",
]

FILLED = "bench.filled"
TARGET = "bench.target"
_BATCH = 500
_numbers = counting()


def new_name() -> str:
    """A unique name of a subscription."""
    return f"bench-{next(_numbers)}"


def messages_of(count: int) -> list[broker.OutboundMessage]:
    """New messages with an attribute and a unique id."""
    run = next(_numbers)
    return [broker.OutboundMessage(BODY, attributes={"type": "created"}, id=f"{run}-{index}") for index in range(count)]


def with_messages(count: int, work: Callable[[list[broker.OutboundMessage]], Awaitable[None]]) -> Variant:
    """The variant, with new messages for each run."""

    @asynccontextmanager
    async def variant() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
        yield partial(work, messages_of(count))

    return variant


@asynccontextmanager
async def subscription_with(bus: broker.Bus, topic: str, count: int) -> AsyncGenerator[str]:
    """A new subscription with `count` messages, deleted at the end of the block."""
    name = new_name()
    await bus.admin.ensure_subscription(topic, name, start="latest")
    await publish_batches(bus.topic(topic), _BATCH, messages_of(count))
    try:
        yield name
    finally:
        await bus.admin.delete_subscription(topic, name)


async def consume(inbox: broker.BatchedMessageStream, count: int, *, batch: int) -> None:
    """Receive and ack `count` messages in batches."""
    async for messages in inbox.batches(batch):
        count -= len(messages)
        await messages.ack()
        if count <= 0:
            break


async def publish_batches(topic: broker.Topic, batch: int, messages: list[broker.OutboundMessage]) -> None:
    """Publish the messages in batches, one after the other."""
    for start in range(0, len(messages), batch):
        await topic.publish_batch(messages[start : start + batch])


async def enqueue(topic: broker.Topic, messages: list[broker.OutboundMessage]) -> None:
    """Enqueue the messages, and wait for their receipts.

    :raises RuntimeError: one has no id.
    """
    receipts = [await topic.enqueue(message) for message in messages]
    await topic.flush()
    if not all(receipt.result().id for receipt in receipts):
        raise RuntimeError("A message has no id")
