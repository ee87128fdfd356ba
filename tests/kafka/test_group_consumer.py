"""The group consumer on a real broker: assignment, both ways of reading, and close."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.errors import Closed, ConfigurationError, TopicNotFound
from broker_kafka.group import GroupConsumer, PartitionStream, Rebalance
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import (
    both_protocols,
    eventually,
    every_protocol,
    fill,
    opened,
    options_of,
    take,
    values_of,
)
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

T = TypeVar("T")


def per_topic(consumer: GroupConsumer) -> Counter[str]:
    return Counter(place.topic for place in consumer.assignment())


# -- who gets what ---------------------------------------------------------------------------------------------


@every_protocol
async def test_partitions_are_shared_and_taken_over(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topics = [make_topic(partitions=4), make_topic(partitions=4)]
    options = options_of(protocol)
    if protocol == "consumer":
        options["group_remote_assignor"] = "range"
    async with opened(kafka, topics, group, **options) as first:
        await eventually(lambda: len(first.assignment()) == 8)
        assert first.subscription() == sorted(topics)
        async with opened(kafka, topics, group, **options) as second:
            shares = dict.fromkeys(topics, 2)
            await eventually(lambda: len(first.assignment()) == len(second.assignment()) == 4)
            if protocol in ("range", "consumer"):
                assert per_topic(first) == per_topic(second) == shares
            assert not set(first.assignment()) & set(second.assignment())
        await eventually(lambda: len(first.assignment()) == 8)


@every_protocol
async def test_more_members_than_partitions(kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str):
    topic = make_topic(partitions=4)
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(opened(kafka, topic, group, **options_of(protocol))) for _ in range(5)
        ]
        await eventually(lambda: sorted(len(each.assignment()) for each in members) == [0, 1, 1, 1, 1])
        busy = next(each for each in members if each.assignment())
        await busy.close()
        rest = [each for each in members if each is not busy]
        await eventually(lambda: [len(each.assignment()) for each in rest] == [1, 1, 1, 1])
        assert sorted(each.assignment()[0].partition for each in rest) == [0, 1, 2, 3]


# -- both ways of reading --------------------------------------------------------------------------------------


@every_protocol
async def test_all_partitions_in_one(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin, protocol: str
):
    topic = make_topic(partitions=4)
    await fill(kafka, topic, 4, 300)
    seen: dict[int, list[bytes | None]] = {}
    async with opened(kafka, topic, group, stop_when_idle=1.0, **options_of(protocol)) as consumer:
        async for record in consumer:
            seen.setdefault(record.partition, []).append(record.data)
            assert consumer.mark(record, f"at {record.offset}")
    assert seen == {partition: values_of(partition, 300) for partition in range(4)}
    for partition in range(4):
        stored = admin.committed(group, topic, partition)
        assert (stored.offset, stored.metadata) == (300, "at 299")


@every_protocol
async def test_a_stream_for_each_partition(kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str):
    topic = make_topic(partitions=4)
    await fill(kafka, topic, 4, 300)
    seen: dict[int, list[bytes | None]] = {}
    async with opened(kafka, topic, group, stop_when_idle=1.0, **options_of(protocol)) as consumer:

        async def work(stream: PartitionStream) -> None:
            assert stream.place == (topic, stream.partition)
            async for record in stream:
                assert record.partition == stream.partition
                seen.setdefault(stream.partition, []).append(record.data)
                consumer.mark(record)
            assert stream.position == 300

        async with asyncio.TaskGroup() as tasks:
            async for stream in consumer.partitions():
                tasks.create_task(work(stream))
    assert seen == {partition: values_of(partition, 300) for partition in range(4)}


async def test_what_holds_the_event_loop_is_named(
    kafka: KafkaServer,
    make_topic: MakeTopic,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr("broker.driver.loop_watch._WITHOUT_LEASE", 0.6)
    async with opened(kafka, make_topic(partitions=1), group):
        await asyncio.sleep(0.1)
        time.sleep(1.0)  # noqa: ASYNC251  # this test is about a blocked loop
        await eventually(lambda: any("held the event loop for" in text for text in caplog.messages))
    assert not [thread for thread in threading.enumerate() if thread.name == "broker-loop-watch"]


async def test_a_stream_that_is_not_read_holds_up_no_other(kafka: KafkaServer, make_topic: MakeTopic, group: str):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 5000)
    read = 0
    async with opened(kafka, topic, group, max_buffered=100) as consumer:
        streams = {stream.partition: stream async for stream in first(consumer.partitions(), 2)}
        async with asyncio.timeout(60):
            async for batch in streams[1].batches(200):
                read += len(batch)
                if read == 5000:
                    break
            assert consumer._member is not None
            buffered = consumer._member.assignments[TopicPartition(topic, 0)].records
            await eventually(lambda: len(buffered) >= 100)
            again = 0
            async for batch in streams[0].batches(200):
                assert batch[0].offset == again
                again = batch[-1].offset + 1
                if again == 5000:
                    break
    assert (read, again) == (5000, 5000)


async def first(items: AsyncIterable[T], count: int) -> AsyncGenerator[T]:
    async for item in items:
        yield item
        count -= 1
        if not count:
            return


async def test_the_buffer_is_bounded(kafka: KafkaServer, make_topic: MakeTopic, group: str):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 10_000)
    async with opened(kafka, topic, group, max_buffered=1000) as consumer:
        (record,) = [record async for record in first(consumer, 1)]
        member = consumer._member
        assert member is not None
        # The client's thread stops fetching while there is no room.
        await eventually(lambda: member.thread._stalled_since is not None)
        assert len(member.buffer) <= 2000
        assert record.offset == 0
        assert len(await take(consumer, 19_999)) == 19_999


async def test_only_one_iteration_at_a_time(kafka: KafkaServer, topic: str, group: str):
    async with opened(kafka, topic, group) as consumer:
        consumer.batches()
        aiter(consumer)
        with pytest.raises(ConfigurationError, match="both as a whole and by partition"):
            consumer.partitions()
        with pytest.raises(ConfigurationError, match="max_records is 0"):
            consumer.batches(0)


async def test_a_cancelled_step_takes_nothing(kafka: KafkaServer, topic: str, group: str):
    async with opened(kafka, topic, group) as consumer:
        await eventually(consumer.assignment)
        records = aiter(consumer)
        for _ in range(3):
            step = asyncio.ensure_future(anext(records))
            await asyncio.sleep(0.05)
            step.cancel()
            await asyncio.wait((step,))
        await fill(kafka, topic, 1, 2)
        async with asyncio.timeout(60):
            assert [(await anext(records)).offset for _ in range(2)] == [0, 1]


# -- the end ---------------------------------------------------------------------------------------------------


async def test_closing_twice_and_concurrently(kafka: KafkaServer, topic: str, group: str):
    async with opened(kafka, topic, group) as consumer:
        await eventually(consumer.assignment)
        await asyncio.gather(consumer.close(), consumer.close())
        await consumer.close()
        assert consumer.closed
        with pytest.raises(Closed):
            consumer.assignment()


async def test_close_ends_iterations(kafka: KafkaServer, topic: str, group: str):
    async with opened(kafka, topic, group) as consumer:
        reader = asyncio.ensure_future(take(consumer, 1))
        await eventually(consumer.assignment)
        await consumer.close()
        assert await reader == []


async def test_the_body_of_a_loop_may_close(kafka: KafkaServer, topic: str, group: str, admin: RawAdmin):
    await fill(kafka, topic, 1, 5)
    async with opened(kafka, topic, group) as consumer:
        begun = 0.0
        async for record in consumer:
            begun = time.monotonic()
            consumer.mark(record)
            await consumer.close()
        assert time.monotonic() - begun < 20  # close_timeout is 30 seconds
    assert admin.committed(group, topic).offset == 1


async def test_the_bus_closes_open_consumers(kafka: KafkaServer, topic: str, group: str, admin: RawAdmin):
    await fill(kafka, topic, 1, 5)
    async with connect(kafka.url) as bus:
        consumer = await GroupConsumer(bus, topic, group=group).__aenter__()
        consumer.mark((await take(consumer, 5))[-1])
    assert consumer.closed
    assert admin.committed(group, topic).offset == 5


@both_protocols
async def test_closing_during_a_rebalance_does_not_hang(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=4)
    revoking = asyncio.Event()

    async def dwell(event: Rebalance) -> None:
        revoking.set()
        await asyncio.sleep(60)

    options = options_of(protocol)
    async with opened(kafka, topic, group, on_revoking=dwell, flush_timeout=90, close_timeout=0.5, **options) as first:
        await eventually(lambda: len(first.assignment()) == 4)
        async with opened(kafka, topic, group, **options) as second:
            await revoking.wait()
            begun = time.monotonic()
            await first.close()
            assert time.monotonic() - begun < 30
            await eventually(lambda: len(second.assignment()) == 4)


@pytest.mark.deep
async def test_a_callback_may_close(kafka: KafkaServer, make_topic: MakeTopic, group: str):
    topic = make_topic(partitions=4)
    closers: list[Callable[[], Any]] = []

    async def close(event: Rebalance) -> None:
        await closers[0]()

    async with opened(kafka, topic, group, on_revoking=close) as consumer:
        closers.append(consumer.close)
        await eventually(lambda: len(consumer.assignment()) == 4)
        async with opened(kafka, topic, group) as second:
            await eventually(lambda: len(second.assignment()) == 4)
        assert consumer.closed


async def test_opening_raises_for_a_missing_topic(kafka: KafkaServer, topic: str, group: str):
    with pytest.raises(TopicNotFound, match="nowhere"):
        async with opened(kafka, [topic, "nowhere"], group):
            pass
