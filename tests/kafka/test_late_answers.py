"""A running member repeats a request to the brokers that timed out, and waits for late commits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

import broker_kafka.group.member
import broker_kafka.group.topics
from broker.bus import connect
from broker.driver.contract import Bounds, TopicPartition
from broker.errors import BrokerError, LeaseLost, OperationTimeout, TopicNotFound
from broker.hooks import Event, PositionReset
from broker.testing.waiting import read
from broker_kafka.backend import KafkaBackend
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, partitions_of
from broker_kafka.group import GroupConsumer
from broker_kafka.group.commits import RecordCommits
from broker_kafka.group.topics import TopicWatch, read_topics
from broker_kafka.offsets.protocol import GroupMember, StoredOffset
from broker_kafka.settings import KafkaSettings
from tests.kafka.group_members import both_protocols, options_of, record_commits, take
from tests.kafka.raw_positions import store
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce

ORDERS = TopicPartition("orders", 0)


class Late:
    """`bounds_of`, whose first two requests time out."""

    def __init__(self) -> None:
        self.requests = 0

    async def __call__(
        self, connection: Connection, partitions: Sequence[TopicPartition], *, committed: bool = True
    ) -> dict[TopicPartition, Bounds]:
        self.requests += 1
        if self.requests <= 2:
            raise OperationTimeout("The brokers did not answer")
        return await bounds_of(connection, partitions, committed=committed)


@pytest.fixture
def out_of_range(kafka: KafkaServer, admin: RawAdmin, topic: str, group: str) -> None:
    """The group's position is one that the log does not hold."""
    produce(kafka.bootstrap, topic, [b"%d" % number for number in range(10)])
    store(admin, group, topic, 20)


@both_protocols
@pytest.mark.usefixtures("out_of_range")
async def test_a_record_consumer_retries_a_position_reset(
    kafka: KafkaServer, topic: str, group: str, protocol: str, monkeypatch: pytest.MonkeyPatch
):
    late = Late()
    monkeypatch.setattr(broker_kafka.group.member, "bounds_of", late)
    events: list[Event] = []
    settings = KafkaSettings(servers=(kafka.bootstrap,), offset_reset="earliest", **options_of(protocol))
    async with connect(settings) as bus:
        bus.hooks.listen(events.append)
        async with bus.records(topic, group=group) as log:
            assert [record.offset for record in await read(log, 10, 60)] == list(range(10))
    assert late.requests == 3
    assert len([event for event in events if isinstance(event, PositionReset)]) == 1


@both_protocols
@pytest.mark.usefixtures("out_of_range")
async def test_a_group_consumer_retries_a_position_reset(
    kafka: KafkaServer, topic: str, group: str, protocol: str, monkeypatch: pytest.MonkeyPatch
):
    late = Late()
    monkeypatch.setattr(broker_kafka.group.member, "bounds_of", late)
    options: dict[str, Any] = {**options_of(protocol), "offset_reset": "earliest"}
    async with connect(kafka.url) as bus, GroupConsumer(bus, topic, group=group, **options) as consumer:
        assert [record.offset for record in await take(consumer, 10)] == list(range(10))
        assert consumer.resets == {(topic, 0): 1}
    assert late.requests == 3


async def test_a_check_for_a_deleted_topic_is_retried(
    kafka: KafkaServer, admin: RawAdmin, topic: str, monkeypatch: pytest.MonkeyPatch
):
    requests: list[str] = []
    failed: asyncio.Future[BrokerError] = asyncio.get_running_loop().create_future()

    async def late(connection: Connection, name: str) -> list[TopicPartition]:
        requests.append(name)
        if len(requests) == 1:
            raise OperationTimeout("The brokers did not answer")
        return await partitions_of(connection, name)

    async def subscribe(topics: Sequence[str]) -> None:
        assert topics == [topic]

    async with connect(kafka.url) as bus:
        assert isinstance(bus.backend, KafkaBackend)
        watch = TopicWatch(
            bus.backend.connection, read_topics(topic), interval=3600, subscribe=subscribe, failed=failed.set_result
        )
        await watch.open()
        await watch.start()
        monkeypatch.setattr(broker_kafka.group.topics, "partitions_of", late)
        admin.delete_topic(topic)
        watch.check_soon()
        async with asyncio.timeout(60):
            assert isinstance(await failed, TopicNotFound)
        await watch.stop()
    assert len(requests) >= 2


class Store:
    """Accepts a commit, and passes its answer to a function."""

    def __init__(self, answer: Callable[[asyncio.Future[None]], object]) -> None:
        self._answer = answer

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> Mapping[TopicPartition, BrokerError | None]:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer(answered)
        await answered
        return dict.fromkeys(positions)


def commits(store: Any) -> RecordCommits:
    return record_commits(store, SimpleNamespace(calling_back=False), {ORDERS: 1}, timeout=0.2)


async def test_a_suspended_process_waits_for_the_answer_of_its_commit():
    loop = asyncio.get_running_loop()

    def suspend(answered: asyncio.Future[None]) -> None:
        # Like a stopped process: its threads do not run either, and answer when it resumes.
        loop.call_soon(time.sleep, 1.0)
        Timer(1.1, loop.call_soon_threadsafe, (answered.set_result, None)).start()

    assert await commits(Store(suspend)).commit({ORDERS: StoredOffset(5)}) == {ORDERS: None}


async def test_an_unanswered_commit_times_out():
    begun = time.monotonic()
    (error,) = (await commits(Store(lambda answered: None)).commit({ORDERS: StoredOffset(5)})).values()
    assert isinstance(error, OperationTimeout)
    assert error.retriable
    assert time.monotonic() - begun < 30


class Rebalancing:
    """A store that rejects the first commit, as in the middle of a rebalance, and accepts later ones."""

    def __init__(self) -> None:
        self.refused = asyncio.Event()
        self.position = 0

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> Mapping[TopicPartition, BrokerError | None]:
        if not self.refused.is_set():
            self.refused.set()
            return {ORDERS: LeaseLost("In the middle of a rebalance")}
        self.position = positions[ORDERS].offset
        return {ORDERS: None}


async def test_a_retried_commit_does_not_undo_a_newer_one():
    class Thread:
        calling_back = False

    store, thread = Rebalancing(), Thread()
    member = record_commits(store, thread, {ORDERS: 1})
    older = asyncio.ensure_future(member.commit({ORDERS: StoredOffset(700)}))
    await store.refused.wait()
    assert await member.commit({ORDERS: StoredOffset(750)}) == {ORDERS: None}
    assert await older == {ORDERS: None}
    assert store.position == 750
