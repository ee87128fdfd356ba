"""The streaming reader, called as Spark calls it but without Spark, so that each step can be checked."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import nats
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from broker.blocking import Bus
from broker.errors import ConfigurationError, OffsetOutOfRange, TopicNotFound, Unsupported
from broker.names import native_name
from broker.outbound import OutboundMessage
from broker_jetstream.names import stream_name
from broker_spark.common.options import SourceOptions
from broker_spark.common.topics import chosen_topics
from broker_spark.log import source as log_source
from broker_spark.log.ranges import Range
from broker_spark.log.source import LogBatchReader, LogStreamReader
from tests.spark.conftest import MakeTopic, kafka_is_deep
from tests.spark.support import numbered, publish, rows_of

Offsets = dict[str, Any]


class Query:
    """Calls a reader in Spark's order; a new reader for each run, as after a restart."""

    def __init__(self, url: str, topic: str | None, **options: Any) -> None:
        named = {} if topic is None else {"topic": topic}
        given = {name: str(value) for name, value in options.items()}
        self.options = SourceOptions.parse({"url": url, **named, **given}).for_stream()
        self.reader = LogStreamReader(self.options)
        self.at: Offsets = self.reader.initialOffset()

    def restart(self) -> None:
        self.reader = LogStreamReader(self.options)

    def batches(self, limit: ReadLimit | None = None) -> Iterator[list[bytes]]:
        """Until there is nothing new."""
        while (batch := self.batch(limit)) is not None:
            yield batch

    def batch(self, limit: ReadLimit | None = None) -> list[bytes] | None:
        # Spark stores offsets as JSON text.
        end = json.loads(json.dumps(self.reader.latestOffset(self.at, limit or self.reader.getDefaultReadLimit())))
        if end == self.at:
            return None
        found = self.rows(self.at, end)
        self.reader.commit(self.at)
        self.at = end
        return found

    def rows(self, start: Offsets, end: Offsets) -> list[bytes]:
        found: list[bytes] = []
        for wanted in self.reader.partitions(start, end):
            assert isinstance(wanted, Range)
            found += rows_of(self.options, wanted)
        return found

    @property
    def behind(self) -> int:
        """By what the reader reports."""
        head = self.reader.reportLatestOffset()
        assert head is not None
        return sum(
            place - self.at["topics"][topic]["next"].get(partition, 0)
            for topic, found in head["topics"].items()
            for partition, place in found["next"].items()
        )


def test_bounded_batches_read_each_row_once(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=3)
    publish(bus, topic, numbered(500))
    query = Query(url, topic, maxRows=120, tasksPerPartition=2)
    batches = list(query.batches())
    assert sorted(row for batch in batches for row in batch) == sorted(numbered(500))
    assert max(map(len, batches)) <= 120
    assert 5 <= len(batches) <= 8
    assert query.behind == 0
    publish(bus, topic, numbered(50, start=500))
    query.restart()
    assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(50, start=500))
    publish(bus, topic, numbered(300, start=550))
    assert len(query.batch(ReadAllAvailable()) or []) == 300


async def test_a_topic_by_its_native_name_is_read_by_name_and_by_pattern(url: str, bus: Bus) -> None:
    name = native_name(f"0{uuid.uuid4().hex[:8]}")
    if url.startswith("nats:"):
        # Streams with such names are made with tools of NATS.
        client = await nats.connect(url)
        await client.jetstream().add_stream(name=str(name), subjects=[str(name)], allow_direct=True)
        await client.close()
    else:
        bus.admin.ensure_topic(name, partitions=1)
    publish(bus, name, numbered(20))
    for options in ({"topic": f"native:{name}"}, {"topic": None, "topicPattern": str(name)}):
        query = Query(url, maxRows=10, **options)
        assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(20))
        query.restart()
        assert query.batch() is None
        assert query.behind == 0


def test_a_batch_that_runs_again_has_the_same_rows(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(200))
    query = Query(url, topic, maxRows=50)
    places = [query.at]
    rows: list[list[bytes]] = []
    for batch in query.batches():
        rows.append(batch)
        places.append(query.at)
        publish(bus, topic, [b"later"]) if len(rows) == 1 else None
    query.restart()
    assert [query.rows(start, end) for start, end in pairwise(places)] == rows


def test_a_first_batch_that_runs_again_has_the_same_rows(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(10))
    query = Query(url, topic, start="latest")
    publish(bus, topic, numbered(200, start=10))
    assert sorted(query.batch() or []) == sorted(numbered(200, start=10))
    publish(bus, topic, [b"later"])
    query.restart()
    # Until a batch is committed Spark requests the initial offset again, which is another one now.
    assert sorted(query.rows(query.reader.initialOffset(), query.at)) == sorted(numbered(200, start=10))


@pytest.mark.parametrize("options", [{}, {"minRows": 100, "maxDelay": 3600}])
def test_latest_is_a_fixed_offset_from_the_first_plan_on(
    url: str, bus: Bus, make_topic: MakeTopic, options: dict[str, Any]
) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(10))
    query = Query(url, topic, start="latest", **options)
    # A batch without rows, which stores the position.
    assert query.batch() == []
    assert query.batch() is None
    publish(bus, topic, numbered(200, start=10))
    query.restart()
    assert sorted(query.batch() or []) == sorted(numbered(200, start=10))


