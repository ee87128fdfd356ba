"""The topics of a group consumer: patterns, new and deleted topics, starts, seeks, pauses, lag, positions below the log
start, and offset stores outside Kafka."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.errors import BackendError, ConfigurationError, LeaseLost, OffsetOutOfRange, TopicNotFound
from broker.hooks import Event, PositionReset
from broker_kafka.backend import KafkaBackend
from broker_kafka.group import GroupConsumer, TopicPattern
from broker_kafka.group.topics import TopicWatch, read_topics
from broker_kafka.offsets import GroupMember, MemoryOffsetStore, StoredOffset
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import bare, both_protocols, eventually, every_protocol, fill, opened, options_of, take
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce

END = -1
SOON: dict[str, Any] = {"topic_metadata_refresh_interval_ms": 300}


# -- topics ----------------------------------------------------------------------------------------------------


@every_protocol
async def test_patterns_include_topics_unless_excluded(
    kafka: KafkaServer, make_topic: MakeTopic, admin: RawAdmin, group: str, protocol: str
):
    prefix = f"p{uuid.uuid4().hex[:8]}"
    for name in ("orders-eu", "orders-test"):
        admin.make_topic(f"{prefix}-{name}")
    explicit = admin.make_topic(f"{prefix}-audit-test")
    pattern = TopicPattern(include=f"{prefix}-.*", exclude=f"{prefix}-.*-test")
    topics = [explicit, pattern]
    async with opened(kafka, topics, group, stop_when_idle=None, **SOON, **options_of(protocol)) as consumer:
        assert consumer.subscription() == sorted([explicit, f"{prefix}-orders-eu"])
        await eventually(lambda: {place.topic for place in consumer.assignment()} == set(consumer.subscription()))
        new = admin.make_topic(f"{prefix}-orders-us", 2)
        admin.make_topic(f"{prefix}-payments-test")
        await fill(kafka, new, 2, 5)
        await eventually(lambda: len(consumer.assignment()) == 4)
        records = await take(consumer, 10)
        assert {record.topic for record in records} == {new}
        consumer.mark_all(records)
        admin.delete_topic(f"{prefix}-orders-eu")
        await eventually(lambda: consumer.subscription() == sorted([explicit, new]))
        await eventually(lambda: {place.topic for place in consumer.assignment()} == {explicit, new})
        await fill(kafka, new, 2, 5, 5)
        assert {record.offset for record in await take(consumer, 10)} == set(range(5, 10))


@both_protocols
async def test_a_pattern_without_matches_waits_for_topics(
    kafka: KafkaServer, admin: RawAdmin, group: str, protocol: str
):
    prefix = f"p{uuid.uuid4().hex[:8]}"
    async with opened(kafka, TopicPattern(f"{prefix}-.*"), group, **SOON, **options_of(protocol)) as consumer:
        assert consumer.subscription() == []
        first = admin.make_topic(f"{prefix}-first")
        await eventually(lambda: consumer.assignment() == [(first, 0)])
        admin.delete_topic(first)
        await eventually(lambda: consumer.subscription() == [] and consumer.assignment() == [])
        second = admin.make_topic(f"{prefix}-second")
        await eventually(lambda: consumer.assignment() == [(second, 0)])


@both_protocols
async def test_deleting_an_explicit_topic_ends_the_reading(
    kafka: KafkaServer, make_topic: MakeTopic, admin: RawAdmin, group: str, protocol: str
):
    topics = [make_topic(), make_topic()]
    async with opened(kafka, topics, group, **SOON, **options_of(protocol)) as consumer:
        await eventually(lambda: len(consumer.assignment()) == 2)
        admin.delete_topic(topics[0])
        with pytest.raises(TopicNotFound, match=topics[0]):
            await take(consumer, 1)
        assert consumer.closed


@both_protocols
async def test_a_rejected_commit_reports_the_deleted_topic_at_once(
    kafka: KafkaServer, topic: str, admin: RawAdmin, group: str, protocol: str
):
    await fill(kafka, topic, 1, 2)
    # Topics are looked for every 30 s by default: who marks learns of it by the commit.
    options = {"commit_interval": 0.2, "stop_when_idle": None, **options_of(protocol)}
    async with opened(kafka, topic, group, **options) as consumer:
        records = await take(consumer, 2)
        admin.delete_topic(topic)
        consumer.mark_all(records)
        async with asyncio.timeout(60):
            with pytest.raises(TopicNotFound, match=topic):
                await take(consumer, 1)
        assert consumer.closed


@both_protocols
async def test_added_partitions_are_read_from_offset_zero(
    kafka: KafkaServer, topic: str, admin: RawAdmin, group: str, protocol: str
):
    options = {"start": "latest", **SOON, **options_of(protocol)}
    async with opened(kafka, topic, group, **options) as consumer:
        await eventually(lambda: len(consumer.assignment()) == 1)
        admin.add_partitions(topic, 3)
        await fill(kafka, topic, 3, 5)
        assert len(await take(consumer, 15)) == 15


# -- starts ----------------------------------------------------------------------------------------------------


@pytest.mark.deep
@both_protocols
async def test_a_new_group_begins_at_its_start(kafka: KafkaServer, make_topic: MakeTopic, protocol: str):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 10)
    await asyncio.sleep(0.05)
    moment = datetime.now(UTC)
    await asyncio.sleep(0.05)
    await fill(kafka, topic, 2, 10, 10)
    begins: list[tuple[Any, list[int]]] = [
        ("earliest", [0, 0]),
        (moment, [10, 10]),
        (moment + timedelta(days=1), [END, END]),
        ({TopicPartition(topic, 1): 15}, [0, 15]),
        ({(topic, 0): 3, (topic, 1): 20}, [3, 20]),
        ("latest", [END, END]),
    ]
    for number, (start, expected) in enumerate(begins):
        group = f"group-{uuid.uuid4().hex[:8]}-{number}"
        async with opened(kafka, topic, group, start=start, **options_of(protocol)) as consumer:
            await eventually(lambda: len(consumer.assignment()) == 2)
            await fill(kafka, topic, 2, 1, 20 + number)
            expected = [20 + number if begin == END else begin for begin in expected]
            records = await take(consumer, 2 * (21 + number) - sum(expected))
            for partition in (0, 1):
                offsets = [record.offset for record in records if record.partition == partition]
                assert offsets == list(range(expected[partition], 21 + number)), start


async def test_a_start_beyond_the_end_is_out_of_range(kafka: KafkaServer, topic: str, group: str):
    async with opened(kafka, topic, group, start={(topic, 0): 7}) as consumer:
        with pytest.raises(OffsetOutOfRange, match="position 7 is not in the log"):
            await take(consumer, 1)


@both_protocols
@pytest.mark.parametrize("policy", ["error", "earliest", "latest"])
async def test_offset_reset_applies_below_the_log_start(
    kafka: KafkaServer, topic: str, group: str, admin: RawAdmin, policy: str, protocol: str
):
    await fill(kafka, topic, 1, 20)
    async with opened(kafka, topic, group, **options_of(protocol)) as consumer:
        consumer.mark((await take(consumer, 20))[4])
    await asyncio.to_thread(admin.delete_records, topic, 10)
    events: list[Event] = []
    async with connect(kafka.url) as bus:
        bus.hooks.listen(events.append)
        options: dict[str, Any] = {**options_of(protocol), "offset_reset": policy, "commit_interval": 0.1}
        async with GroupConsumer(bus, topic, group=group, **options) as consumer:
            if policy == "error":
                with pytest.raises(OffsetOutOfRange, match="position 5 is not in the log, which begins at 10"):
                    await take(consumer, 1)
                return
            to = 10 if policy == "earliest" else 20
            await eventually(lambda: consumer.resets)
            assert consumer.resets == {(topic, 0): 1}
            await fill(kafka, topic, 1, 5, 20)
            records = await take(consumer, 25 - to)
            assert [record.offset for record in records] == list(range(to, 25))
            consumer.mark(records[0])
            await eventually(lambda: admin.committed(group, topic).offset == to + 1)
    (reset,) = [event for event in events if isinstance(event, PositionReset)]
    assert (reset.position, reset.to, reset.policy) == (5, to, policy)


# -- seeks, pauses, lag ----------------------------------------------------------------------------------------


@both_protocols
async def test_reading_continues_from_a_seek(kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 50)
    async with opened(kafka, topic, group, **options_of(protocol)) as consumer:
        assert len(await take(consumer, 100)) == 100
        await consumer.seek({(topic, 1): 30})
        assert [(r.partition, r.offset) for r in await take(consumer, 20)] == [(1, offset) for offset in range(30, 50)]
        await consumer.seek({(topic, 0): 50, (topic, 1): 49})
        assert [(r.partition, r.offset) for r in await take(consumer, 1)] == [(1, 49)]
        with pytest.raises(OffsetOutOfRange, match="51"):
            await consumer.seek({(topic, 0): 51})
        with pytest.raises(ConfigurationError, match="-1"):
            await consumer.seek({(topic, 0): -1})
        async with opened(kafka, topic, group, **options_of(protocol)):
            await eventually(lambda: len(consumer.assignment()) == 1)
            (mine,) = consumer.assignment()
            with pytest.raises(LeaseLost):
                await consumer.seek({(topic, 1 - mine.partition): 3})


@both_protocols
async def test_a_paused_partition_is_not_delivered(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=2)
    async with opened(kafka, topic, group, **options_of(protocol)) as consumer:
        await eventually(lambda: len(consumer.assignment()) == 2)
        consumer.pause([(topic, 0)])
        await fill(kafka, topic, 2, 30)
        assert {record.partition for record in await take(consumer, 30)} == {1}
        await fill(kafka, topic, 2, 5, 30)
        assert {record.partition for record in await take(consumer, 5)} == {1}
        consumer.resume()
        assert [(r.partition, r.offset) for r in await take(consumer, 35)] == [(0, offset) for offset in range(35)]


async def test_a_pause_keeps_buffered_records_and_ends_with_the_assignment(
    kafka: KafkaServer, make_topic: MakeTopic, group: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 30)
    async with opened(kafka, topic, group) as consumer:
        records = aiter(consumer)
        seen = [await anext(records)]
        consumer.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await anext(records)
        async with opened(kafka, topic, group):
            await eventually(lambda: len(consumer.assignment()) == 1)
        await eventually(lambda: len(consumer.assignment()) == 2)
        consumer.resume()
        places: set[tuple[int, int]] = {(seen[0].partition, seen[0].offset)}
        async with asyncio.timeout(60):
            while len(places) < 60:
                record = await anext(records)
                places.add((record.partition, record.offset))


@both_protocols
async def test_high_water_marks_and_lag(kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 30)
    async with opened(kafka, topic, group, **options_of(protocol)) as consumer:
        records = await take(consumer, 60)
        places = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        assert await consumer.high_water_marks() == dict.fromkeys(places, 30)
        assert await consumer.lag() == dict.fromkeys(places, 30)
        consumer.mark(next(record for record in records if record.partition == 1 and record.offset == 9))
        assert await consumer.lag() == {places[0]: 30, places[1]: 20}
        await asyncio.to_thread(produce, kafka.bootstrap, topic, [b"more"], partition=0)
        assert (await consumer.lag())[places[0]] == 31
        await take(consumer, 1)
        assert (await consumer.high_water_marks())[places[0]] == 31


# -- stores ----------------------------------------------------------------------------------------------------


@both_protocols
async def test_positions_are_kept_in_the_given_store(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin, protocol: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 10)
    store = MemoryOffsetStore()
    async with opened(kafka, topic, group, store=store, **options_of(protocol)) as consumer:
        records = await take(consumer, 20)
        consumer.mark_all([record for record in records if record.offset < 5], "half")
        assert await consumer.commit() == {(topic, 0): None, (topic, 1): None}
        async with opened(kafka, topic, group, store=store, **options_of(protocol)) as second:
            await eventually(lambda: len(second.assignment()) == 1)
            (place,) = second.assignment()
            assert [record.offset for record in await take(second, 5)] == list(range(5, 10))
            assert second.positions() == {place: StoredOffset(5, "half")}
            second.mark_position(*place, 10)
            second.reset_position(*place, 3, "back")
    assert bare(await store.fetch(group, [place])) == {place: StoredOffset(3, "back")}
    assert admin.committed(group, topic).offset == -1001


async def test_a_recreated_group_may_restart_its_generations(kafka: KafkaServer, topic: str, group: str):
    """Kafka forgets a group without positions of its own; the store still knows its last generation."""
    store = MemoryOffsetStore()
    await fill(kafka, topic, 1, 10)
    place = TopicPartition(topic, 0)
    former = GroupMember(group, 1000, "former")
    await store.claim(former, [place])
    await store.commit(former, {place: StoredOffset(4)})
    async with opened(kafka, topic, group, store=store) as consumer:
        records = await take(consumer, 6)
        assert records[0].offset == 4
        await records[-1].commit()
    assert bare(await store.fetch(group, [place])) == {place: StoredOffset(10)}


async def test_a_failed_subscribe_is_retried_at_the_next_refresh(kafka: KafkaServer, make_topic: MakeTopic):
    subscribed: list[Sequence[str]] = []

    async def subscribe(topics: Sequence[str]) -> None:
        subscribed.append(topics)
        if len(subscribed) == 2:
            raise BackendError("The client does not", retriable=True)

    prefix = f"watched-{uuid.uuid4().hex[:8]}"
    first = make_topic(name=f"{prefix}-1")
    async with connect(kafka.url) as bus:
        assert isinstance(bus.backend, KafkaBackend)
        pattern = read_topics(TopicPattern(f"{prefix}-.*"))
        watch = TopicWatch(bus.backend.connection, pattern, interval=0.1, subscribe=subscribe, failed=lambda _: None)
        await watch.open()
        await watch.start()
        second = make_topic(name=f"{prefix}-2")
        await eventually(lambda: len(subscribed) == 3)
        assert subscribed == [[first], [first, second], [first, second]]
        assert watch.topics == [first, second]
        await watch.stop()


async def test_topics_are_not_refreshed_by_time_if_that_is_off(kafka: KafkaServer, admin: RawAdmin, group: str) -> None:
    prefix = f"still-{uuid.uuid4().hex[:8]}"
    first, second = f"{prefix}-1", f"{prefix}-2"
    pattern = TopicPattern(f"{prefix}-.*")
    async with connect(kafka.url) as bus:
        await bus.admin.ensure_topic(first)
        async with (
            GroupConsumer(bus, pattern, group=group, topic_metadata_refresh_interval_ms=-1) as still,
            GroupConsumer(bus, pattern, group=f"{group}-2", **SOON) as looking,
        ):
            await bus.admin.ensure_topic(second)
            await eventually(lambda: looking.subscription() == [first, second])
            assert still.subscription() == [first]
