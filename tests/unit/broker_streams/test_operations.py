"""Lag and resets of groups, on brokers that write checkpoints in different ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker import (
    CHECKPOINT_KEY,
    BackendError,
    Bus,
    ConfigurationError,
    DecodeError,
    Json,
    OutboundMessage,
    TopicNotFound,
    connect,
)
from broker_inmem import Broker, InmemSettings
from broker_streams import Context, Group, Input, Memory, Persist, Processor, StoreLocked, View, operations
from broker_streams.operations import Reset, find_group, lag
from broker_streams.redo import pack
from broker_streams.stores.directory import StateDirectory
from tests.unit.broker_streams.brokers import Limited

SECONDS = 60
KEYS = 30
NAME = "counts"
sums = Persist(Json(int))


RECIPES = {
    "transactions": Limited(atomic=False),
    "atomic-10-rows": Limited(transactions=False, rows=10),
    "fenced": Limited(transactions=False, atomic=False),
    "plain": Limited(transactions=False, atomic=False, tables=False),
}


@pytest.fixture(params=RECIPES.values(), ids=list(RECIPES))
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    async with connect(InmemSettings(broker=Broker(request.param))) as bus:
        await bus.admin.ensure_topic("clicks", partitions=2)
        yield bus


def add(ctx: Context, value: int) -> None:
    ctx[sums] = (ctx[sums] or 0) + value


GROUP = Group(NAME, Input("clicks", Json(int), add), sums)


async def publish(bus: Bus) -> None:
    """A one for each key."""
    await bus.topic("clicks").publish_batch([OutboundMessage(b"1", f"key-{n}") for n in range(KEYS)])


async def handle(bus: Bus, wanted: int) -> None:
    """Run the group until the sums of all keys are `wanted`."""
    async with asyncio.timeout(SECONDS), Processor(bus, GROUP, store=Memory(), checkpoint_interval=0.01) as processor:
        await processor.ready()
        async with View(bus, GROUP.table, Json(int)) as view:
            await view.ready()
            changes = view.changes()
            while sum(value for _, value in view.items()) != wanted:
                await anext(changes)


async def rows(bus: Bus) -> list[int]:
    async with View(bus, GROUP.table, Json(int)) as view:
        await view.ready()
        return [value for _, value in view.items()]


async def behind(bus: Bus) -> int:
    return sum(each.records for each in await lag(bus, await find_group(bus, NAME)))


async def test_a_reset_with_rows_starts_from_nothing(bus: Bus, tmp_path: Path) -> None:
    await publish(bus)
    await handle(bus, KEYS)
    assert await behind(bus) == 0
    told: list[str] = []
    stored = await find_group(bus, NAME)
    async with Reset(bus, stored, rows=True, state_dir=tmp_path, progress=told.append) as reset:
        assert {(move.partition, move.after) for move in reset.moves} == {(0, 0), (1, 0)}
        assert await reset.run() == KEYS
    assert len(told) == 2
    assert await rows(bus) == []
    assert await behind(bus) == KEYS
    await handle(bus, KEYS)
    assert await rows(bus) == [1] * KEYS


async def test_a_reset_without_rows_counts_again(bus: Bus, tmp_path: Path) -> None:
    await publish(bus)
    await handle(bus, KEYS)
    async with Reset(bus, await find_group(bus, NAME), state_dir=tmp_path) as reset:
        assert await reset.run() == 0
    await handle(bus, 2 * KEYS)
    assert await rows(bus) == [2] * KEYS


async def test_a_reset_keeps_rows_that_a_crash_left_out(tmp_path: Path) -> None:
    async with connect(InmemSettings(broker=Broker(RECIPES["fenced"]))) as bus:
        await bus.admin.ensure_topic("clicks", partitions=2)
        await publish(bus)
        await handle(bus, KEYS)
        pending = (await find_group(bus, NAME)).checkpoints[0]
        assert pending is not None
        redo = [OutboundMessage(data, key) for key, data in pack({b"left-out": b"5"}, "token", 1000).items()]
        async with bus.table_writer(GROUP.table, 0) as writer:
            await writer.write(redo, checkpoint=pending.pending("token").pack())
        async with Reset(bus, await find_group(bus, NAME), to="latest", state_dir=tmp_path) as reset:
            await reset.run()
        assert sorted(await rows(bus)) == [*[1] * KEYS, 5]
        for checkpoint in (await find_group(bus, NAME)).checkpoints.values():
            assert checkpoint is not None
            assert (checkpoint.redo, checkpoint.format) == ("", 1)


async def test_a_reset_to_the_end_skips(bus: Bus, tmp_path: Path) -> None:
    await publish(bus)
    await handle(bus, KEYS)
    await publish(bus)
    assert await behind(bus) == KEYS
    before = (await find_group(bus, NAME)).checkpoints
    async with Reset(bus, await find_group(bus, NAME), to="latest", state_dir=tmp_path) as reset:
        await reset.run()
    assert await behind(bus) == 0
    for number, checkpoint in (await find_group(bus, NAME)).checkpoints.items():
        had = before[number]
        assert had is not None
        assert checkpoint is not None
        assert (checkpoint.number, checkpoint.epoch) == (had.number + 1, had.epoch + 1)
        assert (checkpoint.stream_time, checkpoint.fingerprint) == (had.stream_time, had.fingerprint)
    await publish(bus)
    await handle(bus, 2 * KEYS)


async def test_a_checkpoint_far_from_the_end_is_found(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish(bus)
    await handle(bus, KEYS)
    found = await find_group(bus, NAME)
    await bus.topic(GROUP.table).publish_batch([OutboundMessage(b"1", f"new-{n}") for n in range(100)])
    monkeypatch.setattr(operations, "_NEAR_END", 1)
    assert (await find_group(bus, NAME)).checkpoints == found.checkpoints
    assert None not in found.checkpoints.values()


async def test_a_deleted_checkpoint_is_none(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish(bus)
    await handle(bus, KEYS)
    tombstones = [OutboundMessage(None, CHECKPOINT_KEY, partition=n) for n in range(2)]
    await bus.topic(GROUP.table).publish_batch(tombstones)
    monkeypatch.setattr(operations, "_NEAR_END", 1)
    assert (await find_group(bus, NAME)).checkpoints == {0: None, 1: None}


@pytest.mark.parametrize("broken", [[1], [0, 1]])
async def test_a_checkpoint_that_cannot_be_read_has_a_way_out(bus: Bus, broken: list[int], tmp_path: Path) -> None:
    await publish(bus)
    await handle(bus, KEYS)
    rubbish = [OutboundMessage(b"rubbish", CHECKPOINT_KEY, partition=n) for n in broken]
    await bus.topic(GROUP.table).publish_batch(rubbish)
    place = f"Partition {broken[0]} of table 'counts-table': The checkpoint cannot be read"
    with pytest.raises(DecodeError, match="The checkpoint cannot be read") as raised:
        await handle(bus, KEYS)
    assert str(raised.value).startswith("Partition ")
    assert "broker streams reset GROUP --table" in raised.value.advice
    code = None if len(broken) == 1 else GROUP
    stored = await find_group(bus, NAME, code)
    with pytest.raises(DecodeError, match=place):
        await lag(bus, stored)
    with pytest.raises(DecodeError, match=place):
        async with Reset(bus, stored, state_dir=tmp_path):
            pass
    async with Reset(bus, stored, rows=True, state_dir=tmp_path, group=code) as reset:
        assert await reset.run() == KEYS
    await handle(bus, KEYS)
    assert await rows(bus) == [1] * KEYS
    assert await behind(bus) == 0


async def test_a_long_lag_is_told_from_the_offsets(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish(bus)
    await handle(bus, KEYS)
    await publish(bus)
    monkeypatch.setattr(operations, "_FEW", -1)
    assert await behind(bus) == KEYS


async def test_groups_that_are_not_known(bus: Bus, tmp_path: Path) -> None:
    with pytest.raises(TopicNotFound, match="Group 'nobody' has no table 'nobody-table'"):
        await find_group(bus, "nobody")
    await bus.admin.ensure_topic(GROUP.table, partitions=2, compacted=True)
    stored = await find_group(bus, NAME)
    assert (stored.topics, await lag(bus, stored)) == ((), [])
    with pytest.raises(ConfigurationError, match="has no checkpoint that tells what group 'counts' consumes"):
        async with Reset(bus, stored, rows=True, state_dir=tmp_path):
            pass
    assert (await find_group(bus, NAME, GROUP)).topics == ("clicks",)


async def test_members_are_in_the_way(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish(bus)
    await handle(bus, KEYS)
    monkeypatch.setattr(operations, "_JOIN_SECONDS", 0.2)
    stored = await find_group(bus, NAME)
    async with Processor(bus, GROUP, store=Memory()) as processor:
        await processor.ready()
        with pytest.raises(BackendError, match="has members, which keep clicks"):
            async with Reset(bus, stored, rows=True, state_dir=tmp_path) as reset:
                await reset.run()
    assert await rows(bus) == [1] * KEYS
    with StateDirectory(tmp_path, NAME, "one"), pytest.raises(StoreLocked):
        async with Reset(bus, stored, state_dir=tmp_path):
            pass
