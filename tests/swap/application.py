"""An application that works with any broker: it bills orders, in order by customer, from the broker of a URL.

An order may be broken, and becomes a dead letter; it may be early, and is brought back; when the cause is fixed, the
dead letters are redriven. All that the application does is counted in `Books`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

import broker
from broker.outbound import OutboundMessage

__all__ = ["EARLY_SECONDS", "SUBSCRIPTION", "Books", "Order", "bill_all", "prepare", "publish"]

SUBSCRIPTION = "billing"
EARLY_SECONDS = 0.5


class Order(msgspec.Struct):
    """What a customer asks for.

    :ivar number: counts up for each customer.
    """

    customer: str
    number: int
    broken: bool = False
    early: bool = False


ORDER_JSON: Final = broker.Json(Order)


@dataclass
class Books:
    """What was billed.

    :ivar billed: the numbers of each customer's orders, as they were billed.
    :ivar brought_back: early orders, and when.
    :ivar waited: how long each of these took to come again, in seconds.
    """

    billed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    brought_back: dict[tuple[str, int], float] = field(default_factory=dict)
    waited: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(len, self.billed.values()))


async def prepare(bus: broker.Bus, topic: str) -> None:
    """Create the topics, and a subscription for everything published from now on."""
    for name in (topic, f"{topic}.dead"):
        await bus.admin.ensure_topic(name)
    await bus.admin.ensure_subscription(topic, SUBSCRIPTION)


async def publish(bus: broker.Bus, topic: str, orders: list[Order]) -> None:
    messages = [OutboundMessage(ORDER_JSON.encode(order), order.customer) for order in orders]
    await bus.topic(topic).publish_batch(messages)


async def bill_all(bus: broker.Bus, topic: str, books: Books, until: Callable[[], bool], *, fixed: bool) -> None:
    """Bill orders until the condition is true.

    :param fixed: the cause of broken orders is gone.
    """

    async def bill(message: broker.Message[Order]) -> None:
        order = message.payload
        place = order.customer, order.number
        if order.broken and not fixed:
            await message.reject("no such article")
        elif order.early and place not in books.brought_back:
            books.brought_back[place] = time.monotonic()
            await message.nack(delay=EARLY_SECONDS)
        else:
            if order.early:
                books.waited[place] = time.monotonic() - books.brought_back[place]
            books.billed[order.customer].append(order.number)
        if until():
            inbox.stop()

    async with bus.messages(
        topic,
        subscription=SUBSCRIPTION,
        codec=ORDER_JSON,
        ordered_by_key=True,
        retry=broker.Retry(max_attempts=3, initial=0.1),
        dead_letter=f"{topic}.dead",
    ) as inbox:
        async with asyncio.timeout(120):
            await inbox.receive(bill, concurrency=4)
