"""A log reader creates no records for columns, and an abandoned read frees its client."""

from __future__ import annotations

import asyncio
import logging
from threading import Event
from typing import Any

import pytest

from broker.driver.contract import TopicPartition
from broker.errors import Closed
from broker.hooks import Hooks
from broker.reading.log_reader import LogReaderFacade
from broker_kafka.client.log_fetcher import ReaderThread
from broker_kafka.cluster.connection import Connection
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.log_reader import KafkaLogReader
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce


async def test_columns_do_not_create_records(
    reader: KafkaLogReader, kafka: KafkaServer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [b"%d" % number for number in range(25)]
    produce(kafka.bootstrap, topic, values, key=b"k", headers=[("color", b"red")])
    made: list[int] = []
    make = NativeRun.make

    def counted(run: NativeRun, *owner: Any) -> Any:
        made.append(len(run))
        return make(run, *owner)

    monkeypatch.setattr(NativeRun, "make", counted)
    log = LogReaderFacade(reader)
    rows: list[tuple[Any, ...]] = []
    async for batch in log.read(topic, 0, max_records=10):
        table = batch.to_arrow(["offset", "key", "data", "attributes"])
        assert list(batch.rows("offset", "data")) == [(row["offset"], row["data"]) for row in table.to_pylist()]
        rows += [(row["offset"], row["key"], row["data"], row["attributes"]) for row in table.to_pylist()]
    assert rows == [(number, b"k", value, [("color", "red")]) for number, value in enumerate(values)]
    assert made == []
    # Who looks at records gets the same ones each time.
    async for batch in log.read(topic, 0, max_records=100):
        assert [record.data for record in batch] == values[batch[0].offset : batch[-1].offset + 1]
        assert batch[0] is next(iter(batch))
    assert sum(made) == 25


async def test_a_read_abandoned_before_its_start_frees_its_client(kafka: KafkaServer, topic: str) -> None:
    busy = Event()
    connection = Connection(KafkaSettings(servers=(kafka.bootstrap,)), Hooks())
    thread = ReaderThread(connection.client_config("consumer") | {"group.id": "readers"}, patience=60.0)
    await thread.start()
    try:
        thread.submit(lambda client: busy.wait(20))
        # Nothing is there to be read.
        reading = asyncio.ensure_future(thread.begin(TopicPartition(topic, 0), 0, 10, 10))
        await asyncio.sleep(0)
        thread.abandon()
        busy.set()
        async with asyncio.timeout(60):
            with pytest.raises(Closed):
                await reading
    finally:
        busy.set()
        await thread.stop(5)
        await connection.close()


async def test_the_first_record_does_not_wait_for_librdkafkas_timer(
    kafka: KafkaServer, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    produce(kafka.bootstrap, topic, [b"first"])
    settings = KafkaSettings(servers=(kafka.bootstrap,), properties={"debug": "metadata"})
    connection = Connection(settings, Hooks())
    await connection.open()
    try:
        with caplog.at_level(logging.DEBUG, "broker.kafka"):
            for _ in range(4):
                reader = KafkaLogReader(connection)
                assert [len(batch) async for batch in reader.read(topic, 0, 0, 1, 10)] == [1]
                follower = await reader.follow(topic, {0: 0})
                assert len(await follower.fetch(10, 1000, 60.0)) == 1
                await reader.close()
    finally:
        await connection.close()
    lines = [record.getMessage() for record in caplog.records if "consumer-" in record.getMessage()]
    assert sum("for 1 topic(s): application requested" in line for line in lines) >= 8
    # The timer may hit by chance.
    assert sum("for 1 topic(s): refresh unavailable topics" in line for line in lines) < 4
