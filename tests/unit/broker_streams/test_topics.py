"""The topics of a group: created once, and every mistake named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from broker import Bus, ConfigurationError, Json, UnknownSetting, connect
from broker_inmem import Broker, InmemSettings
from broker_streams.context import Context
from broker_streams.failures import DeadLetter
from broker_streams.graph import Group, Input, Join, Lookup, Loop, Output, Persist
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
    found = await TopicPolicy().prepare(bus, counting(Loop(Json(int), ignore)))
    assert (found.partitions, set(found.consumed)) == (3, {"clicks", "counts-loop"})
    table, loop = await bus.admin.describe_topic("counts-table"), await bus.admin.describe_topic("counts-loop")
    assert (table.partitions, table.compacted) == (3, True)
    assert (loop.partitions, loop.compacted) == (3, False)


async def test_m1_preparing_twice_changes_nothing(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    group = counting(Loop(Json(int), ignore))
    first = await TopicPolicy().prepare(bus, group)
    before = await bus.admin.describe_topic("counts-table")
    assert await TopicPolicy().prepare(bus, group) == first
    assert await bus.admin.describe_topic("counts-table") == before


async def test_m1_missing_topics_are_named_and_nothing_is_created(bus: Bus) -> None:
    letters = Input("visits", Json(int), ignore, on_undecodable=DeadLetter("letters"))
    group = counting(letters, Join("users", Json(int)), Lookup("prices", Json(int)), Output("alerts", Json(int)))
    with pytest.raises(ConfigurationError) as raised:
        await TopicPolicy().prepare(bus, group)
    text = str(raised.value)
    for what in ("Input 'clicks'", "Input 'visits'", "Join 'users'", "Lookup 'prices'", "Output 'alerts'"):
        assert f"{what} does not exist" in text
    assert "Dead-letter topic 'letters' does not exist" in text
    assert await bus.admin.topics() == []


async def test_m1_nothing_is_created_with_create_false(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    with pytest.raises(
        ConfigurationError, match=r"Table 'counts-table' does not exist, and the policy has create=False"
    ):
        await TopicPolicy(create=False).prepare(bus, counting())
    assert await bus.admin.topics() == ["clicks"]


async def test_inputs_and_joins_have_one_number_of_partitions(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    await bus.admin.ensure_topic("users", partitions=4, compacted=True)
    with pytest.raises(ConfigurationError, match=r"'clicks' has 3, 'users' has 4"):
        await TopicPolicy().prepare(bus, counting(Join("users", Json(int))))


async def test_a_lookup_may_have_another_number_of_partitions(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    await bus.admin.ensure_topic("prices", partitions=1, compacted=True)
    found = await TopicPolicy().prepare(bus, counting(Lookup("prices", Json(int))))
    assert found.partitions == 3


async def test_m1_a_table_with_another_number_of_partitions_is_refused(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    await bus.admin.ensure_topic("counts-table", partitions=2, compacted=True)
    with pytest.raises(ConfigurationError, match=r"Table 'counts-table' has 2 partitions, and the inputs have 3"):
        await TopicPolicy(mismatch="ignore").prepare(bus, counting())


async def test_m1_a_table_that_is_not_compacted_is_refused_warned_of_or_ignored(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    await bus.admin.ensure_topic("clicks", partitions=3)
    await bus.admin.ensure_topic("counts-table", partitions=3)
    with pytest.raises(ConfigurationError, match=r"Table 'counts-table' is not compacted"):
        await TopicPolicy().prepare(bus, counting())
    await TopicPolicy(mismatch="ignore").prepare(bus, counting())
    assert "not compacted" not in caplog.text
    await TopicPolicy(mismatch="warn").prepare(bus, counting())
    assert "Table 'counts-table' is not compacted" in caplog.text


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


async def test_options_reach_the_broker(bus: Bus) -> None:
    await bus.admin.ensure_topic("clicks", partitions=1)
    policy = TopicPolicy(loop_retention=timedelta(hours=1), loop_options={"retention_messages": 10})
    await policy.prepare(bus, counting(Loop(Json(int), ignore)))
    with pytest.raises(UnknownSetting):
        await TopicPolicy(options={"nothing": 1}).prepare(bus, Group("other", Input("clicks", Json(int), ignore)))


def test_a_policy_checks_its_mismatch() -> None:
    with pytest.raises(ConfigurationError, match="mismatch"):
        TopicPolicy(mismatch="maybe")  # pyright: ignore[reportArgumentType]
