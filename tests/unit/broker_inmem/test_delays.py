"""Delays beyond the broker's native ones: the consumer keeps them in memory, within its bound."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

import broker
from broker.consuming.retry.policy import Retry
from broker.errors import BrokerError
from broker.hooks import DeadLettered, Event

COUNT = 10
PATIENCE = 60.0


@pytest.mark.parametrize("by", ["nack", "retry"])
async def test_no_delay_is_shortened_by_a_full_consumer(by: str) -> None:
    began: dict[bytes | None, list[float]] = {}
    done = asyncio.Event()

    async def handle(message: broker.Message[bytes]) -> None:
        began.setdefault(message.data, []).append(monotonic())
        if all(len(times) == 2 for times in began.values()) and len(began) == COUNT:
            done.set()
        if len(began[message.data]) == 1:
            if by == "retry":
                raise BrokerError("not now")
            await message.nack(delay=0.3)

    retry = Retry(initial=0.3, jitter=0)
    async with broker.connect(f"inmem://delays-{by}?native_delay=0") as bus:
        await bus.admin.ensure_topic("jobs")
        async with bus.messages("jobs", subscription="work", max_outstanding=COUNT, retry=retry) as inbox:
            await bus.topic("jobs").publish_batch([b"%d" % number for number in range(COUNT)])
            working = asyncio.ensure_future(inbox.receive(handle, concurrency=COUNT))
            async with asyncio.timeout(PATIENCE):
                await done.wait()
            await inbox.close()
            await working
    assert len(began) == COUNT
    assert all(second - first >= 0.29 for first, second in began.values())


@pytest.mark.parametrize("ordered", [False, True])
async def test_retries_from_memory_count_towards_the_bound(ordered: bool) -> None:
    seen: list[int | None] = []
    reported: list[Event] = []
    done = asyncio.Event()

    def listen(event: Event) -> None:
        reported.append(event)
        if isinstance(event, DeadLettered):
            done.set()

    async def handle(message: broker.Message[bytes]) -> None:
        seen.append(message.delivery_attempt)
        await message.nack(delay=0.01)

    retry = Retry(max_attempts=5, max_deliveries=5)
    async with broker.connect(f"inmem://bound-{ordered}") as bus:
        bus.hooks.listen(listen)
        await bus.admin.ensure_topic("jobs")
        await bus.admin.ensure_topic("dead")
        async with bus.messages(
            "jobs", subscription="work", dead_letter="dead", retry=retry, ordered_by_key=ordered
        ) as inbox:
            await bus.topic("jobs").publish(b"x", key="k")
            working = asyncio.ensure_future(inbox.receive(handle))
            async with asyncio.timeout(PATIENCE):
                await done.wait()
            await inbox.close()
            await working
    assert seen == [1, 2, 3, 4, 5]