def test_available_now_stops_where_it_began(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(100))
    query = Query(url, topic, maxRows=40, minRows=30)
    query.reader.prepareForTriggerAvailableNow()
    publish(bus, topic, numbered(100, start=100))
    bus.admin.ensure_topic(topic, partitions=3)
    assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(100))
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(100, start=100))


def test_new_partitions_are_read_from_their_beginning(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(10))
    query = Query(url, topic)
    assert len(query.batch() or []) == 10
    bus.admin.ensure_topic(topic, partitions=4)
    bus.topic(topic).publish_batch([OutboundMessage(value, partition=int(value) % 4) for value in numbered(40, 10)])
    before = query.at
    assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(40, 10))
    query.restart()
    assert sorted(query.rows(before, query.at)) == sorted(numbered(40, 10))


@pytest.mark.parametrize("by", ["name", "pattern"])
def test_a_stream_of_several_topics(url: str, bus: Bus, make_topic: MakeTopic, by: str) -> None:
    first, second, other = make_topic(partitions=2), make_topic(partitions=1), make_topic()
    for topic, start in ((first, 0), (second, 100), (other, 900)):
        publish(bus, topic, numbered(100, start))
    if by == "name":
        query = Query(url, f"{first},{second}", maxRows=60)
    else:
        query = Query(url, None, topicPattern=f"{re.escape(first)}|{re.escape(second)}", maxRows=60)
    batches = list(query.batches())
    assert sorted(row for batch in batches for row in batch) == sorted(numbered(200))
    assert max(map(len, batches)) <= 60
    publish(bus, second, numbered(10, 200))
    query.restart()
    assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(10, 200))
    assert query.behind == 0


def test_a_new_topic_of_a_pattern_joins_a_stream_from_its_beginning(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    first = make_topic()
    second = f"{first}.later"
    publish(bus, first, numbered(10))
    query = Query(url, None, topicPattern=re.escape(first) + ".*", start="latest")
    assert list(query.batches()) in ([], [[]])
    bus.admin.ensure_topic(second)
    try:
        publish(bus, second, numbered(20, 10))
        before = query.at
        assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(20, 10))
        query.restart()
        assert sorted(query.rows(before, query.at)) == sorted(numbered(20, 10))
    finally:
        bus.admin.delete_topic(second)


def test_a_topic_deleted_during_a_pattern_lookup_is_left_out(
    url: str, bus: Bus, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(10))

    def listed_before(bus: Bus, options: SourceOptions) -> list[str]:
        return [*chosen_topics(bus, options), f"{topic}.gone"]

    monkeypatch.setattr(log_source, "chosen_topics", listed_before)
    query = Query(url, None, topicPattern=f"{re.escape(topic)}.*")
    assert sorted(row for batch in query.batches() for row in batch) == sorted(numbered(10))
    reader = LogBatchReader(SourceOptions.parse({"url": url, "topicPattern": f"{re.escape(topic)}.*"}).for_batch())
    assert {part.topic for part in reader.partitions() if isinstance(part, Range)} == {topic}
    with pytest.raises(TopicNotFound):
        Query(url, topic)


def test_an_idle_partition_is_not_taken_for_a_lost_one(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)
    bus.topic(topic).publish_batch([OutboundMessage(value, partition=0) for value in numbered(20)])
    query = Query(url, topic)
    assert len(query.batch() or []) == 20
    bus.admin.purge(topic)
    bus.topic(topic).publish_batch([OutboundMessage(b"late", partition=1)])
    assert query.batch() == [b"late"]


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
async def test_a_last_message_that_was_deleted_is_no_lost_end(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(10))
    query = Query(url, topic)
    assert len(query.batch() or []) == 10
    client = await nats.connect(url)
    last = max(bounds.next for bounds in bus.log.bounds(topic).values()) - 1
    await client.jetstream().delete_msg(stream_name(topic), last)
    await client.close()
    assert query.batch() is None
    publish(bus, topic, [b"next"])
    assert query.batch() == [b"next"]


def test_a_log_that_ends_below_the_checkpoint_raises(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(10))
    query = Query(url, topic)
    assert len(query.batch() or []) == 10
    # As after the restore of an older copy of the log.
    places = query.at["topics"][topic]["next"]
    query.at["topics"][topic]["next"] = {partition: place + 5 for partition, place in places.items()}
    with pytest.raises(OffsetOutOfRange, match=r"ends at .*, and the checkpoint is at"):
        query.batch()


