"""Errors of Spark, its file systems and the brokers name the part of the pipeline."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker.blocking import Bus
from broker.errors import BrokerError, ConfigurationError, OffsetOutOfRange, TopicNotFound
from broker_spark.pipeline import CallSink, FileSink, Pipeline, Source, TableSink, TopicSink, run
from broker_spark.pipeline.frames import frames_of
from broker_spark.pipeline.preflight import check_rows
from broker_spark.runtime.spark_errors import broker_error_in
from tests.spark.conftest import MakeTopic
from tests.spark.support import numbered, publish, values

pytestmark = pytest.mark.parametrize("url", ["jetstream"], indirect=True)

Make = Callable[..., Pipeline]


@pytest.fixture
def make(url: str, make_topic: MakeTopic, tmp_path: Path) -> Make:
    """`make(trigger="")` returns a valid pipeline with these changes."""
    topic = make_topic(1)

    def made(**changes: Any) -> Pipeline:
        fields: dict[str, Any] = {
            "name": "refused",
            "url": url,
            "sources": {"numbers": Source(topic)},
            "sinks": {"files": FileSink(str(tmp_path / "files"))},
            "checkpoint": str(tmp_path / "checkpoint"),
            "trigger": "available-now",
        }
        return Pipeline(**(fields | changes))

    return made


def counts(numbers: DataFrame) -> DataFrame:
    return numbers.groupBy("key").count()


def ordered(numbers: DataFrame) -> DataFrame:
    return numbers.orderBy("key")


def elsewhere(numbers: DataFrame) -> DataFrame:
    return numbers.sparkSession.range(3)


def misspelt(numbers: DataFrame) -> DataFrame:
    return numbers.select("nmber")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"sql": "selekt 1"}, "sql is 'selekt 1': [PARSE_SYNTAX_ERROR]"),
        ({"sql": "select * from nmbers"}, "sql is 'select * from nmbers': [TABLE_OR_VIEW_NOT_FOUND]"),
        ({"sql": "select nmber from numbers"}, "sql is 'select nmber from numbers': [UNRESOLVED_COLUMN"),
        ({"transform": misspelt}, "transform cannot be planned: [UNRESOLVED_COLUMN"),
    ],
)
def test_errors_of_sparks_planner_are_reported_in_a_sentence(
    spark: SparkSession, make: Make, capfd: pytest.CaptureFixture[str], part: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        frames_of(make(**part), {"numbers": spark.createDataFrame([(1, "red")], "number bigint, colour string")})
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith("on numbers (number, colour)" if "sql" in part else "numbers (number, colour)")
    assert "\n" not in str(caught.value), "there is no plan in it"
    assert "QueryContextLogger" not in capfd.readouterr().err, "PySpark does not log it too, with its stack"


def test_rows_without_columns_raise(spark: SparkSession, make: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"^transform returned rows without columns"):
        frames_of(make(transform=lambda numbers: numbers.select()), {"numbers": spark.range(1)})


@pytest.mark.parametrize("sink", [FileSink("/x", format="Broker"), TableSink("x", format="broker")])
def test_broker_is_no_format_of_files(spark: SparkSession, make: Make, sink: FileSink | TableSink) -> None:
    with pytest.raises(ConfigurationError, match=r"^sinks\.out: format is '.roker', which writes no files"):
        check_rows(make(sinks={"out": sink}), spark.range(1))


@pytest.mark.deep
def test_a_checkpoint_of_fewer_sources_raises(spark: SparkSession, make: Make, bus: Bus, make_topic: MakeTopic) -> None:
    first, second = make().sources["numbers"].topic, make_topic(1)
    publish(bus, first, numbered(3))
    assert run(make(), spark=spark) == 1
    both = {"numbers": Source(first), "more": Source(second)}
    pipeline = make(sources=both, transform=lambda numbers, more: numbers.union(more))
    with pytest.raises(ConfigurationError) as caught:
        run(pipeline, spark=spark)
    assert str(caught.value).startswith("checkpoint belongs to a pipeline with other sources, another decode or")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"transform": elsewhere},
            "transform returned a DataFrame that uses none of the sources. Derive it from numbers",
        ),
        ({"sql": "select 1"}, "sql returned a DataFrame that uses none of the sources. Derive it from numbers"),
    ],
)
def test_rows_of_no_source_raise(spark: SparkSession, make: Make, part: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run(make(**part), spark=spark)
    assert str(caught.value) == expected


@pytest.mark.deep
def test_rows_may_have_columns_of_any_name(spark: SparkSession, make: Make, bus: Bus, tmp_path: Path) -> None:
    pipeline = make(transform=lambda numbers: numbers.selectExpr("value", "1 AS DEAD_0", "2 AS dead", "3 AS `__dead`"))
    publish(bus, pipeline.sources["numbers"].topic, numbered(3))
    assert run(pipeline, spark=spark) == 1
    assert spark.read.parquet(str(tmp_path / "files")).count() == 3
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"_anybroker", "batch=0"}


def test_a_condition_that_cannot_count_rows_raises(spark: SparkSession, make: Make) -> None:
    sink = CallSink(print, where="rand() > 0.5")
    with pytest.raises(
        ConfigurationError, match=r"^sinks\.out: where is 'rand\(\) > 0\.5': \[AGGREGATE_FUNCTION_WITH_NON"
    ):
        check_rows(make(sinks={"out": sink}), spark.range(1))


@pytest.mark.parametrize("columns", ["id BIGINT", "id BIGINT, batch BIGINT"])
def test_a_table_without_a_partition_for_each_batch_is_refused(spark: SparkSession, make: Make, columns: str) -> None:
    table = f"plain_{uuid.uuid4().hex[:8]}"
    spark.sql(f"CREATE TABLE {table} ({columns}) USING parquet")
    try:
        with pytest.raises(ConfigurationError, match=rf"^sinks\.out: Table '{table}' is not partitioned .* BY \(batch"):
            check_rows(make(sinks={"out": TableSink(table)}), spark.range(1))
    finally:
        spark.sql(f"DROP TABLE {table}")


def test_an_impossible_table_is_named(spark: SparkSession, make: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"^sinks\.out: table is 'a b': \[PARSE_SYNTAX_ERROR\]"):
        check_rows(make(sinks={"out": TableSink("a b")}), spark.range(1))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (counts, r"Invalid streaming output mode: append.* Aggregates need a watermark, or output_mode \"update\""),
        (ordered, "Sorting is not supported"),
    ],
)
def test_impossible_streams_are_reported_with_the_fix(
    spark: SparkSession, make: Make, transform: Any, expected: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^The rows cannot be those of a stream: .*{expected}"):
        run(make(transform=transform), spark=spark)


@pytest.mark.deep
@pytest.mark.parametrize("letters", [False, True])
def test_a_missing_topic_raises_before_anything_is_written(
    spark: SparkSession, make: Make, bus: Bus, tmp_path: Path, letters: bool
) -> None:
    name = f"spark.{uuid.uuid4().hex[:12]}"
    written: list[int] = []
    sinks = {"first": CallSink(lambda _, batch: written.append(batch)), "last": TopicSink(name)}
    pipeline = make(dead_letters=TopicSink(name)) if letters else make(sinks=sinks)
    publish(bus, pipeline.sources["numbers"].topic, numbered(3))
    with pytest.raises(TopicNotFound, match=name):
        run(pipeline, spark=spark)
    assert written == []
    bus.admin.ensure_topic(name)
    assert run(pipeline, spark=spark) == 1


@pytest.mark.deep
def test_an_impossible_start_raises_while_nothing_was_read(
    spark: SparkSession, make: Make, bus: Bus, tmp_path: Path
) -> None:
    topic = make().sources["numbers"].topic
    publish(bus, topic, numbered(3))
    end = bus.log.bounds(topic)[0].next

    def starting(**offsets: int) -> Pipeline:
        return make(sources={"numbers": Source(topic, options={"start": {key[1:]: at for key, at in offsets.items()}})})

    for pipeline, expected in (
        (starting(p7=0), f"sources.numbers: Option start names partition 7 of topic '{topic}'. It has 0"),
        (
            starting(p0=end + 9),
            f"sources.numbers: Option start has offset {end + 9} for '{topic}'[0]. That log ends",
        ),
    ):
        with pytest.raises(ConfigurationError) as caught:
            run(pipeline, spark=spark)
        assert str(caught.value).startswith(expected)
    assert run(starting(p0=end - 1), spark=spark) == 1
    assert values(spark.read.parquet(str(tmp_path / "files"))) == [b"2"]
    # Only the first run begins there.
    assert run(starting(p7=0), spark=spark) == 0


@pytest.mark.deep
def test_an_impossible_directory_is_named(spark: SparkSession, make: Make, tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("a file")
    for changes, expected in (
        ({"checkpoint": "nowhere://here/a"}, "checkpoint is 'nowhere://here/a': No FileSystem for scheme"),
        ({"checkpoint": str(occupied)}, f"checkpoint is '{occupied}': [Errno 17] File exists"),
        ({"sinks": {"out": FileSink("nowhere://here/a")}}, "sinks.out: path is 'nowhere://here/a': No FileSystem for"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            run(make(**changes), spark=spark)
        assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        (FileSink("HERE/occupied"), "sinks.out: path is '.*/occupied': Parent path is not a directory"),
        (FileSink("HERE/out", options={"compression": "zippy"}), "sinks.out: The rows cannot be written: .*zippy"),
        (
            FileSink("HERE/out", format="text"),
            "sinks.out: The rows cannot be written: .*Text datasource .*Fix its format",
        ),
        (FileSink("HERE/out", format="csv"), "sinks.out: The rows cannot be written: .*CSV datasource doesn't support"),
        (TableSink("nowhere_at_all.t"), "sinks.out: The rows cannot be written: .*SCHEMA_NOT_FOUND"),
        (TableSink("no_table", options={"compression": "zippy"}), "sinks.out: The rows cannot be written: .*zippy"),
        (TableSink("no_table", format="text"), "sinks.out: The rows cannot be written: .*Text datasource .*Fix its"),
    ],
)
def test_rows_that_spark_refuses_name_the_sink(
    spark: SparkSession, make: Make, bus: Bus, tmp_path: Path, sink: FileSink | TableSink, expected: str
) -> None:
    (tmp_path / "occupied").write_text("a file")
    if isinstance(sink, FileSink):
        sink = replace(sink, path=sink.path.replace(f"{Path.cwd()}/HERE", str(tmp_path)))
    written: list[int] = []
    pipeline = make(sinks={"first": CallSink(lambda _, batch: written.append(batch)), "out": sink})
    publish(bus, pipeline.sources["numbers"].topic, numbered(3))
    with pytest.raises(BrokerError, match=f"^{expected}"):
        run(pipeline, spark=spark)
    if expected.endswith("NOT_FOUND"):
        return
    assert (written, (tmp_path / "out").exists()) == ([], False), "it raises before the first batch"
    if isinstance(sink, TableSink):
        assert not spark.catalog.tableExists(sink.table)


@pytest.mark.deep
def test_an_error_of_a_task_is_reported_without_plan_and_stack(spark: SparkSession, make: Make, bus: Bus) -> None:
    pipeline = make()
    topic = pipeline.sources["numbers"].topic
    publish(bus, topic, numbered(3))
    assert run(pipeline, spark=spark) == 1
    publish(bus, topic, numbered(3))
    bus.admin.purge(topic)
    publish(bus, topic, numbered(3))
    with pytest.raises(OffsetOutOfRange) as caught:
        run(pipeline, spark=spark)
    assert str(caught.value).startswith(f"Retention removed unread records of '{topic}'[0] from ")
    assert str(caught.value).endswith("set option onDataLoss to skip, which counts and logs what is missing")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Traceback:\nbroker.errors.Closed: It is closed. Open it", "Closed: It is closed. Open it"),
        ("Traceback:\nbroker.errors.PublishError: 1 of 2", "BackendError: 1 of 2"),
        ("broker.errors.Closed: x\n\nDuring handling of the above exception, ...\nKeyError: 1", None),
        ("KeyError: 'broker.errors.Closed: x'", None),
    ],
)
def test_an_error_of_this_package_is_parsed_from_its_text(url: str, text: str, expected: str | None) -> None:
    found = broker_error_in(Exception(text))
    assert (found and f"{type(found).__name__}: {found}") == expected
