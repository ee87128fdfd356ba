"""A read that begins where another ended uses the prefetched records, and no read gets anything stale."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as NativePartition

from broker.driver.contract import TopicPartition
from broker.errors import OffsetOutOfRange
from broker.testing.waiting import eventually
from broker_kafka import log_reader
from broker_kafka.admin.topics import KafkaTopics
from broker_kafka.client import log_fetcher as reader_thread
from broker_kafka.client.log_fetcher import ReaderThread
from broker_kafka.log_reader import KafkaLogReader
from tests.kafka.conftest import MakeTopic
from tests.kafka.test_log_reader import Transactions, numbered, transactions
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce

__all__ = ["transactions"]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Called for each place from which a client is to fetch."""
    begun = Mock(wraps=NativePartition)
    monkeypatch.setattr(reader_thread, "NativePartition", begun)
    return begun


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, reads that follow come in time."""
    monkeypatch.setattr(reader_thread, "_AHEAD", 60.0)


async def offsets(
    reader: KafkaLogReader, topic: str, start: int, stop: int, most: int = 100, *, partition: int = 0
) -> list[int]:
    async with asyncio.timeout(60):
        return [record.offset async for batch in reader.read(topic, partition, start, stop, most) for record in batch]


async def test_consecutive_ranges_are_fetched_once(
    reader: KafkaLogReader, kafka: KafkaServer, topic: str, begun: Mock
) -> None:
    produce(kafka.bootstrap, topic, numbered(1000))
    for start in range(0, 1000, 100):
        assert await offsets(reader, topic, start, start + 100, 30) == list(range(start, start + 100))
    produce(kafka.bootstrap, topic, numbered(100))
    assert await offsets(reader, topic, 1000, 1100) == list(range(1000, 1100))
    assert begun.call_count == 1
    assert await offsets(reader, topic, 1000, 1100) == list(range(1000, 1100)), "the same once more"
    assert begun.call_count == 2


async def test_a_read_reuses_the_client_that_prefetched_its_range(
    reader: KafkaLogReader, kafka: KafkaServer, make_topic: MakeTopic, begun: Mock
) -> None:
    topics = [make_topic() for _ in range(3)]
    for topic in topics:
        produce(kafka.bootstrap, topic, numbered(100))
    for start in range(0, 100, 20):
        found = await asyncio.gather(*(offsets(reader, topic, start, start + 20) for topic in topics))
        assert found == [list(range(start, start + 20))] * 3
    assert begun.call_count == 3


async def test_interleaved_reads_of_partitions_reuse_their_clients(
    reader: KafkaLogReader, kafka: KafkaServer, make_topic: MakeTopic, begun: Mock
) -> None:
    topic = make_topic(partitions=6)
    for partition in range(6):
        produce(kafka.bootstrap, topic, numbered(40), partition=partition)
    for start in range(0, 40, 10):
        for partition in range(3):
            assert await offsets(reader, topic, start, start + 10, partition=partition) == list(
                range(start, start + 10)
            )
    assert (begun.call_count, len(reader._all)) == (3, 3)
    for partition in range(6):
        assert await offsets(reader, topic, 0, 40, partition=partition) == list(range(40))
    assert len(reader._all) == 4, "what is kept of them is bounded"


async def test_concurrent_reads_of_many_partitions_reopen_no_client(
    reader: KafkaLogReader, kafka: KafkaServer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(wraps=ReaderThread)
    monkeypatch.setattr(log_reader, "ReaderThread", made)
    topic = make_topic(partitions=6)
    for partition in range(6):
        produce(kafka.bootstrap, topic, numbered(30), partition=partition)
    for start in range(0, 30, 10):
        for first in range(0, 6, 2):
            pair = (offsets(reader, topic, start, start + 10, partition=first + number) for number in range(2))
            assert await asyncio.gather(*pair) == [list(range(start, start + 10))] * 2
    assert made.call_count == 4


async def test_a_recreated_topic_returns_its_new_records(
    reader: KafkaLogReader, kafka: KafkaServer, admin: RawAdmin, topic: str
) -> None:
    produce(kafka.bootstrap, topic, numbered(20, "old-"))
    assert await offsets(reader, topic, 0, 10) == list(range(10))
    admin.delete_topic(topic)
    await KafkaTopics(reader._connection).ensure_topic(topic, partitions=1, retention=None, options={})
    produce(kafka.bootstrap, topic, numbered(20, "new-"))
    async with asyncio.timeout(60):
        found = [record.data async for batch in reader.read(topic, 0, 10, 20, 100) for record in batch]
    assert found == numbered(20, "new-")[10:]


async def test_a_read_after_a_recreation_returns_new_records(
    reader: KafkaLogReader, kafka: KafkaServer, admin: RawAdmin, topic: str
) -> None:
    produce(kafka.bootstrap, topic, numbered(20, "old-"))
    reading = reader.read(topic, 0, 0, 10, 5)
    assert len(await anext(reading)) == 5
    admin.delete_topic(topic)
    await KafkaTopics(reader._connection).ensure_topic(topic, partitions=1, retention=None, options={})
    produce(kafka.bootstrap, topic, numbered(20, "new-"))
    async with asyncio.timeout(60):
        async for _ in reading:
            pass
        found = [record.data async for batch in reader.read(topic, 0, 10, 20, 100) for record in batch]
    assert found == numbered(20, "new-")[10:]


@pytest.mark.deep
async def test_truncation_below_a_range_ends_the_read_with_an_error(
    reader: KafkaLogReader, kafka: KafkaServer, admin: RawAdmin, topic: str, transactions: Transactions
) -> None:
    produce(kafka.bootstrap, topic, numbered(100))
    transactions.write(topic, *numbered(5))
    assert await offsets(reader, topic, 0, 50, 50) == list(range(50))
    (thread,) = reader._all
    records = await thread.call(lambda client: client.consume(50, 5.0))
    admin.delete_records(topic, -1)
    after = await thread.call(lambda client: client.consume(2, 10.0))
    errors = [(each, each.error()) for each in after]
    (lost,) = [each for each, error in errors if error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET]
    assert (len(records), lost.offset()) == (50, 100)
    place = TopicPartition(topic, 0)
    async with asyncio.timeout(60):
        # What ends the range comes, and the next one has the error.
        thread._behind.extend([*records, lost])
        chunk = await thread.begin(place, 50, 100, 100)
        assert (len(chunk.records), chunk.done) == (50, True)
        thread.fetch_ahead(place, 100)
        with pytest.raises(OffsetOutOfRange, match="position 100"):
            await thread.begin(place, 100, 105, 100)
        # What would end it does not come.
        thread.fetch_ahead(place, 50)
        await thread.call(lambda _: thread._behind.extend([*records[:-1], lost]))
        chunk = await thread.begin(place, 50, 100, 100)
        assert (len(chunk.records), chunk.done) == (49, False)
        with pytest.raises(OffsetOutOfRange, match="position 100"):
            await thread.take(100)


async def test_prefetched_records_are_read_one_by_one(
    reader: KafkaLogReader, kafka: KafkaServer, topic: str, begun: Mock
) -> None:
    """With the end of the partition, as it was, between the records."""
    produce(kafka.bootstrap, topic, numbered(10))
    assert await offsets(reader, topic, 0, 5, 5) == list(range(5))
    (thread,) = reader._all
    thread._behind.extend(await thread.call(lambda client: client.consume(6, 5.0)))
    # One batch, so that the client gets no end of the partition within it.
    produce({"bootstrap.servers": kafka.bootstrap, "linger.ms": 300}, topic, numbered(10))
    thread._behind.extend(await thread.call(lambda client: client.consume(11, 5.0)))
    ends = [number for number, each in enumerate(thread._behind) if each.error() is not None]
    assert ends == [5, 16]
    assert await offsets(reader, topic, 5, 10, 100) == list(range(5, 10))
    assert await offsets(reader, topic, 10, 13, 1) == list(range(10, 13))
    assert await offsets(reader, topic, 13, 20, 2) == list(range(13, 20))
    assert begun.call_count == 1


@pytest.mark.deep
async def test_errors_during_prefetch_do_not_fail_another_read(
    reader: KafkaLogReader,
    kafka: KafkaServer,
    admin: RawAdmin,
    topic: str,
    transactions: Transactions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_thread, "_AHEAD", 3.0)
    produce(kafka.bootstrap, topic, numbered(100))
    transactions.write(topic, *numbered(5))
    assert await offsets(reader, topic, 0, 100) == list(range(100))
    (thread,) = reader._all
    # Where it fetches is not in the log any more.
    admin.delete_records(topic, -1)

    async def has_ended() -> bool:
        return not await thread.call(lambda client: client.assignment())

    await eventually(has_ended, 20, "the end of fetching")
    transactions.abort()
    await asyncio.to_thread(admin.wait_for_markers, topic)
    produce(kafka.bootstrap, topic, numbered(10))
    bounds = (await reader.bounds(topic))[0]
    assert len(await offsets(reader, topic, bounds.first, bounds.next)) == 10
    assert thread in reader._idle


async def test_prefetch_stops_after_a_while(
    reader: KafkaLogReader, kafka: KafkaServer, topic: str, begun: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_thread, "_AHEAD", 0.05)
    produce(kafka.bootstrap, topic, numbered(100))
    assert await offsets(reader, topic, 0, 50, 30) == list(range(50))
    (thread,) = reader._all

    async def has_ended() -> bool:
        return not await thread.call(lambda client: client.assignment())

    await eventually(has_ended, 10, "the end of fetching")
    assert not thread._behind
    assert await offsets(reader, topic, 50, 100) == list(range(50, 100))
    assert begun.call_count == 2


async def test_an_abandoned_read_leaves_no_prefetched_records(
    reader: KafkaLogReader, kafka: KafkaServer, topic: str
) -> None:
    produce(kafka.bootstrap, topic, numbered(100))
    assert await offsets(reader, topic, 0, 10) == list(range(10))
    left: Any = reader.read(topic, 0, 10, 90, 5)
    assert len(await anext(left)) == 5
    await left.aclose()
    for start in (10, 15, 90):
        assert await offsets(reader, topic, start, 100) == list(range(start, 100))


@pytest.mark.parametrize("seed", range(4))
async def test_consecutive_ranges_return_what_one_read_returns(
    reader: KafkaLogReader, admin: RawAdmin, topic: str, transactions: Transactions, seed: int
) -> None:
    """Among markers and aborted records, while the log grows."""
    random = Random(seed)
    expected: list[int] = []
    found: list[int] = []
    position = 0

    async def bound() -> int:
        return (await reader.bounds(topic))[0].next

    for _ in range(6):
        begin = await bound()
        count = random.randint(1, 8)
        transactions.write(topic, *numbered(count))
        if commits := random.random() < 0.6:
            expected += range(begin, begin + count)
        transactions.commit() if commits else transactions.abort()
        await asyncio.to_thread(admin.wait_for_markers, topic)
        end = await bound()
        while position < end and random.random() < 0.8:
            stop = random.randint(position + 1, end)
            found += await offsets(reader, topic, position, stop, random.choice([1, 3, 100]))
            position = stop
    found += await offsets(reader, topic, position, await bound()) if position < await bound() else []
    assert found == expected


async def test_records_removed_between_reads_are_not_skipped_silently(
    reader: KafkaLogReader, kafka: KafkaServer, admin: RawAdmin, topic: str
) -> None:
    produce(kafka.bootstrap, topic, numbered(100))
    assert await offsets(reader, topic, 0, 10) == list(range(10))
    admin.delete_records(topic, 50)
    result: Any = (await asyncio.gather(offsets(reader, topic, 10, 100), return_exceptions=True))[0]
    assert isinstance(result, OffsetOutOfRange) or result == list(range(10, 100))
    assert await offsets(reader, topic, 50, 100) == list(range(50, 100))
