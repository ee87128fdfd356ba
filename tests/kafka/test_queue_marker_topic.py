"""The marker topic of a queue on the real broker: created as trackers need it, or refused with advice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError

from broker.bus import connect
from broker.driver.contract import MessageSubscription, TopicInfo, TopicPartition
from broker.errors import BackendError, BrokerError, ConfigurationError, InvalidName, TopicNotFound
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.admin.topics import KafkaTopics
from broker_kafka.cluster.connection import Connection
from broker_kafka.errors import translate
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.queue.markers.marker_topic import (
    MARKER_HEADROOM,
    check_names,
    ensure_marker_topic,
    marker_topic_name,
    tracker_group,
)
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

RIGHT = {"message.timestamp.type": "LogAppendTime", "retention.bytes": "-1", "max.message.bytes": "2000000"}


async def test_it_is_created_with_the_settings_that_trackers_need(
    connection: Connection, spi: KafkaAdmin, make_topic: MakeTopic, group: str
) -> None:
    messages = make_topic(partitions=3, config={"max.message.bytes": "3000000"})
    counts = await asyncio.gather(*(ensure_marker_topic(connection, group, topics=[messages]) for _ in range(3)))
    assert counts == [3, 3, 3]
    config: Any = (await spi.describe_topic(marker_topic_name(group))).native["config"]
    assert config["message.timestamp.type"] == "LogAppendTime"
    assert config["cleanup.policy"] == "delete"
    assert int(config["retention.ms"]) >= 7 * 24 * 3_600_000
    assert config["max.message.bytes"] == str(3_000_000 + MARKER_HEADROOM)


async def test_a_tracker_without_topics_creates_it_for_the_default_message_size(
    connection: Connection, group: str, topic: str
) -> None:
    assert await ensure_marker_topic(connection, group) == 1
    # As the first consumer looks at it, whose topic has the brokers' own limit.
    assert await ensure_marker_topic(connection, group, topics=[topic], create=False) == 1


async def test_a_new_one_is_marked_before_any_tracker_ran(connection: Connection, group: str, topic: str) -> None:
    markers = marker_topic_name(group)
    await ensure_marker_topic(connection, group, topics=[topic])
    stored = await GroupOffsetStore(connection).stored(tracker_group(group))
    assert stored == {TopicPartition(markers, 0): StoredOffset(0)}
    with pytest.raises(InvalidName, match="the marker topic of subscription"):
        await check_names(connection, MessageSubscription(topic=markers, subscription=f"{group}-2"))


async def test_brokers_that_do_not_know_the_new_topic_yet_are_asked_repeatedly(
    connection: Connection, group: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    markers = marker_topic_name(group)
    whats = {f"Topic {markers!r}", f"Describing topic {markers!r}"}
    ask = connection.outcomes
    requests: Counter[str] = Counter()

    async def outcomes(start: Callable[[Any], Any], what: str) -> dict[Any, Any]:
        found = await ask(start, what)
        if what not in whats or any(isinstance(each, BrokerError) for each in found.values()):
            return found
        requests[what] += 1
        # The first answer to each is of the broker that made it, the next ones are of others.
        first = what.startswith("Topic")
        strange = first < requests[what] < 4
        return dict.fromkeys(found, translate(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), what)) if strange else found

    monkeypatch.setattr(connection, "outcomes", outcomes)
    assert await ensure_marker_topic(connection, group, topics=[topic]) == 1
    assert all(requests[what] >= 4 for what in whats)


async def test_an_existing_one_keeps_its_partitions(
    connection: Connection, admin: RawAdmin, group: str, topic: str
) -> None:
    admin.make_topic(marker_topic_name(group), 5, config=RIGHT)
    assert await ensure_marker_topic(connection, group, topics=[topic], partitions=2, create=False) == 5


async def test_a_consumer_checks_its_marker_topic_once(
    kafka: KafkaServer, group: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[str] = []

    async def describe(self: KafkaTopics, name: str, *, known: bool = False) -> TopicInfo:
        described.append(name)
        return await before(self, name, known=known)

    before = KafkaTopics.describe_topic
    monkeypatch.setattr(KafkaTopics, "describe_topic", describe)
    async with connect(f"{kafka.url}?queue=markers") as bus:
        for _ in range(2):
            described.clear()
            async with bus.messages(topic, subscription=group):
                pass
    # The first time it was not there.
    assert described == [topic, marker_topic_name(group)]


async def test_it_is_not_created_with_create_off(connection: Connection, group: str) -> None:
    with pytest.raises(TopicNotFound):
        await ensure_marker_topic(connection, group, create=False)


@pytest.mark.parametrize(
    ("option", "value", "advised"),
    [
        ("message.timestamp.type", "CreateTime", "'LogAppendTime'"),
        ("cleanup.policy", "compact", "'delete'"),
        ("cleanup.policy", "compact,delete", "'delete'"),
        ("retention.ms", "60000", "'86400000'"),
        ("retention.bytes", "1000000", "'-1'"),
        ("max.message.bytes", "1048588", f"'{1048588 + MARKER_HEADROOM}'"),
    ],
)
async def test_an_error_names_each_wrong_setting_and_its_fix(
    connection: Connection,
    spi: KafkaAdmin,
    admin: RawAdmin,
    topic: str,
    group: str,
    option: str,
    value: str,
    advised: str,
) -> None:
    name = admin.make_topic(marker_topic_name(group), config={**RIGHT, option: value})
    with pytest.raises(ConfigurationError) as refused:
        await ensure_marker_topic(connection, group, topics=[topic])
    assert f"{option} is {value!r}" in str(refused.value)
    assert f"ensure_topic({name!r}, **{{{option!r}: {advised}}})" in str(refused.value)
    await spi.ensure_topic(name, partitions=None, retention=None, options={option: advised.strip("'")})
    assert await ensure_marker_topic(connection, group, topics=[topic]) == 1


async def test_a_consumer_whose_marker_topic_is_deleted_fails(kafka: KafkaServer, topic: str, group: str) -> None:
    async with connect(f"{kafka.url}?queue=markers") as bus, bus.messages(topic, subscription=group) as inbox:
        await bus.topic(topic).publish(b"x")
        assert await inbox.next_message(timeout=60) is not None
        await bus.admin.delete_topic(marker_topic_name(group))
        with pytest.raises(BackendError, match="was deleted, and with it the record of unsettled messages"):
            while True:
                await bus.topic(topic).publish(b"y")
                await inbox.next_message(timeout=0.1)
