"""The log changes under readers and writers: deleted topics, added partitions, retention, foreign headers, a stall."""

from __future__ import annotations

import asyncio
import resource
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import broker
from broker.errors import OffsetOutOfRange, PublishError, TopicNotFound
from broker.hooks import Event, PositionReset
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from tests.chaos.kafka_accounts import Account
from tests.chaos.test_kafka_server import reached, read_messages, read_records, still
from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_client import RawAdmin, produce, read_all

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-topics")]

PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])


@pytest.fixture
def server() -> KafkaServer:
    return shared_server()


@pytest.fixture
def admin(server: KafkaServer) -> RawAdmin:
    return RawAdmin(server.bootstrap)


@pytest.fixture
async def bus(server: KafkaServer) -> AsyncIterator[broker.Bus]:
    async with broker.connect(server.url) as bus:
        yield bus


def new_group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


# -- topics that go, partitions that come ------------------------------------------------------------------


@PROTOCOLS
@pytest.mark.parametrize("kind", ["records", "messages"])
async def test_deleting_a_topic_ends_its_consumer(
    server: KafkaServer, admin: RawAdmin, protocol: str, kind: str
) -> None:
    topic = admin.make_topic()
    produce(server.bootstrap, topic, [b"1", b"2"])
    # A short metadata refresh only shows it sooner.
    async with broker.connect(f"{server.url}?group_protocol={protocol}&topic_metadata_refresh_interval_ms=500") as bus:
        account = Account(topic, 1)
        read = {"records": read_records, "messages": read_messages}[kind]
        reading = asyncio.create_task(read(bus, account, new_group(), kind))
        await reached(lambda: len(account.read.get(kind, ())) == 2)
        await asyncio.to_thread(admin.delete_topic, topic)
        with pytest.raises(TopicNotFound, match=topic):
            await asyncio.wait_for(reading, 30)


async def test_deleting_a_topic_fails_each_message_of_its_publisher(bus: broker.Bus, admin: RawAdmin) -> None:
    name = admin.make_topic()
    account = Account(name, 1)
    stopped = asyncio.Event()
    publishing = asyncio.create_task(account.publish_until(bus, stopped))
    await reached(lambda: len(account.receipts) >= 200)
    await asyncio.to_thread(admin.delete_topic, name)
    await reached(lambda: len(account.failed) >= 50)
    stopped.set()
    await publishing
    assert {type(error) for error in account.failed.values()} == {TopicNotFound}
    assert min(account.failed) > max(account.receipts)
    assert account.receipts.keys() | account.failed.keys() == set(range(max(account.failed) + 1))


