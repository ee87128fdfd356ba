"""Delta tables: each batch once, MERGE by key, and columns that come and go."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker.blocking import connect
from broker.errors import ConfigurationError
from broker_spark.pipeline import Pipeline, Source, TableSink, replay, run
from broker_spark.pipeline.preflight import check_rows, try_sinks
from broker_spark.pipeline.writing import claim, write
from tests.servers import nats
from tests.spark.support import publish
from tests.spark.test_pipeline_targets import make


@dataclass
class Order:
    number: int
    coffees: int


@dataclass
class NewOrder:
    number: int
    coffees: int
    note: str | None = None


@pytest.fixture
def table(spark: SparkSession) -> Iterator[str]:
    name = f"delta_{uuid.uuid4().hex[:12]}"
    yield name
    spark.sql(f"DROP TABLE IF EXISTS {name}")


def rows_of(spark: SparkSession, rows: Sequence[tuple[Any, ...]], schema: str) -> DataFrame:
    return spark.createDataFrame(list(rows), schema)


def put(directory: Path, sink: TableSink, rows: DataFrame, batch: int, query: str = "query", again: bool = True) -> int:
    pipeline = make(directory, out=sink)
    check_rows(pipeline, rows)
    claim(pipeline, rows.sparkSession, query)
    return write(pipeline, "out", sink, rows, batch, query, again=again)


def found(spark: SparkSession, table: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in spark.table(table).collect()), key=str)


def test_a_batch_is_in_a_table_once(spark: SparkSession, tmp_path: Path, table: str) -> None:
    sink = TableSink(table, format="delta")
    first = rows_of(spark, [(1, "red"), (2, "blue")], "number bigint, colour string")
    assert put(tmp_path, sink, first, 0) == 2
    assert put(tmp_path, sink, first, 0) == 2
    assert put(tmp_path, sink, first.limit(1), 1, again=False) == 1
    assert put(tmp_path, sink, first, 1) == 2
    due = [(1, "red"), (1, "red"), (2, "blue")]
    assert found(spark, table) == due
    # Another query counts its batches from 0 too.
    assert put(tmp_path, sink, first, 0, "another") == 2
    assert found(spark, table) == sorted([*due, (1, "red"), (2, "blue")], key=str)


def test_a_table_gains_columns_and_keeps_those_that_rows_lack(spark: SparkSession, tmp_path: Path, table: str) -> None:
    sink = TableSink(table, format="delta")
    put(tmp_path, sink, rows_of(spark, [(1, (1,))], "number bigint, inner struct<a: int>"), 0)
    put(tmp_path, sink, rows_of(spark, [((2, 3), True)], "inner struct<a: int, b: int>, big boolean"), 1)
    put(tmp_path, sink, rows_of(spark, [(4, 5)], "number int, batch int"), 2)
    schema = "struct<number:bigint,inner:struct<a:int,b:int>,big:boolean,batch:int>"
    assert spark.table(table).schema.simpleString() == schema
    assert found(spark, table) == [(1, (1, None), None, None), (4, None, None, 5), (None, (2, 3), True, None)]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("number string", "Table '{table}' has 'number' as bigint, and the rows have it as string"),
        ("number double", "Table '{table}' has 'number' as bigint, and the rows have it as double"),
        ("inner struct<a: string>", "has 'inner' as struct<a:int>, and the rows have it as struct<a:string>"),
        ("colour string", "has a column 'must' that may not be null, and the rows lack it"),
    ],
)
def test_rows_that_a_table_cannot_take_raise(
    spark: SparkSession, tmp_path: Path, table: str, columns: str, expected: str
) -> None:
    must = ", must int NOT NULL" if "must" in expected else ""
    spark.sql(f"CREATE TABLE {table} (number bigint, inner struct<a: int>{must}) USING delta")
    with pytest.raises(ConfigurationError) as caught:
        check_rows(make(tmp_path, out=TableSink(table, format="delta")), rows_of(spark, [], columns))
    assert expected.format(table=table) in str(caught.value)


def test_a_sink_has_the_format_of_its_table(spark: SparkSession, tmp_path: Path, table: str) -> None:
    spark.sql(f"CREATE TABLE {table} (number bigint) USING delta")
    rows = rows_of(spark, [], "number bigint")
    with pytest.raises(ConfigurationError, match=r'for a Delta table, set format to "delta"'):
        check_rows(make(tmp_path, out=TableSink(table)), rows)
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW view_{table} AS SELECT 1 AS number")
    spark.sql(f"CREATE TABLE plain_{table} (number bigint) USING parquet")
    try:
        for other, kind in ((f"plain_{table}", "parquet"), (f"view_{table}", "unknown")):
            with pytest.raises(ConfigurationError, match=rf"'{other}' has the format {kind}, and the sink has delta"):
                check_rows(make(tmp_path, out=TableSink(other, format="delta")), rows)
    finally:
        spark.sql(f"DROP TABLE plain_{table}")
        spark.catalog.dropTempView(f"view_{table}")


def test_rows_replace_those_with_their_key(spark: SparkSession, tmp_path: Path, table: str) -> None:
    sink = TableSink(table, format="delta", merge_by=["number", "colour"])
    schema = "number bigint, colour string, coffees int"
    assert put(tmp_path, sink, rows_of(spark, [(1, "red", 1), (1, None, 2), (2, "red", 3)], schema), 0) == 3
    second = rows_of(spark, [(1, None, 4), (2, "blue", 5)], schema)
    assert put(tmp_path, sink, second, 1) == 2
    due = [(1, "red", 1), (1, None, 4), (2, "blue", 5), (2, "red", 3)]
    assert found(spark, table) == sorted(due, key=str)
    # It runs again, and the table has it.
    assert put(tmp_path, sink, rows_of(spark, [(2, "red", 9)], schema), 1) == 1
    assert found(spark, table) == sorted(due, key=str)
    assert put(tmp_path, sink, rows_of(spark, [], schema), 2) == 0
    # What the rows lack stays as it is.
    put(tmp_path, sink, rows_of(spark, [(2, "red", "hot")], "number bigint, colour string, note string"), 3)
    assert (2, "red", 3, "hot") in found(spark, table)


def test_of_rows_with_one_key_the_newest_is_written(spark: SparkSession, tmp_path: Path, table: str) -> None:
    sink = TableSink(table, format="delta", merge_by=["number"], order_by=["day", "hour"])
    rows = [(1, 2, 1, "new"), (1, 1, 9, "old"), (1, 2, None, "none"), (2, 1, 1, "only")]
    assert put(tmp_path, sink, rows_of(spark, rows, "number bigint, day int, hour int, note string"), 0) == 4
    assert found(spark, table) == [(1, 2, 1, "new"), (2, 1, 1, "only")]


@pytest.mark.parametrize("merge_by", [[], ["number"]])
def test_a_replay_replaces_its_table(spark: SparkSession, tmp_path: Path, table: str, merge_by: list[str]) -> None:
    url, topic = nats.shared_server().url, f"replayed_{uuid.uuid4().hex[:12]}"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
        publish(bus, topic, [b'{"number": %d, "coffees": 1}' % number for number in range(4)])
        pipeline = Pipeline(
            name="delta",
            url=url,
            sources={"orders": Source(topic, decode=Order)},
            transform=lambda orders: orders.select("payload.*"),
            sinks={"table": TableSink(table, format="delta", merge_by=merge_by)},
            dead_letters=TableSink(f"{table}_dead", format="delta"),
            checkpoint=str(tmp_path / "checkpoint"),
            trigger="available-now",
        )
        try:
            for published in (4, 5):
                report = replay(pipeline, name="again", start="earliest", spark=spark)
                assert report.rows_out == {"table": published}
                assert [row.number for row in spark.table(f"{table}_again").orderBy("number").collect()] == [
                    *range(published)
                ]
                publish(bus, topic, [b'{"number": 4, "coffees": 1}'])
        finally:
            spark.sql(f"DROP TABLE IF EXISTS {table}_again")


def test_a_table_has_the_columns_of_its_key(spark: SparkSession, tmp_path: Path, table: str) -> None:
    spark.sql(f"CREATE TABLE {table} (number bigint) USING delta")
    with pytest.raises(ConfigurationError, match=rf"^sinks\.out: merge_by has 'colour', which table '{table}' lacks"):
        check_rows(
            make(tmp_path, out=TableSink(table, format="delta", merge_by=["number", "colour"])),
            rows_of(spark, [], "number bigint, colour string"),
        )


def test_two_rows_with_one_key_raise(spark: SparkSession, tmp_path: Path, table: str) -> None:
    sink = TableSink(table, format="delta", merge_by=["number"])
    with pytest.raises(ConfigurationError, match=r"^sinks\.out: 2 rows of batch 7 have the same key, number=1\. Give"):
        put(tmp_path, sink, rows_of(spark, [(1, 1), (1, 2), (2, 3)], "number bigint, coffees int"), 7)


def test_a_table_in_a_path_is_known_to_a_catalog_that_forgot_it(
    spark: SparkSession, tmp_path: Path, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = TableSink(table, format="delta", options={"path": str(tmp_path / "it's")})
    first = rows_of(spark, [(1,)], "number bigint")
    try_sinks(make(tmp_path, out=sink), first)
    assert list(tmp_path.iterdir()) == []
    assert "in-memory catalog" not in caplog.text
    put(tmp_path, sink, first, 0)
    spark.sql(f"DROP TABLE {table}")
    with pytest.raises(ConfigurationError, match="as bigint, and the rows have it as string"):
        check_rows(make(tmp_path, out=sink), rows_of(spark, [], "number string"))
    put(tmp_path, sink, first, 0)
    put(tmp_path, sink, rows_of(spark, [(2, "x")], "number bigint, note string"), 1)
    assert found(spark, table) == [(1, None), (2, "x")]


def test_a_table_that_an_earlier_session_forgot_is_refused(spark: SparkSession, tmp_path: Path, table: str) -> None:
    warehouse = Path(spark.catalog.getDatabase("default").locationUri.removeprefix("file:"))
    (warehouse / table / "_delta_log").mkdir(parents=True)
    try:
        with pytest.raises(ConfigurationError, match=r"already has files: .*in-memory catalog"):
            try_sinks(make(tmp_path, out=TableSink(table, format="delta")), rows_of(spark, [], "number bigint"))
    finally:
        (warehouse / table / "_delta_log").rmdir()
        (warehouse / table).rmdir()


def test_columns_that_delta_refuses_raise_before_the_first_batch(
    spark: SparkSession, tmp_path: Path, table: str
) -> None:
    sink = TableSink(table, format="delta", options={"path": str(tmp_path / "out")})
    with pytest.raises(ConfigurationError, match=r"^sinks\.out: The rows cannot be written: .*DELTA"):
        try_sinks(make(tmp_path, out=sink), spark.range(0).selectExpr("id AS `a b`"))
    assert list(tmp_path.iterdir()) == []


def test_a_session_without_the_extension_is_refused(spark: SparkSession, tmp_path: Path, table: str) -> None:
    name = "spark.sql.catalog.spark_catalog"
    own = spark.newSession()
    own.conf.unset(name)
    rows = own.range(1).selectExpr("id AS number")
    with pytest.raises(ConfigurationError) as caught:
        check_rows(make(tmp_path, out=TableSink(table, format="delta")), rows)
    assert str(caught.value).startswith("sinks.out: format is 'delta', and this session is not one of Delta Lake. Set")
    assert f"{name} to org.apache.spark.sql.delta.catalog.DeltaCatalog" in str(caught.value)
    assert "spark.jars" not in str(caught.value)


def test_a_class_gains_fields_between_two_runs(spark: SparkSession, tmp_path: Path, table: str) -> None:
    url, topic = nats.shared_server().url, f"delta_{uuid.uuid4().hex[:12]}"
    options = {"path": str(tmp_path / "merged")}

    def pipeline(decode: type) -> Pipeline:
        return Pipeline(
            name="delta",
            url=url,
            sources={"orders": Source(topic, decode)},
            transform=lambda orders: orders.select("payload.*"),
            sinks={
                "all": TableSink(table, format="delta"),
                "merged": TableSink(f"{table}_merged", format="delta", options=options, merge_by=["number"]),
            },
            dead_letters=TableSink(f"{table}_dead", format="delta"),
            checkpoint=str(tmp_path / "checkpoint"),
            trigger="available-now",
        )

    try:
        with connect(url) as bus:
            bus.admin.ensure_topic(topic, partitions=1)
            publish(bus, topic, [b'{"number": 1, "coffees": 1}', b'{"number": 2, "coffees": 2}', b"?"])
            assert run(pipeline(Order), spark=spark) == 1
            publish(bus, topic, [b'{"number": 2, "coffees": 3, "note": "hot"}'])
            reports = []
            assert run(pipeline(NewOrder), spark=spark, on_batch=reports.append) == 1
        assert [report.rows_out for report in reports] == [{"all": 1, "merged": 1}]
        spark.catalog.refreshTable(table)
        assert found(spark, table) == [(1, 1, None), (2, 2, None), (2, 3, "hot")]
        assert found(spark, f"{table}_merged") == [(1, 1, None), (2, 3, "hot")]
        assert [bytes(row.value) for row in spark.table(f"{table}_dead").collect()] == [b"?"]
    finally:
        for name in ("merged", "dead"):
            spark.sql(f"DROP TABLE IF EXISTS {table}_{name}")
