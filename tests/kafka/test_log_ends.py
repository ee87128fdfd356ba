"""Behind the last record of a partition there may be transaction markers and aborted records: a group that has read
everything has no lag, and its position never passes a record that is still to be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.driver.contract import Lag, TopicPartition
from broker.hooks import PositionsCommitted
from broker.testing.waiting import eventually
from broker_kafka.group import GroupConsumer
from broker_kafka.group.member import Member
from broker_kafka.group.topic_ids import TopicIds
from broker_kafka.offsets import StoredOffset
from broker_kafka.queue.markers.commit_text import member_mark_in
from tests.kafka.group_members import take
from tests.kafka.raw_positions import store, stored
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

PATIENCE = 60.0
FEW = 5


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with broker.connect(kafka.url) as bus:
        yield bus


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ends of partitions that members have reached."""
    reached: list[int] = []
    ended = Member.ended

    def noted(member: Member[Any], partition: TopicPartition, end: int) -> None:
        ended(member, partition, end)
        reached.append(end)

    monkeypatch.setattr(Member, "ended", noted)
    return reached


async def fill(bus: Bus, topic: str, *bodies: bytes) -> None:
    await bus.topic(topic).publish_batch([broker.OutboundMessage(each) for each in bodies])


async def undo(bus: Bus, topic: str) -> None:
    """Write records that do not count, and the mark that says so."""
    async with bus.transactional_publisher(f"tx-{topic}") as publisher:
        with suppress(ZeroDivisionError):
            async with publisher.transaction() as tx:
                await tx.publish_batch(topic, [broker.OutboundMessage(b"undone")] * FEW)
                raise ZeroDivisionError


async def lag(bus: Bus, topic: str, group: str) -> Lag:
    return await bus.admin.lag(topic, group)


async def read_up(bus: Bus, topic: str, group: str) -> None:
    """Until the group is not behind."""
    async with asyncio.timeout(PATIENCE):
        while (await lag(bus, topic, group)).partitions != {0: 0}:
            await asyncio.sleep(0.05)


Reader = Callable[[Bus, str, str], AbstractAsyncContextManager[Callable[[], Any]]]


@asynccontextmanager
async def records(bus: Bus, topic: str, group: str) -> AsyncGenerator[Callable[[], Any]]:
    async with bus.records(topic, group=group) as log:

        async def take() -> bytes | None:
            record = await log.next_record(timeout=PATIENCE)
            assert record is not None
            await record.commit()
            return record.data

        yield take


@asynccontextmanager
async def messages(bus: Bus, topic: str, group: str) -> AsyncGenerator[Callable[[], Any]]:
    async with bus.messages(topic, subscription=group) as inbox:

        async def take() -> bytes | None:
            message = await inbox.next_message(timeout=PATIENCE)
            assert message is not None
            await message.ack()
            return message.data

        yield take


@asynccontextmanager
async def member(bus: Bus, topic: str, group: str) -> AsyncGenerator[Callable[[], Any]]:
    async with GroupConsumer(bus, topic, group=group, commit_interval=0.05) as consumer:

        async def take() -> bytes | None:
            async for record in consumer:
                consumer.mark(record)
                return record.data
            return None

        yield take


READERS: dict[str, Reader] = {"records": records, "messages": messages, "group": member}


@pytest.mark.deep
@pytest.mark.parametrize("kind", READERS)
async def test_a_group_that_has_read_everything_has_no_lag(bus: Bus, topic: str, group: str, kind: str) -> None:
    await fill(bus, topic, b"0", b"1")
    async with READERS[kind](bus, topic, group) as take:
        assert [await take(), await take()] == [b"0", b"1"]
        await undo(bus, topic)
        await read_up(bus, topic, group)
        # And again, behind aborted records.
        await undo(bus, topic)
        await read_up(bus, topic, group)
        await fill(bus, topic, b"2")
        assert await take() == b"2"
        await read_up(bus, topic, group)


@pytest.mark.parametrize("kind", ["messages", "group"])
async def test_a_later_member_has_no_lag_either(bus: Bus, topic: str, group: str, kind: str) -> None:
    await fill(bus, topic, b"0")
    async with READERS[kind](bus, topic, group) as take:
        assert await take() == b"0"
    await undo(bus, topic)
    assert (await lag(bus, topic, group)).waiting == FEW + 1
    async with READERS[kind](bus, topic, group):
        await read_up(bus, topic, group)


@pytest.mark.deep
async def test_positions_never_pass_unfinished_records_or_open_transactions(bus: Bus, topic: str, group: str) -> None:
    async with bus.messages(topic, subscription=group) as inbox, bus.transactional_publisher(f"{topic}-open") as writer:
        await fill(bus, topic, b"0")
        message = await inbox.next_message(timeout=PATIENCE)
        assert message is not None
        await undo(bus, topic)
        async with writer.transaction() as tx:
            await tx.publish(topic, b"1")
            await undo(bus, topic)
            # The fetch that says where the partition ends for now has been answered by then.
            assert await inbox.next_message(timeout=1.0) is None
            assert (await lag(bus, topic, group)).partitions == {0: 1 + FEW + 1}
            await message.ack()
            await read_up(bus, topic, group)
        message = await inbox.next_message(timeout=PATIENCE)
        assert message is not None
        assert message.data == b"1"
        await message.ack()
        await read_up(bus, topic, group)


