"""What a member that runs asks the brokers, and they do not tell at once: it asks again, and goes on."""

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
from broker_kafka.group.commits import MemberCommits
from broker_kafka.group.topics import TopicWatch, read_topics
from broker_kafka.offsets.protocol import GroupMember, StoredOffset
from broker_kafka.settings import KafkaSettings
from tests.kafka.group_members import both_protocols, options_of, take
from tests.kafka.raw_positions import store
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce

ORDERS = TopicPartition("orders", 0)


class Late:
    """Asks the brokers in place of `bounds_of`, which got no answer in time twice."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(
        self, connection: Connection, partitions: Sequence[TopicPartition], *, committed: bool = True
    ) -> dict[TopicPartition, Bounds]:
        self.asked += 1
        if self.asked <= 2:
            raise OperationTimeout("The brokers did not answer")
        return await bounds_of(connection, partitions, committed=committed)


@pytest.fixture
def overtaken(kafka: KafkaServer, admin: RawAdmin, topic: str, group: str) -> None:
    """The group's position is one that the log does not hold."""
    produce(kafka.bootstrap, topic, [b"%d" % number for number in range(10)])
    store(admin, group, topic, 20)


@both_protocols
@pytest.mark.usefixtures("overtaken")
async def test_records_go_on_when_the_brokers_tell_late_where_a_log_begins(
    kafka: KafkaServer, topic: str, group: str, protocol: str, monkeypatch: pytest.MonkeyPatch
):
    late = Late()
    monkeypatch.setattr(broker_kafka.group.member, "bounds_of", late)
    events: list[Event] = []
    settings = KafkaSettings(servers=(kafka.bootstrap,), offset_reset="earliest", **options_of(protocol))
    async with connect(settings) as bus:
        bus.hooks.listen(events.append)
        async with bus.records(topic, group=group) as log:
            assert [record.offset for record in await read(log, 10, 20)] == list(range(10))
    assert late.asked == 3
    assert len([event for event in events if isinstance(event, PositionReset)]) == 1


@both_protocols
@pytest.mark.usefixtures("overtaken")
async def test_a_group_consumer_goes_on_when_the_brokers_tell_late_where_a_log_begins(
    kafka: KafkaServer, topic: str, group: str, protocol: str, monkeypatch: pytest.MonkeyPatch
):
    late = Late()
    monkeypatch.setattr(broker_kafka.group.member, "bounds_of", late)
    options: dict[str, Any] = {**options_of(protocol), "offset_reset": "earliest"}
    async with connect(kafka.url) as bus, GroupConsumer(bus, topic, group=group, **options) as consumer:
        assert [record.offset for record in await take(consumer, 10)] == list(range(10))
        assert consumer.resets == {(topic, 0): 1}
    assert late.asked == 3


async def test_a_deleted_topic_is_told_though_the_brokers_tell_late(
    kafka: KafkaServer, admin: RawAdmin, topic: str, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []
    failed: asyncio.Future[BrokerError] = asyncio.get_running_loop().create_future()

    async def late(connection: Connection, name: str) -> list[TopicPartition]:
        asked.append(name)
        if len(asked) == 1:
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
        async with asyncio.timeout(20):
            assert isinstance(await failed, TopicNotFound)
        await watch.stop()
    assert len(asked) >= 2


class Store:
    """Takes a commit, and does with its answer as it is told."""

    def __init__(self, answer: Callable[[asyncio.Future[None]], object]) -> None:
        self._answer = answer

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> Mapping[TopicPartition, BrokerError | None]:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer(answered)
        await answered
        return dict.fromkeys(positions)


def commits(store: Any) -> MemberCommits:
    thread: Any = SimpleNamespace(calling_back=False)
    return MemberCommits(store, thread, {ORDERS: 1}, lambda: GroupMember("g", -1), group="g", timeout=0.2)


async def test_a_process_that_stood_still_waits_for_the_answer_of_its_commit():
    loop = asyncio.get_running_loop()

    def stand_still(answered: asyncio.Future[None]) -> None:
        # As a process that is stopped: its threads do not run either, and answer when it goes on.
        loop.call_soon(time.sleep, 1.0)
        Timer(1.1, loop.call_soon_threadsafe, (answered.set_result, None)).start()

    assert await commits(Store(stand_still)).commit({ORDERS: StoredOffset(5)}) == {ORDERS: None}


async def test_a_commit_without_an_answer_ends_in_time():
    begun = time.monotonic()
    (error,) = (await commits(Store(lambda answered: None)).commit({ORDERS: StoredOffset(5)})).values()
    assert isinstance(error, OperationTimeout)
    assert error.retriable
    assert time.monotonic() - begun < 5


class Rebalancing:
    """A store that refuses the first commit, as a member of no generation is, and takes what comes after."""

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


async def test_a_commit_that_is_tried_again_undoes_no_newer_one():
    class Thread:
        calling_back = False

    store, thread = Rebalancing(), Thread()
    member = MemberCommits(store, thread, {ORDERS: 1}, lambda: GroupMember("g", -1), group="g", timeout=5)  # pyright: ignore[reportArgumentType]
    older = asyncio.ensure_future(member.commit({ORDERS: StoredOffset(700)}))
    await store.refused.wait()
    assert await member.commit({ORDERS: StoredOffset(750)}) == {ORDERS: None}
    assert await older == {ORDERS: None}
    assert store.position == 750
