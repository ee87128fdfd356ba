"""Complaints about other stream processors that no other test answers; README.md has the list."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from broker import Bus, Json
from broker_streams.context import Context
from broker_streams.graph import Group, Input, Join
from broker_streams.stores.lmdb import Lmdb
from tests.streams.brokers import StreamBroker, on
from tests.streams.support import PARTITIONS, Stream, ones, total, until


@on("memory", "jetstream", "kafka", "pulsar", deep=("jetstream",))
async def test_c1_many_partitions_are_released_together(server: StreamBroker, bus: Bus, tmp_path: Path) -> None:
    """Two members with stores on disk share 32 partitions under load; the one that gives away half of them stays."""
    stream = Stream(server, bus)
    await stream.prepare(32)
    options: dict[str, Any] = {"store": Lmdb(), "state_dir": tmp_path}
    owned: set[int] = set()
    async with stream.viewing() as view, stream.processing(**options) as first:
        await first.ready()
        await stream.publish(ones(2000, keys=500))
        await until(lambda: total(view) == 2000)
        async with stream.processing(bus=await server.connect(), **options) as second:
            loading = asyncio.create_task(stream.publish(ones(2000, keys=500)))
            await until(lambda: len(second.partitions) == 16)
            owned.update(first.partitions)
            await second.ready()
            await loading
            await until(lambda: total(view) >= 4000)
            # No rebalance after the one: the release was in time.
            assert owned == set(first.partitions)
            assert len(owned) == 16
            stats = first.stats()
        await until(lambda: len(first.partitions) == 32)
        assert total(view) == 4000 or stats.guarantee != "exactly_once"
    assert len(set(await stream.outputs())) == 4000


@on("memory", "jetstream", "kafka", "pulsar")
async def test_c5_a_restart_with_one_input_at_its_end_does_not_stall(stream: Stream) -> None:
    visits = await stream.topic("visits")
    group = Group(stream.name, Input([stream.clicks, visits], Json(int), stream.count), stream.counts, stream.alerts)
    await stream.publish([("a", 1)])
    await stream.publish([("a", 1)], visits)
    async with stream.viewing() as view:
        await stream.handle(group, lambda: view.get("a") == 2)
        await stream.publish([("a", 1)])
        await stream.handle(group, lambda: view.get("a") == 3)


@on("memory", "jetstream", "kafka", "pulsar", deep=("jetstream",))
async def test_c13_a_long_backlog_does_not_hold_up_the_recovery(stream: Stream) -> None:
    """More messages wait than a partition holds in memory while its tables are recovered."""
    users = Join(await stream.topic("users", compacted=True), Json(int))

    def add(ctx: Context, value: int) -> None:
        ctx[stream.counts] = (ctx[stream.counts] or 0) + value * (ctx[users] or 0)

    for _ in range(4):
        await stream.publish([("a", 1)] * 10_000)
    for value in range(5):
        await stream.publish([(f"user-{n}", value) for n in range(2000)], users.table)
    await stream.publish([("a", 2)], users.table)
    async with stream.viewing() as view, stream.processing(stream.group(add, users), checkpoint_interval=0.5) as member:
        await member.ready()
        await until(lambda: view.get("a") == 80_000 and len(member.partitions) == PARTITIONS)
        await member.ready()
        assert sum(each.joins[users.table].rows for each in member.stats().partitions.values()) >= 2001
