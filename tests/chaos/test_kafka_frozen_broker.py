"""Administration and members while one broker of three is frozen but not yet considered dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from time import monotonic
from typing import Any
from uuid import uuid4

import pytest

import broker
from broker.bus import Bus
from broker.errors import BrokerError, Closed, ConnectionFailed, OperationTimeout
from broker.hooks import Hooks
from broker.reading.record_consumer import RecordConsumer
from broker.testing.waiting import eventually
from broker_kafka.admin.topics import KafkaTopics, TopicOptions
from broker_kafka.cluster.connection import Connection
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka_client import produce, wait_for
from tests.servers.kafka_cluster import KafkaCluster

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-frozen-broker")]

SIZE = 3
SECONDS = 6.0
"""The time for a request that fails."""
PATIENT = 15.0
"""The time for one that does not."""
LATER = 4.0
"""What an answer may be late by, on a busy machine."""
# No other broker takes over.
OPTIONS = {
    "broker.session.timeout.ms": "120000",
    # But writes do not wait for its replica.
    "replica.lag.time.max.ms": "1500",
    "offsets.topic.num.partitions": "5",
    # If the controller was frozen, brokers forward requests to its successor.
    "controller.socket.timeout.ms": "1000",
}

EACH_BROKER = pytest.mark.parametrize(
    "index", [pytest.param(index, marks=[pytest.mark.deep] if index else []) for index in range(SIZE)]
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster(SIZE, OPTIONS) as cluster:
        yield cluster


def leader(cluster: KafkaCluster, topic: str) -> int:
    """The node that leads the topic's partition; 0 while the broker does not know it."""
    partitions = cluster.admin.client.list_topics(topic).topics[topic].partitions
    return partitions[0].leader if 0 in partitions else 0


@pytest.fixture(scope="module")
def topics(cluster: KafkaCluster) -> dict[int, str]:
    """For each broker, a topic that it leads, with two records."""
    found: dict[int, str] = {}
    while len(found) < SIZE:
        topic = cluster.admin.make_topic(copies=SIZE)
        found.setdefault(wait_for(lambda topic=topic: leader(cluster, topic)) - 1, topic)
    for topic in found.values():
        produce(cluster.bootstrap, topic, [b"a", b"b"])
    return found


@pytest.fixture(scope="module")
def groups(cluster: KafkaCluster, topics: dict[int, str]) -> dict[int, str]:
    """For each broker, a group that it coordinates, with positions on all those topics."""

    async def make() -> dict[int, str]:
        found: dict[int, str] = {}
        async with broker.connect(cluster.url) as bus:
            while len(found) < SIZE:
                group = f"frozen-{uuid4().hex[:8]}"
                for topic in topics.values():
                    await bus.admin.ensure_subscription(topic, group)
                (answer,) = cluster.admin.client.describe_consumer_groups([group]).values()
                found.setdefault((await asyncio.wrap_future(answer)).coordinator.id - 1, group)
        return found

    return asyncio.run(make())


@asynccontextmanager
async def frozen(cluster: KafkaCluster, index: int, topics: dict[int, str]) -> AsyncGenerator[str]:
    """Freeze one of the brokers within the block; yields its name."""
    cluster[index].pause()
    try:
        yield f"broker {index + 1} at {cluster[index].bootstrap}"
    finally:
        cluster[index].resume()
        for topic in (*topics.values(), "__consumer_offsets"):
            await asyncio.to_thread(cluster.wait_until_whole, topic)


@asynccontextmanager
async def connect(cluster: KafkaCluster, seconds: float = SECONDS) -> AsyncGenerator[Bus]:
    async with broker.connect(f"{cluster.url}?request_timeout={seconds}") as bus:
        yield bus


async def refused(call: Callable[[], Awaitable[Any]]) -> BrokerError:
    """The error of a call, which must be raised within the request timeout."""
    begun = monotonic()
    with pytest.raises((OperationTimeout, ConnectionFailed)) as raised:
        await call()
    assert monotonic() - begun < SECONDS + LATER
    assert raised.value.retriable
    return raised.value


@EACH_BROKER
async def test_requests_for_any_broker_go_to_another(
    cluster: KafkaCluster, topics: dict[int, str], groups: dict[int, str], index: int
):
    other = (index + 1) % SIZE
    topic, group = topics[other], groups[other]
    hours = iter(range(1, 100))
    calls: dict[str, Callable[[Bus], Awaitable[Any]]] = {
        "topics": lambda bus: bus.admin.topics(),
        "health": lambda bus: bus.health(),
        "identity": lambda bus: bus.admin.topic_identity(topic),
        "describe": lambda bus: bus.admin.describe_topic(topic),
        "bounds": lambda bus: bus.log.bounds(topic),
        "change": lambda bus: bus.admin.ensure_topic(topic, retention=timedelta(hours=next(hours) + 24 * index)),
        "lag": lambda bus: bus.admin.lag(topic, group),
    }
    for name, call in calls.items():
        async with connect(cluster, PATIENT) as bus:
            # The client prefers the broker of its last request.
            for _ in range(SIZE):
                await call(bus)
            async with frozen(cluster, index, topics):
                for _ in range(2):
                    found = await call(bus)
                    assert getattr(found, "ok", True), (name, found)


