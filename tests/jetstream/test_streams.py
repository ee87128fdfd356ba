"""Stream processors on a real nats-server: fenced atomic checkpoints, takeovers, views."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from broker import BrokerError, Bus, Bytes, ConnectionFailed, Json, OutboundMessage, connect
from broker_streams.context import Context
from broker_streams.failures import DeadLetter
from broker_streams.graph import Group, Input, Output, Persist
from broker_streams.processor import Processor
from broker_streams.stores.memory import Memory
from broker_streams.view import View
from tests.servers.nats import shared_server
from tests.streams.support import published, total

PARTITIONS = 3

counts = Persist(Json(int))


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with connect(shared_server().url) as bus:
        yield bus


@pytest.fixture
async def group(bus: Bus) -> Group:
    """A group that sums the values of each key and publishes each sum."""
    name = f"streams-{uuid.uuid4().hex[:8]}"
    for topic in (f"{name}-in", f"{name}-out"):
        await bus.admin.ensure_topic(topic, partitions=PARTITIONS)
    await bus.admin.ensure_topic(f"{name}-table", partitions=PARTITIONS, compacted=True)
    sums = Output(f"{name}-out", Json(int))

    def add(ctx: Context, value: int) -> None:
        total = ctx[counts] = (ctx[counts] or 0) + value
        ctx.emit(sums, key=ctx.key, value=total)

    return Group(name, Input(f"{name}-in", Json(int), add), counts, sums)


async def publish(bus: Bus, group: Group, number: int, keys: int = 7) -> None:
    messages = [OutboundMessage(b"1", f"key-{n % keys}") for n in range(number)]
    await bus.topic(f"{group.name}-in").publish_batch(messages)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.01)


def processing(bus: Bus, group: Group, **options: Any) -> Processor:
    options = {"store": Memory(), "checkpoint_interval": 0.05, **options}
    return Processor(bus, group, **options)


async def test_restarts_count_nothing_twice(bus: Bus, group: Group) -> None:
    async with View(bus, group.table, Json(int)) as view:
        await view.ready()
        for turn in range(3):
            await publish(bus, group, 100)
            async with processing(bus, group) as processor:
                await processor.ready()
                assert processor.stats().guarantee == "exactly_once"
                await until(lambda: total(view) == 100 * (turn + 1))  # noqa: B023
        assert {key: view.get(key) for key, _ in view.items()} == dict(view.items())
    ids = await published(bus, f"{group.name}-out")
    assert len(ids) == len(set(ids)) == 300


async def test_a_dead_letter_of_the_largest_message_fits(bus: Bus, group: Group) -> None:
    def fail(ctx: Context, data: bytes) -> None:
        raise ValueError("😀\n" * 5000)

    letters = f"{group.name}-letters"
    await bus.admin.ensure_topic(letters, partitions=1)
    failing = Group(group.name, Input(f"{group.name}-in", Bytes(), fail, on_error=DeadLetter(letters)), counts)
    largest = bus.capabilities.publish.limits.message
    assert largest is not None
    attributes = {"note": "ü" * 800}
    full = b"x" * (largest - len("key") - len("note") - 1600)
    async with processing(bus, failing) as processor:
        await processor.ready()
        await bus.topic(f"{group.name}-in").publish(OutboundMessage(full, "key", attributes))
        async with asyncio.timeout(90), bus.log.follow(letters, {0: 0}) as log:
            while not (batch := await log.next_batch()):
                pass
            (letter,) = batch
    assert letter.data == full and letter.attributes["note"] == attributes["note"]
    assert letter.attributes["dead-letter-error"].startswith("ValueError: 😀")


class Dying:
    """Commits that die before or after the first or the second write."""

    def __init__(self, commits: Any, chance: random.Random) -> None:
        self._commits = commits
        self._lives = chance.choice((1, 1, 2))
        self._after = chance.choice((False, True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._commits, name)

    async def write(self, parts: Any) -> Any:
        self._lives -= 1
        if self._lives == 0 and not self._after:
            raise ConnectionFailed("died before a write", retriable=False)
        written = await self._commits.write(parts)
        if self._lives == 0:
            raise ConnectionFailed("died after a write", retriable=False)
        return written


async def test_crashes_around_checkpoints_count_nothing_twice(bus: Bus, group: Group) -> None:
    chance = random.Random(5)
    deaths = 0
    async with View(bus, group.table, Json(int)) as view:
        await view.ready()
        for turn in range(8):
            await publish(bus, group, 30)
            processor = processing(bus, group)
            try:
                async with processor:
                    if turn < 7:
                        raw: Any = vars(processor)["_checkpoints"]
                        raw.commits = Dying(raw.commits, chance)
                    stopped = asyncio.create_task(processor._stopping.wait())
                    done = asyncio.create_task(until(lambda: total(view) == 30 * (turn + 1)))  # noqa: B023
                    await asyncio.wait((stopped, done), return_when=asyncio.FIRST_COMPLETED)
                    stopped.cancel()
                    done.cancel()
            except BrokerError:
                deaths += 1
        assert deaths > 2
        assert total(view) == 240
    ids = await published(bus, f"{group.name}-out")
    assert len(ids) == len(set(ids)) == 240


async def test_more_rows_than_one_write_takes(bus: Bus, group: Group) -> None:
    await publish(bus, group, 6000, keys=3000)
    async with View(bus, group.table, Json(int)) as view, processing(bus, group, checkpoint_interval=1.0) as processor:
        await until(lambda: total(view) == 6000)
        assert len(view) == 3000
        await processor.ready()


async def test_members_share_the_partitions(bus: Bus, group: Group) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(connect(shared_server().url))
        view = await stack.enter_async_context(View(bus, group.table, Json(int)))
        first = await stack.enter_async_context(processing(bus, group))
        await first.ready()
        await publish(bus, group, 200)
        second = await stack.enter_async_context(processing(other, group))
        await until(lambda: len(first.partitions) + len(second.partitions) == PARTITIONS and bool(second.partitions))
        await publish(bus, group, 200)
        await until(lambda: total(view) == 400)
        second.stop()
        await until(lambda: len(first.partitions) == PARTITIONS)
        await publish(bus, group, 200)
        await until(lambda: total(view) == 600)
    ids = await published(bus, f"{group.name}-out")
    assert len(ids) == len(set(ids)) == 600


async def test_a_view_waits_for_a_receipt(bus: Bus, group: Group) -> None:
    async with View(bus, group.table, Json(int)) as view:
        await view.ready()
        receipt = await bus.topic(group.table).publish(b"5", key="a")
        assert await view.get("a", at_least=receipt) == 5
        assert view.staleness == 0.0
