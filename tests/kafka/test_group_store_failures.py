"""An offset store that breaks its contract, or gets invalid input: an error is reported, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.errors import BackendError, ConfigurationError, SettleError
from broker.hooks import Event, Warned
from broker.records import Record
from broker_kafka.client import consumer as consuming
from broker_kafka.group import GroupConsumer
from broker_kafka.offsets import GroupMember, MemoryOffsetStore, SqlOffsetStore, StoredOffset
from broker_kafka.offsets.protocol import CommitResults, FetchResults
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import bare, both_protocols, eventually, fill, opened, options_of, take
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin


class BrokenStore(MemoryOffsetStore):
    """Raises `error` if it is set, which no store may; answers for no partition if `answers_nothing`."""

    error: BaseException | None = None
    answers_nothing = False

    def __init__(self) -> None:
        super().__init__()
        self.stored_positions: list[Mapping[TopicPartition, StoredOffset]] = []
        """What was committed."""

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        if self.error is not None:
            raise self.error
        if self.answers_nothing:
            return {}
        self.stored_positions.append(positions)
        return await super().commit(owner, positions, rewind=rewind)


def members_of(admin: RawAdmin, group: str) -> int:
    described: Any = admin.client.describe_consumer_groups([group])[group].result()
    return len(described.members)


@both_protocols
@pytest.mark.parametrize("error", [RuntimeError("no disk"), TimeoutError("of its own")], ids=["any", "timeout"])
async def test_a_store_that_raises_ends_the_reading(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin, protocol: str, error: Exception
):
    topic, store = make_topic(partitions=2), BrokenStore()
    await fill(kafka, topic, 2, 10)
    options: dict[str, Any] = {**options_of(protocol), "commit_interval": None, "store": store}
    async with connect(kafka.url) as bus:
        consumer = GroupConsumer(bus, topic, group=group, **options)
        async with consumer:
            consumer.mark_all(await take(consumer, 20))
            store.error = error
            results = await consumer.commit()
            assert set(results) == {(topic, 0), (topic, 1)}
            for reported in results.values():
                assert isinstance(reported, BackendError)
                assert reported.native is error
        assert consumer.closed
        assert members_of(admin, group) == 0
    store.error = None
    async with opened(kafka, topic, group, **options) as consumer:
        assert len(await take(consumer, 20)) == 20


async def test_a_store_that_is_cancelled_does_not_keep_the_member(
    kafka: KafkaServer, topic: str, group: str, admin: RawAdmin
):
    await fill(kafka, topic, 1, 10)
    store = BrokenStore()
    async with connect(kafka.url) as bus:
        consumer = await GroupConsumer(bus, topic, group=group, store=store, commit_interval=None).__aenter__()
        consumer.mark_all(await take(consumer, 10))
        store.error = asyncio.CancelledError()
        with pytest.raises(asyncio.CancelledError):
            await consumer.close()
        assert members_of(admin, group) == 0


async def test_a_failed_background_commit_is_reported_and_retried(kafka: KafkaServer, topic: str, group: str):
    await fill(kafka, topic, 1, 10)
    store, reported = BrokenStore(), list[Event]()
    async with connect(kafka.url) as bus:
        bus.hooks.listen(reported.append)
        async with GroupConsumer(bus, topic, group=group, store=store, commit_interval=0.05) as consumer:
            records = await take(consumer, 10)
            store.error = RuntimeError("no disk")
            consumer.mark(records[3])
            warned: list[Warned] = await eventually(lambda: [event for event in reported if isinstance(event, Warned)])
            assert "no disk" in warned[0].text
            store.error = None
            await eventually(lambda: [bare(each) for each in store.stored_positions] == [{(topic, 0): StoredOffset(4)}])
            store.answers_nothing = True
            consumer.mark(records[5])
            (answer,) = (await consumer.commit()).values()
            assert answer is not None
            assert answer.retriable
            store.answers_nothing = False
            consumer.mark(records[7])
    assert bare(await store.stored(group))[TopicPartition(topic, 0)] == StoredOffset(8)


_MARKS: Mapping[str, Callable[[GroupConsumer, Record[Any], Any], object]] = {
    "mark": lambda consumer, record, text: consumer.mark(record, text),
    "mark_all": lambda consumer, record, text: consumer.mark_all([record], text),
    "finish": lambda consumer, record, text: consumer.finish(record, text),
    "reset": lambda consumer, record, text: consumer.reset(record, text),
    "mark_position": lambda consumer, record, text: consumer.mark_position(record.topic, record.partition, 5, text),
    "reset_position": lambda consumer, record, text: consumer.reset_position(record.topic, record.partition, 5, text),
}


async def test_invalid_metadata_is_rejected_when_marked(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 10)
    async with opened(kafka, topic, group, commit_interval=None) as consumer:
        records = {(record.partition, record.offset): record for record in await take(consumer, 20)}
        consumer.mark(records[1, 9], "fine: ü")
        for mark in _MARKS.values():
            for text in ("a\0b", "\ud800", 5, None, b"x"):
                with pytest.raises(ConfigurationError, match="metadata of"):
                    mark(consumer, records[0, 3], text)
        assert consumer.positions()[TopicPartition(topic, 0)] is None
        assert await consumer.commit() == {(topic, 1): None}
    assert members_of(admin, group) == 0
    assert admin.committed(group, topic, 1).offset == 10
    assert admin.committed(group, topic, 0).offset == -1001


class SlowStore(MemoryOffsetStore):
    """Its first claim does not come to an end."""

    claims = given_up = 0

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        self.claims += 1
        if self.claims == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        return await super().claim(owner, partitions, restarted=restarted)


async def test_a_slow_claim_is_cancelled_and_retried(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(consuming, "_ASSIGN_SECONDS", 0.5)
    await fill(kafka, topic, 1, 10)
    store = SlowStore()
    async with opened(kafka, topic, group, store=store) as consumer:
        assert len(await take(consumer, 10)) == 10
    assert (store.claims, store.given_up) == (2, 1)


@pytest.mark.parametrize("make", [create_engine, create_async_engine])
async def test_a_database_without_the_table_ends_the_reading(
    kafka: KafkaServer, topic: str, group: str, tmp_path: Path, make: Callable[[str], Any]
):
    await fill(kafka, topic, 1, 3)
    driver = "sqlite" if make is create_engine else "sqlite+aiosqlite"
    engine = make(f"{driver}:///{tmp_path / 'offsets.db'}")
    store = SqlOffsetStore(engine)
    with pytest.raises(SettleError, match=r"no such table.*create_table\(\)"):
        async with opened(kafka, topic, group, store=store) as consumer, asyncio.timeout(60):
            await take(consumer, 1)
    await store.create_table()
    async with opened(kafka, topic, group, store=store) as consumer:
        assert len(await take(consumer, 3)) == 3
    disposed = engine.dispose()
    if disposed is not None:
        await disposed


class TellingStore(MemoryOffsetStore):
    """Returns the given answer, valid or not."""

    def __init__(self, claimed: Any = None, committed: Any = None) -> None:
        super().__init__()
        self._claimed = claimed
        self._committed = committed

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        return dict.fromkeys(partitions, self._claimed) if self._claimed != "nothing" else {}

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        return dict.fromkeys(positions, self._committed)


@pytest.mark.parametrize(
    "answer",
    [StoredOffset(-1), StoredOffset(-2), StoredOffset(2**63), 5, "nothing"],
    ids=["end", "begin", "large", "int", "none"],
)
async def test_an_invalid_position_from_a_store_ends_the_reading(
    kafka: KafkaServer, topic: str, group: str, answer: Any
) -> None:
    await fill(kafka, topic, 1, 3)
    async with opened(kafka, topic, group, store=TellingStore(answer)) as consumer:
        with pytest.raises(BackendError, match=f"The offset store returned .* for '{topic}'"):
            async with asyncio.timeout(60):
                await take(consumer, 1)


async def test_an_invalid_commit_result_is_reported(
    kafka: KafkaServer, topic: str, group: str, admin: RawAdmin
) -> None:
    await fill(kafka, topic, 1, 3)
    async with asyncio.timeout(60), opened(kafka, topic, group, store=TellingStore(None, True)) as consumer:
        for record in await take(consumer, 3):
            consumer.mark(record)
        (error,) = (await consumer.commit()).values()
        assert "it returned True" in str(error)
    assert members_of(admin, group) == 0
