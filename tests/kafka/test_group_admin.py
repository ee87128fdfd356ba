"""Groups and subscriptions on a real broker: create, describe, reset, delete."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Consumer

from broker.driver.contract import Lag, Start, TopicPartition
from broker.driver.group_admin import GroupAdminSpi, GroupInfo, GroupReset
from broker.errors import (
    BackendError,
    NotFound,
    OffsetOutOfRange,
    SubscriptionNotFound,
    TopicNotFound,
    UnknownSetting,
    Unsupported,
)
from broker.hooks import Hooks
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.cluster.connection import Connection
from broker_kafka.codec.offset_metadata import encode
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.kafka.raw_positions import store
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce


def join(kafka: KafkaServer, group: str, topic: str, protocol: str = "classic") -> Consumer:
    """A member of the group that has all the topic's partitions."""
    client = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "client.id": "someone",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 3,
        }
    )
    client.subscribe([topic])
    while not client.assignment():
        client.poll(0.05)
    return client


# -- groups as subscriptions -------------------------------------------------------------------------------------


async def test_ensure_subscription_creates_the_group_before_its_first_member(
    spi: KafkaAdmin, kafka: KafkaServer, admin: RawAdmin, make_topic: MakeTopic, group: str
):
    topic = make_topic(partitions=2)
    produce(kafka.bootstrap, topic, [b"x"] * 3, partition=0)
    moment = datetime.now(UTC) + timedelta(seconds=0.001)
    await asyncio.sleep(0.01)
    produce(kafka.bootstrap, topic, [b"x"] * 2, partition=0)
    starts: list[tuple[Start, int]] = [("earliest", 0), ("latest", 5), (moment, 3)]
    for start, position in starts:
        name = f"{group}-{position}"
        info = await spi.ensure_subscription(topic, name, start=start, options={})
        assert (info.topic, info.name) == (topic, name)
        assert info.native["partitions"] == {
            0: {"position": position, "end": 5, "lag": 5 - position},
            1: {"position": 0, "end": 0, "lag": 0},
        }
        assert admin.committed(name, topic).offset == position
        # An existing one keeps its position.
        await spi.ensure_subscription(topic, name, start="latest", options={})
        assert admin.committed(name, topic).offset == position
        lag = await spi.lag(topic, name)
        assert (lag.waiting, lag.partitions) == (5 - position, {0: 5 - position, 1: 0})
    assert await spi.list_subscriptions(topic) == sorted(f"{group}-{n}" for n in (0, 3, 5))
    await spi.delete_subscription(topic, f"{group}-3")
    await spi.delete_subscription(topic, f"{group}-3")
    assert await spi.list_subscriptions(topic) == [f"{group}-0", f"{group}-5"]
    with pytest.raises(UnknownSetting, match="'color'"):
        await spi.ensure_subscription(topic, group, start="earliest", options={"color": "red"})


@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.deep)])
async def test_lag_without_commits_counts_from_the_start(
    spi: KafkaAdmin, kafka: KafkaServer, admin: RawAdmin, topic: str, group: str, protocol: str
):
    produce(kafka.bootstrap, topic, [b"x"] * 6)
    admin.delete_records(topic, 2)
    client = await asyncio.to_thread(join, kafka, group, topic, protocol)
    assert await spi.list_subscriptions(topic) == [group]
    assert (await spi.lag(topic, group)).partitions == {0: 4}
    native = (await spi.describe_subscription(topic, group)).native
    assert (native["state"], native["type"]) == ("stable", protocol)
    (member,) = native["members"].values()
    assert (member["client"], member["partitions"]) == ("someone", [0])
    # It is there already, so nothing is committed over its head.
    await spi.ensure_subscription(topic, group, start="latest", options={})
    assert admin.committed(group, topic).offset == -1001
    with pytest.raises(BackendError, match=r"1 member .*someone"):
        await spi.delete_subscription(topic, group)
    await asyncio.to_thread(client.close)


async def test_lag_ignores_finished_records_that_retention_deleted(
    spi: KafkaAdmin, kafka: KafkaServer, admin: RawAdmin, topic: str, group: str
):
    produce(kafka.bootstrap, topic, [b"x"] * 6)
    store(admin, group, topic, 1, encode(1, [(2, 4)]).text)
    assert await spi.lag(topic, group) == Lag(waiting=3, partitions={0: 5})
    # Of the finished 2 and 3 the first is gone, as is the position itself.
    admin.delete_records(topic, 3)
    assert await spi.lag(topic, group) == Lag(waiting=2, partitions={0: 3})


