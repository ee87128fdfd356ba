"""Stream processors on a real Kafka: transactions over rows, outputs, loop and positions; kills and rebalances."""

from __future__ import annotations

import asyncio
import random
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from broker import Bus, Json, OutboundMessage, connect
from broker.hooks import PartitionsAssigned
from broker.metrics import Metrics
from broker_streams.context import Context
from broker_streams.graph import Group, Input, Persist
from broker_streams.processor import Processor
from broker_streams.stores.memory import Memory
from broker_streams.view import View
from tests.kafka import streams_process
from tests.kafka.streams_process import make_group
from tests.servers.kafka import KafkaServer
from tests.streams.support import published

PARTITIONS = 4


@pytest.fixture
def url(kafka: KafkaServer) -> str:
    return f"{kafka.url}?session_timeout_ms=6000&heartbeat_interval_ms=300"


@pytest.fixture
async def bus(url: str) -> AsyncIterator[Bus]:
    async with connect(url) as bus:
        yield bus


@pytest.fixture
async def graph(bus: Bus) -> Group:
    """The group of `streams_process`, with its topics."""
    group = make_group(f"streams-{uuid.uuid4().hex[:8]}")
    for end in ("a", "b", "out", "loop"):
        await bus.admin.ensure_topic(f"{group.name}-{end}", partitions=PARTITIONS)
    await bus.admin.ensure_topic(group.table, partitions=PARTITIONS, compacted=True)
    return group


async def publish(bus: Bus, group: Group, number: int) -> None:
    """Publish so many ones to both inputs."""
    for end in ("a", "b"):
        messages = [OutboundMessage(b"1", f"key-{n % 17}") for n in range(number)]
        await bus.topic(f"{group.name}-{end}").publish_batch(messages)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)


def summed(view: View[int]) -> tuple[int, int]:
    """What the inputs and the loop have added up to."""
    rows = dict(view.items())
    looped = sum(value for key, value in rows.items() if key.startswith("looped"))
    return sum(rows.values()) - looped, looped


def processing(bus: Bus, group: Group, **options: Any) -> Processor:
    options = {"store": Memory(), "checkpoint_interval": 0.1, **options}
    return Processor(bus, group, **options)


async def test_restarts_count_nothing_twice(bus: Bus, graph: Group) -> None:
    async with View(bus, graph.table, Json(int)) as view:
        await view.ready()
        for turn in range(1, 4):
            await publish(bus, graph, 100)
            async with processing(bus, graph, name="one") as processor:
                await processor.ready()
                assert processor.stats().how == "transactions"
                await until(lambda: summed(view) == (200 * turn, 200 * turn))  # noqa: B023
                assert await processor.get("key-3") == view.get("key-3")
    ids = await published(bus, f"{graph.name}-out")
    assert len(ids) == len(set(ids)) == 600
    lag = await bus.admin.lag(f"{graph.name}-a", graph.name)
    # The last offset of a partition may be that of a transaction.
    assert lag.waiting <= PARTITIONS


async def test_at_least_once_loses_nothing(bus: Bus, graph: Group) -> None:
    async with View(bus, graph.table, Json(int)) as view:
        for turn in range(1, 3):
            await publish(bus, graph, 100)
            async with processing(bus, graph, guarantee="at_least_once") as processor:
                await processor.ready()
                assert processor.stats().how == "single messages"
                await until(lambda: summed(view) == (200 * turn, 200 * turn))  # noqa: B023


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_a_spare_member_is_ready(url: str, bus: Bus, protocol: str) -> None:
    url = url if protocol == "classic" else f"{url.partition('?')[0]}?group_protocol=consumer"
    group = make_group(f"spare-{uuid.uuid4().hex[:8]}")
    for end in ("a", "b", "out", "loop"):
        await bus.admin.ensure_topic(f"{group.name}-{end}", partitions=1)
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(connect(url)) for _ in range(2)]
        first = await stack.enter_async_context(processing(one, group))
        await first.ready()
        async with processing(two, group) as second:
            async with asyncio.timeout(120):
                await second.ready()
            having, spare = (first, second) if first.partitions else (second, first)
            assert (list(having.partitions), spare.partitions) == ([0], {})
            having.stop()
            await until(lambda: spare.partitions != {})
            async with asyncio.timeout(120):
                await spare.ready()


