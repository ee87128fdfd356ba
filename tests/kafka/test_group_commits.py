"""Marks, resets and commits of the group consumer on a real broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.errors import Closed, LeaseLost, OffsetOutOfRange, SettleError
from broker.hooks import Warned
from broker_kafka.group import GroupConsumer, OffsetStash
from broker_kafka.offsets import MemoryOffsetStore, StoredOffset
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import both_protocols, eventually, fill, opened, options_of, take
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin


async def test_marks_and_resets_are_committed_as_the_next_offset(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin
):
    left, right = make_topic(partitions=4), make_topic(partitions=4)
    for topic in (left, right):
        await fill(kafka, topic, 4, 20)
    async with opened(kafka, [left, right], group, commit_interval=None) as consumer:
        records = {(record.topic, record.partition, record.offset): record for record in await take(consumer, 160)}
        assert await consumer.commit() == {}
        consumer.mark(records[left, 1, 3], "one")
        consumer.mark_position(left, 2, 5, "two")
        consumer.mark(records[right, 1, 2])
        expected: dict[tuple[str, int], BaseException | None] = {(left, 1): None, (left, 2): None, (right, 1): None}
        assert await consumer.commit() == expected
        assert await consumer.commit() == {}
        for topic, partition, offset, note in ((left, 1, 4, "one"), (left, 2, 5, "two"), (right, 1, 3, "")):
            stored = admin.committed(group, topic, partition)
            assert (stored.offset, stored.metadata or "") == (offset, note)
        assert admin.committed(group, left, 0).offset == -1001

        assert consumer.reset(records[left, 1, 2], "back")
        assert consumer.reset_position(left, 2, 0)
        assert consumer.reset(records[right, 1, 2])
        assert not consumer.reset(records[right, 1, 9])
        assert await consumer.commit([(left, 1)]) == {(left, 1): None}
        assert await consumer.commit() == {(left, 2): None}
        assert admin.committed(group, left, 1).offset == 3
        assert admin.committed(group, left, 2).offset == 0
        assert admin.committed(group, right, 1).offset == 3
        assert (await consumer.committed([(left, 1), (left, 0)])) == {
            (left, 1): StoredOffset(3, "back"),
            (left, 0): None,
        }
        assert consumer.positions()[TopicPartition(left, 1)] == StoredOffset(3, "back")
        assert not consumer.mark_position("elsewhere", 0, 3)
        assert not consumer.reset_position("elsewhere", 0, 3)


async def test_a_mark_beyond_the_end_is_rejected_and_changes_nothing(
    kafka: KafkaServer, topic: str, group: str, admin: RawAdmin
):
    await fill(kafka, topic, 1, 10)
    place = TopicPartition(topic, 0)
    async with opened(kafka, topic, group, commit_interval=None) as consumer:
        records = await take(consumer, 10)
        stash = OffsetStash()
        stash.mark_position(topic, 0, 50)
        consumer.mark(records[3])
        for beyond in (lambda: consumer.mark_position(topic, 0, 50), lambda: consumer.mark_stashed(stash)):
            beyond()
            (error,) = (await consumer.commit()).values()
            assert isinstance(error, OffsetOutOfRange)
            assert "Position 50" in str(error)
            assert consumer.positions() == {place: StoredOffset(4)}
            assert admin.committed(group, topic).offset == 4
        # What was written and not fetched yet, or is not shown, may be marked.
        consumer.pause()
        await fill(kafka, topic, 1, 10, 10)
        assert consumer.mark_position(topic, 0, 20, "far")
        assert consumer.positions() == {place: StoredOffset(20, "far")}
        assert await consumer.commit() == {place: None}
        assert admin.committed(group, topic).offset == 20
        consumer.mark_position(topic, 0, 70)
        assert consumer.reset_position(topic, 0, 60)
        assert consumer.reset_position(topic, 0, 15)
        assert await consumer.commit() == {place: None}
        assert admin.committed(group, topic).offset == 15


async def test_a_mark_beyond_the_end_is_a_warning_of_a_background_commit(kafka: KafkaServer, topic: str, group: str):
    await fill(kafka, topic, 1, 2)
    warnings: asyncio.Queue[str] = asyncio.Queue()
    async with connect(kafka.url) as bus:
        bus.hooks.listen(lambda event: warnings.put_nowait(event.text) if isinstance(event, Warned) else None)
        async with GroupConsumer(bus, topic, group=group, commit_interval=0.01) as consumer:
            await take(consumer, 2)
            consumer.mark_position(topic, 0, 50)
            async with asyncio.timeout(60):
                assert "Position 50" in await warnings.get()
            assert consumer.positions() == {TopicPartition(topic, 0): None}


async def test_a_stash_is_drained_into_the_consumer(kafka: KafkaServer, make_topic: MakeTopic, group: str):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 10)
    async with opened(kafka, topic, group, commit_interval=None) as consumer:
        stash = OffsetStash()
        for record in reversed(await take(consumer, 20)):
            stash.mark(record)
        stash.mark_position("elsewhere", 3, 7)
        assert consumer.mark_stashed(stash) == [("elsewhere", 3)]
        assert len(stash) == 0
        assert await consumer.commit() == {(topic, 0): None, (topic, 1): None}
        stash.reset_position(topic, 0, 4)
        assert consumer.reset_stashed(stash) == []
        await consumer.commit()
        assert await consumer.committed() == {(topic, 0): StoredOffset(4), (topic, 1): StoredOffset(10)}


async def test_commits_by_time_and_by_count(kafka: KafkaServer, topic: str, group: str, admin: RawAdmin):
    await fill(kafka, topic, 1, 20)
    async with opened(kafka, topic, group, commit_interval=0.1) as consumer:
        records = await take(consumer, 20)
        consumer.mark(records[6])
        await eventually(lambda: admin.committed(group, topic).offset == 7)
        consumer.mark(records[7])
        await eventually(lambda: admin.committed(group, topic).offset == 8)
    async with opened(kafka, topic, group, commit_interval=None, commit_every=5) as consumer:
        records = await take(consumer, 12)
        consumer.mark(records[3])
        assert await consumer.committed() == {(topic, 0): StoredOffset(8)}
        consumer.mark(records[4])
        await eventually(lambda: admin.committed(group, topic).offset == 13)


async def test_only_contiguous_finished_records_are_committed(
    kafka: KafkaServer, topic: str, group: str, admin: RawAdmin
):
    await fill(kafka, topic, 1, 20)
    async with opened(kafka, topic, group, flush_timeout=0.2, close_timeout=0.2) as consumer:
        records = await take(consumer, 20)
        for record in [*records[:5], *records[6:]]:
            consumer.finish(record)
        await consumer.commit()
        assert admin.committed(group, topic).offset == 5
    assert admin.committed(group, topic).offset == 5


async def test_a_commit_rejected_for_one_partition_succeeds_for_others(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin
):
    topic = make_topic(partitions=3)
    await fill(kafka, topic, 3, 10)
    async with opened(kafka, topic, group, commit_interval=None) as consumer:
        last = {record.partition: record for record in await take(consumer, 30)}
        long = "x" * 5000  # the broker takes 4096
        for partition in range(3):
            consumer.mark(last[partition], long if partition == 1 else "")
        results = await consumer.commit()
        assert (results[TopicPartition(topic, 0)], results[TopicPartition(topic, 2)]) == (None, None)
        assert isinstance(results[TopicPartition(topic, 1)], SettleError)
        assert f"Committing 10 of {topic!r}[1] for group {group!r}" in str(results[TopicPartition(topic, 1)])
        assert list(await consumer.commit()) == [(topic, 1)]
        assert [admin.committed(group, topic, partition).offset for partition in range(3)] == [10, -1001, 10]


@both_protocols
async def test_unmarked_records_are_not_committed_after_a_failure(
    kafka: KafkaServer, topic: str, group: str, admin: RawAdmin, protocol: str
):
    await fill(kafka, topic, 1, 10)
    with pytest.raises(ZeroDivisionError):
        async with opened(kafka, topic, group, **options_of(protocol)) as consumer:
            async for record in consumer:
                if record.offset == 4:
                    raise ZeroDivisionError
                if record.offset < 3:
                    consumer.mark(record)
    assert admin.committed(group, topic).offset == 3
    async with opened(kafka, topic, group, **options_of(protocol)) as consumer:
        assert [record.offset for record in await take(consumer, 7)] == list(range(3, 10))


async def test_commit_methods_of_records_and_batches(kafka: KafkaServer, topic: str, group: str, admin: RawAdmin):
    await fill(kafka, topic, 1, 10)
    async with opened(kafka, topic, group, commit_interval=None) as consumer:
        records = aiter(consumer)
        await anext(records)
        await (await anext(records)).commit()
        assert admin.committed(group, topic).offset == 2
        batch = await anext(consumer.batches(3))
        await batch.commit()
        assert admin.committed(group, topic).offset == 5
        record = await anext(records)
    with pytest.raises(Closed):
        await record.commit()


@both_protocols
async def test_a_reassigned_partition_is_committed_again(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin, protocol: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 5)
    options: dict[str, Any] = {**options_of(protocol), "commit_interval": None}
    async with opened(kafka, topic, group, **options) as consumer:
        consumer.mark_all(record for record in await take(consumer, 10) if record.offset < 2)
        async with opened(kafka, topic, group, **options):
            # What goes away is committed within the callback that takes it.
            (gone,) = await eventually(lambda: {0, 1} - {each.partition for each in consumer.assignment()})
        await eventually(lambda: len(consumer.assignment()) == 2)
        assert admin.committed(group, topic, gone).offset == 2
        assert consumer.mark_position(topic, gone, 4)
        async with asyncio.timeout(60):
            assert (await consumer.commit())[TopicPartition(topic, gone)] is None
        assert admin.committed(group, topic, gone).offset == 4


@both_protocols
async def test_a_record_of_an_earlier_assignment_marks_nothing(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 5)
    options: dict[str, Any] = {**options_of(protocol), "commit_interval": None}
    async with opened(kafka, topic, group, **options) as consumer:
        records = await take(consumer, 10)
        async with opened(kafka, topic, group, **options):
            (gone,) = await eventually(lambda: {0, 1} - {each.partition for each in consumer.assignment()})
        await eventually(lambda: len(consumer.assignment()) == 2)
        old = [record for record in records if record.partition == gone]
        assert not consumer.mark(old[-1])
        assert not consumer.finish(old[-1])
        assert not consumer.reset(old[-1])
        assert not consumer.mark_all(records)
        stash = OffsetStash()
        stash.mark(old[-1])
        assert consumer.mark_stashed(stash) == [(topic, gone)]
        assert consumer.positions()[TopicPartition(topic, gone)] is None
        taken = rf"was taken away from this member of group {group!r} before"
        with pytest.raises(LeaseLost, match=f"{taken} the commit"):
            await old[-1].commit()
        with pytest.raises(LeaseLost, match=f"{taken} its results were saved"):
            await consumer.save_point(old)
        assert {record.offset for record in await take(consumer, 5)} == set(range(5))


@pytest.mark.parametrize("same", [True, False], ids=["reopened", "another-group"])
async def test_a_record_of_another_consumer_marks_nothing(kafka: KafkaServer, topic: str, group: str, same: bool):
    """Each consumer's first assignment of a partition is like the other's, and only one of them was handed these."""
    await fill(kafka, topic, 1, 20)
    store = MemoryOffsetStore()
    stash = OffsetStash()
    async with opened(kafka, topic, group, commit_interval=None, store=store) as former:
        late = await take(former, 20)
        former.mark(late[4])
        await former.commit()
        point = await former.save_point(late)
        stash.mark(late[-1])
    other = group if same else f"{group}-other"
    begin = 5 if same else 0
    async with opened(kafka, topic, other, commit_interval=None, store=store) as consumer:
        await eventually(lambda: len(consumer.assignment()) == 1)
        before = consumer.positions()
        assert not consumer.mark(late[-1])
        assert not consumer.finish(late[begin])
        assert not consumer.reset(late[0])
        assert not consumer.mark_all(late)
        assert consumer.mark_stashed(stash) == [(topic, 0)]
        consumer.saved(point)
        with pytest.raises(LeaseLost):
            await consumer.commit_records(late)
        with pytest.raises(LeaseLost):
            await consumer.save_point(late)
        assert consumer.positions() == before
        assert await consumer.commit() == {}
        ours = await take(consumer, 20 - begin)
        assert ours[0].offset == begin
        # One of another consumer in between takes nothing from its neighbours, nor gives them anything.
        assert not consumer.mark_all([ours[2], late[-1], ours[0]])
        assert consumer.positions()[TopicPartition(topic, 0)] == StoredOffset(ours[2].offset + 1)


async def test_the_highest_record_of_a_run_is_marked(kafka: KafkaServer, topic: str, group: str):
    await fill(kafka, topic, 1, 10)
    async with opened(kafka, topic, group, commit_interval=None) as consumer:
        records = await take(consumer, 10)
        assert consumer.mark_all([records[2], records[7], records[5]])
        assert consumer.positions()[TopicPartition(topic, 0)] == StoredOffset(8)
