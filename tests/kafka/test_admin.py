"""Provisioning of topics on the real broker."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from broker.bus import connect
from broker.errors import (
    ConfigurationError,
    InvalidSetting,
    TopicNotFound,
    UnknownSetting,
    Unsupported,
)
from broker.hooks import Hooks
from broker.names import native_name
from broker.testing.waiting import eventually
from broker_kafka.admin import topics as topics_admin
from broker_kafka.admin.facade import KafkaAdmin
from broker_kafka.cluster.connection import Connection
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce


async def ensure(spi: KafkaAdmin, name: str, **values: Any) -> Any:
    given: dict[str, Any] = {"partitions": None, "retention": None, "options": {}, **values}
    return await spi.ensure_topic(name, **given)


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
    for call in (spi.describe_topic(name), spi.topic_identity(name), spi.purge(name)):
        with pytest.raises(TopicNotFound, match=name):
            await call
    # Created again at once, as another topic.
    recreated = await ensure(spi, name)
    assert recreated.partitions == 1
    assert again.identity
    assert recreated.identity not in {None, again.identity}
    assert await spi.topic_identity(name) == recreated.identity
    await asyncio.to_thread(produce, kafka.bootstrap, name, [b"x"])


async def test_names_in_the_brokers_own_form(kafka: KafkaServer, name: str):
    topic, group = native_name(f"9.{name}"), native_name(f"for {name}/é")
    async with connect(f"{kafka.url}?session_timeout_ms=6000&heartbeat_interval_ms=300") as bus:
        await bus.admin.ensure_topic(topic, partitions=1)
        await bus.topic(topic).publish(b"x")
        async with bus.messages(topic, subscription=group) as inbox:
            message = await inbox.next_message(timeout=60)
            assert message is not None
            await message.ack()
        await bus.admin.ensure_topic(topic, partitions=2, retention=timedelta(hours=1))
        assert (await bus.admin.lag(topic, group)).waiting == 0
        assert await bus.admin.subscriptions(topic) == [group]
        await bus.admin.delete_subscription(topic, group)
        assert await bus.admin.subscriptions(topic) == []
        await bus.admin.delete_topic(topic)
        assert topic not in await bus.admin.topics()


async def test_concurrent_ensure_topic(spi: KafkaAdmin, name: str):
    made = await asyncio.gather(*(ensure(spi, name, partitions=2 + n % 2) for n in range(8)), return_exceptions=True)
    found = [info.partitions for info in made if not isinstance(info, BaseException)]
    # A call for two partitions fails once there are three.
    assert set(found) <= {2, 3}
    assert all(isinstance(info, Unsupported) for info in made if isinstance(info, BaseException))
    assert (await spi.describe_topic(name)).partitions == 3


async def test_a_broker_with_stale_metadata_is_retried(spi: KafkaAdmin, name: str, monkeypatch: pytest.MonkeyPatch):
    describe = topics_admin.describe_topic
    strangers = {2, 4, 5}  # numbers of the requests to brokers with stale metadata
    requests = 0

    async def of_any_broker(connection: Connection, topic: str, **options: Any) -> Any:
        nonlocal requests
        requests += 1
        found = await describe(connection, topic, **options)
        if requests in strangers:
            raise TopicNotFound(f"Topic {topic!r}: unknown topic or partition")
        return found

    monkeypatch.setattr(topics_admin, "describe_topic", of_any_broker)
    made = await ensure(spi, name, partitions=2)
    assert (made.name, made.partitions) == (name, 2)
    assert requests > max(strangers)


async def test_changed_options_are_described_when_ensure_topic_returns(
    spi: KafkaAdmin, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
):
    await ensure(spi, name, retention=timedelta(hours=1))
    ask = connection.outcomes
    descriptions: list[Any] = []

    async def outcomes(start: Any, what: str) -> Any:
        found = await ask(start, what)
        if what == f"Describing topic {name!r}":
            descriptions.append(found)
            # The first is from before the change; the next ones are of brokers that have not heard of the change.
            return descriptions[0] if len(descriptions) < 5 else found
        return found

    monkeypatch.setattr(connection, "outcomes", outcomes)
    changed = await ensure(spi, name, retention=timedelta(hours=2))
    assert changed.native["config"]["retention.ms"] == "7200000"


async def test_partitions_can_be_added_only(spi: KafkaAdmin, kafka: KafkaServer, name: str):
    await ensure(spi, name, partitions=2)
    assert (await ensure(spi, name, partitions=4)).partitions == 4
    await asyncio.to_thread(produce, kafka.bootstrap, name, [b"x"], partition=3)
    with pytest.raises(Unsupported, match="has 4 partitions, and 3"):
        await ensure(spi, name, partitions=3)
    with pytest.raises(Unsupported, match="replication_factor is 3"):
        await ensure(spi, name, options={"replication_factor": 3})
    assert (await ensure(spi, name, options={"replication_factor": 1})).partitions == 4


async def test_options_have_dotted_and_underscored_names(spi: KafkaAdmin, name: str):
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
    await ensure(spi, name, options={"segment.ms": None, "cleanup.policy": "delete"})

    # A broker that is busy reports the old values for a moment.
    async def is_changed() -> bool:
        config = (await spi.describe_topic(name)).native["config"]
        assert config["message.timestamp.type"] == "LogAppendTime"
        return (config["segment.ms"], config["cleanup.policy"]) == ("604800000", "delete")

    await eventually(is_changed, 60.0, "the change of the configuration")


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
async def test_an_invalid_option_is_named(
    spi: KafkaAdmin, name: str, values: Any, error: Any, texts: list[str], existing: bool
):
    if existing:
        await ensure(spi, name)
    with pytest.raises(error) as caught:
        await ensure(spi, name, **values)
    for text in texts:
        assert text in str(caught.value)
    assert (name in await spi.list_topics()) is existing


async def test_more_partitions_than_the_client_takes_are_refused(spi: KafkaAdmin, topic: str, name: str):
    for each in (name, topic):
        with pytest.raises(ConfigurationError, match=r"partitions is 100001\. It takes 1 to 100000 on Kafka"):
            await ensure(spi, each, partitions=100_001)
    assert name not in await spi.list_topics()


async def test_more_replicas_than_brokers_are_rejected(spi: KafkaAdmin, name: str):
    with pytest.raises(InvalidSetting, match=r"^replication_factor is 3, and topic 'made-") as caught:
        await ensure(spi, name, options={"replication_factor": 3})
    assert "Set replication_factor to at most 1, the number of brokers" in caught.value.advice


async def test_a_compacted_topic_is_not_purged(spi: KafkaAdmin, name: str):
    await ensure(spi, name, options={"cleanup.policy": "compact"})
    with pytest.raises(Unsupported, match="compacted"):
        await spi.purge(name)


async def test_a_topic_whose_old_rows_go_is_no_table(spi: KafkaAdmin, name: str):
    made = await ensure(spi, name, options={"cleanup.policy": "compact,delete"})
    assert not made.compacted
    with pytest.raises(Unsupported, match=r"cleanup\.policy=compact,delete: its rows are deleted"):
        await spi.ensure_compacted_topic(name, partitions=None, options={})


async def test_a_new_topic_has_the_defaults_of_the_settings(kafka: KafkaServer, name: str):
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,), partitions=5, replication_factor=1), Hooks())
    await connection.open()
    assert (await ensure(KafkaAdmin(connection), name)).partitions == 5
    await connection.close()


async def test_more_replicas_in_the_settings_than_brokers_are_rejected(kafka: KafkaServer, name: str):
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,), replication_factor=4), Hooks())
    await connection.open()
    with pytest.raises(InvalidSetting, match=r"^replication_factor is 4, and topic 'made-.* or for the bus"):
        await ensure(KafkaAdmin(connection), name)
    await connection.close()


async def test_a_cancelled_request_logs_no_error(spi: KafkaAdmin, topic: str, caplog: pytest.LogCaptureFixture):
    for wait in (0.0, 0.001, 0.002, 0.003, 0.005):
        tasks = [asyncio.create_task(spi.describe_topic(topic)) for _ in range(10)]
        await asyncio.sleep(wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (await spi.describe_topic(topic)).name == topic
    assert [record.getMessage() for record in caplog.records if record.name == "concurrent.futures"] == []