async def test_markers_of_transactions_are_no_lag(bus: Bus, graph: Group) -> None:
    metrics = Metrics(bus)

    def lags() -> set[float]:
        found = metrics.read().items()
        return {number for series, number in found if "lag_messages" in series.name and isinstance(number, int)}

    async with processing(bus, graph) as processor, View(bus, graph.table, Json(int)) as view:
        await processor.ready()
        await publish(bus, graph, 100)
        await until(lambda: summed(view) == (200, 200))
        # The loop and the table end with such markers.
        await until(lambda: lags() == {0})


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_members_come_and_go_under_load(url: str, bus: Bus, graph: Group, protocol: str) -> None:
    url = url if protocol == "classic" else f"{url.partition('?')[0]}?group_protocol=consumer"
    async with AsyncExitStack() as stack:
        view = await stack.enter_async_context(View(bus, graph.table, Json(int)))
        await view.ready()
        one, two = [await stack.enter_async_context(connect(url)) for _ in range(2)]
        first = await stack.enter_async_context(processing(one, graph))
        await first.ready()
        await publish(bus, graph, 200)
        second = processing(two, graph)
        async with second:
            await until(lambda: len(first.partitions) == len(second.partitions) == 2)
            await publish(bus, graph, 200)
            await until(lambda: summed(view) == (800, 800))
        await until(lambda: len(first.partitions) == PARTITIONS)
        await publish(bus, graph, 200)
        await until(lambda: summed(view) == (1200, 1200))
    ids = await published(bus, f"{graph.name}-out")
    assert len(ids) == len(set(ids)) == 1200


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_a_checkpoint_that_meets_a_rebalance_undoes_no_partition_that_stays(
    url: str, bus: Bus, protocol: str
) -> None:
    """In the classic protocol its positions are refused for their generation: the same is written again."""
    url = url if protocol == "classic" else f"{url.partition('?')[0]}?group_protocol=consumer"
    name = f"streams-{uuid.uuid4().hex[:8]}"
    await bus.admin.ensure_topic(name, partitions=PARTITIONS)
    handled: list[tuple[int, int]] = []

    def group(note: Callable[[int, int], object]) -> Group:
        counts = Persist(Json(int))

        def count(ctx: Context, value: int) -> None:
            ctx[counts] = (ctx[counts] or 0) + value
            note(ctx.partition, ctx.offset)

        return Group(name, Input(name, Json(int), count), counts)

    async def publish() -> None:
        for partition in range(PARTITIONS):
            messages = [OutboundMessage(b"1", f"key-{partition}", partition=partition)] * 10
            await bus.topic(name).publish_batch(messages)

    async def reaches(number: int) -> None:
        await until(lambda: sum(value for _, value in view.items()) == number)

    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(connect(url)) for _ in range(2)]
        first = await stack.enter_async_context(processing(one, group(lambda *place: handled.append(place)), name="1"))
        await first.ready()
        view = await stack.enter_async_context(View(bus, f"{name}-table", Json(int)))
        await view.ready()
        async with processing(two, group(lambda *place: None), name="2") as second:
            await until(lambda: len(first.partitions) == len(second.partitions) == 2)
            staying = set(first.partitions)
            await publish()
            await reaches(10 * PARTITIONS)
            held, rebalanced = asyncio.Event(), asyncio.Event()
            transaction: Any = vars(vars(first)["_checkpoints"].commits)["_publisher"].spi
            commit, abort, aborts = transaction.commit, transaction.abort, 0

            async def late_commit() -> None:
                # The positions have the generation of now.
                held.set()
                await rebalanced.wait()
                await commit()

            async def counted_abort() -> None:
                nonlocal aborts
                aborts += 1
                await abort()

            transaction.commit, transaction.abort = late_commit, counted_abort
            await publish()
            async with asyncio.timeout(120):
                await held.wait()
            one.hooks.listen(lambda event: rebalanced.set() if isinstance(event, PartitionsAssigned) else None)
        await until(lambda: len(first.partitions) == PARTITIONS)
        await publish()
        await reaches(30 * PARTITIONS)
        # With KIP-848 brokers accept the epoch in which the partition was assigned, and refuse nothing here.
        assert aborts == (1 if protocol == "classic" else 0)
        assert first.stats().failed_checkpoints == 0
    again = [place for place, times in Counter(handled).items() if place[0] in staying and times > 1]
    assert again == []


@pytest.mark.deep
async def test_killed_members_count_nothing_twice(url: str, bus: Bus, graph: Group, tmp_path: Path) -> None:
    chance = random.Random(11)

    async def start(name: str) -> Process:
        arguments = (url, graph.name, name, str(tmp_path / "state"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", streams_process.__name__, *arguments, stdout=PIPE
        )
        assert process.stdout is not None
        return process

    async with View(bus, graph.table, Json(int)) as view:
        await view.ready()
        members = {name: await start(name) for name in ("one", "two")}
        total = 0
        try:
            for turn in range(4):
                await publish(bus, graph, 150)
                total += 300
                # Messages are handled meanwhile: a kill meets checkpoints at any point.
                seen = summed(view)[0]
                await until(lambda: summed(view)[0] > seen + chance.randrange(50))  # noqa: B023
                name = ("one", "two")[turn % 2]
                members[name].kill()
                await members[name].wait()
                members[name] = await start(name)
            await until(lambda: summed(view) == (total, total))
        finally:
            for process in members.values():
                process.kill()
                await process.wait()
    ids = await published(bus, f"{graph.name}-out")
    assert len(ids) == len(set(ids)) == total
