"""Consumers of a queue with markers, beside the conformance kit: redelivered content, other topics, administration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from confluent_kafka import Producer

from broker.bus import Bus, connect
from broker.consuming.retry.policy import Retry
from broker.driver.contract import Lag
from broker.driver.queue_tracking import TracksQueues
from broker.errors import BackendError, SubscriptionNotFound, Unsupported
from broker.hooks import Warned
from broker.messages import Message
from broker.names import ephemeral
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, nothing_more, numbered, take
from broker_kafka.queue.consumer.start_builder import marker_partition
from broker_kafka.queue.markers.marker_topic import marker_topic_name
from broker_kafka.queue.markers.wire import TIME_MARKER, Kind, read_markers, write_marker
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce, read_all

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers"


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with connect(f"{kafka.url}?{QUICK}") as bus:
        yield bus


async def test_a_redelivered_message_is_unchanged(kafka: KafkaServer, bus: Bus, topic: str, group: str) -> None:
    headers = [("colour", b"red"), ("colour", b"blue"), ("binary", b"\xff"), ("none", None)]
    async with bus.messages(topic, subscription=group) as inbox:
        produce(kafka.bootstrap, topic, [None], key=b"k", headers=headers)
        (first,) = await take(inbox, 1, PATIENCE)
        await first.nack(delay=0)
        (again,) = await take(inbox, 1, PATIENCE)
        assert (again.data, again.key, again.id, again.attributes) == (None, b"k", first.id, first.attributes)
        assert again.publish_time == first.publish_time
        assert again.native.headers()[: len(headers)] == headers
        assert (first.delivery_attempt, again.delivery_attempt) == (1, 2)
        await again.ack()


async def test_an_open_lease_has_the_error_of_its_handler(bus: Bus, topic: str, group: str) -> None:
    failed = asyncio.Event()
    assert isinstance(bus.backend, TracksQueues)

    async def fail(message: Message[bytes]) -> None:
        failed.set()
        raise ValueError("the bank is closed")

    retry = Retry(initial=60.0)
    await bus.topic(topic).publish(b"x")
    async with bus.messages(topic, subscription=group, retry=retry) as inbox:
        work = asyncio.create_task(inbox.receive(fail))
        await asyncio.wait_for(failed.wait(), PATIENCE)
        inbox.stop()
        await work
    (lease,) = await bus.backend.open_leases(group)
    assert (lease.state, lease.attempt, lease.reason) == ("waiting", 1, "ValueError: the bank is closed")


@pytest.mark.parametrize("partitioner", ["murmur2_random", "random"])
async def test_i7_markers_of_a_message_share_a_partition_and_those_of_a_queue_are_spread(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, partitioner: str
) -> None:
    topic = make_topic(partitions=3)
    url = f"{kafka.url}?{QUICK}&partitioner={partitioner}"
    async with connect(url) as bus, bus.messages(topic, subscription=group) as inbox:
        sent = [OutboundMessage(b"%d" % number, "k", partition=number % 3) for number in range(12)]
        await bus.topic(topic).publish_batch(sent)
        for message in await take(inbox, 12, PATIENCE):
            await message.ack()
    for partition in range(3):
        records = await asyncio.to_thread(read_all, kafka.bootstrap, marker_topic_name(group), partition)
        markers = [marker for record in records for marker, _ in read_markers(record.value())]
        known = [marker for marker in markers if marker is not None and marker != TIME_MARKER]
        marked = {(marker.kind, message) for marker in known for message in marker.ids()}
        messages = {message for _, message in marked}
        assert marked == {(kind, message) for kind in (Kind.START, Kind.END) for message in messages}
        assert {marker_partition(message, 3) for message in messages} == {partition}


@pytest.mark.deep
async def test_lag_counts_records_of_an_open_transaction(kafka: KafkaServer, bus: Bus, topic: str, group: str) -> None:
    worker = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": group, "log_level": 0})
    await asyncio.to_thread(worker.init_transactions, PATIENCE)
    async with bus.messages(topic, subscription=group) as inbox:
        worker.begin_transaction()
        worker.produce(marker_topic_name(group), write_marker(TIME_MARKER), partition=0)
        assert await asyncio.to_thread(worker.flush, PATIENCE) == 0
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, PATIENCE)
        assert (await bus.admin.lag(topic, group)).unsettled
        await asyncio.to_thread(worker.commit_transaction, PATIENCE)
        assert (await bus.admin.lag(topic, group)).unsettled == 1
        await message.ack()


async def test_each_subscription_of_a_topic_gets_its_messages(bus: Bus, topic: str, group: str) -> None:
    async with (
        bus.messages(topic, subscription=group) as first,
        bus.messages(topic, subscription=f"{group}-2") as second,
    ):
        await bus.topic(topic).publish(b"x")
        (mine,) = await take(first, 1, PATIENCE)
        (theirs,) = await take(second, 1, PATIENCE)
        assert mine.id == theirs.id
        await theirs.ack()
        await mine.nack(delay=0)
        (again,) = await take(first, 1, PATIENCE)
        assert (again.id, again.delivery_attempt) == (mine.id, 2)
        await again.ack()
        await nothing_more(second, 0.3)


async def test_lag_counts_backlog_and_open_messages(bus: Bus, topic: str, group: str) -> None:
    async with bus.messages(topic, subscription=group, max_outstanding=3) as inbox:
        await bus.topic(topic).publish_batch(numbered(10))
        held = await take(inbox, 3, PATIENCE)
        lag = await bus.admin.lag(topic, group)
        assert (lag.waiting, lag.unsettled) == (7, 3)
        await held[0].nack(delay=3600)
        for message in held[1:]:
            await message.ack()
        for _ in range(7):
            (message,) = await take(inbox, 1, PATIENCE)
            await message.ack()

        async def only_the_delayed_one() -> bool:
            lag = await bus.admin.lag(topic, group)
            return (lag.waiting, lag.unsettled) == (0, 1)

        await eventually(only_the_delayed_one, PATIENCE, "one that waits for its time")


async def test_lag_of_a_partition_excludes_transaction_ends(bus: Bus, make_topic: MakeTopic, group: str) -> None:
    topic = make_topic(partitions=2)
    await bus.admin.ensure_subscription(topic, group, start="earliest")
    async with bus.transactional_publisher(f"{group}-writer") as publisher:
        for partition in (0, 0, 1):
            async with publisher.transaction() as tx:
                await tx.publish(topic, OutboundMessage(b"x", partition=partition))
    assert await bus.admin.lag(topic, group) == Lag(waiting=3, unsettled=0, partitions={0: 2, 1: 1})


@pytest.mark.deep
async def test_a_deleted_topic_does_not_block_others(bus: Bus, make_topic: MakeTopic, group: str) -> None:
    gone, there = make_topic(), make_topic()
    warnings: list[str] = []
    bus.hooks.listen(lambda event: warnings.append(event.text) if isinstance(event, Warned) else None)
    async with bus.messages(there, subscription=group) as inbox:
        async with bus.messages(gone, subscription=group) as other:
            await bus.topic(gone).publish_batch(numbered(3))
            for message in await take(other, 3, PATIENCE):
                await message.nack(delay=2)
        await bus.admin.delete_topic(gone)
        await bus.topic(there).publish(b"x")
        while not warnings:
            (message,) = await take(inbox, 1, PATIENCE)
            await message.nack(delay=0.1)
        (message,) = await take(inbox, 1, PATIENCE)
        await message.ack()
    # One for all of them, and none of a transaction that had to be undone.
    assert len(warnings) == 1
    assert "topic does not exist" in warnings[0]


async def test_a_message_above_our_own_size_limit_is_redelivered(
    kafka: KafkaServer, bus: Bus, make_topic: MakeTopic, group: str
) -> None:
    topic, body = make_topic(config={"max.message.bytes": "3000000"}), b"x" * 2_000_000
    async with bus.messages(topic, subscription=group) as inbox:
        produce({"bootstrap.servers": kafka.bootstrap, "message.max.bytes": 3_000_000}, topic, [body])
        (message,) = await take(inbox, 1, PATIENCE)
        await message.nack(delay=0)
        (again,) = await take(inbox, 1, PATIENCE)
        assert (again.id, again.delivery_attempt, again.data) == (message.id, 2, body)
        await again.ack()


async def test_deleting_a_subscription_deletes_its_marker_topic(bus: Bus, topic: str, group: str) -> None:
    async with bus.messages(topic, subscription=group) as inbox:
        await bus.topic(topic).publish(b"x")
        await take(inbox, 1, PATIENCE)
    assert marker_topic_name(group) in await bus.admin.topics()
    await bus.admin.delete_subscription(topic, group)
    assert marker_topic_name(group) not in await bus.admin.topics()
    with pytest.raises(SubscriptionNotFound):
        await bus.admin.describe_subscription(topic, group)


async def test_the_marker_topic_of_a_running_tracker_is_not_deleted(bus: Bus, topic: str, group: str) -> None:
    async with bus.messages(topic, subscription=group):
        pass
    assert isinstance(bus.backend, TracksQueues)
    tracker = bus.backend.queue_tracker(group)
    await tracker.open()
    try:
        await eventually(lambda: tracker.metrics()["partitions"] == 1, PATIENCE, "its partition")
        with pytest.raises(BackendError, match="1 member"):
            await bus.admin.delete_subscription(topic, group)
        assert marker_topic_name(group) in await bus.admin.topics()
    finally:
        await tracker.close()
    await bus.admin.delete_subscription(topic, group)
    assert marker_topic_name(group) not in await bus.admin.topics()


async def test_unsupported_options_are_refused(bus: Bus, topic: str) -> None:
    with pytest.raises(Unsupported, match="ephemeral"):
        bus.messages(topic, subscription=ephemeral())
