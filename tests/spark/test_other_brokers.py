"""Pulsar's log, whose offsets do not count records; and queues and sinks on Pulsar, Pub/Sub
and the double of Service Bus."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

import broker
from broker.blocking import Bus, connect
from broker.errors import Unsupported
from broker.testing.waiting import eventually
from broker_spark import progress
from broker_spark.common.options import SourceOptions
from broker_spark.log.ranges import Range
from broker_spark.log.source import LogBatchReader
from broker_spark.sink.sink import SinkOptions, Written, _publish
from tests.servers import kafka, pubsub, pulsar, servicebus
from tests.spark import test_spool
from tests.spark.conftest import MakeTopic
from tests.spark.support import copy, log, numbered, publish, read, rows_of, values
from tests.spark.test_log_stream import Query

on_pulsar = pytest.mark.parametrize("url", ["pulsar"], indirect=True)


@pytest.fixture(params=["pulsar", "pubsub", "servicebus"])
def url(request: pytest.FixtureRequest) -> str:
    match request.param:
        case "pulsar":
            return pulsar.shared_server().url
        case "kafka":
            return kafka.shared_server().url
        case "kafka with a queue that schedules":
            return f"{kafka.shared_server().url}?queue=markers"
        case "pubsub":
            return f"{pubsub.shared_server().url}&lease_seconds=2"
        case _:
            if (reason := servicebus.missing()) is not None:
                pytest.skip(reason)
            return f"{servicebus.shared_double().url}&lease_seconds=2"


@pytest.fixture(params=["default", "off"])
def batched(request: pytest.FixtureRequest) -> Iterator[Bus]:
    """Publishes in entries of many messages, and without batches."""
    with connect(f"{pulsar.shared_server().url}&batching={request.param}") as bus:
        yield bus


def behind(query: Query, topic: str) -> int:
    head = query.reader.reportLatestOffset()
    assert head is not None
    return sum(head["topics"][topic]["behind"].values())


@pytest.mark.deep
@on_pulsar
def test_bounded_batches_of_a_log_in_ledgers_read_each_row_once(url: str, batched: Bus) -> None:
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    batched.admin.ensure_topic(topic, partitions=2)
    rows = numbered(200)
    for first in range(0, 200, 25):
        # A batch may be one entry of the ledger, which is never cut.
        publish(batched, topic, rows[first : first + 25])
    query = Query(url, topic, maxRows=60, tasksPerPartition=2)
    batches = [query.batch() or []]
    assert 0 < len(batches[0]) < 200
    assert behind(query, topic) > 0
    # The next run begins in the first ledger and continues in a second one.
    path = f"/admin/v2/persistent/public/default/{topic}/unload"
    assert pulsar.shared_server().request("PUT", path)[0] < 300
    publish(batched, topic, numbered(50, start=200))
    query.restart()
    batches += query.batches()
    assert sorted(row for batch in batches for row in batch) == sorted(numbered(250))
    assert behind(query, topic) == 0
    assert query.batch() is None
    # A query at the end continues with new messages.
    publish(batched, topic, numbered(5, start=250))
    assert sorted(query.batch() or []) == sorted(numbered(5, start=250))


@on_pulsar
def test_a_log_without_retention_is_warned_of(
    url: str, make_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic(partitions=1)
    nothing = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}

    async def keep_nothing() -> None:
        async with broker.connect(url) as bus:
            connection: Any = bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
            place = f"{connection.topic(topic).path}/retention"

            async def is_set() -> bool:
                await connection.http.request("POST", place, "", nothing)
                return await connection.http.get(f"{place}?applied=true", "") == nothing

            await eventually(is_set, test_spool.SECONDS, "the policy of the topic")

    asyncio.run(keep_nothing())
    query = Query(url, topic)
    query.batch()
    query.batch()
    (warning,) = [each.message for each in caplog.records if topic in each.message]
    assert warning.startswith(f"Topic {topic!r} has no retention: Pulsar removes messages that all its subscriptions")


@on_pulsar
def test_tasks_cut_a_log_in_ledgers(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(40))
    options = SourceOptions.parse({"url": url, "topic": topic, "tasksPerPartition": "4"})
    tasks = [task for task in LogBatchReader(options).partitions() if isinstance(task, Range)]
    rows = [rows_of(options, task) for task in tasks]
    assert [len(part) for part in rows] == [10] * 4
    assert sorted(row for part in rows for row in part) == sorted(numbered(40))


@pytest.mark.deep
@on_pulsar
def test_spark_copies_a_log_of_pulsar(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source, target = make_topic(), make_topic()
    publish(bus, source, numbered(50))
    query = copy(spark, url, source, target, tmp_path / "checkpoint", maxRows=20)
    publish(bus, source, numbered(10, start=50))
    query = copy(spark, url, source, target, tmp_path / "checkpoint", maxRows=20)
    assert sorted(body for _, body in log(bus, target)) == sorted(numbered(60))
    assert progress.behind(query.lastProgress) == 0
    assert sorted(values(read(spark, url, target, tasksPerPartition=2))) == sorted(numbered(60))


@pytest.mark.parametrize("url", ["pubsub", pytest.param("servicebus", marks=pytest.mark.deep)], indirect=True)
def test_a_broker_without_a_log_is_streamed_as_a_queue(url: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    with pytest.raises(Unsupported, match="Stream it with options subscription and spool"):
        Query(url, topic)


@pytest.mark.parametrize("url", ["servicebus"], indirect=True)
def test_rows_written_again_are_stored_once(url: str) -> None:
    """The broker deduplicates, but does not report it."""
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    with connect(f"{url}&deduplication_window=60") as bus:
        bus.admin.ensure_topic(topic)
        bus.admin.ensure_subscription(topic, "reader")
        options = SinkOptions(url=f"{url}&deduplication_window=60", topic=topic, ids=True, columns=("value",))
        for _ in range(2):
            rows = pyarrow.RecordBatch.from_pydict({"value": numbered(5)})
            assert _publish(options, iter([rows]), "query-7-0") == Written(5, None)
        publish(bus, topic, [b"last"])
        came: list[bytes | None] = []
        with bus.messages(topic, subscription="reader") as consumer:
            while b"last" not in came:
                message = consumer.next_message(timeout=test_spool.SECONDS)
                assert message is not None, came
                came.append(message.data)
                message.ack()
        assert sorted(came, key=str) == sorted([*numbered(5), b"last"], key=str)


def test_a_queue_is_drained_once(url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path) -> None:
    topic = make_topic()
    # A spool confirms its acks if the broker can.
    options: dict[str, Any] = {"exactly_once": True} if bus.capabilities.backend == "pubsub" else {}
    bus.admin.ensure_subscription(topic, "spark", **options)
    publish(bus, topic, numbered(100))
    query = test_spool.Query(url, topic, tmp_path / "spool", maxRows=60)
    try:
        batches = list(query.begin(drain=True).batches())
        assert sorted(row for batch in batches for row in batch) == sorted(numbered(100))
        assert max(map(len, batches)) <= 60
        assert test_spool.settled(bus, topic)
    finally:
        query.reader.stop()


@pytest.mark.parametrize(
    "url", ["pubsub", *(pytest.param(each, marks=pytest.mark.deep) for each in ("pulsar", "servicebus"))], indirect=True
)
def test_rows_arrive_with_their_columns(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic()
    bus.admin.ensure_subscription(topic, "reader")
    frame = spark.range(20).select(
        F.concat(F.lit("k"), F.col("id").cast("string")).alias("key"),
        F.col("id").cast("string").alias("value"),
        F.create_map(F.lit("colour"), F.lit("red")).alias("attributes"),
    )
    frame.write.format("broker").options(url=url, topic=topic).mode("append").save()
    came: dict[bytes | None, tuple[bytes | None, dict[str, str], datetime | None]] = {}
    with bus.messages(topic, subscription="reader") as consumer:
        while len(came) < 20:
            message = consumer.next_message(timeout=test_spool.SECONDS)
            assert message is not None, len(came)
            came[message.data] = (message.key, dict(message.attributes), message.publish_time)
            message.ack()
    assert came.keys() == set(numbered(20))
    for value, (key, attributes, time) in came.items():
        assert (key, attributes) == (b"k" + (value or b""), {"colour": "red"})
        assert time is not None


@pytest.mark.deep
@pytest.mark.parametrize("url", ["pulsar", "servicebus", "kafka with a queue that schedules"], indirect=True)
def test_a_row_is_delivered_when_it_is_due(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    assert bus.capabilities.publish.deliver_at
    topic = make_topic(partitions=1)
    bus.admin.ensure_subscription(topic, "reader")
    with bus.messages(topic, subscription="reader") as consumer:
        # On a busy machine a write may take longer than that, and then shows nothing.
        for seconds in (2, 12, 60):
            due = datetime.now(UTC) + timedelta(seconds=seconds)
            rows = spark.createDataFrame([("later", due), ("now", None)], "value string, deliver_at timestamp")
            rows.write.format("broker").options(url=url, topic=topic).mode("append").save()
            came: dict[bytes | None, datetime] = {}
            while len(came) < 2:
                message = consumer.next_message(timeout=seconds + test_spool.SECONDS)
                assert message is not None, came
                came[message.data] = datetime.now(UTC)
                message.ack()
            assert came.keys() == {b"now", b"later"}
            # The broker has another clock.
            assert came[b"later"] >= due - timedelta(milliseconds=20)
            if came[b"now"] < due:
                return
    pytest.fail("no write was done before its row was due")


@pytest.mark.parametrize("url", ["kafka", pytest.param("pubsub", marks=pytest.mark.deep)], indirect=True)
def test_delayed_rows_are_refused_where_the_broker_does_not_schedule(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic
) -> None:
    assert not bus.capabilities.publish.deliver_at
    topic = make_topic(partitions=1)
    bus.admin.ensure_subscription(topic, "reader")
    due = datetime.now(UTC) + timedelta(seconds=1)
    rows = spark.createDataFrame([("now", None), ("later", due)], "value string, deliver_at timestamp")
    write = rows.write.format("broker").options(url=url, topic=topic).mode("append")
    with pytest.raises(PySparkException, match=r"no use for column 'deliver_at'.*df\.drop\('deliver_at'\)"):
        write.save()
    publish(bus, topic, [b"last"])
    with bus.messages(topic, subscription="reader") as consumer:
        message = consumer.next_message(timeout=test_spool.SECONDS)
        assert message is not None
        assert message.data == b"last"
        message.ack()
