"""Provisioning of topics and groups on the real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer

from broker.errors import (
    BackendError,
    InvalidSetting,
    NotFound,
    OffsetOutOfRange,
    SubscriptionNotFound,
    TopicNotFound,
    UnknownSetting,
    Unsupported,
)
from broker.group_admin import GroupAdminSpi, GroupInfo, GroupReset
from broker.hooks import Hooks
from broker.spi import Start, TopicPartition
from broker_kafka.admin import KafkaAdmin
from broker_kafka.connection import Connection
from broker_kafka.groups_admin import KafkaGroups
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.kafka.raw_positions import store
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce


@pytest.fixture
async def spi(kafka: KafkaServer) -> AsyncIterator[KafkaAdmin]:
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,)), Hooks())
    await connection.open()
    yield KafkaAdmin(connection)
    await connection.close()


@pytest.fixture
def name() -> str:
    return f"made-{uuid4().hex[:12]}"


async def ensure(spi: KafkaAdmin, name: str, **values: Any) -> Any:
    given: dict[str, Any] = {"partitions": None, "retention": None, "options": {}, **values}
    return await spi.ensure_topic(name, **given)


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


# -- topics ----------------------------------------------------------------------------------------------------


async def test_a_topic_from_creation_to_deletion(spi: KafkaAdmin, kafka: KafkaServer, name: str):
    made = await ensure(spi, name, partitions=3, retention=timedelta(hours=1))
    assert (made.name, made.partitions, made.messages) == (name, 3, 0)
    assert made.native["config"]["retention.ms"] == "3600000"
    # It can be used at once.
    await asyncio.to_thread(produce, kafka.bootstrap, name, [b"x"] * 4, partition=2)
    again = await ensure(spi, name)
    assert (again.partitions, again.messages, again.native["config"]["retention.ms"]) == (3, 4, "3600000")
    place = again.native["partitions"][2]
    assert (place["first"], place["next"], place["replicas"], place["isr"]) == (0, 4, [1], [1])
    assert place["leader"] == 1
    assert name in await spi.list_topics()
    assert not [each for each in await spi.list_topics() if each.startswith("__")]
    assert await spi.purge(name) == 4
    assert await spi.purge(name) == 0
    assert (await spi.describe_topic(name)).messages == 0
    await spi.delete_topic(name)
    await spi.delete_topic(name)
    assert name not in await spi.list_topics()
    for call in (spi.describe_topic(name), spi.purge(name)):
        with pytest.raises(TopicNotFound, match=name):
            await call
    # And made again at once.
    assert (await ensure(spi, name)).partitions == 1
    await asyncio.to_thread(produce, kafka.bootstrap, name, [b"x"])


async def test_ensure_at_once_from_many(spi: KafkaAdmin, name: str):
    made = await asyncio.gather(*(ensure(spi, name, partitions=2 + n % 2) for n in range(8)), return_exceptions=True)
    found = [info.partitions for info in made if not isinstance(info, BaseException)]
    # Whoever asked for two after there were three is told.
    assert set(found) <= {2, 3}
    assert all(isinstance(info, Unsupported) for info in made if isinstance(info, BaseException))
    assert (await spi.describe_topic(name)).partitions == 3


async def test_partitions_can_be_added_only(spi: KafkaAdmin, kafka: KafkaServer, name: str):
    await ensure(spi, name, partitions=2)
    assert (await ensure(spi, name, partitions=4)).partitions == 4
    await asyncio.to_thread(produce, kafka.bootstrap, name, [b"x"], partition=3)
    with pytest.raises(Unsupported, match="has 4 partitions, and 3"):
        await ensure(spi, name, partitions=3)
    with pytest.raises(Unsupported, match="replication_factor is 3"):
        await ensure(spi, name, options={"replication_factor": 3})
    assert (await ensure(spi, name, options={"replication_factor": 1})).partitions == 4


async def test_any_option_of_a_topic_by_either_name(spi: KafkaAdmin, name: str):
    options = {
        "cleanup_policy": ["compact", "delete"],
        "min.insync.replicas": 1,
        "segment_ms": timedelta(minutes=5),
        "message_timestamp_type": "LogAppendTime",
        "min_cleanable_dirty_ratio": 0.25,
        "preallocate": False,
        "replication_factor": 1,
    }
    config = (await ensure(spi, name, options=options)).native["config"]
    wanted = {
        "cleanup.policy": "compact,delete",
        "min.insync.replicas": "1",
        "segment.ms": "300000",
        "message.timestamp.type": "LogAppendTime",
        "min.cleanable.dirty.ratio": "0.25",
        "preallocate": "false",
    }
    assert {key: config[key] for key in wanted} == wanted
    config = (await ensure(spi, name, options={"segment.ms": None, "cleanup.policy": "delete"})).native["config"]
    assert (config["segment.ms"], config["cleanup.policy"]) == ("604800000", "delete")
    assert config["message.timestamp.type"] == "LogAppendTime"


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("values", "error", "texts"),
    [
        ({"options": {"retention.mss": 1}}, UnknownSetting, ["'retention.mss'", "Did you mean 'retention.ms'?"]),
        ({"options": {"color": "red"}}, UnknownSetting, ["'color'", "documentation"]),
        ({"options": {"segment.ms": "soon"}}, InvalidSetting, ["'segment.ms' is 'soon'", "LONG"]),
        ({"options": {"cleanup_policy": "none"}}, InvalidSetting, ["'cleanup.policy' is 'none'", "compact, delete"]),
        ({"options": {"retention.ms": -7}}, InvalidSetting, ["'retention.ms' is '-7'", "at least -1"]),
        ({"options": {"segment.ms": object()}}, InvalidSetting, ["'segment.ms'", "timedelta"]),
        ({"options": {"segment.ms": 1, "segment_ms": 1}}, InvalidSetting, ["'segment.ms'", "twice"]),
        ({"retention": timedelta(1), "options": {"retention_ms": 1}}, InvalidSetting, ["retention.ms", "either"]),
        ({"options": {"replication_factor": 0}}, InvalidSetting, ["replication_factor", "0", "1 to 32767"]),
        ({"partitions": 0}, InvalidSetting, ["partitions is 0", "1 or more"]),
        ({"retention": timedelta(0)}, InvalidSetting, ["retention", "above 0"]),
    ],
)
async def test_an_option_that_cannot_be_used_is_named(
    spi: KafkaAdmin, name: str, values: Any, error: Any, texts: list[str], existing: bool
):
    if existing:
        await ensure(spi, name)
    with pytest.raises(error) as caught:
        await ensure(spi, name, **values)
    for text in texts:
        assert text in str(caught.value)
    assert (name in await spi.list_topics()) is existing


async def test_more_copies_than_brokers_are_refused(spi: KafkaAdmin, name: str):
    with pytest.raises(InvalidSetting, match="3"):
        await ensure(spi, name, options={"replication_factor": 3})


async def test_a_compacted_topic_is_not_purged(spi: KafkaAdmin, name: str):
    await ensure(spi, name, options={"cleanup.policy": "compact"})
    with pytest.raises(Unsupported, match="compacted"):
        await spi.purge(name)


async def test_the_defaults_of_a_new_topic_are_the_settings(kafka: KafkaServer, name: str):
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,), partitions=5, replication_factor=1), Hooks())
    await connection.open()
    assert (await ensure(KafkaAdmin(connection), name)).partitions == 5
    await connection.close()


# -- groups as subscriptions -------------------------------------------------------------------------------------


async def test_a_subscription_is_there_before_its_first_member(
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


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_a_group_that_never_committed_counts_from_its_start(
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


async def test_a_subscription_or_topic_that_is_not_there(spi: KafkaAdmin, topic: str, group: str, name: str):
    for call in (spi.describe_subscription(topic, group), spi.lag(topic, group)):
        with pytest.raises(SubscriptionNotFound, match=group):
            await call
    await spi.delete_subscription(topic, group)
    for call in (
        spi.list_subscriptions(name),
        spi.ensure_subscription(name, group, start="earliest", options={}),
        spi.lag(name, group),
        spi.delete_subscription(name, group),
    ):
        with pytest.raises(TopicNotFound, match=name):
            await call


async def test_a_group_of_two_topics_is_deleted_from_both_or_not_at_all(
    spi: KafkaAdmin, make_topic: MakeTopic, group: str
):
    left, right = make_topic(), make_topic()
    for topic in (left, right):
        await spi.ensure_subscription(topic, group, start="earliest", options={})
    with pytest.raises(Unsupported, match=right):
        await spi.delete_subscription(left, group)
    # Positions on a topic that is gone are in nobody's way.
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
    # A group that is not there yet is made if the topic is named.
    with pytest.raises(SubscriptionNotFound):
        await spi.reset_group(f"{group}-new", GroupReset(to="latest"), dry_run=False)
    (first, _) = await spi.reset_group(f"{group}-new", GroupReset(to="latest", topics=[topic]), dry_run=False)
    assert (first.before, first.after) == (None, 20)


async def test_a_group_that_runs_is_neither_reset_nor_deleted(
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


async def test_the_first_group_of_a_new_cluster():
    """The offsets' topic is not there yet, and making it must not cost a time-out."""
    with KafkaServer() as server:
        connection = Connection(KafkaSettings(servers=(server.bootstrap,), request_timeout=40.0), Hooks())
        await connection.open()
        spi = KafkaAdmin(connection)
        async with asyncio.timeout(30):
            await ensure(spi, "orders")
            assert await spi.list_subscriptions("orders") == []
            await spi.ensure_subscription("orders", "billing", start="earliest", options={})
            assert await spi.list_subscriptions("orders") == ["billing"]
        assert await spi.list_topics() == ["orders"]
        await connection.close()


