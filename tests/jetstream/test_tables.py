"""Compacted topics and their writers on the real server: keys, tombstones, and servers that lack something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker import (
    CHECKPOINT_KEY,
    Bus,
    InvalidSetting,
    MessageTooLarge,
    OutboundMessage,
    StorageFailed,
    TransactionFatal,
    UnknownSetting,
    Unsupported,
    connect,
    native_name,
)
from broker_jetstream.names import row_subject, stream_name
from tests.servers.nats import shared_server


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with connect(shared_server().url) as opened:
        yield opened


async def table_of(bus: Bus, topic: str) -> dict[bytes | None, bytes | None]:
    return {record.key: record.data async for batch in bus.log.read(topic, 0) for record in batch}


async def alter(bus: Bus, topic: str, **config: Any) -> None:
    """Change the stream behind the library's back."""
    connection: Any = vars(bus.backend)["_connection"]
    found = (await bus.admin.describe_topic(topic)).native["config"]
    await connection.api(f"STREAM.UPDATE.{stream_name(topic)}", {**found, **config}, what="test")


def test_keys_have_subjects_of_their_own() -> None:
    keys = [b"", b"a", b"A", b".", b"*", b"\x00", b"a" * 256, b"a" * 257, b"a" * 258, b"b" * 16_384]
    subjects = {row_subject("stream", 3, key) for key in keys}
    assert len(subjects) == len(keys)
    for subject in subjects:
        assert subject.startswith("stream.3.")
        assert subject.count(".") == 2
        assert len(subject) < 400
        assert not set(subject) & set(" *>\r\n")


async def test_a_stream_without_atomic_batches_is_refused_until_it_is_ensured_again(bus: Bus, topic: str) -> None:
    await bus.admin.ensure_topic(topic, partitions=1, compacted=True)
    await alter(bus, topic, allow_atomic=False)
    with pytest.raises(Unsupported, match="atomic batches") as raised:
        async with bus.table_writer(topic, 0):
            pass
    assert "2.12" in raised.value.advice
    await bus.admin.ensure_topic(topic, compacted=True)
    async with bus.table_writer(topic, 0) as table:
        await table.write([OutboundMessage(b"1", "a")], checkpoint=b"1")
    assert await table_of(bus, topic) == {b"a": b"1", CHECKPOINT_KEY: b"1"}


