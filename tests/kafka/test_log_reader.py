"""Bounded reads of a partition end, whatever the end of the log consists of, and never skip records silently."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from broker.driver.contract import Bounds
from broker.errors import BrokerError, Closed, NotFound, OffsetOutOfRange, OperationTimeout, TopicNotFound
from broker.hooks import Hooks
from broker.reading.log_reader import LogReaderFacade
from broker.records import Record, RecordBatch
from broker_kafka.cluster.connection import Connection
from broker_kafka.log_reader import KafkaLogReader
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.servers import kafka_client
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce


class Transactions:
    """A raw transactional producer."""

    def __init__(self, kafka: KafkaServer) -> None:
        self.producer = Producer(
            {"bootstrap.servers": kafka.bootstrap, "transactional.id": uuid4().hex, "log_level": 3}
        )
        self.producer.init_transactions()

    def write(self, topic: str, *values: bytes) -> None:
        self.producer.begin_transaction()
        for value in values:
            self.producer.produce(topic, value, key=b"key", partition=0)
        self.producer.flush()

    def commit(self) -> None:
        self.producer.commit_transaction()

    def abort(self) -> None:
        self.producer.abort_transaction()


@pytest.fixture
def transactions(kafka: KafkaServer) -> Transactions:
    return Transactions(kafka)


def small_fetches(kafka: KafkaServer, **values: Any) -> KafkaSettings:
    return KafkaSettings(
        servers=(kafka.bootstrap,),
        fetch_max_bytes=20_000,
        message_max_bytes=20_000,
        max_partition_fetch_bytes=20_000,
        queued_min_messages=1,
        queued_max_messages_kbytes=20,
        **values,
    )


async def read_all(reader: KafkaLogReader, topic: str, *, partition: int = 0, most: int = 100) -> list[Record[Any]]:
    """From bound to bound, which has to end by itself."""
    bounds = (await reader.bounds(topic))[partition]
    async with asyncio.timeout(60):
        return [
            record async for batch in reader.read(topic, partition, bounds.first, bounds.next, most) for record in batch
        ]


def values(records: list[Record[Any]]) -> list[bytes | None]:
    return [record.data for record in records]


def numbered(count: int, prefix: str = "") -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


@pytest.mark.parametrize("ends", ["committed", "aborted", "aborted-only", "open", "many"])
async def test_ends_at_transactions(
    reader: KafkaLogReader, admin: RawAdmin, topic: str, transactions: Transactions, ends: str
):
    expected: list[bytes] = []
    if ends != "aborted-only":
        transactions.write(topic, *numbered(5))
        transactions.commit()
        expected = numbered(5)
    if ends in ("aborted", "aborted-only"):
        transactions.write(topic, *numbered(5, "never-"))
        transactions.abort()
    await asyncio.to_thread(admin.wait_for_markers, topic)
    if ends == "open":
        transactions.write(topic, b"open")
        assert await reader.bounds(topic) == {0: Bounds(0, 6)}
    if ends == "many":
        for number in range(20):
            transactions.write(topic, b"%d" % number)
            transactions.commit() if number % 3 == 0 else transactions.abort()
            if number % 3 == 0:
                expected.append(b"%d" % number)
        await asyncio.to_thread(admin.wait_for_markers, topic)
    assert values(await read_all(reader, topic)) == expected
    # Also from and to every position in between, markers and aborted records included.
    bounds = (await reader.bounds(topic))[0]
    everything = await read_all(reader, topic)
    async with asyncio.timeout(60):
        for start in range(bounds.first, bounds.next + 1, 3):
            for stop in range(start, bounds.next + 1, 4):
                found = [r.offset async for batch in reader.read(topic, 0, start, stop, 7) for r in batch]
                assert found == [r.offset for r in everything if start <= r.offset < stop]
    if ends == "open":
        transactions.abort()


async def test_a_transaction_that_commits_later_is_read_later(
    reader: KafkaLogReader, admin: RawAdmin, topic: str, transactions: Transactions
):
    transactions.write(topic, *numbered(3))
    assert await read_all(reader, topic) == []
    transactions.commit()
    await asyncio.to_thread(admin.wait_for_markers, topic)
    assert values(await read_all(reader, topic)) == numbered(3)


@pytest.mark.deep
async def test_ends_at_a_compacted_tail(
    reader: KafkaLogReader, kafka: KafkaServer, admin: RawAdmin, make_topic: MakeTopic
):
    topic = make_topic(
        config={
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.01",
            "max.compaction.lag.ms": "200",
            "delete.retention.ms": "0",
        }
    )
    for key in range(3):
        produce(kafka.bootstrap, topic, [b"%d" % number for number in range(10)], key=b"%d" % key)
    # Tombstones, which go as well: the last offsets of the segments that are cleaned hold nothing.
    for key in range(3):
        produce(kafka.bootstrap, topic, [None], key=b"%d" % key)

    async def cleaned() -> bool:
        # The active segment is never cleaned, so it is rolled by further records.
        await asyncio.to_thread(produce, kafka.bootstrap, topic, [b"x"], key=b"last")
        return all(record.key == b"last" for record in await read_all(reader, topic))

    async with asyncio.timeout(60):
        while not await cleaned():
            await asyncio.sleep(0.2)
    bounds = (await reader.bounds(topic))[0]
    records = await read_all(reader, topic)
    assert len(records) < bounds.next - bounds.first
    # Ranges that hold nothing end at once.
    async with asyncio.timeout(60):
        for start, stop in ((0, 1), (0, 30), (5, 29), (29, 33)):
            assert [batch async for batch in reader.read(topic, 0, start, stop, 10)] == []


async def test_records_removed_by_retention_are_an_error(
    reader: KafkaLogReader, kafka: KafkaServer, admin: RawAdmin, topic: str
):
    produce(kafka.bootstrap, topic, numbered(10))
    admin.delete_records(topic, 4)
    assert await reader.bounds(topic) == {0: Bounds(4, 10)}
    for start, stop in ((0, 10), (3, 3), (4, 11), (11, 11)):
        with pytest.raises(OffsetOutOfRange, match="4 to 10"):
            await anext(aiter(reader.read(topic, 0, start, stop, 5)))
    assert values(await read_all(reader, topic)) == numbered(10)[4:]
    admin.delete_records(topic, -1)
    assert await reader.bounds(topic) == {0: Bounds(10, 10)}
    assert await read_all(reader, topic) == []


async def test_retention_during_a_read_is_an_error(kafka: KafkaServer, admin: RawAdmin, topic: str):
    # So small a prefetch queue that most of the log is still on the broker when it is removed.
    settings = small_fetches(kafka)
    connection = Connection(settings, Hooks())
    await connection.open()
    reader = KafkaLogReader(connection)
    produce({"bootstrap.servers": kafka.bootstrap, "batch.num.messages": 10}, topic, [b"x" * 10_000] * 400)
    seen: list[int] = []
    with pytest.raises(OffsetOutOfRange):
        async for batch in reader.read(topic, 0, 0, 400, 10):
            if not seen:
                await asyncio.to_thread(admin.delete_records, topic, 390)
            seen += [record.offset for record in batch]
    assert seen == list(range(len(seen)))
    # The client that met the error is as good as new.
    assert [r.offset for r in await read_all(reader, topic)] == list(range(390, 400))
    await reader.close()
    await connection.close()


@pytest.mark.deep
async def test_deleting_a_topic_during_a_read_is_an_error(kafka: KafkaServer, admin: RawAdmin, topic: str):
    connection = Connection(small_fetches(kafka, request_timeout=2.0), Hooks())
    await connection.open()
    reader = KafkaLogReader(connection)
    produce({"bootstrap.servers": kafka.bootstrap, "batch.num.messages": 20}, topic, [b"x" * 10_000] * 400)
    seen: list[int] = []
    with pytest.raises(BrokerError) as caught:
        async with asyncio.timeout(60):
            async for batch in reader.read(topic, 0, 0, 400, 10):
                if not seen:
                    await asyncio.to_thread(admin.delete_topic, topic)
                seen += [record.offset for record in batch]
    assert isinstance(caught.value, (TopicNotFound, OperationTimeout)), caught.value
    assert seen == list(range(len(seen)))
    assert len(seen) < 400
    await reader.close()
    await connection.close()


@pytest.mark.deep
async def test_by_time(reader: KafkaLogReader, kafka: KafkaServer, make_topic: MakeTopic):
    topic = make_topic(partitions=2, config={"retention.ms": "-1"})
    begin = datetime(2020, 1, 1, tzinfo=UTC)
    for number in range(5):
        moment = int((begin + timedelta(seconds=number)).timestamp() * 1000)
        produce(kafka.bootstrap, topic, [b"%d" % number], partition=0, timestamp=moment)
    assert await reader.position_at(topic, begin) == {0: 0, 1: 0}
    assert await reader.position_at(topic, begin - timedelta(days=400)) == {0: 0, 1: 0}
    assert await reader.position_at(topic, begin + timedelta(seconds=2)) == {0: 2, 1: 0}
    assert await reader.position_at(topic, begin + timedelta(seconds=2, microseconds=1)) == {0: 3, 1: 0}
    assert await reader.position_at(topic, begin + timedelta(seconds=9)) == {0: 5, 1: 0}


@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
async def test_columns_equal_the_records(reader: KafkaLogReader, kafka: KafkaServer, make_topic: MakeTopic, kind: str):
    topic = make_topic(config={"message.timestamp.type": kind})
    produce(kafka.bootstrap, topic, [b"a", None], key=b"k", headers=[("color", b"red"), ("anybroker-time", b"1000001")])
    produce(kafka.bootstrap, topic, [b"b"], headers=[("anybroker-time", b"soon")])
    produce(kafka.bootstrap, topic, [b"c"])
    batch = RecordBatch(await read_all(reader, topic))
    table = batch.to_arrow()
    for record, row in zip(batch, table.to_pylist(), strict=True):
        assert row | {"attributes": dict(row["attributes"])} == {
            name: getattr(record, name) for name in table.column_names
        } | {"attributes": dict(record.attributes)}
    assert (batch[0].broker_time is None) == (kind == "CreateTime")
    assert batch.to_arrow(["broker_time", "offset"]).column_names == ["broker_time", "offset"]


async def test_missing_topics_and_partitions(reader: KafkaLogReader, kafka: KafkaServer, admin: RawAdmin, topic: str):
    missing = f"missing-{uuid4().hex}"
    for call in (reader.partitions(missing), reader.bounds(missing), reader.position_at(missing, datetime.now(UTC))):
        with pytest.raises(TopicNotFound, match=missing):
            await call
    with pytest.raises(TopicNotFound, match=missing):
        await anext(aiter(reader.read(missing, 0, 0, 1, 5)))
    for stop in (0, 1):
        with pytest.raises(NotFound, match="no partition 7"):
            await anext(aiter(reader.read(topic, 7, 0, stop, 5)))
    # Nothing runs on after the error, and no client is kept that knows the topic as missing.
    assert (asyncio.all_tasks(), reader._all) == ({asyncio.current_task()}, set())
    admin.make_topic(missing)
    produce(kafka.bootstrap, missing, numbered(3))
    assert values(await read_all(reader, missing)) == numbered(3)


async def test_a_read_of_everything_needs_no_lookup(
    reader: KafkaLogReader, kafka: KafkaServer, topic: str, monkeypatch: pytest.MonkeyPatch
):
    produce(kafka.bootstrap, topic, numbered(10))
    monkeypatch.setattr("broker_kafka.log_reader._SOON", 10.0)
    monkeypatch.setattr(Connection, "outcomes", Mock(side_effect=AssertionError("a second request")))
    assert [values([*batch]) async for batch in reader.read(topic, 0, 3, 7, 100)] == [numbered(10)[3:7]]
    with pytest.raises(AssertionError):
        await anext(aiter(reader.read(topic, 0, 3, 7, 3)))


async def test_clients_are_reused_and_returned_by_abandoned_reads(
    reader: KafkaLogReader, kafka: KafkaServer, topic: str
):
    produce(kafka.bootstrap, topic, numbered(100))
    facade = LogReaderFacade(reader)
    for _ in range(3):
        async for batch in facade.read(topic, 0, max_records=5):
            assert len(batch) == 5
            break
        assert values(await read_all(reader, topic)) == numbered(100)
    (thread,) = reader._all

    # One that is cancelled while its client opens has none to give back.
    all_read = asyncio.Barrier(7)

    async def cancelled() -> None:
        async for _ in reader.read(topic, 0, 0, 100, 5):
            await all_read.wait()
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(cancelled()) for _ in range(6)]
    await all_read.wait()
    assert len(reader._all) == 6
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # Four are kept at most.
    while len(reader._idle) != 4 or len(reader._all) != 4:
        await asyncio.sleep(0.01)
    assert values(await read_all(reader, topic)) == numbered(100)
    await reader.close()
    # It reports that its client is closed, and then ends.
    await asyncio.to_thread(thread._thread.join, 10)
    assert not thread._thread.is_alive()
    with pytest.raises(Closed):
        await anext(aiter(reader.read(topic, 0, 0, 1, 5)))


async def test_a_log_reader_creates_no_group(reader: KafkaLogReader, kafka: KafkaServer, admin: RawAdmin, topic: str):
    produce(kafka.bootstrap, topic, numbered(3))
    await read_all(reader, topic)
    groups = admin.client.list_consumer_groups(request_timeout=10).result().valid
    assert not [group.group_id for group in groups if "log-reader" in group.group_id]


@pytest.mark.deep
async def test_a_read_survives_a_broker_restart():
    with KafkaServer() as server:
        admin = RawAdmin(server.bootstrap)
        topic = admin.make_topic()
        produce({"bootstrap.servers": server.bootstrap, "batch.num.messages": 20}, topic, [b"x" * 10_000] * 400)
        settings = small_fetches(server, request_timeout=1.5)
        connection = Connection(settings, Hooks())
        await connection.open()
        reader = KafkaLogReader(connection)
        seen: list[int] = []
        with pytest.raises(BrokerError) as caught:
            async for batch in reader.read(topic, 0, 0, 400, 10):
                if not seen:
                    await asyncio.to_thread(server.kill)
                seen += [record.offset for record in batch]
        assert isinstance(caught.value, OperationTimeout) or caught.value.retriable
        assert 0 < len(seen) < 400
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(admin.wait_for_leaders, topic, 1)
        async with asyncio.timeout(60):
            async for batch in reader.read(topic, 0, seen[-1] + 1, 400, 10):
                seen += [record.offset for record in batch]
        assert seen == list(range(400))
        await reader.close()
        await connection.close()


@pytest.mark.deep
async def test_reading_is_about_as_fast_as_the_raw_client(reader: KafkaLogReader, kafka: KafkaServer, topic: str):
    """A read of many batches keeps its client busy: a coarse guard, the figures are the benchmarks'."""
    count = 100_000
    many = {"bootstrap.servers": kafka.bootstrap, "linger.ms": 20, "queue.buffering.max.messages": count}
    await asyncio.to_thread(produce, many, topic, [b"x" * 100] * count, partition=0)
    took: list[float] = []
    raw: list[float] = []
    for _ in range(3):
        begun = monotonic()
        assert len(await asyncio.to_thread(kafka_client.read_all, kafka.bootstrap, topic)) == count
        raw.append(monotonic() - begun)
        begun = monotonic()
        assert sum([len(batch) async for batch in reader.read(topic, 0, 0, count, 5000)]) == count
        took.append(monotonic() - begun)
    # Any one may meet a busy machine; a client that stalls between two batches does so in each.
    assert min(took) < 5 * min(raw), (took, raw)
