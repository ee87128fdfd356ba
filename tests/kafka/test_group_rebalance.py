"""Rebalances: the events and callbacks, their time and order, and what a member keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.hooks import Event, PartitionsAssigned, PartitionsRevoked
from broker_kafka.group import GroupConsumer, PartitionStream, Rebalance, consumer_member
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import both_protocols, eventually, every_protocol, fill, opened, options_of, take
from tests.kafka.test_group_leaving import patient
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin


class Log:
    """The events that callbacks got, with their times."""

    def __init__(self) -> None:
        self.reported: list[Rebalance] = []

    def __call__(self, event: Rebalance) -> None:
        self.reported.append(event)

    @property
    def events(self) -> dict[str, Callable[[Rebalance], None]]:
        return {"on_assigned": self, "on_revoking": self, "on_lost": self}


@every_protocol
async def test_rebalance_events_list_assigned_revoked_and_current_partitions(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=4)
    everything = tuple(TopicPartition(topic, partition) for partition in range(4))
    log, options = Log(), options_of(protocol)
    hooked: list[Event] = []
    async with connect(kafka.url) as bus:
        bus.hooks.listen(hooked.append)
        async with GroupConsumer(bus, topic, group=group, **log.events, **options) as consumer:
            await eventually(lambda: log.reported)
            assert log.reported[0] == Rebalance(assigned=everything, current=everything)
            async with opened(kafka, topic, group, **options):
                await eventually(
                    lambda: len(consumer.assignment()) == 2 and any(event.revoked for event in log.reported)
                )
                kept = tuple(consumer.assignment())
                (revoked,) = [event for event in log.reported if event.revoked]
                if protocol in ("cooperative-sticky", "consumer"):
                    assert revoked.revoked == tuple(sorted(set(everything) - set(kept)))
                    assert revoked.current == kept
                    assert [event.assigned for event in log.reported if event.assigned] == [everything]
                else:
                    assert revoked.revoked == everything
                    assert revoked.current == ()
                assert revoked.deadline is not None
            # A callback runs soon after the partitions are there.
            await eventually(lambda: log.reported[-1].current == everything)
        assert log.reported[-1].revoked == everything
        assert log.reported[-1].current == ()
    assert not any(event.lost for event in log.reported)
    assert sum(isinstance(event, PartitionsAssigned) for event in hooked) == sum(bool(e.assigned) for e in log.reported)
    assert sum(isinstance(event, PartitionsRevoked) for event in hooked) == sum(bool(e.revoked) for e in log.reported)


@every_protocol
async def test_on_revoking_runs_before_the_release(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin, protocol: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 10)
    order: list[str] = []
    consumers: list[GroupConsumer] = []

    async def flush(event: Rebalance) -> None:
        order.append("revoked")
        await asyncio.sleep(0.3)
        for place in event.revoked:
            assert consumers[0].mark_position(*place, 7, "flushed")
        order.append("flushed")

    def assigned(event: Rebalance) -> None:
        order.append("assigned to the other")

    options: dict[str, Any] = {"commit_interval": None, **options_of(protocol)}
    async with opened(kafka, topic, group, on_revoking=flush, **options) as first:
        consumers.append(first)
        await eventually(lambda: len(first.assignment()) == 2)
        async with opened(kafka, topic, group, on_assigned=assigned, **options) as second:
            (place,) = await eventually(second.assignment)
            assert (await anext(aiter(second))).offset == 7
            assert order[:3] == ["revoked", "flushed", "assigned to the other"]
            assert admin.committed(group, topic, place.partition).metadata == "flushed"


@both_protocols
async def test_a_release_without_work_in_flight_takes_no_time(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=4)
    options = options_of(protocol)
    log = Log()
    async with opened(kafka, topic, group, flush_timeout=60, **log.events, **options) as first:
        reader = asyncio.ensure_future(anext(aiter(first)))
        await eventually(lambda: len(first.assignment()) == 4)
        begun = time.monotonic()
        async with opened(kafka, topic, group, flush_timeout=60, **options) as second:
            await eventually(lambda: len(second.assignment()) == 2)
        assert time.monotonic() - begun < 40
        reader.cancel()


@both_protocols
async def test_the_flush_deadline_cancels_callbacks(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=2)
    ends: list[str] = []

    async def never(event: Rebalance) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    options = options_of(protocol)
    async with opened(kafka, topic, group, on_revoking=never, flush_timeout=0.5, close_timeout=0.5, **options) as first:
        await eventually(lambda: len(first.assignment()) == 2)
        async with opened(kafka, topic, group, **options) as second:
            await eventually(second.assignment)
            assert ends == ["cancelled"]


@both_protocols
@pytest.mark.parametrize("way", ["records", "batches", "streams", "finish"])
async def test_work_in_flight_is_finished_before_a_release(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str, way: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 20)
    options = options_of(protocol)
    working = asyncio.Event()
    done: list[tuple[int, int]] = []
    tasks: set[asyncio.Task[None]] = set()

    async with opened(kafka, topic, group, commit_interval=None, **options) as first:

        async def work(record: Any) -> None:
            working.set()
            await asyncio.sleep(0.1)
            done.append((record.partition, record.offset))

        async def by_stream(stream: PartitionStream) -> None:
            async for record in stream:
                await work(record)
                first.mark(record)

        async def finish(record: Any) -> None:
            await work(record)
            first.finish(record)

        async def read() -> None:
            if way == "streams":
                async for stream in first.partitions():
                    tasks.add(asyncio.create_task(by_stream(stream)))
            elif way == "batches":
                async for batch in first.batches(7):
                    for record in batch:
                        await work(record)
                    first.mark_all(batch)
            else:
                async for record in first:
                    if way == "finish":
                        tasks.add(asyncio.create_task(finish(record)))
                        await asyncio.sleep(0.05)
                    else:
                        await work(record)
                        first.mark(record)

        reader = asyncio.create_task(read())
        await working.wait()
        async with opened(kafka, topic, group, **options) as second:
            other = asyncio.create_task(collect(second, done))
            await eventually(lambda: len(set(done)) == 40)
            tasks |= {reader, other}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    assert sorted(done) == [(partition, offset) for partition in (0, 1) for offset in range(20)]


async def collect(consumer: GroupConsumer, done: list[tuple[int, int]]) -> None:
    async for record in consumer:
        done.append((record.partition, record.offset))
        consumer.mark(record)


@both_protocols
async def test_on_assigned_returns_before_the_first_record(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 5)
    order: list[str] = []

    async def load(event: Rebalance) -> None:
        await asyncio.sleep(0.3)
        order.append("loaded")

    async with opened(kafka, topic, group, on_assigned=load, **options_of(protocol)) as consumer:
        async for _ in consumer:
            order.append("record")
            if len(order) == 11:
                break
    assert order[0] == "loaded"
    assert order.count("loaded") == 1


async def test_a_slow_on_assigned_is_a_warning(
    kafka: KafkaServer,
    topic: str,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(consumer_member, "_SLOW_CALLBACK", 0.1)
    await fill(kafka, topic, 1, 5)
    go_on = asyncio.Event()

    async def hang(event: Rebalance) -> None:
        await go_on.wait()

    async with opened(kafka, topic, group, on_assigned=hang) as consumer:
        await eventually(lambda: "on_assigned has not returned" in caplog.text)
        assert topic in caplog.text
        go_on.set()
        assert len(await take(consumer, 5)) == 5


async def test_a_failing_callback_does_not_block_the_release(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, caplog: pytest.LogCaptureFixture
):
    topic = make_topic(partitions=2)

    def fail(event: Rebalance) -> None:
        raise ZeroDivisionError

    async with opened(kafka, topic, group, on_assigned=fail, on_revoking=fail) as first:
        await eventually(lambda: len(first.assignment()) == 2)
        async with opened(kafka, topic, group) as second:
            await eventually(second.assignment)
    assert f"A rebalance callback failed on {Rebalance.__name__}" in caplog.text
    assert topic in caplog.text


@pytest.mark.deep
@both_protocols
async def test_retained_partitions_are_read_without_a_gap(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    """Nothing is committed here, so a partition that is read again would deliver its records twice."""
    topic = make_topic(partitions=4)
    await fill(kafka, topic, 4, 500)
    seen: list[tuple[int, int]] = []
    options: dict[str, Any] = {"commit_interval": None, **options_of(protocol)}
    async with opened(kafka, topic, group, **options) as first:

        async def read() -> None:
            async for record in first:
                seen.append((record.partition, record.offset))
                await asyncio.sleep(0.001)

        reader = asyncio.create_task(read())
        await eventually(lambda: len(seen) > 100)
        async with opened(kafka, topic, group, **options):
            await eventually(lambda: len(first.assignment()) == 2)
            kept = {place.partition for place in first.assignment()}
            await fill(kafka, topic, 4, 100, 500)
            await eventually(lambda: len([1 for partition, _ in seen if partition in kept]) >= 1200)
            theirs = [(partition, offset) for partition, offset in seen if partition in kept]
            assert sorted(theirs) == [(partition, offset) for partition in sorted(kept) for offset in range(600)]
            for partition in kept:
                assert [offset for each, offset in theirs if each == partition] == list(range(600))
        reader.cancel()


@pytest.mark.deep
@both_protocols
async def test_a_returning_static_member_causes_no_rebalance(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=4)
    await fill(kafka, topic, 4, 10)
    log, options = Log(), options_of(protocol)
    async with opened(kafka, topic, group, group_instance_id="one", **log.events, **options) as first:
        await eventually(lambda: len(first.assignment()) == 4)
        async with opened(kafka, topic, group, group_instance_id="two", **options) as second:
            await eventually(lambda: len(first.assignment()) == len(second.assignment()) == 2)
            theirs = second.assignment()
            async for record in second:
                second.mark(record)
                if record.offset == 9:
                    break
        reported = len(log.reported)
        async with opened(kafka, topic, group, group_instance_id="two", **options) as again:
            await eventually(lambda: again.assignment() == theirs)
            assert len(log.reported) == reported


@pytest.mark.deep
@both_protocols
async def test_slow_handlers_never_exceed_the_poll_interval(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 3000)
    log = Log()
    options = {**options_of(protocol), "session_timeout_ms": 2000, "max_poll_interval_ms": 2000, "max_buffered": 100}
    seen: list[int] = []
    async with opened(kafka, topic, group, **log.events, **options) as consumer:
        async for record in consumer:
            if not seen:
                await asyncio.sleep(3)
            seen.append(record.offset)
            if len(seen) == 6000:
                break
        assert not any(event.lost or event.revoked for event in log.reported)
    assert sorted(seen) == sorted([*range(3000), *range(3000)])


@pytest.mark.deep
@both_protocols
@pytest.mark.parametrize("stay", [0.0, 0.1, 0.6, 1.2])
async def test_a_member_that_leaves_ends_its_session(
    kafka: KafkaServer, admin: RawAdmin, make_topic: MakeTopic, group: str, protocol: str, stay: float
):
    topic = make_topic(partitions=4)
    # A session that would be waited for is longer than the patience below.
    options = patient(protocol)
    if protocol == "consumer":
        admin.configure_group(group, {"consumer.session.timeout.ms": "45000"})
    async with opened(kafka, topic, group, **options) as first, opened(kafka, topic, group, **options) as second:
        await eventually(lambda: len(first.assignment()) == len(second.assignment()) == 2)
        async with opened(kafka, topic, group, **options):
            await asyncio.sleep(stay)
        await eventually(lambda: len(first.assignment()) + len(second.assignment()) == 4, 20.0)
        # A rebalance may still be under way, with the partitions where they were.
        await asyncio.sleep(0.5)
        await eventually(lambda: len(first.assignment()) + len(second.assignment()) == 4, 20.0)
        assert sorted(place.partition for each in (first, second) for place in each.assignment()) == [0, 1, 2, 3]
