"""Options, positions, offsets and admission: pure parts, without Spark or a broker."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from broker.errors import ConfigurationError, Unsupported
from broker_spark import COLUMNS, arrow_schema, spark_schema
from broker_spark.common.admission import admit, backlog
from broker_spark.common.offsets import Offsets, TopicOffsets
from broker_spark.common.options import Position, SourceOptions, as_texts, parse_position
from broker_spark.log.ranges import ranges
from broker_spark.sink.sink import SinkOptions
from broker_spark.spool.positions import SpoolPosition

URL = "nats://127.0.0.1:4222"


def parse(**options: str) -> SourceOptions:
    return SourceOptions.parse({"url": URL, "topic": "orders", **options})


def test_the_schema_is_what_spark_makes_of_it() -> None:
    assert to_arrow_schema(spark_schema(), timezone="UTC") == arrow_schema()
    assert arrow_schema(["value", "topic"]).names == ["value", "topic"]
    assert len(COLUMNS) == 10


def test_options_ignore_case_and_underscores() -> None:
    for name in ("maxRows", "maxrows", "max_rows", "MAX_ROWS"):
        assert parse(**{name: "7"}).max_rows == 7
    assert parse(maxBytes="64m").max_bytes == 64 << 20
    assert parse(topic="orders, refunds").topics == ("orders", "refunds")
    assert parse(columns="value, key").columns == ("value", "key")
    assert SourceOptions.parse({"url": URL, "topicPattern": "orders-.*"}).pattern == "orders-.*"


def test_options_of_python_become_text_for_spark() -> None:
    given = {"group": None, "maxRows": 7, "start": {"0": 1}, "end": datetime(2026, 1, 31, tzinfo=UTC), "flag": True}
    assert as_texts(given) == {
        "maxRows": "7",
        "start": '{"0": 1}',
        "end": "2026-01-31T00:00:00+00:00",
        "flag": "true",
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"maxRow": "1"}, "no option 'maxRow'. Did you mean 'maxRows'"),
        ({"maxRows": "many"}, "Option maxRows is 'many'. It takes a whole number of 1 or more"),
        ({"maxRows": "0"}, "Option maxRows is '0'"),
        ({"maxBytes": "12x"}, "Option maxBytes is '12x'. It takes a size"),
        ({"maxDelay": "nan"}, "Option maxDelay is 'nan'"),
        ({"minRows": "9", "maxRows": "8"}, "Option minRows is 9. It takes no more than maxRows, which is 8"),
        ({"onDataLoss": "ignore"}, "Option onDataLoss is 'ignore'. It takes fail or skip"),
        ({"columns": "valu"}, "no column 'valu'. Did you mean 'value'"),
        ({"columns": "key,key"}, "Option columns names 'key' twice"),
        ({"start": "soon"}, "Option start is 'soon'. It takes \"earliest\""),
        ({"start": "2026-01-31T12:00:00"}, "Option start is '2026-01-31T12:00:00', which has no timezone"),
        (
            {"start": "2026-01-31"},
            "which has no timezone. Add the offset, for instance 2026-01-31T00:00:00+00:00 for UTC",
        ),
        ({"start": '{"0": -1}'}, "Option start has -1 for partition '0'"),
        ({"start": '{"refunds": {"0": 1}}'}, "an offset of topic 'refunds'"),
        ({"topicPattern": "x.*"}, "topic and topicPattern are both given"),
        ({"maxRows": "9" * 20}, "Option maxRows is '99999999999999999999'. It takes a whole number"),
        ({"maxRows": "9" * 5000}, "It takes a whole number"),
        ({"aheadBytes": "9" * 5000}, "It takes a size"),
        ({"start": '{"a":' * 100_000}, "Option start is incomplete: it nests too deeply"),
        (
            {"start": '{"0": 17'},
            "Option start is incomplete: it ends after 8 characters, in the middle of its JSON. It",
        ),
        ({"start": "{0: 17}"}, "Option start is incomplete: it is not JSON at line 1, character 2 (Expecting"),
        ({"start": "{}"}, "Option start names no partition"),
        ({"start": "2026-02-01T00:00Z", "end": "2026-01-31T23:00Z"}, "end is '2026-01-31T23:00:00+00:00'. It takes a"),
        ({"start": '{"orders": "%s"}' % ("x" * 999)}, f"Option start has '{'x' * 27}...{'x' * 28}' for 'orders'"),
        ({"start": '{"\u0663": 1}'}, "Option start has 1 for '\u0663'"),
        (
            {"topic": "a b"},
            "topic name 'a b' is not portable. Use a letter, then letters, digits, '.', '_' or '-', 3 to",
        ),
        ({"topic": "a b"}, "200 characters in all; one in the broker's own form is written 'native:a b'"),
        ({"topic": "native:"}, "The native name is empty"),
        ({"url": "inmem:"}, "Use embedded:///directory"),
        ({"url": "embedded:"}, "Use embedded:///directory"),
        ({"url": "nets://x"}, "nats"),
    ],
)
def test_a_wrong_option_is_named_with_the_fix(options: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(**options)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"topicPattern": ""}, "Option topicPattern is ''. It takes a regular expression"),
        ({"start": '{"order-1": {"0": 17}}'}, "an offset of topic 'order-1'\". It takes topics that match"),
        ({"end": '{"0": 17}'}, "offsets of no topic"),
    ],
)
def test_a_wrong_option_beside_a_pattern_is_named(options: dict[str, str], expected: str) -> None:
    given = {"url": URL, "topicPattern": "orders-.*"}
    SourceOptions.parse({**given, "start": '{"orders-1": {"0": 17}}'})
    with pytest.raises(ConfigurationError) as caught:
        SourceOptions.parse({**given, **options})
    assert expected in str(caught.value)


def test_options_of_the_other_kind_of_read_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="maxRows is for a stream only"):
        parse(maxRows="1").for_batch()
    with pytest.raises(ConfigurationError, match="end is for a batch read only"):
        parse(end="latest").for_stream()


def test_positions() -> None:
    assert parse_position("start", "latest", "earliest") == Position("latest")
    assert parse_position("start", "2026-01-31T12:00:00Z", "earliest") == Position(
        datetime(2026, 1, 31, 12, tzinfo=UTC)
    )
    found = parse_position("start", '{"orders": {"0": 17, "1": "latest"}}', "earliest")
    assert (found.default, found.of("orders"), found.of("refunds")) == ("earliest", {0: 17, 1: "latest"}, {})


def test_offsets_round_trip_and_foreign_ones_are_refused() -> None:
    mine = Offsets("kafka", {"orders": TopicOffsets("a", {0: 5, 10: 7}, {10: 0})})
    assert Offsets.from_json(mine.to_json()) == mine
    mine.check("kafka", {"orders": "a", "refunds": "b"}, named=True)
    for stranger, whose in (
        ({"orders": {"0": 5}}, "Spark's own of Kafka, of 'orders'. Give this query a checkpointLocation of its own"),
        ({"source": "another", "spool": "x" * 999}, "of source 'another'. Give"),
        ({"logOffset": 3}, "with 'logOffset'. Give"),
        (7, "a number. Give"),
        ([], "a list. Give"),
        ({}, "empty. Give"),
    ):
        for source in (Offsets, SpoolPosition):
            with pytest.raises(ConfigurationError) as caught:
                source.from_json(cast("Any", stranger))
            assert f"the positions of another kind of source: {whose}" in str(caught.value)
    for broken, expected in (
        ({"source": "broker-log", "version": 1}, "incomplete: 'topics' is missing. Restore the checkpoint"),
        ({**mine.to_json(), "topics": {"orders": {"identity": "a"}}}, "incomplete: 'next' is missing. Restore"),
        (
            {**mine.to_json(), "topics": {"orders": 5}},
            "incomplete: a value is not a number. Restore",
        ),
    ):
        with pytest.raises(ConfigurationError) as caught:
            Offsets.from_json(broken)
        assert expected in str(caught.value)
    with pytest.raises(ConfigurationError, match="position in the checkpoint is incomplete: spool or next is missing"):
        SpoolPosition.from_json({"source": "broker-spool", "version": 1})
    with pytest.raises(ConfigurationError, match="another version of broker_spark: 2"):
        SpoolPosition.from_json({"source": "broker-spool", "version": 2})
    with pytest.raises(ConfigurationError, match="another version"):
        Offsets.from_json({**mine.to_json(), "version": 2})
    with pytest.raises(ConfigurationError, match="a query on kafka, and this one reads jetstream"):
        mine.check("jetstream", {"orders": "a"}, named=True)
    with pytest.raises(ConfigurationError, match="on topic 'orders', and this one reads refunds"):
        mine.check("kafka", {"refunds": "a"}, named=True)
    with pytest.raises(ConfigurationError, match="deleted and recreated"):
        mine.check("kafka", {"orders": "b"}, named=True)


PLACES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1),
    min_size=1,
)


@given(PLACES, st.integers(1, 60), st.booleans())
def test_batches_are_bounded_and_reach_the_end(
    places: dict[str, dict[int, tuple[int, int]]], most: int, shared: bool
) -> None:
    start = {topic: {each: low for each, (low, _) in found.items()} for topic, found in places.items()}
    end = {topic: {each: low + more for each, (low, more) in found.items()} for topic, found in places.items()}
    if shared:
        end = {
            topic: dict.fromkeys(found, max([*found.values(), *start[topic].values()])) for topic, found in end.items()
        }
    total = sum(backlog(start, end, shared=shared).values())
    batches = 0
    while start != end:
        reached = admit(start, end, most, shared=shared)
        rows = backlog(start, reached, shared=shared)
        assert 0 < sum(rows.values()) <= most
        for topic, found in reached.items():
            for each, place in found.items():
                assert start[topic][each] <= place <= end[topic][each]
        start = reached
        batches += 1
    assert batches <= total


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 20))
def test_tasks_cover_a_range_once(first: int, length: int, tasks: int) -> None:
    found = ranges("orders", None, {0: first}, {0: first + length}, tasks)
    assert [offset for each in found for offset in range(each.start, each.stop)] == list(range(first, first + length))
    assert len(found) == min(tasks, length)


def sink(*columns: tuple[str, object], **options: str) -> SinkOptions:
    schema = StructType([StructField(name, kind) for name, kind in columns])  # pyright: ignore[reportArgumentType]
    return SinkOptions.parse({"url": URL, "topic": "orders", **options}, schema)


def test_columns_and_options_of_a_sink() -> None:
    found = SinkOptions.parse({"url": URL}, spark_schema())
    assert found.columns == ("topic", "id", "key", "value", "attributes", "publish_time")
    assert "topic" not in SinkOptions.parse({"url": URL, "topic": "orders"}, spark_schema()).columns
    assert "partition" in SinkOptions.parse({"url": URL, "keepPartition": "true"}, spark_schema()).columns
    with pytest.raises(ConfigurationError, match="keepPartition is true, and there is no column 'partition'"):
        sink(("value", StringType()), keepPartition="true")
    sink(("value", StringType()), keepPartition="false")
    with pytest.raises(ConfigurationError, match=r"no column 'vale'. Did you mean 'value'.*df.drop"):
        sink(("vale", StringType()))
    with pytest.raises(ConfigurationError, match=r"Column 'value' is of type bigint. It takes binary or string"):
        sink(("value", LongType()))
    with pytest.raises(ConfigurationError, match="There are two columns 'key'"):
        sink(("value", StringType()), ("key", StringType()), ("key", StringType()))
    with pytest.raises(ConfigurationError, match="no column 'value'"):
        sink(("key", StringType()))
    with pytest.raises(ConfigurationError, match="Neither option topic nor a column topic"):
        SinkOptions.parse({"url": URL}, StructType([StructField("value", StringType())]))
    with pytest.raises(ConfigurationError, match=r"The sink has no option 'topics'. Did you mean 'topic'"):
        sink(("value", StringType()), topics="x")
    with pytest.raises(Unsupported, match="no use for column 'deliver_at'"):
        SinkOptions.parse(
            {"url": "kafka://127.0.0.1:9092", "topic": "orders"},
            StructType([StructField("value", StringType()), StructField("deliver_at", spark_schema()[7].dataType)]),
        )
