"""Every offset store rejects the same invalid arguments before it reads or writes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine

from broker.driver.contract import TopicPartition
from broker.errors import ConfigurationError, SettleError
from broker_kafka.offsets import (
    GroupMember,
    MemoryOffsetStore,
    SqlOffsetStore,
    StoredOffset,
    migrate_offsets,
)
from tests.kafka.offset_store_cases import StoreCase, every_store


@every_store
@pytest.mark.parametrize("bad", [StoredOffset(-1), StoredOffset(2**63), StoredOffset(True), StoredOffset(1, None)])  # type: ignore[arg-type]
async def test_an_invalid_position_is_rejected(case: StoreCase, bad: StoredOffset):
    with pytest.raises(ConfigurationError, match=case.topics[0]):
        await case.store.commit(case.owner, {case.partition(0): bad})
    with pytest.raises(ConfigurationError, match=case.topics[0]):
        await case.store.reset(case.owner.group, {case.partition(0): bad})


_TOPICS: list[Any] = [None, "", "a\0b", "\ud800", "x" * 250]
_NUMBERS: list[Any] = ["0", None, True, -1, 2**31]
_PLACES: list[Any] = [
    *(None, ("left", 0), "left"),
    *(TopicPartition(topic, 0) for topic in _TOPICS),
    *(TopicPartition("left", number) for number in _NUMBERS),
]
_POSITIONS: list[Any] = [None, 5, (5, ""), StoredOffset(1, "\ud800"), StoredOffset(1, "a\0b"), StoredOffset(1, b"x")]  # type: ignore[arg-type]


@every_store
async def test_every_store_rejects_the_same_arguments(case: StoreCase):
    """One store kept what the next died of, and what it kept made its other positions unreadable."""
    store, owner, good = case.store, case.owner, case.partition(0)
    for place in _PLACES:
        for call in (
            store.fetch(owner.group, [good, place]),
            store.claim(owner, [good, place]),
            store.commit(owner, {good: StoredOffset(1), place: StoredOffset(1)}),
            store.reset(owner.group, {good: StoredOffset(1), place: StoredOffset(1)}),
        ):
            with pytest.raises(ConfigurationError, match=r"(topic|partition|partition of 'left') is"):
                await call
    for position in _POSITIONS:
        for call in (
            store.commit(owner, {good: StoredOffset(1), case.partition(1): position}),
            store.reset(owner.group, {good: StoredOffset(1), case.partition(1): position}),
        ):
            with pytest.raises(ConfigurationError, match=rf"(position|offset|metadata) of '{case.topics[0]}'\[1\] is"):
                await call
    several: list[Any] = [None, 5, "left", b"left"]
    for wrong in several:
        for call in (store.fetch(owner.group, wrong), store.claim(owner, wrong)):
            with pytest.raises(ConfigurationError, match="partitions is"):
                await call
        for call in (store.commit(owner, wrong), store.reset(owner.group, wrong)):
            with pytest.raises(ConfigurationError, match="positions is"):
                await call
    for group in (None, 5, "", "a\0b", "\ud800"):
        member: Any = owner._replace(group=group)
        for call in (
            store.fetch(member.group, [good]),
            store.claim(member, [good]),
            store.commit(member, {good: StoredOffset(1)}),
            store.reset(member.group, {good: StoredOffset(1)}),
            store.stored(member.group),
        ):
            with pytest.raises(ConfigurationError, match="group is"):
                await call
    owners: list[Any] = [None, "me", tuple(owner), owner._replace(generation="1"), owner._replace(member="a\0b")]
    for wrong in owners:
        for call in (store.claim(wrong, [good]), store.commit(wrong, {good: StoredOffset(1)})):
            with pytest.raises(ConfigurationError, match="owner"):
                await call
    assert await store.stored(owner.group) == {}


def test_the_member_of_a_consumer_is_read_from_its_metadata():
    metadata = b"CGMDv2:\x02\x00\x00\x00orders\x00member-1\x00\x01"
    assert GroupMember.from_metadata(metadata) == GroupMember("orders", 2, "member-1")
    with pytest.raises(ConfigurationError, match="consumer_group_metadata"):
        GroupMember.from_metadata(b"CGMDv9:")


@pytest.mark.parametrize("metadata", [None, "CGMDv2:", 5])
def test_invalid_group_metadata_is_rejected(metadata: Any):
    with pytest.raises(ConfigurationError, match="consumer_group_metadata"):
        GroupMember.from_metadata(metadata)


async def test_migration_needs_two_stores():
    store = MemoryOffsetStore()
    for wrong in (None, "memory", MemoryOffsetStore):
        not_one: Any = wrong
        with pytest.raises(ConfigurationError, match=r"source is .*OffsetStore"):
            await migrate_offsets(not_one, store, "audit")
        with pytest.raises(ConfigurationError, match=r"target is .*OffsetStore"):
            await migrate_offsets(store, not_one, "audit")
    with pytest.raises(ConfigurationError, match="group is None"):
        await migrate_offsets(store, MemoryOffsetStore(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["sqlite", "sqlite-async"], indirect=True)
async def test_save_needs_a_transaction(case: StoreCase):
    """A connection of the other kind was an error of the inside, after the results were written."""
    store: Any = case.store
    positions = {case.partition(0): StoredOffset(1)}
    for wrong in (None, case.engine, "tx"):
        with pytest.raises(ConfigurationError, match=r"tx is .*Session"):
            store.save(wrong, case.owner, positions)
        with pytest.raises(ConfigurationError, match=r"tx is .*Session"):
            await store.save_async(wrong, case.owner, positions)
    if isinstance(case.engine, AsyncEngine):
        async with case.engine.begin() as tx:
            with pytest.raises(ConfigurationError, match="goes to save_async"):
                store.save(tx, case.owner, positions)
    else:
        with case.engine.begin() as tx, pytest.raises(ConfigurationError, match="goes to save"):
            await store.save_async(tx, case.owner, positions)


@pytest.mark.parametrize(("names", "says"), [({"table": ""}, "table is ''"), ({"schema": 5}, "schema is 5")])
def test_invalid_table_names_are_rejected(names: dict[str, Any], says: str):
    with pytest.raises(ConfigurationError, match=says):
        SqlOffsetStore(create_engine("sqlite://"), **names)


def test_an_engine_is_needed():
    with pytest.raises(ConfigurationError, match="str"):
        SqlOffsetStore("sqlite://")  # type: ignore[arg-type]


async def test_a_table_with_other_columns_is_rejected(tmp_path: Path):
    engine = create_engine(f"sqlite:///{tmp_path / 'offsets.db'}")
    with engine.begin() as tx:
        tx.execute(text("CREATE TABLE anybroker_offsets (topic TEXT, next_offset INTEGER)"))
    with pytest.raises(ConfigurationError, match=r"'anybroker_offsets' exists and has no column changed_at, gen"):
        await SqlOffsetStore(engine).create_table()
    await SqlOffsetStore(engine, table="positions").create_table()
    engine.dispose()


async def test_a_locked_database_is_not_reported_as_a_missing_table(tmp_path: Path):
    engine = create_engine(f"sqlite:///{tmp_path / 'offsets.db'}", connect_args={"timeout": 0.01})
    store = SqlOffsetStore(engine)
    await store.create_table()
    owner, place = GroupMember("audit", 1, "a"), TopicPartition("orders", 0)
    with engine.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        error = (await store.commit(owner, {place: StoredOffset(1)}))[place]
        other.rollback()
    assert isinstance(error, SettleError)
    assert error.retriable
    assert "locked" in str(error)
    assert "create_table" not in str(error)
    assert (await store.commit(owner, {place: StoredOffset(1)}))[place] is None
    engine.dispose()
