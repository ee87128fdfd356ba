"""Stream processors on a real Pulsar: redo records, fenced writes to the table, takeovers, kills, views."""

from __future__ import annotations

import asyncio
import random
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from broker import Bus, Json, OutboundMessage, connect
from broker_streams.graph import Group
from broker_streams.processor import Processor
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.memory import Memory
from broker_streams.view import View
from tests.pulsar import streams_process
from tests.pulsar.streams_process import make_group
from tests.servers.pulsar import PulsarServer
from tests.streams.support import published, total

pytestmark = pytest.mark.xdist_group("pulsar")

PARTITIONS = 3


@pytest.fixture
async def group(bus: Bus) -> Group:
    """The group of `streams_process`, with its topics."""
    group = make_group(f"streams-{uuid.uuid4().hex[:8]}")
    for end in ("in", "out"):
        await bus.admin.ensure_topic(f"{group.name}-{end}", partitions=PARTITIONS)
    await bus.admin.ensure_topic(group.table, partitions=PARTITIONS, compacted=True)
    return group


async def publish(bus: Bus, group: Group, number: int, keys: int = 7) -> None:
    messages = [OutboundMessage(b"1", f"key-{n % keys}") for n in range(number)]
    await bus.topic(f"{group.name}-in").publish_batch(messages)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.02)


def processing(bus: Bus, group: Group, **options: Any) -> Processor:
    options = {"store": Memory(), "checkpoint_interval": 0.1, **options}
    return Processor(bus, group, **options)


async def test_restarts_count_nothing_twice(bus: Bus, group: Group) -> None:
    async with View(bus, group.table, Json(int)) as view:
        await view.ready()
        for turn in range(1, 4):
            await publish(bus, group, 100)
            async with processing(bus, group) as processor:
                await processor.ready()
                assert processor.stats().guarantee == "exactly_once"
                await until(lambda: total(view) == 100 * turn)  # noqa: B023
                while await processor.get("key-3") != view.get("key-3"):
                    await asyncio.sleep(0.02)
    ids = await published(bus, f"{group.name}-out")
    assert len(ids) == len(set(ids)) == 300


async def test_members_share_the_partitions(pulsar_server: PulsarServer, bus: Bus, group: Group) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(connect(pulsar_server.url))
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
    assert len(set(await published(bus, f"{group.name}-out"))) == 600


async def test_a_view_waits_for_a_receipt(bus: Bus, group: Group) -> None:
    async with View(bus, group.table, Json(int)) as view:
        await view.ready()
        receipt = await bus.topic(group.table).publish(b"5", key="a")
        assert await view.get("a", at_least=receipt) == 5
        await publish(bus, group, 10)
        async with processing(bus, group):
            await until(lambda: total(view) == 15)
        await until(lambda: view.staleness == 0.0)


async def test_a_store_that_was_closed_misses_no_deletion(
    pulsar_server: PulsarServer, bus: Bus, group: Group, tmp_path: Path
) -> None:
    """A compaction of Pulsar removes tombstones at once."""
    table = bus.topic(group.table)
    await table.publish(b"1", key="deleted")
    async with View(bus, group.table, Json(int), store=Lmdb(), state_dir=tmp_path) as view:
        await view.ready()
        assert view.get("deleted") == 1
    await table.publish(OutboundMessage(None, "deleted"))
    last = await table.publish(b"2", key="kept")
    for partition in range(PARTITIONS):
        path = f"/admin/v2/persistent/public/default/{group.table}-partition-{partition}/compaction"
        assert pulsar_server.request("PUT", path, seconds=60)[0] == 204
        async with asyncio.timeout(240):
            while b"SUCCESS" not in pulsar_server.request("GET", path, seconds=60)[1]:
                await asyncio.sleep(0.1)
    async with View(bus, group.table, Json(int), store=Lmdb(), state_dir=tmp_path) as view:
        await view.ready()
        assert await view.get("kept", at_least=last) == 2
        assert dict(view.items()) == {"kept": 2}
    async with View(bus, group.table, Json(int)) as view:
        await view.ready()
        assert dict(view.items()) == {"kept": 2}


@pytest.mark.deep
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
async def test_killed_members_are_replaced(
    pulsar_server: PulsarServer, bus: Bus, group: Group, tmp_path: Path, guarantee: str
) -> None:
    chance = random.Random(11)

    async def start(name: str) -> Process:
        arguments = (pulsar_server.url, group.name, guarantee, name, str(tmp_path / "state"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", streams_process.__name__, *arguments, stdout=PIPE
        )
        assert process.stdout is not None
        return process

    async with View(bus, group.table, Json(int)) as view:
        await view.ready()
        members = {name: await start(name) for name in ("one", "two")}
        published_in_all = 0
        try:
            for turn in range(4):
                await publish(bus, group, 300)
                published_in_all += 300
                # Messages are handled meanwhile: a kill meets checkpoints at any point.
                seen = total(view)
                await until(lambda: total(view) > seen + chance.randrange(50))  # noqa: B023
                name = ("one", "two")[turn % 2]
                members[name].kill()
                await members[name].wait()
                members[name] = await start(name)
            await until(lambda: total(view) >= published_in_all)
            if guarantee == "exactly_once":
                assert total(view) == published_in_all
        finally:
            for process in members.values():
                process.kill()
                await process.wait()
    assert len(set(await published(bus, f"{group.name}-out"))) == published_in_all