@kafka_is_deep
def test_few_rows_wait_for_more(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    query = Query(url, topic, minRows=10, maxDelay=3600)
    publish(bus, topic, numbered(9))
    assert query.batch() is None
    assert query.behind == 9
    publish(bus, topic, numbered(1, 9))
    assert len(query.batch() or []) == 10
    hasty = Query(url, topic, minRows=11, maxDelay=0.001)
    while (rows := hasty.batch()) is None:
        pass
    assert len(rows) == 10


@pytest.mark.deep
def test_batches_are_bounded_in_bytes(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, [b"x" * 1000] * 100)
    batches = list(Query(url, topic, maxBytes="20k").batches())
    assert sum(map(len, batches)) == 100
    assert max(sum(map(len, batch)) for batch in batches) <= 20 << 10
    # A row larger than the limit is a batch of its own.
    assert list(map(len, Query(url, topic, maxBytes="1").batches())) == [1] * 100


def test_other_checkpoints_are_refused(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic, other = make_topic(), make_topic()
    publish(bus, topic, numbered(10))
    query = Query(url, topic)
    query.batch()
    with pytest.raises(ConfigurationError, match=f"on topic '{topic}', and this one reads {other}.*checkpointLocation"):
        Query(url, other).reader.latestOffset(query.at, ReadAllAvailable())
    with pytest.raises(ConfigurationError, match="another kind of source"):
        query.reader.latestOffset({topic: {"0": 3}}, ReadAllAvailable())
    foreign = {**query.at, "backend": "another"}
    with pytest.raises(ConfigurationError, match="a query on another, and this one reads"):
        query.reader.latestOffset(foreign, ReadAllAvailable())
    planned = query.reader.partitions(Query(url, topic).at, query.at)
    bus.admin.delete_topic(topic)
    for available_now in (False, True):
        query.restart()
        if available_now:
            query.reader.prepareForTriggerAvailableNow()
        with pytest.raises(TopicNotFound, match=rf"{topic}.* deleted.*create it again.*checkpointLocation of its own"):
            query.batch()
    assert isinstance(planned[0], Range)
    with pytest.raises(TopicNotFound, match=rf"{topic}.* deleted after planning.*Begin a new checkpoint"):
        rows_of(query.options, planned[0])
    with pytest.raises(TopicNotFound, match=r"Create it with .*ensure_topic"):
        Query(url, topic)
    fresh = Query(url, other)
    fresh.options = replace(fresh.options, topics=(other, topic))
    fresh.restart()
    # Nothing was read of it, so the advice is to create it.
    with pytest.raises(TopicNotFound, match=r"Create it with .*ensure_topic"):
        fresh.batch()
    bus.admin.ensure_topic(topic, partitions=2)
    publish(bus, topic, numbered(20))
    with pytest.raises(ConfigurationError, match="was deleted and recreated"):
        query.batch()
    assert sorted(row for batch in Query(url, topic).batches() for row in batch) == sorted(numbered(20))


def test_a_recreated_topic_raises_while_a_query_catches_up(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(100))
    query = Query(url, topic, maxRows=10)
    assert query.batch() == numbered(10)
    bus.admin.delete_topic(topic)
    bus.admin.ensure_topic(topic, partitions=1)
    publish(bus, topic, numbered(200))
    # Whether or not the ends are fetched before this batch.
    with pytest.raises(ConfigurationError, match="was deleted and recreated"):
        query.batch()


def test_data_loss_by_retention_raises_or_is_skipped(
    url: str, bus: Bus, make_topic: MakeTopic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A client may still have records that it fetched before their removal.
    monkeypatch.setattr("broker_kafka.client.log_fetcher._AHEAD", 0.0)
    topic = make_topic(partitions=1)
    publish(bus, topic, numbered(100))
    query, skipping = Query(url, topic), Query(url, topic, onDataLoss="skip")
    for each in (query, skipping):
        assert each.batch() == numbered(100)
    publish(bus, topic, numbered(50, 100))
    bus.admin.purge(topic)
    publish(bus, topic, numbered(70, 150))
    with pytest.raises(OffsetOutOfRange, match=r"(?s)Retention removed .* onDataLoss to skip"):
        query.batch()
    assert skipping.batch() == numbered(70, 150)
    assert "before they were read, 50 at most" in caplog.text


@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_the_position_is_reported_to_a_group(url: str, bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(10))
    group = f"{topic}.lag"
    query = Query(url, topic, group=group)
    query.batch()
    query.reader.commit(query.at)
    assert bus.admin.lag(topic, group).waiting == 0
    assert sum(bus.admin.describe_group(group).positions.values()) == 10
    publish(bus, topic, numbered(5, start=10))
    assert bus.admin.lag(topic, group).waiting == 5


@pytest.mark.parametrize("url", ["jetstream"], indirect=True)
def test_a_broker_without_groups_is_warned_of_once(
    url: str, bus: Bus, make_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic(partitions=2)
    publish(bus, topic, numbered(10))
    group = f"{topic}.lag"
    query = Query(url, topic, group=group, maxRows=5)
    batches = list(query.batches())
    query.reader.commit(query.at)
    assert len(batches) > 1
    assert sorted(row for batch in batches for row in batch) == sorted(numbered(10))
    logged = [(each.levelname, each.message) for each in caplog.records if group in each.message]
    assert logged == [("WARNING", f"Option group '{group}' does nothing: jetstream has no groups that keep positions")]
    # Nor is a group of that name left, which tools would show as a position.
    assert bus.admin.subscriptions(topic) == []
    with pytest.raises(Unsupported, match="has no group administration"):
        bus.admin.describe_group(group)