async def test_missing_subscriptions_and_topics(spi: KafkaAdmin, admin: RawAdmin, topic: str, group: str, name: str):
    admin.make_topic(f"{topic}-other")
    for call in (spi.describe_subscription(topic, group), spi.lag(topic, group)):
        with pytest.raises(SubscriptionNotFound, match=group):
            await call
    await spi.delete_subscription(topic, group)
    # A group that is there, and has read nothing of this topic that could be committed.
    await spi.reset_group(group, GroupReset(to="latest", topics=[f"{topic}-other"]), dry_run=False)
    with pytest.raises(SubscriptionNotFound, match=f"{group}' has no position on topic '{topic}'"):
        await spi.lag(topic, group)
    for call in (
        spi.list_subscriptions(name),
        spi.ensure_subscription(name, group, start="earliest", options={}),
        spi.lag(name, group),
        spi.delete_subscription(name, group),
    ):
        with pytest.raises(TopicNotFound, match=name):
            await call


async def test_a_group_with_two_topics_is_not_deleted_from_one(spi: KafkaAdmin, make_topic: MakeTopic, group: str):
    left, right = make_topic(), make_topic()
    for topic in (left, right):
        await spi.ensure_subscription(topic, group, start="earliest", options={})
    with pytest.raises(Unsupported, match=right):
        await spi.delete_subscription(left, group)
    # Positions on a deleted topic do not matter.
    await spi.delete_topic(right)
    await spi.delete_subscription(left, group)
    assert await spi.list_subscriptions(left) == []


# -- groups --------------------------------------------------------------------------------------------------------


async def test_groups_are_listed_and_described(spi: KafkaAdmin, kafka: KafkaServer, make_topic: MakeTopic, group: str):
    assert isinstance(spi, GroupAdminSpi)
    left, right = make_topic(partitions=2), make_topic()
    produce(kafka.bootstrap, left, [b"x"] * 5, partition=1)
    await spi.ensure_subscription(left, group, start="earliest", options={})
    await spi.ensure_subscription(right, group, start="earliest", options={})
    (listed,) = [each for each in await spi.list_groups() if each.name == group]
    assert listed.state == "empty"
    info = await spi.describe_group(group)
    places = {TopicPartition(left, 0): 0, TopicPartition(left, 1): 0, TopicPartition(right, 0): 0}
    assert (info.state, info.members, info.positions) == ("empty", [], places)
    assert info.lag == {**places, TopicPartition(left, 1): 5}
    client = await asyncio.to_thread(join, kafka, group, left)
    info = await spi.describe_group(group)
    (member,) = info.members
    assert (info.state, member.client, member.host) == ("stable", "someone", "127.0.0.1")
    assert member.partitions == [TopicPartition(left, 0), TopicPartition(left, 1)]
    await asyncio.to_thread(client.close)
    await spi.delete_group(group)
    await spi.delete_group(group)
    with pytest.raises(SubscriptionNotFound, match=group):
        await spi.describe_group(group)