async def is_listed(admin: KafkaTopics, name: str) -> bool:
    return name in await admin.list_topics()


@EACH_BROKER
async def test_topics_are_created(cluster: KafkaCluster, topics: dict[int, str], index: int):
    settings = KafkaSettings(servers=tuple(cluster.bootstrap.split(",")), request_timeout=PATIENT)
    connection = Connection(settings, Hooks())
    await connection.open()
    admin = KafkaTopics(connection)
    try:
        await admin.list_topics()
        async with frozen(cluster, index, topics):
            for _ in range(2):
                name = f"made-{uuid4().hex[:8]}"
                # A retried request that had succeeded late reports an existing topic.
                await admin.create(name, 1, TopicOptions())
                # The request may go to another broker than the one that knows its leaders.
                assert await eventually(lambda name=name: is_listed(admin, name), PATIENT)
    finally:
        await connection.close()


async def test_an_unresponsive_leader_is_named(cluster: KafkaCluster, topics: dict[int, str]):
    async with connect(cluster) as bus:
        await bus.log.bounds(topics[0])
        async with frozen(cluster, 0, topics) as name:
            for _ in range(2):
                error = await refused(lambda: bus.log.bounds(topics[0]))
                assert f"the leader of {topics[0]!r}[0], {name}, did not answer" in error.message
                assert error.advice.startswith("Resume or restart that broker")
            # Other topics can be read.
            assert (await bus.log.bounds(topics[1]))[0].next == 2
        assert (await bus.log.bounds(topics[0]))[0].next == 2


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.deep)])
async def test_an_unresponsive_coordinator_is_named(
    cluster: KafkaCluster, topics: dict[int, str], groups: dict[int, str], warm: bool
):
    async with connect(cluster) as bus:
        if warm:
            await bus.admin.describe_group(groups[1])
        async with frozen(cluster, 1, topics) as name:
            for call in (
                lambda: bus.admin.describe_group(groups[1]),
                lambda: bus.admin.delete_group(groups[1]),
                lambda: bus.admin.lag(topics[0], groups[1]),
                lambda: bus.admin.reset_group(groups[1], to="latest", topics=[topics[0]], dry_run=True),
            ):
                error = await refused(call)
                assert f"coordinator, {name}, did not answer in time" in error.message
                assert repr(groups[1]) in error.message
                assert error.advice.startswith("Resume or restart that broker")
            assert await bus.admin.lag(topics[0], groups[0])
        assert (await bus.admin.describe_group(groups[1])).name == groups[1]


async def test_an_unresponsive_broker_in_a_list_of_groups_is_named(
    cluster: KafkaCluster, topics: dict[int, str], groups: dict[int, str]
):
    async with connect(cluster) as bus:
        assert {group.name for group in await bus.admin.groups()} >= set(groups.values())
        async with frozen(cluster, 2, topics) as name:
            error = await refused(bus.admin.groups)
            assert f"Listing groups: every broker has to answer, and there was no answer from {name}" in error.message
            assert error.advice.startswith("Resume or restart that broker")
        assert {group.name for group in await bus.admin.groups()} >= set(groups.values())


@asynccontextmanager
async def waiting_member(
    cluster: KafkaCluster, topics: dict[int, str], groups: dict[int, str]
) -> AsyncGenerator[tuple[RecordConsumer[bytes], asyncio.Task[Any]]]:
    """A member that reads a topic of another broker, and whose coordinator is frozen."""
    async with connect(cluster, 2 * PATIENT) as bus, bus.records(topics[1], group=groups[0]) as log:
        assert len(await log.next_batch(2, timeout=PATIENT)) > 0
        async with frozen(cluster, 0, topics):
            asking = asyncio.create_task(log.committed())
            try:
                yield log, asking
            finally:
                asking.cancel()


async def test_a_member_continues_to_read_while_it_waits_for_its_positions(
    cluster: KafkaCluster, topics: dict[int, str], groups: dict[int, str]
):
    async with waiting_member(cluster, topics, groups) as (log, asking):
        await asyncio.to_thread(produce, cluster[1].bootstrap, topics[1], [b"later"])
        async with asyncio.timeout(PATIENT):
            while b"later" not in [record.data for record in await log.next_batch()]:
                pass
        assert not asking.done()


async def test_a_member_that_waits_for_its_positions_can_be_closed(
    cluster: KafkaCluster, topics: dict[int, str], groups: dict[int, str]
):
    async with waiting_member(cluster, topics, groups) as (log, asking):
        await asyncio.wait((asking,), timeout=1)
        assert not asking.done()
        await log.close()
        # And its thread does not wait; the request itself would take twice as long.
        await asyncio.wait((asking,), timeout=PATIENT)
        assert isinstance(asking.exception(), Closed)
