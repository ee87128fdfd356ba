"""Spark's own Kafka connector and our Python source: the same options, the same columns, equal rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError
from broker.outbound import OutboundMessage
from broker_kafka.settings import KafkaSettings
from broker_spark import COLUMNS, read, read_stream, spark_schema
from broker_spark.common.options import SourceOptions
from broker_spark.kafka_connector import _settings, java_properties
from tests.servers import kafka, nats
from tests.servers.kafka_client import RawAdmin
from tests.spark.support import numbered, plan_of, publish

pytestmark = pytest.mark.usefixtures("compiled")

SOURCES = ("always", "never")


@pytest.fixture
def url() -> str:
    return kafka.shared_server().url


@pytest.fixture
def topic(url: str) -> Iterator[str]:
    name = f"spark.{uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(name, partitions=2)
        yield name


@pytest.fixture
def bus(url: str) -> Iterator[Bus]:
    with connect(url) as bus:
        yield bus


def sorted_rows(frame: DataFrame) -> list[Any]:
    return sorted(frame.collect(), key=lambda row: (row.topic, row.partition, row.offset))


@pytest.mark.deep
def test_rows_are_equal_whatever_producers_write(spark: SparkSession, bus: Bus, url: str, topic: str) -> None:
    publish(bus, topic, numbered(50))
    bus.topic(topic).publish_batch(
        [
            OutboundMessage(b"ids", "k", {"a": "1", "b": "ü"}, id="mine"),
            OutboundMessage(b"times", publish_time=datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)),
            OutboundMessage(b"hostile", attributes={"nul\0name": "a&b=c+d%"}),
            OutboundMessage(None, "tombstone"),
            OutboundMessage(b"", b"\xff\x00", {"empty": ""}),
        ]
    )
    foreign = Producer({"bootstrap.servers": kafka.shared_server().bootstrap})
    written: list[list[tuple[str, str | bytes | None]]] = [
        [("twice", b"1"), ("twice", b"2"), ("null", None), ("", b"no name"), ("binary", b"\xff\xfe")],
        [("anybroker-id", None), ("anybroker-id", b"second"), ("anybroker-time", b"no number")],
        [("anybroker-attributes", b"=x&y=&z&a%20b=1=2"), ("y", b"header")],
        [("anybroker-attributes", b"no=%zz%4&plus=1+2&%=%C3%BC%41&lines=1\n2&raw=\xc3\xbc&%ff=\xff")],
        [("anybroker-time", b"9223372036854775807"), ("anybroker-id", b"\xff")],
        [("anybroker-time", b"-9223372036854775808"), ("anybroker-id", b"")],
        [
            ("anybroker-time", b"1_000"),
            ("anybroker-attributes", b"half=%ED%A0%80%ed%bf%bf&beyond=%F4%90%80%80&cut=%F0%9F%98"),
        ],
        [("anybroker-attributes", b"raw=\xed\xa0\x80&beyond=\xf4\x90\x80\x80&cut=\xf0\x9f\x98&next=\xe2\x82A")],
        [("anybroker-attributes", b"anybroker-x=1&dead-letter-x=2&ok=3"), ("retry-letter-x", b"4")],
        [("dead-letter-topic", b"orders"), ("dead-letter-x", b"5"), ("retry-letter-x", b"6"), ("ok", b"7")],
    ]
    for headers in written:
        foreign.produce(topic, b"foreign", headers=headers)
    for torn in (b"\xed\xa0\x80", b"a\xffb", b"\xc3", b"\xe2\x82", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f\x98"):
        foreign.produce(topic, b"foreign", headers=[("anybroker-id", torn)])
    assert foreign.flush(10) == 0
    theirs, ours = (read(spark, connector=how, url=url, topic=topic) for how in SOURCES)
    assert theirs.dtypes == ours.dtypes
    assert ours.schema == spark_schema()
    rows = sorted_rows(theirs)
    assert len(rows) == 72
    assert rows == sorted_rows(ours)
    # Invalid UTF-8 becomes the same text in Python.
    assert sorted_rows(theirs.withColumn("id", F.hex("id"))) == sorted_rows(ours.withColumn("id", F.hex("id")))


@pytest.mark.deep
def test_aborted_transactions_are_not_seen(spark: SparkSession, bus: Bus, url: str, topic: str) -> None:
    publish(bus, topic, numbered(10))
    producer = Producer({"bootstrap.servers": kafka.shared_server().bootstrap, "transactional.id": uuid4().hex})
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in range(10):
        producer.produce(topic, b"aborted %d" % number)
    producer.flush(10)
    producer.abort_transaction(30)
    publish(bus, topic, numbered(10, 10))
    RawAdmin(kafka.shared_server().bootstrap).wait_for_markers(topic)
    for how in SOURCES:
        frame = read(spark, connector=how, url=url, topic=topic, columns="value")
        assert sorted(bytes(row.value) for row in frame.collect()) == sorted(numbered(20))


@pytest.mark.deep
@pytest.mark.parametrize("how", SOURCES)
def test_positions_mean_the_same(spark: SparkSession, bus: Bus, url: str, topic: str, how: str) -> None:
    publish(bus, topic, numbered(40))
    whole = sorted_rows(read(spark, connector=how, url=url, topic=topic))
    ends = {row.partition: row.offset + 1 for row in whole}
    between = read(spark, connector=how, url=url, topic=topic, start={"0": 3}, end={"0": ends[0] - 2, "1": 5})
    expected = [row for row in whole if (3 <= row.offset < ends[0] - 2 if row.partition == 0 else row.offset < 5)]
    assert sorted_rows(between) == expected
    middle = whole[7].publish_time
    late = datetime.now(UTC) + timedelta(hours=1)
    by_time = read(spark, connector=how, url=url, topic=topic, start=f"{middle.isoformat()}+00:00")
    assert len(sorted_rows(by_time)) >= 1
    assert read(spark, connector=how, url=url, topic=topic, start=late.isoformat()).count() == 0
    assert read(spark, connector=how, url=url, topic=topic, tasksPerPartition=3).count() == 40
    with pytest.raises((ConfigurationError, AnalysisException), match="Options start and end mean 5 to 2"):
        read(spark, connector=how, url=url, topic=topic, start={"0": 5}, end={"0": 2}).collect()
    with pytest.raises((ConfigurationError, AnalysisException), match="partition 7"):
        read(spark, connector=how, url=url, topic=topic, start={"7": 0}).collect()


@pytest.mark.parametrize("how", SOURCES)
def test_patterns_and_several_topics(spark: SparkSession, bus: Bus, url: str, topic: str, how: str) -> None:
    for end in ("x", "y", "yy"):
        bus.admin.ensure_topic(f"{topic}.{end}")
        publish(bus, f"{topic}.{end}", [end.encode()])
    found = read(spark, connector=how, url=url, topicPattern=rf"{topic}\.[xy]", columns="topic,value")
    assert sorted(bytes(row.value) for row in found.collect()) == [b"x", b"y"]
    found = read(spark, connector=how, url=url, topic=f"{topic}.x,{topic}.yy")
    assert sorted(bytes(row.value) for row in found.collect()) == [b"x", b"yy"]
    assert read(spark, connector=how, url=url, topicPattern=f"{topic}-nothing").count() == 0
    with pytest.raises((ConfigurationError, PySparkException), match=rf"offsets of '{topic}\.y0', and topicPattern"):
        read(spark, connector=how, url=url, topicPattern=rf"{topic}\..*", start={f"{topic}.y0": {"0": 1}}).collect()


@pytest.mark.deep
@pytest.mark.parametrize("connector", SOURCES)
def test_data_loss_by_retention_fails_a_stream_or_is_skipped(
    spark: SparkSession, bus: Bus, url: str, topic: str, tmp_path: Path, connector: str
) -> None:
    def run(loss: str, timeout: int = 30) -> int:
        where = f"{url}?request_timeout={timeout}"
        frame = read_stream(spark, connector=connector, url=where, topic=topic, onDataLoss=loss)
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / loss))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return sum(progress["numInputRows"] for progress in query.recentProgress)

    publish(bus, topic, numbered(100))
    assert [run(loss) for loss in ("fail", "skip")] == [100, 100]
    publish(bus, topic, numbered(50, 100))
    bus.admin.purge(topic)
    publish(bus, topic, numbered(70, 150))
    # Over another connection, since the first one may have prefetched the removed records.
    with pytest.raises(StreamingQueryException, match=r"(?i)data.?loss|Retention removed"):
        run("fail", timeout=31)
    assert run("skip", timeout=31) == 70


@pytest.mark.deep
def test_a_stream_resumes(spark: SparkSession, bus: Bus, url: str, topic: str, tmp_path: Path) -> None:
    """Over Spark's own connector; `test_streams` has the Python source."""

    def run() -> list[int]:
        checkpoint = str(tmp_path / "checkpoint")
        frame = read_stream(spark, connector="always", checkpoint=checkpoint, url=url, topic=topic, maxRows=25)
        query = (
            frame.writeStream.format("parquet")
            .options(path=str(tmp_path / "out"), checkpointLocation=checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    publish(bus, topic, numbered(40))
    batches = run()
    assert sum(batches) == 40
    assert max(batches) <= 26  # the connector rounds each partition's share up
    publish(bus, topic, numbered(10, 40))
    assert sum(run()) == 10
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(bytes(row.value) for row in rows) == sorted(numbered(50))

    # Recreated with more rows than before, so that the old offsets would exist.
    bus.admin.delete_topic(topic)
    bus.admin.ensure_topic(topic, partitions=2)
    publish(bus, topic, numbered(90))
    with pytest.raises(ConfigurationError, match=f"'{topic}' was deleted and recreated"):
        run()
    other = f"{topic}.other"
    bus.admin.ensure_topic(other)
    with pytest.raises(ConfigurationError, match=f"is of a query on topic '{topic}', and this one reads {other}"):
        read_stream(spark, connector="always", checkpoint=str(tmp_path / "checkpoint"), url=url, topic=other)
    bus.admin.delete_topic(other)


def test_auto_uses_the_connector_if_the_checkpoint_can_be_checked(
    spark: SparkSession, url: str, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def is_connectors(**options: Any) -> bool:
        frame: Any = read_stream(spark, url=url, topic=topic, **options)
        return "KafkaSourceProvider" in frame._jdf.queryExecution().analyzed().toString()

    assert is_connectors(checkpoint=str(tmp_path))
    assert is_connectors(connector="always")
    assert not is_connectors(connector="never", checkpoint=str(tmp_path))
    assert not caplog.messages
    assert not is_connectors()
    assert caplog.messages == [
        "Reading with the Python source: checkpoint is not given, so its topics cannot be checked"
    ]


def test_reads_that_the_connector_does_not_support_fall_back_or_raise(
    spark: SparkSession, url: str, topic: str
) -> None:
    assert read(spark, url=url, topic=topic, arrowRows=10).count() == 0
    for options, reason in (
        ({"arrowRows": 10}, "no counterpart of option arrowRows"),
        ({"url": nats.shared_server().url}, "is not Kafka"),
        ({"url": f"{url}?debug=broker"}, "'debug' is a property of librdkafka"),
    ):
        given: dict[str, Any] = {"url": url, "topic": topic, **options}
        with pytest.raises(ConfigurationError, match=reason):
            read(spark, connector="always", **given)
    with pytest.raises(ConfigurationError, match="connector is 'perhaps'"):
        read(spark, connector="perhaps", url=url, topic=topic)


def test_columns_are_those_of_the_package(spark: SparkSession, url: str, topic: str) -> None:
    assert tuple(read(spark, connector="always", url=url, topic=topic).columns) == COLUMNS
    some = read(spark, connector="always", url=url, topic=topic, columns="value,id")
    assert some.columns == ["value", "id"]


def test_headers_are_read_for_the_columns_that_need_them(spark: SparkSession, url: str, topic: str) -> None:
    def included(**columns: str) -> str:
        source = SourceOptions.parse({"url": url, "topic": topic, **columns})
        return (_settings(spark, source, "always") or {})["includeHeaders"]

    assert included(columns="topic,partition,offset,key,value,broker_time,delivery_attempt") == "false"
    for name in ("id", "attributes", "publish_time"):
        assert included(columns=f"key,{name}") == "true"
    assert included() == "true"


def test_generated_methods_are_small_enough_to_be_compiled(spark: SparkSession, url: str, topic: str) -> None:
    steps = plan_of(read(spark, url=url, topic=topic, connector="always"))
    assert [step.split(" ")[0] for step in steps if "anybroker-id" in step] == ["Project"]


def test_security_reaches_java() -> None:
    found, reason = java_properties(
        KafkaSettings.from_url(r"kafka://me:pa%22s%5Cs@host:1?sasl_mechanism=SCRAM-SHA-512")
    )
    assert not reason
    assert found["security.protocol"] == "SASL_SSL"
    assert found["sasl.mechanism"] == "SCRAM-SHA-512"
    assert found["sasl.jaas.config"].endswith(r'username="me" password="pa\"s\\s";')
    assert found["ssl.endpoint.identification.algorithm"] == "https"


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("sasl_mechanism=GSSAPI&sasl_kerberos_service_name=kafka", "sasl_mechanism GSSAPI"),
        ("security_protocol=SSL&enable_ssl_certificate_verification=false", "always verifies certificates"),
    ],
)
def test_security_that_java_does_not_support_is_reported(query: str, reason: str) -> None:
    assert reason in java_properties(KafkaSettings.from_url(f"kafka://host?{query}"))[1]