async def test_positions_are_reset(spi: KafkaAdmin, kafka: KafkaServer, make_topic: MakeTopic, group: str):
    topic = make_topic(partitions=2)
    produce(kafka.bootstrap, topic, [b"x"] * 10, partition=0)
    moment = datetime.now(UTC) + timedelta(seconds=0.001)
    await asyncio.sleep(0.01)
    produce(kafka.bootstrap, topic, [b"x"] * 10, partition=0)
    await spi.ensure_subscription(topic, group, start="earliest", options={})
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)

    async def reset(reset: GroupReset) -> list[tuple[int | None, int]]:
        before = (await spi.describe_group(group)).positions
        plan = await spi.reset_group(group, reset, dry_run=True)
        assert (await spi.describe_group(group)).positions == before
        done = await spi.reset_group(group, reset, dry_run=False)
        assert done == plan
        after = (await spi.describe_group(group)).positions
        assert {change.partition: change.after for change in done}.items() <= after.items()
        return [(change.before, change.after) for change in done]

    assert await reset(GroupReset(to="latest")) == [(0, 20), (0, 0)]
    assert await reset(GroupReset(to=moment)) == [(20, 10), (0, 0)]
    assert await reset(GroupReset(to=7, partitions=[0])) == [(10, 7)]
    assert await reset(GroupReset(shift=-3, topics=[topic])) == [(7, 4), (0, 0)]
    assert await reset(GroupReset(shift=100)) == [(4, 20), (0, 0)]
    assert await reset(GroupReset(shift=-100)) == [(20, 0), (0, 0)]
    assert await reset(GroupReset(to="earliest")) == [(0, 0), (0, 0)]
    for bad, error, text in (
        (GroupReset(to=5), OffsetOutOfRange, "0 to 0"),
        (GroupReset(to=21, partitions=[0]), OffsetOutOfRange, "0 to 20"),
        (GroupReset(to="latest", partitions=[7]), NotFound, "no partition 7"),
        (GroupReset(to="latest", topics=["missing-topic"]), TopicNotFound, "missing-topic"),
    ):
        with pytest.raises(error, match=text):
            await spi.reset_group(group, bad, dry_run=True)
    assert (await spi.describe_group(group)).positions == {zero: 0, one: 0}
    # A missing group is created if the topic is named.
    with pytest.raises(SubscriptionNotFound):
        await spi.reset_group(f"{group}-new", GroupReset(to="latest"), dry_run=False)
    (first, _) = await spi.reset_group(f"{group}-new", GroupReset(to="latest", topics=[topic]), dry_run=False)
    assert (first.before, first.after) == (None, 20)


async def test_a_group_with_members_is_neither_reset_nor_deleted(
    spi: KafkaAdmin, kafka: KafkaServer, admin: RawAdmin, topic: str, group: str
):
    await spi.ensure_subscription(topic, group, start="earliest", options={})
    client = await asyncio.to_thread(join, kafka, group, topic)
    for dry_run in (True, False):
        with pytest.raises(BackendError, match="1 member") as caught:
            await spi.reset_group(group, GroupReset(to="latest"), dry_run=dry_run)
        assert "Stop its consumers" in str(caught.value)
    with pytest.raises(BackendError, match="1 member"):
        await spi.delete_group(group)
    await asyncio.to_thread(client.close)
    assert len(await spi.reset_group(group, GroupReset(to="latest"), dry_run=False)) == 1
    await spi.delete_group(group)
    assert admin.committed(group, topic).offset == -1001


@pytest.mark.deep
async def test_the_first_group_of_a_new_cluster():
    """The offsets' topic is not there yet, and making it must not cost a time-out."""
    with KafkaServer() as server:
        connection = Connection(KafkaSettings(servers=(server.bootstrap,), request_timeout=40.0), Hooks())
        await connection.open()
        spi = KafkaAdmin(connection)
        async with asyncio.timeout(60):
            await spi.ensure_topic("orders", partitions=None, retention=None, options={})
            assert await spi.list_subscriptions("orders") == []
            await spi.ensure_subscription("orders", "billing", start="earliest", options={})
            assert await spi.list_subscriptions("orders") == ["billing"]
        assert await spi.list_topics() == ["orders"]
        await connection.close()


async def test_a_group_that_cannot_be_described_does_not_fail_a_purge(
    spi: KafkaAdmin, kafka: KafkaServer, admin: RawAdmin, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
):
    topic, other = make_topic(), make_topic()
    await asyncio.to_thread(produce, kafka.bootstrap, topic, [b"x"] * 4)
    behind, stranger = f"behind-{topic}", f"stranger-{topic}"
    await asyncio.to_thread(store, admin, behind, topic, 1)
    await asyncio.to_thread(store, admin, stranger, other, 0)

    describe = KafkaGroups.state

    async def state(self: KafkaGroups, name: str) -> GroupInfo | None:
        if name in (behind, stranger):
            raise BackendError(f"Group {name!r}: ConsumerGroupDescribe: ")
        return await describe(self, name)

    monkeypatch.setattr(KafkaGroups, "state", state)
    assert await spi.purge(topic) == 4
    assert (await asyncio.to_thread(admin.committed, behind, topic)).offset == 4
    assert await spi.list_subscriptions(topic) == [behind]
