"""Streams of Kafka by Spark's own connector and by our Python source: the same options, the same rows.

The rows are compared with the topic each time. Where the two differ, as `docs/spark.md` says, the test has both.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from broker.blocking import Bus, connect
from broker.errors import ConfigurationError
from broker.outbound import OutboundMessage
from broker_spark import lag, read, read_stream
from broker_spark.checkpoint.topic_ids import TopicIds
from broker_spark.pipeline import CallSink, Pipeline, Source, run
from tests.fault_matrix import Books
from tests.servers import kafka
from tests.servers.kafka_client import RawAdmin, produce, wait_for
from tests.spark.conftest import MakeTopic
from tests.spark.support import numbered, publish

SOURCES = ("always", "never")
NAMES = {"always": "Spark's connector", "never": "the Python source"}

PATIENCE = 60.0

Record = tuple[str, int, int, bytes]
"""Topic, partition, offset and value."""


@pytest.fixture
def url() -> str:
    return kafka.shared_server().url


@pytest.fixture(params=SOURCES)
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Stream:
    """The runs of one query, and what they read."""

    def __init__(self, spark: SparkSession, url: str, connector: str, checkpoint: Path) -> None:
        self._spark = spark
        self._fixed = {"url": url, "connector": connector, "checkpoint": str(checkpoint)}
        self.batches: list[list[Record]] = []
        """The rows of each batch that had any."""
        self.tasks: list[dict[int, int]] = []
        """How many tasks read each of its partitions."""
        self.on_batch: Callable[[int], object] = lambda number: None
        """Called after each batch, with its number."""
        self.queries: list[StreamingQuery] = []

    def start(self, *, available_now: bool = False, **options: Any) -> StreamingQuery:
        frame = read_stream(self._spark, **self._fixed, columns="topic,partition,offset,value", **options)
        writer = frame.writeStream.foreachBatch(self._take)
        writer = writer.option("checkpointLocation", self._fixed["checkpoint"])
        writer = writer.trigger(availableNow=True) if available_now else writer
        self.queries.append(writer.start())
        return self.queries[-1]

    def run(self, **options: Any) -> list[int]:
        """Read what is there now. Returns the rows of each batch."""
        before = len(self.batches)
        self.start(available_now=True, **options).awaitTermination()
        return [len(batch) for batch in self.batches[before:]]

    @property
    def rows(self) -> list[Record]:
        return [row for batch in self.batches for row in batch]

    @property
    def values(self) -> list[bytes]:
        return [value for _, _, _, value in self.rows]

    def _take(self, frame: DataFrame, batch: int) -> None:
        rows = frame.withColumn("task", F.spark_partition_id()).collect()
        if not rows:
            return
        self.batches.append([(row.topic, row.partition, row.offset, bytes(row.value)) for row in rows])
        tasks = {(row.partition, row.task) for row in rows}
        self.tasks.append({each: sum(part == each for part, _ in tasks) for each, _ in tasks})
        self.on_batch(len(self.batches))


@pytest.fixture
def progress_when_idle(spark: SparkSession) -> Iterator[None]:
    """A query reports each poll of its sources, even without rows."""
    name = "spark.sql.streaming.noDataProgressEventInterval"
    spark.conf.set(name, 0)
    yield
    spark.conf.unset(name)


@pytest.fixture
def stream(spark: SparkSession, url: str, connector: str, tmp_path: Path) -> Iterator[Stream]:
    made = Stream(spark, url, connector, tmp_path / "checkpoint")
    yield made
    for query in made.queries:
        query.stop()


def there(bus: Bus, *topics: str) -> list[Record]:
    """All that the topics hold."""
    return [
        (topic, partition, record.offset, record.data or b"")
        for topic in topics
        for partition in bus.log.partitions(topic)
        for records in bus.log.read(topic, partition)
        for record in records
    ]


@pytest.mark.deep
def test_new_partitions_are_read_and_a_deleted_topic_ends_the_stream(
    stream: Stream, bus: Bus, connector: str, books: Books
) -> None:
    stem = f"spark.{uuid.uuid4().hex[:12]}"
    first, second, other = (f"{stem}.{end}" for end in ("a", "ab", "abc"))
    query = stream.start(topicPattern=rf"{stem}\.ab?", start="latest")
    query.processAllAvailable()
    assert stream.rows == []
    for topic in (first, other):
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, numbered(20))
    query.processAllAvailable()
    assert sorted(stream.rows) == sorted(there(bus, first))

    bus.admin.ensure_topic(second, partitions=2)
    publish(bus, second, numbered(30, 100))
    bus.admin.ensure_topic(first, partitions=3)
    bus.topic(first).publish_batch([OutboundMessage(each, partition=int(each) % 3) for each in numbered(40, 200)])
    query.processAllAvailable()
    due = sorted(there(bus, first, second))
    assert len(due) == 90
    assert sorted(stream.rows) == due
    sent = [value for _, _, _, value in due]
    books.balance(f"partitions and topics are added; {NAMES[connector]}", "kafka", sent, stream.values)

    bus.admin.delete_topic(second)
    with pytest.raises(StreamingQueryException, match=r"does not exist any more|(was|have been) deleted"):
        query.awaitTermination(60)
    books.balance(f"a topic of a pattern is deleted; {NAMES[connector]}", "kafka", sent, stream.values)


@pytest.mark.deep
def test_available_now_reads_to_where_the_log_ended_in_bounded_batches(
    stream: Stream, bus: Bus, make_topic: MakeTopic, connector: str
) -> None:
    topic = make_topic(partitions=3)
    now = datetime.now(UTC)
    early, late = now - timedelta(hours=2), now - timedelta(hours=1)

    def fill(time: datetime, *counts: int) -> None:
        """This many rows of this time in each partition."""
        bus.topic(topic).publish_batch(
            [
                OutboundMessage(each, publish_time=time, partition=partition)
                for partition, count in enumerate(counts)
                for each in numbered(count)
            ]
        )

    fill(early, 10)
    fill(late, 38, 1, 1)
    due = sorted(there(bus, topic))[10:]
    stream.on_batch = lambda number: fill(late, 30) if number == 1 else None
    options = {"topic": topic, "start": now - timedelta(hours=1.5)}
    sizes = stream.run(maxRows=20, **options)
    assert sorted(stream.rows) == due
    # The connector rounds each partition's share up.
    assert sizes == {"always": [21, 19], "never": [20, 20]}[connector]

    # A partition that is added is read from its beginning, whatever its time.
    bus.admin.ensure_topic(topic, partitions=4)
    fill(early, 0, 0, 0, 5)
    assert stream.run(**options) == [35]
    assert sorted(stream.rows) == sorted(there(bus, topic))[10:]


@pytest.mark.deep
def test_few_rows_wait_for_more(
    stream: Stream, bus: Bus, make_topic: MakeTopic, connector: str, progress_when_idle: None
) -> None:
    topic = make_topic(partitions=1)
    rows = iter(range(100))

    def send(count: int) -> None:
        publish(bus, topic, [b"%d" % next(rows) for _ in range(count)])

    send(9)
    query = stream.start(topic=topic, minRows=10, maxDelay=3600)
    if connector == "always":
        # Rows that were there at the start do not wait.
        query.processAllAvailable()
        send(9)

    def behind() -> dict[int, int]:
        return lag(query.lastProgress).get(topic, {})

    wait_for(lambda: behind() == {0: 9}, PATIENCE)
    bus.admin.ensure_topic(topic, partitions=2)
    wait_for(lambda: behind() == {0: 9, 1: 0}, PATIENCE)
    send(1)
    wait_for(lambda: len(stream.rows) == {"always": 19, "never": 10}[connector], PATIENCE)
    assert [len(batch) for batch in stream.batches] == {"always": [9, 10], "never": [10]}[connector]
    query.processAllAvailable()
    query.stop()

    # At the end of a run the connector leaves too few rows to the next run.
    send(15)
    assert stream.run(topic=topic, minRows=10, maxRows=10) == {"always": [10], "never": [10, 5]}[connector]
    query = stream.start(topic=topic, minRows=1000, maxDelay=0.3)
    query.processAllAvailable()
    send(5)
    due = sorted(there(bus, topic))
    wait_for(lambda: len(stream.rows) == len(due), PATIENCE)
    assert sorted(stream.rows) == due


@pytest.mark.deep
@pytest.mark.parametrize("is_planned", [False, True], ids=["after a batch", "under a planned batch"])
def test_a_recreated_topic_ends_its_stream(
    stream: Stream, bus: Bus, make_topic: MakeTopic, connector: str, is_planned: bool, books: Books
) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(30))

    def renew(number: int) -> None:
        bus.admin.delete_topic(topic)
        bus.admin.ensure_topic(topic, partitions=1)
        # More than before, so that the old offsets would exist.
        publish(bus, topic, numbered(50, 100))
        if is_planned:
            raise RuntimeError("not committed")

    stream.on_batch = renew
    query = stream.start(topic=topic)
    expected = f"'{topic}' was deleted and recreated"
    with pytest.raises(StreamingQueryException, match="not committed" if is_planned else expected):
        query.awaitTermination(60)
    # The next run too, which Spark would begin with the planned batch.
    with pytest.raises((ConfigurationError, StreamingQueryException), match=expected):
        stream.run(topic=topic)
    case = f"the topic is recreated {'under a planned batch' if is_planned else 'under a query'}; {NAMES[connector]}"
    sent = numbered(30) + numbered(50, 100)
    books.balance(case, "kafka", sent, stream.values, lost=50, why="the query ends")
    assert stream.values == numbered(30)


@pytest.mark.deep
def test_a_planned_batch_knows_a_topic_that_joined_a_pattern(stream: Stream, bus: Bus, connector: str) -> None:
    stem = f"spark.{uuid.uuid4().hex[:12]}"
    first, second = f"{stem}.a", f"{stem}.b"
    bus.admin.ensure_topic(first, partitions=1)
    publish(bus, first, numbered(5))

    def join(number: int) -> None:
        bus.admin.delete_topic(second)
        bus.admin.ensure_topic(second, partitions=1)
        publish(bus, second, numbered(10 * number, 100 * number))
        if number == 2:
            raise RuntimeError("not committed")

    stream.on_batch = join
    options: dict[str, Any] = {"topicPattern": rf"{stem}\..*"}
    with pytest.raises(StreamingQueryException, match="not committed"):
        stream.start(**options).awaitTermination(60)
    with pytest.raises((ConfigurationError, StreamingQueryException), match=f"'{second}' was deleted and recreated"):
        stream.run(**options)
    assert sorted(stream.values) == sorted(numbered(5) + numbered(10, 100))


def test_internal_topics_match_no_pattern(
    spark: SparkSession, stream: Stream, url: str, bus: Bus, connector: str
) -> None:
    topic = f"spark.{uuid.uuid4().hex[:12]}"
    bus.admin.ensure_topic(topic, partitions=1)
    publish(bus, topic, numbered(5))
    servers = kafka.shared_server().bootstrap
    produce(servers, RawAdmin(servers).make_topic(f"__{topic}"), [b"canary"])
    pattern = rf".*{topic}"
    stream.run(topicPattern=pattern)
    assert sorted(stream.values) == sorted(numbered(5))
    assert read(spark, connector=connector, url=url, topicPattern=pattern).count() == 5


@pytest.mark.deep
def test_a_topic_that_is_deleted_ends_its_stream(
    stream: Stream, bus: Bus, make_topic: MakeTopic, connector: str, books: Books
) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(30))
    query = stream.start(topic=topic)
    query.processAllAvailable()
    bus.admin.delete_topic(topic)
    with pytest.raises(StreamingQueryException, match=f"TopicNotFound.*{topic}|UnknownTopicOrPartition"):
        query.awaitTermination(60)
    books.balance(f"the topic is deleted; {NAMES[connector]}", "kafka", numbered(30), stream.values)


def test_values_of_the_largest_size_in_a_topic_that_was_empty(
    stream: Stream, bus: Bus, make_topic: MakeTopic, connector: str
) -> None:
    topic = make_topic(partitions=2)
    most = bus.capabilities.publish.limits.body
    assert most is not None
    options = {"topic": topic, "start": "latest", "tasksPerPartition": 2}
    assert stream.run(**options) == []
    bus.topic(topic).publish_batch(
        [
            *(OutboundMessage(each * most, partition=0) for each in (b"x", b"y", b"z")),
            OutboundMessage(b"small", partition=1),
        ]
    )
    assert stream.run(**options) == [4]
    assert sorted(stream.rows) == sorted(there(bus, topic))
    # The connector makes twice as many tasks as partitions, by length.
    assert stream.tasks == [{"always": {0: 3, 1: 1}, "never": {0: 2, 1: 1}}[connector]]


@pytest.mark.deep
def test_the_id_of_a_topic_that_joins_over_the_connector_is_stored(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    stem = f"spark.{uuid.uuid4().hex[:12]}"
    first, second = f"{stem}.a", f"{stem}.b"
    batches: list[list[str]] = []
    with connect(url) as bus:

        def renew(topic: str, count: int) -> None:
            bus.admin.delete_topic(topic)
            bus.admin.ensure_topic(topic, partitions=1)
            publish(bus, topic, numbered(count))

        def take(frame: DataFrame, batch: int) -> None:
            assert batch < 2
            batches.append(sorted(row.topic for row in frame.collect()))
            # With more rows than before, so that the old offsets would exist.
            renew(second, 10 if batch == 0 else 40)

        pipeline = Pipeline(
            name="joined",
            url=url,
            sources={"log": Source(options={"connector": "always", "topicPattern": rf"{stem}\..*"})},
            sinks={"rows": CallSink(take)},
            checkpoint=str(tmp_path / "checkpoint"),
        )
        renew(first, 5)
        expected = f"Topic '{second}' was deleted and recreated"
        with pytest.raises(ConfigurationError, match=expected):
            run(pipeline, spark=spark)
        # The stored id stays for the next run.
        with pytest.raises(ConfigurationError, match=expected):
            TopicIds(spark, pipeline.checkpoint).check("log", pipeline.parsed_options("log"))
    assert batches == [[first] * 5, [second] * 10]


@pytest.mark.deep
def test_a_pipeline_that_changes_its_connector_raises(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(5))
    counts: list[int] = []

    def go_on(connector: str, checkpoint: str) -> None:
        pipeline = Pipeline(
            name="changed",
            url=url,
            sources={"log": Source(topic, options={"connector": connector})},
            sinks={"rows": CallSink(lambda frame, batch: counts.append(frame.count()))},
            checkpoint=str(tmp_path / checkpoint),
            trigger="available-now",
        )
        run(pipeline, spark=spark)

    for connector in SOURCES:
        go_on(connector, connector)
    with pytest.raises(ConfigurationError, match="but now Spark's Kafka connector reads it"):
        go_on("always", "never")
    with pytest.raises(ConfigurationError, match="another kind of source: Spark's own of Kafka"):
        go_on("never", "always")
    assert counts == [5, 5]
