"""Streams whose topics, rows or checkpoints are broken: a clear error, and all rows compared with the source."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.blocking import Bus, connect
from broker.errors import PublishError
from broker.outbound import OutboundMessage
from broker_spark.pipeline import FileSink, Pipeline, Source, TopicSink, run
from broker_spark.sink.sink import SinkOptions, _publish
from tests.fault_matrix import Books
from tests.servers import kafka, nats
from tests.spark.conftest import MakeTopic
from tests.spark.support import copy, log, numbered, publish
from tests.spark.test_log_stream import Query


@dataclass
class Order:
    number: int
    colour: str


def bodies(bus: Bus, topic: str) -> list[bytes]:
    return [body for _, body in log(bus, topic)]


@pytest.mark.deep
@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_a_topic_that_changes_under_a_query(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, books: Books
) -> None:
    source, target = make_topic(partitions=1), make_topic()
    backend = bus.capabilities.backend
    publish(bus, source, numbered(100))
    frame = spark.readStream.format("broker").options(url=url, topic=source).load().drop("id")
    writer = frame.writeStream.format("broker").options(url=url, topic=target, checkpointLocation=str(tmp_path / "one"))
    query = writer.start()
    try:
        query.processAllAvailable()
        bus.admin.ensure_topic(source, partitions=4)
        bus.topic(source).publish_batch([OutboundMessage(each, partition=int(each) % 4) for each in numbered(400, 100)])
        query.processAllAvailable()
        books.balance("partitions are added", backend, numbered(500), bodies(bus, target))

        bus.admin.delete_topic(source)
        with pytest.raises(StreamingQueryException, match=f"TopicNotFound.*{source}"):
            query.awaitTermination(60)
        books.balance("the topic is deleted", backend, numbered(500), bodies(bus, target))
    finally:
        query.stop()
    # With more rows than before, so that the old offsets would exist.
    bus.admin.ensure_topic(source, partitions=4)
    publish(bus, source, numbered(900, 1000))
    with pytest.raises(StreamingQueryException, match="was deleted and recreated"):
        copy(spark, url, source, target, tmp_path / "one")
    books.balance("the topic is recreated; its checkpoint", backend, numbered(500), bodies(bus, target))
    recreated = [row for batch in Query(url, source).batches() for row in batch]
    books.balance("the topic is recreated; a new one", backend, numbered(900, 1000), recreated)


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_retention_overtakes_a_query(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, books: Books
) -> None:
    source, target = make_topic(partitions=1), make_topic()
    backend = bus.capabilities.backend
    publish(bus, source, numbered(100))
    copy(spark, url, source, target, tmp_path)
    publish(bus, source, numbered(50, 100))
    bus.admin.purge(source)
    publish(bus, source, numbered(70, 150))
    with pytest.raises(StreamingQueryException, match=r"(?s)Retention removed .* onDataLoss to skip"):
        copy(spark, url, source, target, tmp_path)
    books.balance("retention overtakes; fail", backend, numbered(100), bodies(bus, target))
    copy(spark, url, source, target, tmp_path, onDataLoss="skip")
    books.balance(
        "retention overtakes; skip", backend, numbered(220), bodies(bus, target), lost=50, why="50 are counted, logged"
    )


@pytest.mark.deep
def test_a_checkpoint_of_another_topic_or_broker(
    spark: SparkSession, tmp_path: Path, books: Books, request: pytest.FixtureRequest
) -> None:
    urls = [nats.shared_server().url, kafka.shared_server().url]
    source, other, target = (f"spark.{request.node.originalname}.{end}" for end in ("source", "other", "target"))
    for url in urls:
        with connect(url) as bus:
            for topic in (source, other, target):
                bus.admin.delete_topic(topic)
                bus.admin.ensure_topic(topic, partitions=2)
            publish(bus, source, numbered(20))
            publish(bus, other, numbered(20))
    copy(spark, urls[0], source, target, tmp_path)
    with pytest.raises(StreamingQueryException, match=f"The checkpoint is of a query on topic '{source}'"):
        copy(spark, urls[0], other, target, tmp_path)
    with pytest.raises(StreamingQueryException, match="a query on jetstream, and this one reads kafka"):
        copy(spark, urls[1], source, target, tmp_path)
    with connect(urls[0]) as bus:
        books.balance("checkpoint of another broker; its own", "jetstream", numbered(20), bodies(bus, target))
    with connect(urls[1]) as bus:
        books.balance("checkpoint of another broker; the other", "kafka", [], bodies(bus, target))
    # The checkpoint holds readable JSON.
    offsets = (tmp_path / "offsets" / "0").read_text().splitlines()[-1]
    assert json.loads(offsets)["topics"][source]["next"].keys() == {"0", "1"}


def test_the_largest_value(url: str, bus: Bus, make_topic: MakeTopic, books: Books) -> None:
    """A task's read, in this process: the size depends on the broker, not on Spark."""
    source, target = make_topic(partitions=1), make_topic(partitions=1)
    most = bus.capabilities.publish.limits.body
    assert most is not None
    sent = [b"%d" % number * most for number in range(3)]

    def write(topic: str, values: list[bytes]) -> None:
        rows = pyarrow.RecordBatch.from_pydict({"value": values})
        _publish(SinkOptions(url=url, topic=topic, ids=True, columns=("value",)), iter([rows]), uuid.uuid4().hex)

    write(source, sent)
    write(target, [row for batch in Query(url, source).batches() for row in batch])
    backend = bus.capabilities.backend
    books.balance("values of the largest size", backend, sent, bodies(bus, target))
    with pytest.raises(PublishError, match=f"Body has {most + 1} bytes"):
        write(target, [b"x" * (most + 1)])
    books.balance("values that are a byte too large", backend, sent, bodies(bus, target))


