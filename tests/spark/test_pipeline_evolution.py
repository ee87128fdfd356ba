"""Tables whose rows have other columns than before: what is added, what is null, and what raises."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker.blocking import connect
from broker.errors import ConfigurationError
from broker_spark.pipeline import FileSink, Pipeline, Source, TableSink, run
from broker_spark.pipeline.preflight import check_rows
from broker_spark.pipeline.writing import write
from tests.servers import nats
from tests.spark.support import publish
from tests.spark.test_pipeline_targets import make


@dataclass
class Order:
    number: int


@dataclass
class NewOrder:
    number: int
    note: str | None = None
    coffees: int = 1


@dataclass
class ChangedOrder:
    number: str


@pytest.fixture
def table(spark: SparkSession) -> Iterator[str]:
    name = f"evolving_{uuid.uuid4().hex[:12]}"
    yield name
    spark.sql(f"DROP TABLE IF EXISTS {name}")


@pytest.mark.parametrize("format", ["parquet", "orc", "json", "csv"])
def test_a_table_gains_columns_and_keeps_those_that_rows_lack(
    spark: SparkSession, tmp_path: Path, table: str, format: str
) -> None:
    sink = TableSink(table, format=format)
    pipeline = make(tmp_path, out=sink)
    for batch, columns in enumerate((["1L as number", "'red' as colour"], ["true as big", "2 as NUMBER"])):
        rows = spark.range(1).selectExpr(*columns)
        check_rows(pipeline, rows)
        assert write(pipeline, "out", sink, rows, batch, "query") == 1
    found = spark.table(table)
    assert found.schema.simpleString() == "struct<number:bigint,colour:string,big:boolean,batch:bigint>"
    assert sorted(found.collect()) == [(1, "red", None, 0), (2, None, True, 1)]


@pytest.mark.parametrize(
    ("column", "rows", "taken"),
    [
        ("bigint", "int", True),
        ("int", "bigint", False),
        ("double", "float", True),
        ("float", "double", False),
        ("decimal(10,2)", "decimal(9,1)", True),
        ("decimal(10,2)", "decimal(10,1)", False),
        ("decimal(10,2)", "decimal(9,3)", False),
        ("string", "int", False),
        ("int", "string", False),
        ("struct<a:int>", "struct<a:int>", True),
        ("struct<a:int>", "struct<a:int,b:int>", False),
        ("array<int>", "array<bigint>", False),
    ],
)
def test_a_column_takes_its_own_type_and_narrower_numbers(
    spark: SparkSession, tmp_path: Path, table: str, column: str, rows: str, taken: bool
) -> None:
    spark.sql(f"CREATE TABLE {table} (number {column}, batch bigint) USING parquet PARTITIONED BY (batch)")
    pipeline = make(tmp_path, out=TableSink(table))
    frame = spark.range(1).selectExpr(f"cast(null as {rows}) as number")
    if taken:
        check_rows(pipeline, frame)
        return
    with pytest.raises(ConfigurationError) as caught:
        check_rows(pipeline, frame)
    assert str(caught.value) == (
        f"sinks.out: Table '{table}' has 'number' as {column}, and the rows have it as {rows}. "
        "Cast it in the transform, give it another name, or write to another table"
    )


def test_a_table_without_batches_is_refused(spark: SparkSession, tmp_path: Path, table: str) -> None:
    spark.sql(f"CREATE TABLE {table} (number bigint) USING parquet")
    with pytest.raises(ConfigurationError, match=r"sinks\.out: .* is not partitioned by 'batch', .*PARTITIONED BY"):
        check_rows(make(tmp_path, out=TableSink(table)), spark.range(1).selectExpr("id as number"))


@pytest.mark.deep
def test_a_class_gains_fields_between_two_runs(spark: SparkSession, tmp_path: Path, table: str) -> None:
    url, topic = nats.shared_server().url, f"evolving_{uuid.uuid4().hex[:12]}"

    def pipeline(decode: type) -> Pipeline:
        return Pipeline(
            name="evolving",
            url=url,
            sources={"orders": Source(topic, decode)},
            transform=lambda orders: orders.select("payload.*"),
            sinks={"table": TableSink(table), "files": FileSink(str(tmp_path / "files"))},
            dead_letters=FileSink(str(tmp_path / "dead")),
            checkpoint=str(tmp_path / "checkpoint"),
            trigger="available-now",
        )

    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, [b'{"number": 1}'])
        assert run(pipeline(Order), spark=spark) == 1
        publish(bus, topic, [b'{"number": 2, "note": "hot"}', b'{"number": 3}'])
        assert run(pipeline(NewOrder), spark=spark) == 1
        publish(bus, topic, [b'{"number": 4}'])
        assert run(pipeline(Order), spark=spark) == 1
        due = [(1, None, None), (2, "hot", 1), (3, None, 1), (4, None, None)]
        spark.catalog.refreshTable(table)
        files = spark.read.option("mergeSchema", True).parquet(str(tmp_path / "files"))
        for found in (spark.table(table), files):
            assert sorted(found.select("number", "note", "coffees").collect()) == due
        publish(bus, topic, [b'{"number": "five"}'])
        with pytest.raises(
            ConfigurationError, match=r"sinks\.table: .*'number' as bigint, and the rows have .* string"
        ):
            run(pipeline(ChangedOrder), spark=spark)
        assert run(pipeline(Order), spark=spark) == 1
        assert len(list((tmp_path / "dead").glob("batch=3/*.parquet"))) == 1
