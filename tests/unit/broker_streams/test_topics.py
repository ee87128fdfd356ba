"""The topics of a group: created once, and every mistake named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from broker import Bus, ConfigurationError, Json, UnknownSetting, connect
from broker_inmem import Broker, InmemSettings
from broker_streams.context import Context
from broker_streams.graph import Group, Input, Join, Lookup, Loop, Persist
from broker_streams.topics import TopicPolicy


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with connect(InmemSettings(broker=Broker())) as bus:
        yield bus


def ignore(ctx: Context, value: int) -> None: ...


def counting(*edges: object) -> Group:
    return Group("counts", Input("clicks", Json(int), ignore), Persist(Json(int)), *edges)  # pyright: ignore[reportArgumentType]


async def test_the_table_and_the_loop_are_created_with_the_partitions_of_the_inputs(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    assert await TopicPolicy().prepare(bus, counting(Loop(Json(int), ignore))) == 3
    table, loop = await bus.admin.describe_topic("counts-table"), await bus.admin.describe_topic("counts-loop")
    assert (table.partitions, table.compacted) == (3, True)
    assert (loop.partitions, loop.compacted) == (3, False)


async def test_inputs_and_joins_have_one_number_of_partitions(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    await bus.admin.ensure_topic("users", partitions=4, compacted=True)
    with pytest.raises(ConfigurationError, match=r"'clicks' has 3, 'users' has 4"):
        await TopicPolicy().prepare(bus, counting(Join("users", Json(int))))


async def test_a_lookup_may_have_another_number_of_partitions(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    await bus.admin.ensure_topic("prices", partitions=1, compacted=True)
    assert await TopicPolicy().prepare(bus, counting(Lookup("prices", Json(int)))) == 3


async def test_joined_and_looked_up_tables_are_compacted_and_loops_are_not(bus: Bus) -> None:
    for topic in ("clicks", "users", "prices"):
        await bus.admin.ensure_topic(topic, partitions=3)
    await bus.admin.ensure_topic("counts-loop", partitions=3, compacted=True)
    group = counting(Join("users", Json(int)), Lookup("prices", Json(int)), Loop(Json(int), ignore))
    with pytest.raises(ConfigurationError) as raised:
        await TopicPolicy().prepare(bus, group)
    text = str(raised.value)
    for mistake in ("Join 'users' is not compacted", "Lookup 'prices' is not", "Loop 'counts-loop' is compacted"):
        assert mistake in text


async def test_missing_topics_are_told_with_who_creates_them(bus: Bus) -> None:
    with pytest.raises(ConfigurationError) as raised:
        await TopicPolicy().prepare(bus, counting(Join("users", Json(int))))
    _, missing, table = str(raised.value).split("\n")
    assert missing == "- Input 'clicks' does not exist: create it with `broker topics create` or ensure_topic"
    assert table.startswith("- Join 'users' does not exist: start the group whose table it is, or create it")


async def test_options_reach_the_broker(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=1)
    policy = TopicPolicy(loop_retention=timedelta(hours=1), loop_options={"retention_messages": 10})
    await policy.prepare(bus, counting(Loop(Json(int), ignore)))
    with pytest.raises(UnknownSetting):
        await TopicPolicy(options={"nothing": 1}).prepare(bus, Group("other", Input("clicks", Json(int), ignore)))


def test_a_policy_checks_its_mismatch() -> None:
    with pytest.raises(ConfigurationError, match="mismatch"):
        TopicPolicy(mismatch="maybe")  # pyright: ignore[reportArgumentType]