@pytest.mark.deep
async def test_a_seek_back_moves_the_position_back(bus: Bus, topic: str, group: str) -> None:
    await fill(bus, topic, b"0", b"1", b"2")
    place = TopicPartition(topic, 0)
    async with bus.records(topic, group=group) as log:
        assert len(await log.next_batch(max_records=3)) == 3
        await log.commit()
        await undo(bus, topic)
        await read_up(bus, topic, group)
        await log.seek({place: 0})
        record = await log.next_record(timeout=PATIENCE)
        assert record is not None
        await record.commit()
        assert await log.committed() == {place: 1}
        assert await log.next_record(timeout=PATIENCE) is not None
        # Nor does it move by itself while something is in hand.
        assert len(await log.next_batch(max_records=3)) == 1
        assert await log.next_record(timeout=1.0) is None
        assert await log.committed() == {place: 1}
        await log.commit()
        await read_up(bus, topic, group)


async def test_without_commits_no_position_is_moved(bus: Bus, topic: str, group: str, ends: list[int]) -> None:
    await fill(bus, topic, b"0")
    await undo(bus, topic)
    async with bus.records(topic, group=group) as log:
        assert await log.next_record(timeout=PATIENCE) is not None
        await eventually(lambda: 1 + FEW + 1 in ends, PATIENCE)
        assert await log.next_record(timeout=0) is None
        assert await log.committed() == {TopicPartition(topic, 0): None}


async def test_a_seek_forward_leaves_the_mark(bus: Bus, topic: str, group: str) -> None:
    await fill(bus, topic, b"0", b"1", b"2")
    place = TopicPartition(topic, 0)
    async with GroupConsumer(bus, topic, group=group, commit_interval=None) as consumer:
        first = (await take(consumer, 3))[0]
        consumer.mark(first)
        await undo(bus, topic)
        await consumer.seek({place: 3})
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await take(consumer, 1)
        assert consumer.positions() == {place: StoredOffset(1)}


async def test_transactional_positions_pass_log_ends(
    bus: Bus, topic: str, name: str, group: str, ends: list[int]
) -> None:
    await bus.admin.ensure_topic(name, partitions=1)
    await fill(bus, topic, b"0")
    await undo(bus, topic)
    async with bus.records(topic, group=group) as log, bus.transactional_publisher(f"tx-{name}") as publisher:
        batch = await log.next_batch()
        await eventually(lambda: 1 + FEW + 1 in ends, PATIENCE)
        assert await log.next_record(timeout=0) is None
        async with publisher.transaction(log) as tx:
            await tx.publish_batch(name, [broker.OutboundMessage.from_message(record) for record in batch])
        await read_up(bus, topic, group)


async def test_a_queue_keeps_the_metadata_of_its_position(kafka: KafkaServer, topic: str, group: str) -> None:
    async with broker.connect(f"{kafka.url}?queue=markers") as bus:
        await fill(bus, topic, b"0")
        async with bus.messages(topic, subscription=group, confirm_acks=True) as inbox:
            message = await inbox.next_message(timeout=PATIENCE)
            assert message is not None
            await message.ack()
            await undo(bus, topic)
            assert await inbox.next_message(timeout=1.0) is None
        found = await asyncio.to_thread(RawAdmin(kafka.bootstrap).committed, group, topic)
    # Others see by it that a queue with markers was here.
    assert member_mark_in(found.metadata or "") is not None


@pytest.mark.parametrize("kind", ["records", "messages"])
async def test_moving_past_a_log_end_emits_an_event(bus: Bus, topic: str, group: str, kind: str) -> None:
    events: list[PositionsCommitted] = []
    bus.hooks.listen(lambda event: events.append(event) if isinstance(event, PositionsCommitted) else None)
    await fill(bus, topic, b"0")
    async with READERS[kind](bus, topic, group) as take:
        assert await take() == b"0"
        await read_up(bus, topic, group)
        await undo(bus, topic)
        # The broker writes the mark later: until then the group is not behind.
        await eventually(lambda: len(events) > 1, PATIENCE)
    assert [dict(event.positions) for event in events] == [{(topic, 0): 1}, {(topic, 0): 1 + FEW + 1}]


async def test_foreign_metadata_of_a_position_is_kept(
    bus: Bus, admin: RawAdmin, topic: str, group: str, ends: list[int]
) -> None:
    await fill(bus, topic, b"0")
    await undo(bus, topic)
    await asyncio.to_thread(store, admin, group, topic, 1, "by another")
    async with bus.messages(topic, subscription=group) as inbox:
        await eventually(lambda: 1 + FEW + 1 in ends, PATIENCE)
        assert await inbox.next_message(timeout=0) is None
    found = await asyncio.to_thread(stored, admin, group, topic)
    assert (found.offset, found.metadata) == (1, "by another")


@pytest.mark.parametrize("kind", ["records", "messages"])
async def test_records_arriving_during_close_are_not_skipped(
    bus: Bus, admin: RawAdmin, topic: str, group: str, kind: str, monkeypatch: pytest.MonkeyPatch, ends: list[int]
) -> None:
    look = TopicIds.check

    async def look_for_long(self: TopicIds) -> None:
        await fill(bus, topic, b"1", b"2")
        await eventually(lambda: 3 in ends, PATIENCE)
        await look(self)

    await fill(bus, topic, b"0")
    async with READERS[kind](bus, topic, group) as take:
        assert await take() == b"0"
        await read_up(bus, topic, group)
        monkeypatch.setattr(TopicIds, "check", look_for_long)
    assert (await asyncio.to_thread(stored, admin, group, topic)).offset == 1