async def test_older_servers_are_named(bus: Bus, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connection: Any = vars(bus.backend)["_connection"]
    monkeypatch.setattr(connection, "server_version", (2, 11))
    assert bus.capabilities.records
    assert bus.capabilities.records.compacted_topics
    with pytest.raises(Unsupported, match=r"nats-server 2\.12 or newer"):
        bus.table_writer(topic, 0)
    monkeypatch.setattr(connection, "server_version", (2, 10))
    with pytest.raises(Unsupported, match=r"nats-server 2\.11 or newer"):
        await bus.admin.ensure_topic(topic, compacted=True)


async def test_a_foreign_stream_is_not_compacted(bus: Bus, topic: str) -> None:
    connection: Any = vars(bus.backend)["_connection"]
    name = topic.replace(".", "_foreign_")
    config = {"name": name, "subjects": [f"{name}.>"], "max_msgs_per_subject": 1, "allow_direct": True}
    await connection.api(f"STREAM.CREATE.{name}", config, what="test")
    with pytest.raises(Unsupported, match="not compacted"):
        await bus.admin.ensure_topic(native_name(name), compacted=True)


async def test_options_of_a_compacted_topic(bus: Bus, topic: str) -> None:
    info = await bus.admin.ensure_topic(
        topic,
        partitions=2,
        compacted=True,
        tombstone_retention=timedelta(hours=1),
        max_bytes=1 << 20,
        discard="new",
    )
    config = info.native["config"]
    assert config["max_msgs_per_subject"] == 1
    assert (config["max_bytes"], config["metadata"]["anybroker-tombstone-seconds"]) == (1 << 20, "3600")
    kept = await bus.admin.ensure_topic(topic, compacted=True)
    assert kept.native["config"]["metadata"]["anybroker-tombstone-seconds"] == "3600"
    changed = await bus.admin.ensure_topic(topic, compacted=True, tombstone_retention=timedelta(minutes=1))
    assert changed.native["config"]["metadata"]["anybroker-tombstone-seconds"] == "60"
    for bad in (timedelta(0), timedelta(seconds=1.5), 60):
        with pytest.raises(InvalidSetting, match="tombstone_retention"):
            await bus.admin.ensure_topic(topic, compacted=True, tombstone_retention=bad)
    with pytest.raises(UnknownSetting, match="tombstone_retention"):
        await bus.admin.ensure_topic(topic, tombstone_retention=timedelta(minutes=1))
    with pytest.raises(Unsupported, match="compacted and takes no scheduled"):
        await bus.topic(topic).publish(b"x", key="k", deliver_at=datetime.now(UTC) + timedelta(hours=1))


async def test_a_bounded_table_refuses_writes_and_drops_no_row(bus: Bus, topic: str) -> None:
    dropping: list[dict[str, Any]] = [{"max_bytes": 3}, {"max_messages": 3, "discard": "old"}]
    for options in dropping:
        with pytest.raises(InvalidSetting, match=r"max_.* is 3 for a compacted topic.*discard=.new"):
            await bus.admin.ensure_topic(topic, partitions=1, compacted=True, **options)
    await bus.admin.ensure_topic(topic, partitions=1, compacted=True, max_messages=3, discard="new")
    with pytest.raises(InvalidSetting, match="max_messages is 3 for a compacted topic"):
        await bus.admin.ensure_topic(topic, discard="old")
    for key in ("a", "b", "c"):
        await bus.topic(topic).publish(b"1", key=key)
    with pytest.raises(StorageFailed):
        await bus.topic(topic).publish(b"1", key="d")
    await bus.topic(topic).publish(b"2", key="a")
    assert await table_of(bus, topic) == {b"a": b"2", b"b": b"1", b"c": b"1"}
    await bus.admin.ensure_topic(topic, max_messages=-1)
    await bus.topic(topic).publish(b"1", key="d")


async def test_a_purge_keeps_the_claim_and_a_recreated_table_does_not(bus: Bus, topic: str) -> None:
    await bus.admin.ensure_topic(topic, partitions=1, compacted=True)
    async with bus.table_writer(topic, 0) as table:
        await table.write([OutboundMessage(b"1", "a")], checkpoint=b"1")
        await bus.admin.purge(topic)
        assert await table_of(bus, topic) == {}
        await table.write([OutboundMessage(b"2", "a")], checkpoint=b"2")
        await bus.admin.delete_topic(topic)
        await bus.admin.ensure_topic(topic, partitions=1, compacted=True)
        with pytest.raises(TransactionFatal, match="partition 0 of table"):
            await table.write([OutboundMessage(b"3", "a")], checkpoint=b"3")
    assert await table_of(bus, topic) == {}


async def test_a_writer_of_a_table_that_was_recreated_does_not_write_beside_the_new_one(bus: Bus, topic: str) -> None:
    await bus.admin.ensure_topic(topic, partitions=1, compacted=True)
    async with bus.table_writer(topic, 0) as old:
        await bus.admin.delete_topic(topic)
        await bus.admin.ensure_topic(topic, partitions=1, compacted=True)
        # Its claim has the number of the other one.
        async with bus.table_writer(topic, 0) as newer:
            with pytest.raises(TransactionFatal, match=r"partition 0 of table .* deleted and recreated"):
                await old.write([OutboundMessage(b"old", "a")], checkpoint=b"1")
            await newer.write([OutboundMessage(b"new", "a")], checkpoint=b"2")
    assert (await table_of(bus, topic))[b"a"] == b"new"


async def test_a_row_too_large_for_the_server_stores_nothing(bus: Bus, topic: str) -> None:
    await bus.admin.ensure_topic(topic, partitions=1, compacted=True)
    async with bus.table_writer(topic, 0) as table:
        with pytest.raises(MessageTooLarge):
            await table.write([OutboundMessage(b"1", "a"), OutboundMessage(b"x" * (1 << 20), "b")], checkpoint=b"1")
        assert await table_of(bus, topic) == {}
        await table.write([OutboundMessage(b"2", "a")], checkpoint=b"2")
    assert await table_of(bus, topic) == {b"a": b"2", CHECKPOINT_KEY: b"2"}


async def test_more_writers_than_the_server_has_open_batches(bus: Bus, topic: str) -> None:
    await bus.admin.ensure_topic(topic, partitions=60, compacted=True)
    rows = [OutboundMessage(b"1", f"key-{n}") for n in range(20)]

    async def write(partition: int) -> None:
        async with bus.table_writer(topic, partition) as table:
            for number in range(3):
                await table.write(rows, checkpoint=b"%d" % number)

    await asyncio.gather(*map(write, range(60)))
    assert (await bus.admin.describe_topic(topic)).messages == 60 * (len(rows) + 2)
