"""Records with a header name that is not UTF-8, which the client cannot decode, are delivered without headers.

A second decode of such headers ends the process, so a failure here may end the test worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Message as NativeRecord

from broker.bus import connect
from broker.driver.queue_tracking import TracksQueues
from broker.outbound import OutboundMessage
from broker_kafka.codec.headers import RECORD_VIEW, encode_headers
from broker_kafka.queue.consumer.start_builder import QUEUE_VIEW
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce, read_all
from tests.servers.kafka_raw_headers import produce_raw_headers

BAD = [(b"color", b"red"), (b"caf\xe9", b"1"), (b"size", b"2")]
MANY = 40
"""Enough that the interpreter has specialised the calls."""
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300"
QUEUES = ["offsets", "markers", "markers&queue_transactions=true", "markers&marker_format=v1", "share&share_lock=30"]


@pytest.fixture
def mixed(kafka: KafkaServer, topic: str) -> str:
    """A topic with such a record between others."""
    produce(kafka.bootstrap, topic, [b"before"], headers=[("color", b"blue")])
    produce_raw_headers(kafka.bootstrap, topic, b"bad", BAD, key=b"mail")
    produce(kafka.bootstrap, topic, [b"after"], headers=[("color", b"blue")])
    return topic


@pytest.mark.deep
@pytest.mark.parametrize("queue", QUEUES)
async def test_an_unreadable_message_is_retried_and_dead_lettered(
    kafka: KafkaServer, make_topic: MakeTopic, mixed: str, group: str, queue: str
) -> None:
    dead = make_topic(partitions=1)
    async with (
        connect(f"{kafka.url}?queue={queue}{'&' + QUICK if 'share' not in queue else ''}") as bus,
        bus.messages(mixed, subscription=group, dead_letter=dead) as inbox,
    ):
        seen: dict[bytes | None, dict[str, str]] = {}
        while len(seen) < 3:
            message = await inbox.next_message(timeout=60)
            assert message is not None
            seen[message.data] = dict(message.attributes)
            if message.data != b"bad":
                await message.ack()
                continue
            assert message.id == f"{mixed}:0:1"
            assert message.publish_time is not None
            assert message.native.headers() == []
            await message.nack(delay=0.1)
        again = await inbox.next_message(timeout=60)
        assert again is not None
        assert (again.data, again.id, dict(again.attributes)) == (b"bad", f"{mixed}:0:1", {})
        await again.reject("it is bad")
        (letter,) = await bus.admin.list_dead(dead)
        assert (letter.data, letter.reason) == (b"bad", "it is bad")
    assert seen == {b"before": {"color": "blue"}, b"bad": {}, b"after": {"color": "blue"}}


async def test_an_unreadable_message_reaches_the_queue_of_its_key(kafka: KafkaServer, mixed: str, group: str) -> None:
    url = f"{kafka.url}?queue=markers&queue_id=mail&{QUICK}"
    async with connect(url) as bus, bus.messages(mixed, subscription=group) as inbox:
        message = await inbox.next_message(timeout=60)
        assert message is not None
        assert (message.data, dict(message.attributes)) == (b"bad", {})
        await message.ack()


async def test_an_unreadable_message_is_listed_in_its_queue(kafka: KafkaServer, mixed: str, group: str) -> None:
    async with connect(f"{kafka.url}?queue=markers&{QUICK}") as bus:
        async with bus.messages(mixed, subscription=group) as inbox:
            first = await inbox.next_message(timeout=60)
            assert first is not None
            await first.ack()
        produce_raw_headers(kafka.bootstrap, mixed, b"bad too", BAD)
        assert isinstance(bus.backend, TracksQueues)
        found = {each.data: each for each in await bus.backend.queued_messages(group, 10)}
        assert found.keys() == {b"bad", b"after", b"bad too"}
        assert found[b"bad too"].state == "ready"
        assert (found[b"bad too"].attributes, found[b"bad"].attributes) == ({}, {})


async def test_records_with_unreadable_headers_have_columns(kafka: KafkaServer, mixed: str, group: str) -> None:
    columns: list[dict[str, str]] = []
    async with connect(kafka.url) as bus:
        async with bus.records(mixed, group=group, start="earliest") as records:
            while len(columns) < 3:
                batch = await records.next_batch(timeout=60)
                assert batch is not None
                columns += [dict(attributes) for (attributes,) in batch.rows("attributes")]
        async with asyncio.timeout(60):
            shown = [(each.id, dict(each.attributes)) async for batch in bus.log.read(mixed, 0) for each in batch]
    assert columns == [{"color": "blue"}, {}, {"color": "blue"}]
    assert shown == [
        (f"{mixed}:0:0", {"color": "blue"}),
        (f"{mixed}:0:1", {}),
        (f"{mixed}:0:2", {"color": "blue"}),
    ]


LOOKS: list[Callable[[NativeRecord], Any]] = [
    RECORD_VIEW.id,
    RECORD_VIEW.attributes,
    RECORD_VIEW.publish_time,
    QUEUE_VIEW.delivery_attempt,
    lambda raw: encode_headers(OutboundMessage(b"", native=raw)),
]


@pytest.mark.deep
async def test_reading_many_unreadable_headers_repeatedly_is_cheap(kafka: KafkaServer, topic: str) -> None:
    for _ in range(MANY):
        await asyncio.to_thread(produce_raw_headers, kafka.bootstrap, topic, b"bad", BAD)
    for look in LOOKS:
        found = await asyncio.to_thread(read_all, kafka.bootstrap, topic)
        assert len([look(raw) for raw in found for _ in range(2)]) == 2 * MANY
        assert [raw.headers() for raw in found] == [[]] * MANY
    for column in (RECORD_VIEW.attributes_of, RECORD_VIEW.publish_times_of, RECORD_VIEW.publish_times):
        found = await asyncio.to_thread(read_all, kafka.bootstrap, topic)
        assert len([each for _ in range(2) for each in column(found)]) == 2 * MANY
