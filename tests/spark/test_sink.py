"""Batch writes to every broker with a log, and refused writes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.blocking import Bus
from broker_spark.sink.sink import SinkOptions, _publish
from tests.spark.conftest import MakeTopic, kafka_is_deep
from tests.spark.support import log, numbered, publish, read, values


@kafka_is_deep
def test_every_column_arrives(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    one, two = make_topic(partitions=1), make_topic(partitions=2)
    # Kafka's retention goes by this time, so it lies within that.
    time = datetime.now(UTC).replace(microsecond=250_000) - timedelta(hours=1)
    frame = spark.createDataFrame(
        [
            (one, b"k", "first", {"colour": "red"}, "mine", time),
            (two, None, "zwölf", None, None, None),
            (one, b"", None, {}, None, None),
        ],
        "topic string, key binary, value string, attributes map<string,string>, id string, publish_time timestamp",
    )
    frame.write.format("broker").options(url=url).mode("append").save()
    found = {
        each.data: each
        for topic in (one, two)
        for part in bus.log.partitions(topic)
        for batch in bus.log.read(topic, part)
        for each in batch
    }
    assert found.keys() == {b"first", "zwölf".encode(), None}
    first = found[b"first"]
    assert (first.topic, first.key, first.id, dict(first.attributes)) == (one, b"k", "mine", {"colour": "red"})
    assert first.publish_time == time
    assert found["zwölf".encode()].topic == two
    assert (found[None].topic, found[None].key) == (one, b"")


@pytest.mark.deep
@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_a_row_is_delivered_when_it_is_due(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    bus.admin.ensure_subscription(topic, "reader")
    due = datetime.now(UTC) + timedelta(seconds=4)
    rows = spark.createDataFrame([("later", due), ("now", None)], "value string, deliver_at timestamp")
    rows.write.format("broker").options(url=url, topic=topic).mode("append").save()
    with bus.messages(topic, subscription="reader") as consumer:
        came: list[tuple[bytes | None, bool]] = []
        for message in consumer:
            came.append((message.data, datetime.now(UTC) >= due))
            message.ack()
            if len(came) == 2:
                break
    assert [data for data, _ in came] == [b"now", b"later"]
    assert came[1] == (b"later", True)


@pytest.mark.deep
@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_many_rows_each_once_and_back_again(spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic, copy = make_topic(partitions=3), make_topic(partitions=1)
    frame = spark.range(0, 10_000, numPartitions=2).select(
        F.col("id").cast("string").alias("value"), F.col("id").cast("string").alias("key")
    )
    frame.write.format("broker").options(url=url, topic=topic).mode("append").save()
    back = read(spark, url, topic, tasksPerPartition=2)
    assert back.select("value", "id").distinct().count() == back.count() == 10_000
    # A sink accepts the rows of a source.
    back.where("partition = 0").write.format("broker").options(url=url, topic=copy).mode("append").save()
    assert sorted(values(read(spark, url, copy))) == sorted(values(back.where("partition = 0")))


@pytest.mark.parametrize(
    ("url", "select", "mode", "expected"),
    [
        ("kafka", "id", "append", "Column 'id' is of type bigint"),
        ("kafka", "id as value", "append", "Column 'value' is of type bigint"),
        ("kafka", "string(id) as value; 1 as colour", "append", "no column 'colour'"),
        ("kafka", "string(id) as value", "overwrite", "cannot be overwritten"),
        ("jetstream", "string(id) as value; string(null) as topic", "append", "names no topic"),
        ("kafka", "string(id) as value; 'no.such.topic' as topic", "append", "no.such.topic"),
        (
            "jetstream",
            "repeat('x', 3000000) as value",
            "append",
            r"not published; first: Body has 3000000 bytes; \w+ takes",
        ),
    ],
    indirect=["url"],
)
def test_unwritable_rows_raise(
    spark: SparkSession, url: str, make_topic: MakeTopic, select: str, mode: str, expected: str
) -> None:
    topic = {} if "topic" in select else {"topic": make_topic()}
    frame = spark.range(3).selectExpr(*select.split("; "))
    with pytest.raises(PySparkException, match=expected):
        frame.write.format("broker").options(url=url, **topic).mode(mode).save()


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_a_batch_is_appended_and_other_modes_are_refused_by_name(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic
) -> None:
    topic = make_topic(partitions=1)
    rows = spark.createDataFrame([("one",)], "value string")
    write = rows.write.format("broker").options(url=url, topic=topic)
    # The first one is the default.
    for mode, expected in (
        (None, '"ErrorIfExists" mode. Please use either the "Append"'),
        ("errorifexists", '"ErrorIfExists" mode. Please use either the "Append"'),
        ("ignore", '"Ignore" mode. Please use either the "Append"'),
        ("overwrite", 'A topic cannot be overwritten. Write with mode("append")'),
    ):
        with pytest.raises(PySparkException) as caught:
            (write if mode is None else write.mode(mode)).save()
        assert expected in str(caught.value)
    write.mode("append").save()
    write.mode("append").save()
    assert values(read(spark, url, topic)) == [b"one", b"one"]


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("update", "does not support Update mode"),
        ("complete", 'A topic cannot be overwritten, as outputMode("complete") would. Use outputMode("append"), or'),
    ],
)
def test_other_output_modes_of_a_stream_are_refused_by_name(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, mode: str, expected: str
) -> None:
    source, target = make_topic(), make_topic()
    publish(bus, source, numbered(5))
    frame = spark.readStream.format("broker").options(url=url, topic=source).load()
    if mode == "complete":
        frame = frame.groupBy("value").count().select("value")
    write = frame.writeStream.format("broker").options(url=url, topic=target, checkpointLocation=str(tmp_path))
    with pytest.raises(StreamingQueryException) as caught:
        write.outputMode(mode).trigger(availableNow=True).start().awaitTermination()
    assert expected in str(caught.value)
    assert log(bus, target) == []


def test_the_ids_of_a_task_do_not_change_with_its_attempts(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    options = SinkOptions(url=url, topic=topic, ids=True, columns=("value",))
    rows = pyarrow.RecordBatch.from_pydict({"value": [b"a", b"b", b"a"]})
    assert _publish(options, iter([rows, rows]), "query-7-0").rows == 6
    again = _publish(options, iter([rows, rows]), "query-7-0")
    ids = [record.id for batch in bus.log.read(topic, 0) for record in batch]
    assert len(set(ids)) == 6
    deduplicates = bus.capabilities.publish.deduplication
    assert again.duplicates == (6 if deduplicates else None)
    assert len(ids) == (6 if deduplicates else 12)
    # Rows in another order have other ids: duplicated rather than lost.
    turned = pyarrow.RecordBatch.from_pydict({"value": [b"b", b"a", b"a"]})
    assert _publish(options, iter([turned]), "query-7-0").duplicates == (1 if deduplicates else None)
