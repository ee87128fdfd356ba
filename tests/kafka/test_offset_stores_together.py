"""Several offset stores together: migration between them, and equal results for equal calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, ConfigurationError, LeaseLost, TopicNotFound, Unsupported
from broker_kafka.group import GroupConsumer
from broker_kafka.offsets import (
    GroupMember,
    GroupOffsetStore,
    MemoryOffsetStore,
    OffsetStore,
    SqlOffsetStore,
    StoredOffset,
    migrate_offsets,
)
from tests.kafka.group_members import fill, take
from tests.kafka.offset_store_cases import StoreCase, committed, every_store
from tests.kafka.raw_positions import store as raw_store
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

# -- migration ---------------------------------------------------------------------------------------------------


@every_store
async def test_positions_move_between_stores(case: StoreCase):
    group = case.owner.group
    source = MemoryOffsetStore()
    positions = {case.partition(n): StoredOffset(n + 1, f"note {n}") for n in range(3)}
    await source.reset(group, positions)
    await committed(case, {case.partition(1): StoredOffset(2, "note 1"), case.partition(2): StoredOffset(9)})
    before = await case.store.stored(group)
    plan = await migrate_offsets(source, case.store, group, dry_run=True)
    assert [(move.partition.partition, move.action) for move in plan] == [(0, "copy"), (1, "same"), (2, "keep")]
    assert plan[2].target == StoredOffset(9)
    assert await case.store.stored(group) == before
    moved = await migrate_offsets(source, case.store, group, existing="overwrite")
    assert [move.action for move in moved] == ["copy", "same", "overwrite"]
    assert await case.store.stored(group) == positions
    assert {move.action for move in await migrate_offsets(source, case.store, group)} == {"same"}


async def test_a_running_group_is_not_migrated_into_kafka(kafka: KafkaServer, topic: str, group: str):
    place, source = TopicPartition(topic, 0), MemoryOffsetStore()
    await fill(kafka, topic, 1, 3)
    await source.reset(group, {place: StoredOffset(1)})
    async with connect(kafka.url) as bus, GroupConsumer(bus, topic, group=group, commit_interval=None) as consumer:
        consumer.mark_all(await take(consumer, 3))
        assert await consumer.commit() == {place: None}
        (move,) = await migrate_offsets(source, GroupOffsetStore.of(bus), group, existing="overwrite")
        assert move.action == "fail"
        assert isinstance(move.error, LeaseLost)
        assert move.error.advice == f"Group {group!r} has members: stop its consumers, then retry"
        assert await consumer.committed() == {place: StoredOffset(3)}


@pytest.mark.parametrize("case", ["kafka-group"], indirect=True)
async def test_a_failed_move_is_reported_per_partition(case: StoreCase):
    group, source = case.owner.group, MemoryOffsetStore()
    await source.reset(group, {case.partition(0): StoredOffset(1), case.partition(99): StoredOffset(1)})
    good, bad = await migrate_offsets(source, case.store, group)
    assert (good.action, bad.action) == ("copy", "fail")
    assert isinstance(bad.error, TopicNotFound)
    with pytest.raises(ConfigurationError, match="same store"):
        await migrate_offsets(source, source, group)
    with pytest.raises(ConfigurationError, match="merge"):
        await migrate_offsets(source, case.store, group, existing="merge")  # type: ignore[arg-type]


# -- the stores agree ----------------------------------------------------------------------------------------------

_step = st.tuples(
    st.sampled_from(["claim", "restart", "commit", "rewind", "reset"]),
    st.integers(1, 3),
    st.sampled_from(["a", "b"]),
    st.dictionaries(st.integers(0, 2), st.integers(0, 4), min_size=1),
)


@pytest.mark.deep
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_step, max_size=12))
def test_memory_and_sql_stores_behave_alike(steps: list[Any], tmp_path: Path):
    async def run() -> None:
        engine = create_engine(f"sqlite:///{tmp_path / uuid.uuid4().hex}.db")
        sql = SqlOffsetStore(engine)
        stores: list[OffsetStore] = [MemoryOffsetStore(), sql]
        await sql.create_table()
        for name, generation, member, offsets in steps:
            owner = GroupMember("group", generation, member)
            positions = {TopicPartition("topic", n): StoredOffset(offset) for n, offset in offsets.items()}
            answers = [_plain(await _take(store, name, owner, positions)) for store in stores]
            assert answers[0] == answers[1], (name, owner, offsets)
        assert len({str(await store.stored("group")) for store in stores}) == 1
        engine.dispose()

    asyncio.run(run())


async def _take(store: OffsetStore, name: str, owner: GroupMember, positions: Mapping[TopicPartition, Any]) -> Any:
    match name:
        case "claim" | "restart":
            return await store.claim(owner, list(positions), restarted=name == "restart")
        case "commit" | "rewind":
            return await store.commit(owner, positions, rewind=name == "rewind")
        case _:
            return await store.reset(owner.group, positions)


def _plain(results: Mapping[TopicPartition, Any]) -> dict[TopicPartition, Any]:
    return {key: str(value) if isinstance(value, BrokerError) else value for key, value in results.items()}


async def test_positions_of_a_bus_are_migrated(kafka: KafkaServer, admin: RawAdmin, topic: str, group: str):
    await asyncio.to_thread(raw_store, admin, group, topic, 7)
    async with connect(kafka.url) as bus:
        target = MemoryOffsetStore()
        (move,) = await migrate_offsets(GroupOffsetStore.of(bus), target, group)
        assert (move.action, move.error) == ("copy", None)
        place = TopicPartition(topic, 0)
        assert await target.fetch(group, [place]) == {place: StoredOffset(7)}


async def test_only_a_kafka_bus_has_kafka_offsets():
    bus: Any = "kafka://localhost:9092"
    with pytest.raises(ConfigurationError, match=r"Give what broker\.connect"):
        GroupOffsetStore.of(bus)
    async with connect("inmem://") as other:
        with pytest.raises(Unsupported, match="inmem"):
            GroupOffsetStore.of(other)
