"""Queues of other brokers than JetStream as a source, without a session of Spark."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from broker.blocking import connect
from tests.servers import kafka, pubsub
from tests.servers.servicebus import double
from tests.spark.support import numbered, publish
from tests.spark.test_spool import Query

ROWS = 60


@pytest.mark.parametrize("backend", ["pubsub", "servicebus"])
def test_a_queue_of_another_broker(backend: str, tmp_path: Path) -> None:
    url = pubsub.shared_server().url if backend == "pubsub" else double.shared_double().url
    topic = f"spark-{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(ROWS))
        query = Query(url, topic, tmp_path / "spool", maxRows=40)
        try:
            query.begin()
            assert sorted(query.until(ROWS)) == sorted(numbered(ROWS))
        finally:
            query.reader.stop()
        # A new run goes on from the checkpoint, and a batch that is run again has the same rows.
        publish(bus, topic, numbered(5, ROWS))
        try:
            before = query.begin().at
            came = query.until(5)
            assert sorted(came) == sorted(numbered(5, ROWS))
            assert sorted(query.rows(before, query.at)) == sorted(came)
            tables = query.tables(before, query.at)
            # An id of the server that is made a number is no offset; a sequence number is one.
            offsets = [offset for table in tables for offset in table["offset"]]
            first = offsets[0]
            assert offsets == ([None] * 5 if backend == "pubsub" else list(range(first, first + 5)))
            assert {partition for table in tables for partition in table["partition"]} == {None}
            assert all(time for table in tables for time in table["broker_time"])
        finally:
            query.reader.stop()


def test_a_queue_of_kafka_tells_the_places_of_its_messages(tmp_path: Path) -> None:
    url = kafka.shared_server().url
    topic = f"spark-{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=2)
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(ROWS))
        places = [
            (partition, record.offset, record.data)
            for partition in bus.log.partitions(topic)
            for batch in bus.log.read(topic, partition)
            for record in batch
        ]
    query = Query(url, topic, tmp_path / "spool")
    try:
        before = query.begin().at
        query.until(ROWS)
        tables = query.tables(before, query.at)
    finally:
        query.reader.stop()
    told = [row for each in tables for row in zip(each["partition"], each["offset"], each["value"], strict=True)]
    assert sorted(told) == sorted(places)
