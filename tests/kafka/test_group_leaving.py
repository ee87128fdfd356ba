"""A member can leave its group at any moment, at once, and the group knows it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from broker.bus import connect
from broker.errors import OperationTimeout
from broker_kafka.group import GroupConsumer
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import both_protocols, eventually, fill, options_of
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import SECONDS, RawAdmin


def patient(protocol: str) -> dict[str, Any]:
    """Options of a member that stays for longer than these tests wait, unless it says that it leaves."""
    options = options_of(protocol)
    return options if protocol == "consumer" else {**options, "session_timeout_ms": 45_000}


def members_of(admin: RawAdmin, group: str) -> int:
    try:
        described: Any = admin.client.describe_consumer_groups([group])[group].result()
    except KafkaException as error:
        if error.args[0].code() in (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS):
            return 1  # not known for a moment
        raise
    return len(described.members)


@both_protocols
async def test_a_member_that_has_just_joined_leaves_quickly(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin, protocol: str
):
    topic = make_topic(partitions=2)
    async with connect(kafka.url) as bus:

        async def join_and_leave(name: str, pause: float) -> float:
            consumer = await GroupConsumer(bus, topic, group=name, **patient(protocol)).__aenter__()
            await asyncio.sleep(pause)
            begun = time.monotonic()
            await consumer.close()
            return time.monotonic() - begun

        # Different steps of joining are caught on the way.
        groups = [f"{group}-{number}" for number in range(8)]
        took = await asyncio.gather(*[join_and_leave(name, 0.02 * n) for n, name in enumerate(groups)])
        assert max(took) < SECONDS
        for name in groups:
            await eventually(lambda name=name: members_of(admin, name) == 0, SECONDS)


async def test_a_cooperative_member_leaves_while_it_joins(kafka: KafkaServer, topic: str, group: str, admin: RawAdmin):
    async with connect(kafka.url) as bus:
        for number in range(5):
            name = f"{group}-{number}"
            consumer = await GroupConsumer(bus, topic, group=name, **patient("cooperative-sticky")).__aenter__()
            while not members_of(admin, name):
                await asyncio.sleep(0)
            begun = time.monotonic()
            await consumer.close()
            assert time.monotonic() - begun < SECONDS
            await eventually(lambda name=name: members_of(admin, name) == 0, SECONDS)


@pytest.mark.deep
async def test_a_member_without_partitions_leaves_while_it_rejoins(
    kafka: KafkaServer, topic: str, group: str, admin: RawAdmin
):
    def is_stable() -> bool:
        described: Any = admin.client.describe_consumer_groups([group])[group].result()
        return described.state.name == "STABLE"

    # The first member holds the only partition, and is the last to notice a rebalance.
    slow: dict[str, Any] = {**patient("cooperative-sticky"), "heartbeat_interval_ms": 2500}
    quick = patient("cooperative-sticky")
    async with connect(kafka.url) as bus, GroupConsumer(bus, topic, group=group, **slow) as first:
        await eventually(first.assignment, SECONDS)
        second = await GroupConsumer(bus, topic, group=group, **quick).__aenter__()
        await eventually(lambda: members_of(admin, group) == 2 and is_stable(), SECONDS)
        async with GroupConsumer(bus, topic, group=group, **quick):
            await eventually(lambda: not is_stable(), SECONDS)
            # Nothing reports that its next heartbeat was answered and it has sent its join request.
            await asyncio.sleep(0.5)
            await second.close()
            await eventually(is_stable, SECONDS)
            assert members_of(admin, group) == 2


@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.deep)])
async def test_consumers_of_both_families_leave_right_after_joining(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin, protocol: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, 10)
    async with connect(f"{kafka.url}?group_protocol={protocol}") as bus:
        for consumer in (bus.records(topic, group=group), bus.messages(topic, subscription=group)):
            async with consumer:
                begun = time.monotonic()
            assert time.monotonic() - begun < SECONDS
            await eventually(lambda: members_of(admin, group) == 0, SECONDS)


@pytest.mark.deep
async def test_close_keeps_its_deadline_when_the_broker_is_frozen():
    with KafkaServer() as server:
        topic = RawAdmin(server.bootstrap).make_topic()
        async with connect(server.url) as bus:
            await bus.topic(topic).publish_batch([b"x"] * 10)
            consumer = await GroupConsumer(bus, topic, group="frozen", close_timeout=1).__aenter__()
            async for record in consumer:
                consumer.mark(record)
                break
            server.pause()
            # A second for the marks to be committed, and one to leave the group, beyond the deadline of one; and what
            # a busy machine adds.
            begun = time.monotonic()
            await consumer.close()
            assert time.monotonic() - begun < 10
            server.resume()


@pytest.mark.deep
async def test_opening_a_transactional_publisher_times_out_by_the_settings():
    with KafkaServer() as server:
        async with connect(
            f"{server.url}?transaction_timeout_ms=1000&request_timeout=0.5&message_timeout_ms=1000"
        ) as bus:
            server.pause()
            with pytest.raises(
                OperationTimeout,
                match=r"'copy': failed to open it: the transaction coordinator did not answer within 1\.5 s",
            ):
                async with asyncio.timeout(15), bus.transactional_publisher("copy"):
                    pass
            server.resume()