async def test_a_cancelled_request_disturbs_nobody(spi: KafkaAdmin, topic: str, caplog: pytest.LogCaptureFixture):
    for wait in (0.0, 0.001, 0.002, 0.003, 0.005):
        tasks = [asyncio.create_task(spi.describe_topic(topic)) for _ in range(10)]
        await asyncio.sleep(wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (await spi.describe_topic(topic)).name == topic
    assert [record.getMessage() for record in caplog.records if record.name == "concurrent.futures"] == []


async def test_a_group_that_cannot_be_described_spoils_no_purge(
    spi: KafkaAdmin, kafka: KafkaServer, admin: RawAdmin, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
):
    topic, other = make_topic(), make_topic()
    await asyncio.to_thread(produce, kafka.bootstrap, topic, [b"x"] * 4)
    behind, stranger = f"behind-{topic}", f"stranger-{topic}"
    await asyncio.to_thread(store, admin, behind, topic, 1)
    await asyncio.to_thread(store, admin, stranger, other, 0)

    async def state(self: KafkaGroups, name: str) -> GroupInfo | None:
        raise BackendError(f"Group {name!r}: ConsumerGroupDescribe: ")

    monkeypatch.setattr(KafkaGroups, "state", state)
    assert await spi.purge(topic) == 4
    assert (await asyncio.to_thread(admin.committed, behind, topic)).offset == 4
    assert await spi.list_subscriptions(topic) == [behind]
