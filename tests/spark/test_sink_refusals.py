"""Errors of a streaming write are raised by its first batch, which runs at once, before a row is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from broker.blocking import Bus
from tests.fault_matrix import Books
from tests.spark.conftest import MakeTopic
from tests.spark.support import log, numbered, publish

SECONDS = 60
VALUE = ("value",)

on_jetstream = pytest.mark.parametrize("url", ["jetstream"], indirect=True)


def writing(
    spark: SparkSession, url: str, source: str, checkpoint: Path, options: Mapping[str, Any], *columns: str
) -> DataStreamWriter:
    """A stream that writes these columns of a topic, not started."""
    frame = spark.readStream.format("broker").options(url=url, topic=source).load().selectExpr(*columns)
    return frame.writeStream.format("broker").options(**{"url": url, "checkpointLocation": str(checkpoint), **options})


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("jetstream", {"topc": "x"}, "The sink has no option 'topc'. Did you mean 'topic'?"),
        ("jetstream", {"topic": "a b"}, "topic name 'a b' is not portable. Use a letter, then letters"),
        ("jetstream", {"url": "inmem:"}, "Use embedded:///directory"),
        ("jetstream", {"ids": "sometimes"}, "Option ids is 'sometimes'. It takes always or never"),
        (
            "kafka",
            {"keepPartition": "true"},
            "Option keepPartition is true, and there is no column 'partition'. Add one of type int, as a source does",
        ),
        (
            "jetstream",
            {"writeId": "mine"},
            "Option writeId is for a batch write only. Leave it out: a stream makes ids of its batches",
        ),
    ],
    indirect=["url"],
)
def test_a_wrong_option_of_a_stream_is_reported_with_the_fix(
    spark: SparkSession,
    url: str,
    bus: Bus,
    make_topic: MakeTopic,
    tmp_path: Path,
    options: dict[str, Any],
    expected: str,
) -> None:
    source, target = make_topic(), make_topic()
    publish(bus, source, numbered(5))
    write = writing(spark, url, source, tmp_path, {"topic": target, **options}, "value")
    query = write.trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination()
    assert expected in str(caught.value)
    assert log(bus, target) == []


@pytest.mark.parametrize(
    ("url", "columns", "expected"),
    [
        ("jetstream", ["value", "key as colour"], r"no column 'colour'. There are value, .*: df.drop\('colour'\)"),
        ("jetstream", ["value as vale"], r"The sink has no column 'vale'. Did you mean 'value'.*df.drop\('vale'\)"),
        ("jetstream", ["key"], "There is no column 'value'. Make one of bytes or text, for instance with to_json"),
        ("jetstream", ["offset as value"], "Column 'value' is of type bigint. It takes binary or string: cast it"),
        ("jetstream", ["value", "key", "key"], "There are two columns 'key'. Rename or leave out one of them before"),
        (
            "kafka",
            ["value", "broker_time as deliver_at"],
            r"no use for column 'deliver_at'. Drop it before the write: df.drop\('deliver_at'\); or set .*markers",
        ),
    ],
    indirect=["url"],
)
def test_a_wrong_column_of_a_stream_is_reported_with_the_fix(
    spark: SparkSession,
    url: str,
    bus: Bus,
    make_topic: MakeTopic,
    tmp_path: Path,
    columns: list[str],
    expected: str,
) -> None:
    source, target = make_topic(), make_topic()
    publish(bus, source, numbered(5))
    query = writing(spark, url, source, tmp_path, {"topic": target}, *columns).trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match=expected):
        query.awaitTermination()
    assert log(bus, target) == []


@on_jetstream
def test_a_stream_without_a_topic_names_both_ways_to_give_one(
    spark: SparkSession, url: str, make_topic: MakeTopic, tmp_path: Path
) -> None:
    query = writing(spark, url, make_topic(), tmp_path, {}, "value").trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match=r"a column topic is given\. Give one of them"):
        query.awaitTermination()


@on_jetstream
@pytest.mark.parametrize("waiting", [0, 5])
def test_a_refused_stream_continues_when_it_is_fixed(
    spark: SparkSession, url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, waiting: int, books: Books
) -> None:
    source, target = make_topic(), make_topic()
    publish(bus, source, numbered(waiting))
    # With this trigger only an error ends it.
    wrong = writing(spark, url, source, tmp_path, {"topic": target}, "value", "1 as colour").start()
    try:
        with pytest.raises(StreamingQueryException, match="The sink has no column 'colour'"):
            wrong.awaitTermination(SECONDS)
    finally:
        wrong.stop()
    assert log(bus, target) == []
    case = f"a wrong column of a streaming sink, {waiting} rows wait"
    books.refused(case, bus.capabilities.backend, "by the first batch")
    # The planned batch runs again, and later rows are the next batch.
    publish(bus, source, numbered(3, waiting))
    fixed = writing(spark, url, source, tmp_path, {"topic": target}, "value").trigger(availableNow=True)
    fixed.start().awaitTermination()
    assert sorted(body for _, body in log(bus, target)) == sorted(numbered(waiting + 3))
