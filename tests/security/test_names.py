"""Names of groups, subscriptions and topics that are paths or statements elsewhere: refused, or plain text."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from broker.driver.contract import TopicPartition
from broker.errors import InvalidName
from broker.names import check_name, native_name
from broker_jetstream.names import consumer_name, group_consumer, stream_name
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.offsets import GroupMember, SqlOffsetStore, StoredOffset
from broker_pulsar.names import subscription_path, topic_path
from broker_servicebus.names import entity_name, subscription_name

PATHS = (
    "..",
    ".",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../b",
    "..\\windows",
    "%2e%2e",
    "a\r\nDELE b",
    "orders.>",
    "*",
)
STATEMENTS = ("'; DROP TABLE anybroker_offsets; --", '"', "x' OR '1'='1", "%", "_")


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_no_portable_name(name: str) -> None:
    for what in ("topic", "subscription", "group"):
        with pytest.raises(InvalidName):
            check_name(name, what)
    assert not is_topic_name(name)


@pytest.mark.parametrize("name", [name for name in PATHS if name != "%2e%2e"])
def test_no_native_name_is_another_subject_of_nats(name: str) -> None:
    native = native_name(name)
    for encode in (stream_name, consumer_name, lambda group: group_consumer(group, 0)):
        with pytest.raises(InvalidName, match="is not valid for a"):
            encode(native)


@pytest.mark.parametrize("name", PATHS)
def test_no_native_name_is_another_path_of_pulsar(name: str) -> None:
    topic = topic_path("orders", "public", "default")
    native = native_name(name)
    try:
        path = subscription_path(topic, native)
    except InvalidName as error:
        assert name in (".", "..", "%2e%2e"), error  # noqa: PT017
    else:
        assert path.startswith(f"{topic.path}/subscription/")
        assert path.count("/") == topic.path.count("/") + 2
        assert not {".", ".."} & set(path.split("/"))
    for whole in (name, f"persistent://public/default/{name}", f"persistent://{name}/default/orders"):
        try:
            found = topic_path(native_name(whole), "public", "default").path
        except InvalidName:
            continue
        assert found.count("/") == 4
        assert not {".", ".."} & set(found.split("/"))


@pytest.mark.parametrize("name", ["..", ".", "../orders", "orders/../payroll", "orders/Subscriptions/../payroll"])
def test_no_native_name_is_another_entity_of_service_bus(name: str) -> None:
    with pytest.raises(InvalidName):
        entity_name(native_name(name))
    with pytest.raises(InvalidName):
        subscription_name(native_name(name))


async def test_a_store_of_offsets_takes_any_group_as_text(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'offsets.db'}")
    store = SqlOffsetStore(engine)
    await store.create_table()
    place = TopicPartition("orders", 0)
    groups = [*PATHS, *STATEMENTS]
    for number, group in enumerate(groups):
        owner = GroupMember(group, 1, "member")
        await store.claim(owner, [place])
        assert dict(await store.commit(owner, {place: StoredOffset(number)})) == {place: None}
    for number, group in enumerate(groups):
        found = (await store.fetch(group, [place]))[place]
        assert isinstance(found, StoredOffset)
        assert found.offset == number
    await store.close()
    engine.dispose()
    assert await asyncio.to_thread(os.listdir, tmp_path) == ["offsets.db"]
