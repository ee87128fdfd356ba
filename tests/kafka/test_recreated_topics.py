"""A topic that is deleted and recreated while a group reads it: no record of the new topic is skipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

import broker
from broker.bus import Bus
from broker.driver.contract import TopicPartition
from broker.errors import OffsetOutOfRange, TopicNotFound, TransactionAborted
from broker.hooks import Event, PositionReset
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually
from broker_kafka.group import GroupConsumer, TopicPattern, topic_ids
from broker_kafka.offsets import MemoryOffsetStore, SqlOffsetStore, StoredOffset
from broker_kafka.offsets.protocol import failures
from tests.kafka.group_members import take
from tests.servers.kafka import KafkaServer

PATIENCE = 120.0
OLD, NEW = 10, 30


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_ids, "_CHECK_AFTER", 0.2)
    # A busy machine may need more than a second for an answer.
    monkeypatch.setattr(topic_ids, "_TIMEOUT", PATIENCE)


@pytest.fixture(params=["classic", pytest.param("consumer", marks=pytest.mark.deep)])
async def bus(kafka: KafkaServer, request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    async with broker.connect(f"{kafka.url}?group_protocol={request.param}") as bus:
        yield bus


@pytest.fixture
def recreated(topic: str) -> str:
    return f"{topic}.recreated"


async def fill(bus: Bus, topic: str, what: str, count: int) -> None:
    await eventually(lambda: bus.admin.ensure_topic(topic, partitions=1), PATIENCE, "the topic is created")
    await bus.topic(topic).publish_batch([OutboundMessage(f"{what}{n}".encode(), b"k") for n in range(count)])


async def is_missing(bus: Bus, topic: str) -> bool:
    try:
        await bus.admin.topic_identity(topic)
    except TopicNotFound:
        return True
    return False


def new_ones(count: int = NEW) -> list[bytes | None]:
    return [b"new%d" % number for number in range(count)]


Reader = Callable[[Bus, str, str], AbstractAsyncContextManager[Callable[[], Any]]]


@asynccontextmanager
async def records(bus: Bus, topic: str, group: str) -> AsyncGenerator[Callable[[], Any]]:
    async with bus.records(topic, group=group) as log:

        async def take() -> bytes | None:
            async for record in log:
                await record.commit()
                return record.data
            return None

        yield take


@asynccontextmanager
async def messages(bus: Bus, topic: str, group: str) -> AsyncGenerator[Callable[[], Any]]:
    async with bus.messages(topic, subscription=group) as inbox:

        async def take() -> bytes | None:
            if (message := await inbox.next_message(timeout=PATIENCE)) is None:
                return None
            await message.ack()
            return message.data

        yield take


def member(by: Callable[[str], Any], **options: Any) -> Reader:
    @asynccontextmanager
    async def opened(bus: Bus, topic: str, group: str) -> AsyncGenerator[Callable[[], Any]]:
        async with GroupConsumer(bus, by(topic), group=group, commit_interval=0.1, **options) as consumer:

            async def take() -> bytes | None:
                async for record in consumer:
                    consumer.mark(record)
                    return record.data
                return None

            yield take

    return opened


READERS: dict[str, Reader] = {
    "records": records,
    "messages": messages,
    "by name": member(str),
    "by pattern": member(lambda topic: TopicPattern(include=topic)),
    "store": member(str, store=MemoryOffsetStore()),
}


@pytest.mark.parametrize("kind", READERS)
async def test_a_recreated_topic_is_reported_and_read_from_the_start(
    bus: Bus, recreated: str, group: str, kind: str
) -> None:
    reader = READERS[kind]
    await fill(bus, recreated, "old", OLD)
    seen: list[bytes | None] = []
    reported = ""
    async with reader(bus, recreated, group) as take:
        while len(seen) < OLD:
            seen.append(await take())
        await bus.admin.delete_topic(recreated)
        await fill(bus, recreated, "new", NEW)
        try:
            async with asyncio.timeout(PATIENCE):
                while seen[OLD:] != new_ones():
                    seen.append(await take())
        except (TopicNotFound, OffsetOutOfRange) as error:
            # The reader may notice the deletion before the new topic has records.
            reported = str(error)
    if reported:
        assert recreated in reported
        del seen[OLD:]
        async with reader(bus, recreated, group) as take:
            while len(seen) < OLD + NEW:
                seen.append(await take())
    assert seen[OLD:] == new_ones()


@pytest.mark.parametrize("kind", ["records", "by name", "store"])
async def test_close_leaves_no_position_of_the_deleted_topic(
    bus: Bus, recreated: str, group: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_ids, "_CHECK_AFTER", 600.0)
    reader = READERS[kind]
    await fill(bus, recreated, "old", OLD)
    async with reader(bus, recreated, group) as take:
        for _ in range(OLD):
            await take()
        await bus.admin.delete_topic(recreated)
        await fill(bus, recreated, "new", NEW)
        # If it reads a record of the new topic, that position is committed. It may fetch before there is one.
        with suppress(TopicNotFound, OffsetOutOfRange, TimeoutError):
            async with asyncio.timeout(2):
                await take()
    seen: list[bytes | None] = []
    async with reader(bus, recreated, group) as take:
        while seen[-1:] != new_ones()[-1:]:
            seen.append(await take())
    assert seen == new_ones()[-len(seen) :]
    assert len(seen) >= NEW - 1


async def test_a_commit_that_the_deleted_topic_refused_skips_no_record_of_the_new_one(
    bus: Bus, recreated: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(bus, recreated, "old", OLD)
    async with GroupConsumer(bus, recreated, group=group, commit_interval=None) as consumer:
        records = await take(consumer, OLD)
        member = consumer._member
        assert member is not None
        await eventually(lambda: not member._topic_ids._unchecked, PATIENCE, "the check after the fetch")
        monkeypatch.setattr(topic_ids, "_CHECK_AFTER", 600.0)
        await bus.admin.delete_topic(recreated)
        await eventually(lambda: is_missing(bus, recreated), PATIENCE, "the end of the topic")
        consumer.mark_all(records)
        (refused,) = (await consumer.commit()).values()
        assert isinstance(refused, TopicNotFound)
        await fill(bus, recreated, "new", NEW)
    async with GroupConsumer(bus, recreated, group=group) as consumer:
        assert [record.data for record in await take(consumer, NEW)] == new_ones()


async def test_a_transactional_copy_copies_every_record_of_the_new_topic(
    bus: Bus, recreated: str, topic: str, group: str
) -> None:
    async def copy(until: bytes) -> None:
        async with (
            bus.transactional_publisher(f"tx-{group}") as publisher,
            bus.records(recreated, group=group) as log,
        ):
            while True:
                batch = await log.next_batch(max_records=100)
                async with publisher.transaction(log) as tx:
                    await tx.publish_batch(topic, [OutboundMessage.from_message(record) for record in batch])
                if batch[-1].data == until:
                    return

    await fill(bus, recreated, "old", OLD)
    copying = asyncio.create_task(copy(b"new%d" % (2 * NEW - 1)))
    sink: list[bytes | None] = []
    async with bus.records(topic, group=f"{group}-check") as log, asyncio.timeout(2 * PATIENCE):
        while len(sink) < OLD:
            sink += [record.data for record in await log.next_batch()]
        await bus.admin.delete_topic(recreated)
        await fill(bus, recreated, "new", NEW)
        # The copy ends before the new topic does: with the news, or at the old position.
        await asyncio.wait((copying,), timeout=PATIENCE)
        await bus.topic(recreated).publish_batch([OutboundMessage(b"new%d" % n, b"k") for n in range(NEW, 2 * NEW)])
        try:
            await copying
        except (TopicNotFound, OffsetOutOfRange, TransactionAborted):
            await copy(b"new%d" % (2 * NEW - 1))
        while set(new_ones(2 * NEW)) - set(sink):
            sink += [record.data for record in await log.next_batch()]
    assert sink[:OLD] == [b"old%d" % number for number in range(OLD)]


STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda directory: MemoryOffsetStore(),
    "sql": lambda directory: SqlOffsetStore(create_engine(f"sqlite:///{directory / 'offsets.db'}")),
}


@pytest.mark.parametrize("how", ["mark", "save point"])
@pytest.mark.parametrize("kind", STORES)
async def test_a_position_in_an_external_store_belongs_to_one_topic_id(
    bus: Bus, recreated: str, group: str, kind: str, how: str, tmp_path: Path
) -> None:
    store = STORES[kind](tmp_path)
    if isinstance(store, SqlOffsetStore):
        await store.create_table()
    await fill(bus, recreated, "old", OLD)
    async with GroupConsumer(bus, recreated, group=group, store=store) as consumer:
        records = await take(consumer, OLD)
        if how == "mark":
            consumer.mark_all(records)
        else:
            point = await consumer.save_point(records)
            assert failures(await store.commit(*point)) == {}
            consumer.saved(point)
    stored = (await store.stored(group))[TopicPartition(recreated, 0)]
    assert isinstance(stored, StoredOffset)
    assert stored.offset == OLD
    assert stored.topic_id == await bus.admin.topic_identity(recreated)
    await bus.admin.delete_topic(recreated)
    await fill(bus, recreated, "new", NEW)
    with pytest.raises(OffsetOutOfRange, match=f"position {OLD} belongs to a topic that was deleted"):
        async with GroupConsumer(bus, recreated, group=group, store=store) as consumer:
            await take(consumer, 1)
    reported: list[Event] = []
    bus.hooks.listen(reported.append)
    async with GroupConsumer(bus, recreated, group=group, store=store, offset_reset="earliest") as consumer:
        assert [record.data for record in await take(consumer, NEW)] == new_ones()
    assert [(each.position, each.to) for each in reported if isinstance(each, PositionReset)] == [(OLD, 0)]
    # The stored position belongs to the new topic by now.
    async with GroupConsumer(bus, recreated, group=group, store=store) as consumer:
        assert [record.data for record in await take(consumer, NEW)] == new_ones()