@pytest.mark.deep
@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_a_poison_row(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, books: Books
) -> None:
    source, target, dead = make_topic(), make_topic(), make_topic()
    backend = bus.capabilities.backend
    rows = [json.dumps({"number": number, "colour": "red"}).encode() for number in range(120)]
    rows[20] = b"{"
    publish(bus, source, rows)

    # Without annotations, of which Spark would make another kind of function.
    def poisoned(number):
        if number == 70:
            raise ValueError("Order 70 has no price")
        return number * 2

    def pipeline(price: Callable[[Column], Column]) -> Pipeline:
        def transform(frame: DataFrame) -> DataFrame:
            return frame.select("payload.number", price(F.col("payload.number")).alias("price"))

        return Pipeline(
            name="poison",
            url=url,
            sources={"orders": Source(source, Order, options={"maxRows": 50})},
            transform=transform,
            sinks={"files": FileSink(str(tmp_path / "files")), "topic": TopicSink(target, key="number")},
            dead_letters=TopicSink(dead),
            checkpoint=str(tmp_path / "checkpoint"),
            trigger="available-now",
        )

    with pytest.raises(Exception, match="ValueError: Order 70 has no price"):
        run(pipeline(F.udf(poisoned, "int")), spark=spark)
    before = len(bodies(bus, target))
    assert 0 < before < 119
    # The fixed program runs the same batch again.
    run(pipeline(F.udf(lambda number: number * 2, "int")), spark=spark)
    good = [b"%d" % number for number in range(120) if number != 20]
    files = [b"%d" % row.number for row in spark.read.parquet(str(tmp_path / "files")).collect()]
    books.balance("a poison row in a transform; files", backend, good, files)
    ids, found = zip(*log(bus, target), strict=True)
    numbers = [b"%d" % json.loads(each)["number"] for each in found]
    books.balance("a poison row in a transform; topic", backend, good, numbers, ids=ids)
    books.balance("a row that does not decode; dead letters", backend, [b"{"], bodies(bus, dead))
