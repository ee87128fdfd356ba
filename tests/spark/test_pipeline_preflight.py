"""The checks before the first batch: Spark can write such rows, and the check leaves nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker.errors import ConfigurationError
from broker_spark.pipeline import FileSink, TableSink
from broker_spark.pipeline.preflight import check_rows, try_sinks
from broker_spark.pipeline.writing import write
from tests.spark.conftest import HAS_DELTA
from tests.spark.test_pipeline_targets import make


@pytest.fixture
def database(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """Run in a directory of its own."""
    name = f"trial_{uuid.uuid4().hex[:12]}"
    spark.sql(f"CREATE DATABASE {name} LOCATION '{tmp_path}/database'")
    yield name
    spark.sql(f"DROP DATABASE {name} CASCADE")


def _try(spark: SparkSession, directory: Path, sink: FileSink | TableSink) -> None:
    rows = spark.sql("SELECT 1 AS number, 'red' AS colour")
    try_sinks(make(directory, out=sink), rows)


def _left(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.deep
def test_a_preflight_leaves_nothing(spark: SparkSession, tmp_path: Path, database: str) -> None:
    before = _left(tmp_path)
    for sink in (
        FileSink(str(tmp_path / "files")),
        FileSink(str(tmp_path / "parts"), partition_by=["colour"]),
        TableSink(f"{database}.numbers"),
        TableSink(f"spark_catalog.{database}.numbers", format="json"),
        TableSink(f"{database}.numbers", options={"Path": str(tmp_path / "below" / "external")}),
    ):
        _try(spark, tmp_path, sink)
        assert _left(tmp_path) == before, sink


@pytest.mark.deep
def test_a_table_may_lie_elsewhere(spark: SparkSession, tmp_path: Path, database: str) -> None:
    sink = TableSink(f"{database}.numbers", options={"path": str(tmp_path / "external")})
    _try(spark, tmp_path, sink)
    write(make(tmp_path, out=sink), "out", sink, spark.sql("SELECT 1 AS number, 'red' AS colour"), 0, "query")
    assert (tmp_path / "external").is_dir()
    assert [(row.number, row.batch) for row in spark.table(sink.table).collect()] == [(1, 0)]


@pytest.mark.parametrize("options", [{"compression": "zippy"}, {"compression": "lzo"}])
@pytest.mark.parametrize("kind", ["files", "parts", "table", "external"])
def test_errors_of_the_writer_raise(
    spark: SparkSession, tmp_path: Path, database: str, kind: str, options: dict[str, str]
) -> None:
    sink = {
        "files": FileSink(str(tmp_path / "out"), options=options),
        "parts": FileSink(str(tmp_path / "out"), partition_by=["colour"], options=options),
        "table": TableSink(f"{database}.numbers", options=options),
        "external": TableSink(f"{database}.numbers", options={**options, "path": str(tmp_path / "out")}),
    }[kind]
    before = _left(tmp_path)
    with pytest.raises(ConfigurationError, match=r"^sinks\.out: "):
        _try(spark, tmp_path, sink)
    assert _left(tmp_path) == before


def test_a_table_of_a_missing_database_raises(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^sinks\.out: The rows cannot be written: .*SCHEMA_NOT_FOUND"):
        _try(spark, tmp_path, TableSink("nowhere_at_all.numbers"))


@pytest.mark.skipif(HAS_DELTA, reason="the session of these tests is one of Delta Lake")
def test_a_session_without_delta_is_told_what_it_needs(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_rows(make(tmp_path, out=TableSink("numbers", format="delta")), spark.range(1))
    assert str(caught.value) == (
        "sinks.out: format is 'delta', and this session is not one of Delta Lake. Set spark.jars to the jars of Delta "
        f"Lake for Spark {spark.version[:3]}, spark.sql.extensions to io.delta.sql.DeltaSparkSessionExtension, "
        "spark.sql.catalog.spark_catalog to org.apache.spark.sql.delta.catalog.DeltaCatalog, in `config` or "
        "spark-defaults.conf, before the session starts"
    )


def test_a_table_of_another_catalog_is_left_to_it(spark: SparkSession, tmp_path: Path) -> None:
    before = _left(tmp_path)
    name = f"other_{uuid.uuid4().hex[:8]}"
    # Any class will do: it is not called.
    spark.conf.set(f"spark.sql.catalog.{name}", "org.apache.spark.sql.connector.catalog.DelegatingCatalogExtension")
    try:
        for table in (f"{name}.numbers", f"{name}.database.numbers"):
            _try(spark, tmp_path, TableSink(table, options={"compression": "zippy"}))
    finally:
        spark.conf.unset(f"spark.sql.catalog.{name}")
    assert _left(tmp_path) == before


def test_a_checkpoint_may_lie_within_files_and_not_files_within_a_checkpoint(tmp_path: Path) -> None:
    out = FileSink(str(tmp_path / "out"))
    assert make(tmp_path / "out", out=out).checkpoint.endswith("/out/checkpoint")
    with pytest.raises(ConfigurationError, match=r"The path of sinks\.out overlaps with that of checkpoint"):
        make(tmp_path, out=FileSink(str(tmp_path / "checkpoint" / "out")))