@PROTOCOLS
async def test_added_partitions_are_written_and_read(
    server: KafkaServer, admin: RawAdmin, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    account = Account(admin.make_topic(partitions=1), 1)
    url = f"{server.url}?group_protocol={protocol}&topic_metadata_refresh_interval_ms=500"
    stopped = asyncio.Event()
    async with broker.connect(url) as bus:
        reading = [
            asyncio.create_task(read(bus, account, new_group(), name))
            for name, read in (("records", read_records), ("messages", read_messages))
        ]
        publishing = asyncio.create_task(account.publish_until(bus, stopped))
        await reached(lambda: len(account.receipts) > 200)
        await asyncio.to_thread(admin.add_partitions, account.topic, 3)
        account.partitions = 3
        await reached(lambda: {place[0] for place in list(account.receipts.values())[-200:]} == {0, 1, 2})
        stopped.set()
        await publishing
        written = {}
        for partition in range(3):
            for message in read_all(server.bootstrap, account.topic, partition):
                written[int(message.value() or b"")] = partition, message.offset() or 0
        try:
            await reached(lambda: all(account.seen_all(name, written) for name in account.read))
        finally:
            account.say(capsys, f"{protocol}, partitions added", written)
        for task in reading:
            await still(task)
    for name in account.read:
        account.check(name, written)
    # Keys move to other partitions, so their order holds only within each.
    assert written == account.receipts


# -- retention ---------------------------------------------------------------------------------------------


async def overtaken(server: KafkaServer, admin: RawAdmin, group: str) -> str:
    """A topic with 100 records, of which the group has committed 10 and the broker removed 50."""
    topic = admin.make_topic()
    produce(server.bootstrap, topic, [b"%d" % n for n in range(100)])
    async with broker.connect(server.url) as bus, bus.records(topic, group=group) as log:
        batch = await log.next_batch(10)
        assert len(batch) == 10
        await batch.commit()
    admin.delete_records(topic, 50)
    return topic


@PROTOCOLS
async def test_a_position_removed_by_retention_is_an_error(server: KafkaServer, admin: RawAdmin, protocol: str) -> None:
    group = new_group()
    topic = await overtaken(server, admin, group)
    async with broker.connect(f"{server.url}?group_protocol={protocol}") as bus, bus.records(topic, group=group) as log:
        with pytest.raises(OffsetOutOfRange, match=r"position 10 .* begins at 50"):
            await log.next_batch(timeout=20)
    assert admin.committed(group, topic).offset == 10


@PROTOCOLS
@pytest.mark.parametrize(("policy", "first"), [("earliest", 50), ("latest", 100)])
@pytest.mark.parametrize("kind", ["records", "messages"])
async def test_a_configured_reset_is_reported_and_continues(
    server: KafkaServer, admin: RawAdmin, kind: str, policy: str, first: int, protocol: str
) -> None:
    group = new_group()
    topic = await overtaken(server, admin, group)
    account = Account(topic, 1)
    events: list[Event] = []
    async with broker.connect(f"{server.url}?offset_reset={policy}&group_protocol={protocol}") as bus:
        bus.hooks.listen(events.append)
        read = {"records": read_records, "messages": read_messages}[kind]
        reading = asyncio.create_task(read(bus, account, group, kind))
        await reached(lambda: any(isinstance(event, PositionReset) for event in events))
        produce(server.bootstrap, topic, [b"100"])
        await reached(lambda: len(account.read.get(kind, ())) == 101 - first)
        await still(reading)
    assert [offset for _, offset, _ in account.read[kind]] == list(range(first, 101))
    assert [event for event in events if isinstance(event, PositionReset)] == [
        PositionReset(partition=(topic, 0), position=10, to=first, policy=policy)
    ]
    assert admin.committed(group, topic).offset == 101


async def test_retention_that_overtakes_a_stalled_reader_is_reported(
    server: KafkaServer, admin: RawAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = admin.make_topic()
    body = bytes(1000)
    produce(server.bootstrap, topic, [body] * 5000)
    # It prefetches little, so that most of the log is not fetched when it is removed.
    url = f"{server.url}?queued.max.messages.kbytes=100&fetch.message.max.bytes=50000"
    async with broker.connect(url) as bus, bus.records(topic, group=new_group(), max_buffered=100) as log:
        seen = [record.offset for record in await log.next_batch(50)]
        await asyncio.to_thread(admin.delete_records, topic, 4900)
        with pytest.raises(OffsetOutOfRange, match="begins at 4900"):
            while True:
                batch = await log.next_batch(timeout=20)
                assert batch, "it waits for what will never come"
                seen += [record.offset for record in batch]
    with capsys.disabled():
        sys.stdout.write(f"\n{len(seen)} of 5000 records read when retention took those below 4900; then an error\n")
    assert seen == list(range(len(seen)))
    assert len(seen) < 4900


# -- foreign records ---------------------------------------------------------------------------------------

HEADERS: list[tuple[str, bytes | None]] = [
    ("", b"no name"),
    ("raw", b"\xff\xfe"),
    ("null", None),
    ("twice", b"1"),
    ("twice", b"2"),
    ("anybroker-id", b"\xff"),
    ("anybroker-time", b"yesterday"),
    ("anybroker-attributes", b"%ZZ=%FF&&=&x"),
    ("dead-letter-attempts", b"many"),
    ("long", b"x" * 20_000),
]


@pytest.mark.parametrize("kind", ["records", "messages"])
async def test_foreign_and_corrupt_headers_do_not_stop_consumers(
    server: KafkaServer, bus: broker.Bus, admin: RawAdmin, kind: str
) -> None:
    topic, dead = admin.make_topic(), admin.make_topic()
    produce(server.bootstrap, topic, [b"odd", None], headers=HEADERS, key=b"\xff\x00")
    produce(server.bootstrap, topic, [b"plain"])
    seen: list[tuple[bytes | None, bytes | None, dict[str, str], str]] = []

    def look(one: broker.Record | broker.Message) -> None:
        assert one.publish_time is not None
        seen.append((one.data, one.key, dict(one.attributes), one.id))

    if kind == "records":
        async with bus.records(topic, group=new_group()) as log:
            while len(seen) < 3:
                batch = await log.next_batch()
                batch.to_arrow()
                for record in batch:
                    look(record)
                await batch.commit()
    else:
        async with bus.messages(topic, subscription=new_group(), dead_letter=dead) as inbox:
            for _ in range(3):
                message = await inbox.next_message(timeout=20)
                assert message is not None
                look(message)
                await message.reject("odd")
        letters = read_all(server.bootstrap, dead)
        assert len(letters) == 3
        for letter in letters[:2]:
            headers = letter.headers() or []
            assert ("raw", b"\xff\xfe") in headers
            assert ("null", None) in headers
            assert [value for name, value in headers if name == "twice"] == [b"1", b"2"]
    assert [data for data, *_ in seen] == [b"odd", None, b"plain"]
    for _, key, attributes, _ in seen[:2]:
        assert key == b"\xff\x00"
        assert attributes["twice"] == "2"
        assert len(attributes["long"]) == 20_000
        assert not {"", "raw", "null", "anybroker-id", "anybroker-time", "dead-letter-attempts"} & attributes.keys()


async def test_an_invalid_message_fails_and_others_are_published(bus: broker.Bus, admin: RawAdmin) -> None:
    topic = admin.make_topic()
    good, bad = OutboundMessage(b"good"), OutboundMessage(b"bad", partition=7)
    with pytest.raises(PublishError) as raised:
        await bus.topic(topic).publish_batch([good, bad, good])
    assert [isinstance(outcome, Receipt) for outcome in raised.value.outcomes] == [True, False, True]


# -- memory ------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def settled_memory() -> int:
    """The resident bytes once a consumer has filled its prefetch: when they do not grow for a second."""
    found, unchanged = resident(), 0
    while unchanged < 5:
        await asyncio.sleep(0.2)
        now = resident()
        unchanged = unchanged + 1 if now - found < 1_000_000 else 0
        found = max(found, now)
    return found


@pytest.mark.parametrize("kind", ["records", "messages"])
async def test_memory_is_flat_under_a_stalled_consumer(
    server: KafkaServer, admin: RawAdmin, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = admin.make_topic()
    body = bytes(10_000)
    # Far more than a consumer may hold.
    produce(server.bootstrap, topic, [body] * 5000)
    async with broker.connect(f"{server.url}?queued.max.messages.kbytes=16384") as bus:
        if kind == "records":
            consumer = bus.records(topic, group=new_group(), max_buffered=500)
        else:
            consumer = bus.messages(topic, subscription=new_group(), max_outstanding=500)
        async with consumer:
            first = await (
                consumer.next_record(20) if isinstance(consumer, broker.RecordConsumer) else consumer.next_message(20)
            )
            assert first is not None
            # The allocator's leftovers of the producers are included before, too.
            await asyncio.to_thread(produce, server.bootstrap, topic, [body] * 5000)
            before = await settled_memory()
            for _ in range(3):
                await asyncio.to_thread(produce, server.bootstrap, topic, [body] * 5000)
            grown = await settled_memory() - before
    with capsys.disabled():
        sys.stdout.write(f"\n{kind}: 150 MB more published past a consumer that stalls; {grown / 1e6:.1f} MB grown\n")
    # The allocator keeps some memory of the producers; all published messages would be 150 MB.
    assert grown < 75_000_000
