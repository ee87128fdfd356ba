"""Files and tables of pipelines: who owns them, and what a failed batch leaves in them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.blocking import connect
from broker.errors import BackendError, ConfigurationError
from broker_spark.pipeline import CallSink, FileSink, Pipeline, Sink, Source, TableSink, TopicSink, run
from broker_spark.pipeline.inspecting import _file_system, status
from broker_spark.pipeline.preflight import _try_table, check_rows
from broker_spark.pipeline.writing import claim, write
from tests.servers import nats
from tests.spark.support import log, publish


def _unchanged(rows: DataFrame) -> DataFrame:
    return rows


def make(directory: Path, **sinks: Sink) -> Pipeline:
    return Pipeline(
        name="targets",
        url="nats://127.0.0.1:4222",
        sources={"numbers": Source("numbers")},
        # Only Spark knows the columns of a transform's rows, so sinks are checked against the frames of the tests.
        transform=_unchanged,
        sinks=sinks,
        checkpoint=str(directory / "checkpoint"),
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FileSink("/data/out"), FileSink("/data/out/")),
        (FileSink("/data/out"), FileSink("file:///data/./out")),
        (FileSink("s3a://bucket/out/red"), FileSink("s3://bucket/out")),
        (TableSink("orders"), TableSink("default.`Orders`")),
    ],
)
def test_sinks_that_would_overwrite_each_other_are_refused(tmp_path: Path, one: Sink, other: Sink) -> None:
    with pytest.raises(ConfigurationError, match=r"The (path|table) of sinks\.other overlaps with that of sinks\.one"):
        make(tmp_path, one=one, other=other)


@pytest.mark.parametrize("scheme", ["s3", "s3a", "S3N"])
def test_a_checkpoint_is_read_through_sparks_file_system(scheme: str) -> None:
    files, path = _file_system(f"{scheme}://bucket/checkpoints/orders?region=eu-west-1")
    assert (files.type_name, path) == ("s3", "bucket/checkpoints/orders")


def test_a_table_that_an_earlier_session_forgot_is_refused(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the next process finds it, whose catalog in memory is empty; beside, Spark would refuse it in a batch."""
    rows = spark.range(1)
    in_warehouse, elsewhere = TableSink(f"forgotten_{tmp_path.name}"), TableSink("far", options={"path": str(tmp_path)})
    warehouse = Path(spark.catalog.getDatabase("default").locationUri.removeprefix("file:"))
    directory = warehouse / in_warehouse.table.lower()
    _try_table(in_warehouse, rows)
    assert f"Table {in_warehouse.table} will be in an in-memory catalog" in caplog.text
    for sink, place in ((in_warehouse, directory), (elsewhere, tmp_path)):
        (place / "batch=0").mkdir(parents=True)
        try:
            with pytest.raises(
                ConfigurationError, match=r"already has files: .*in-memory catalog.*catalogImplementation"
            ):
                _try_table(sink, rows)
        finally:
            (place / "batch=0").rmdir()
    directory.rmdir()


def test_sibling_sinks_are_accepted(tmp_path: Path) -> None:
    make(tmp_path, one=FileSink("/data/out"), other=FileSink("/data/out2"), third=FileSink("s3://data/out"))
    make(tmp_path, one=TableSink("orders"), other=TableSink("archive.orders"), third=FileSink("orders"))


def test_files_are_not_partitioned_by_the_batch_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"sinks\.files: partition_by is 'Batch'\. It takes other columns"):
        make(tmp_path, files=FileSink("/data/out", partition_by=["colour", "Batch"]))


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        (TopicSink("numbers.out", key="numbr"), "There is no column 'numbr' for the key. There are number, colour"),
        (TopicSink("numbers.out", where="numbr > 5"), "where is 'numbr > 5': [UNRESOLVED_COLUMN"),
        (CallSink(print, where="number >"), "where is 'number >': [PARSE_SYNTAX_ERROR]"),
        (FileSink("/nowhere", where="number"), "where is 'number': [DATATYPE_MISMATCH.FILTER_NOT_BOOLEAN]"),
        (
            FileSink("/nowhere", partition_by=["color"]),
            "partition_by has 'color', which is not a column of the rows. Did",
        ),
        (FileSink("/nowhere", partition_by=["number", "colour"]), "partition_by has all columns, number, colour"),
        (FileSink("/nowhere", format="parqet"), "format is 'parqet', which Spark does not find"),
        (TableSink("nowhere", format="parqet"), "format is 'parqet', which Spark does not find"),
    ],
)
def test_rows_that_a_sink_refuses_raise_before_the_first_batch(
    spark: SparkSession, tmp_path: Path, sink: Sink, expected: str
) -> None:
    rows = spark.createDataFrame([(1, "red")], "number bigint, colour string")
    check_rows(make(tmp_path, good=TopicSink("numbers.out", key="number", where="number > 5")), rows)
    with pytest.raises(ConfigurationError) as caught:
        check_rows(make(tmp_path, out=sink), rows)
    assert str(caught.value).startswith(f"sinks.out: {expected}")


def test_rows_that_a_sink_cannot_take_raise(spark: SparkSession, tmp_path: Path) -> None:
    topic, keyed, files = TopicSink("numbers.out"), TopicSink("numbers.out", key="key"), FileSink("/nowhere")
    for columns, sink, expected in (
        (["1L as value"], topic, "Column 'value' is of type bigint"),
        (["'x' as value", "'y' as key"], keyed, "key is 'key', but rows with a column 'value' are already messages"),
        (["'x' as value", "1 as other"], topic, "The sink has no column 'other'"),
        (["'x' as value", "'y' as value"], topic, "The rows have two columns 'value'"),
        (["1 as number", "2 as Number"], files, "The rows have two columns 'Number'"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            check_rows(make(tmp_path, out=sink), spark.range(1).selectExpr(*columns))
        assert str(caught.value).startswith(f"sinks.out: {expected}")


@pytest.mark.deep
def test_the_batches_of_a_query_are_its_own(spark: SparkSession, tmp_path: Path) -> None:
    url = nats.shared_server().url
    topic, target, table = (f"targets_{uuid.uuid4().hex[:12]}" for _ in range(3))
    broken = [True]

    def fail(frame: DataFrame, batch: int) -> None:
        if broken[0]:
            raise BackendError(f"The database is away, with {frame.count()} rows of batch {batch}")

    def pipeline(where: str, checkpoint: str = "checkpoint", column: str = "word", **sinks: Sink) -> Pipeline:
        return Pipeline(
            name="targets",
            url=url,
            sources={"words": Source(topic)},
            transform=lambda words: words.select(F.col("value").cast("string").alias(column)),
            sinks=sinks
            or {
                "topic": TopicSink(target),
                "files": FileSink(str(tmp_path / "files"), where=where),
                "table": TableSink(table, where=where),
                "database": CallSink(fail),
            },
            checkpoint=str(tmp_path / checkpoint),
            trigger="available-now",
        )

    def kept() -> tuple[int, int]:
        # This session keeps which files there are; the pipeline's batches have one of their own.
        spark.catalog.refreshTable(table)
        files = list((tmp_path / "files").glob("batch=*/*.parquet"))
        return len(files) and spark.read.parquet(str(tmp_path / "files")).count(), spark.table(table).count()

    try:
        with connect(url) as bus:
            for each in (topic, target):
                bus.admin.ensure_topic(each, partitions=1)
            publish(bus, topic, [b"one", b"two"])
            with pytest.raises(BackendError, match="The database is away, with 2 rows of batch 0"):
                run(pipeline("true"), spark=spark)
            found = status(pipeline("true"))
            assert (found.committed, found.planned) == (None, 0)
            assert kept() == (2, 2)
            # Rows that the next attempt does not have do not stay.
            broken[0] = False
            assert run(pipeline("word = 'three'"), spark=spark) == 1
            assert kept() == (0, 0)
            publish(bus, topic, [b"three"])
            assert run(pipeline("word = 'three'"), spark=spark) == 1
            assert kept() == (1, 1)
            # A new checkpoint counts from 0, and would overwrite batches that may exist nowhere else.
            written = log(bus, target)
            files = pipeline("true", "new", topic=TopicSink(target), files=FileSink(str(tmp_path / "files")))
            with pytest.raises(ConfigurationError, match=r"files: .* has batches of another query, .*rename"):
                run(files, spark=spark)
            with pytest.raises(ConfigurationError, match=r"table: .* has batches of another query, .*rename"):
                claim(pipeline("true", table=TableSink(table)), spark, "another")
            (tmp_path / "strange" / "batch=0").mkdir(parents=True)
            spark.range(1).write.saveAsTable(f"{table}_strange")
            for sink in (FileSink(str(tmp_path / "strange")), TableSink(f"{table}_strange")):
                with pytest.raises(ConfigurationError, match="has batches of no known pipeline"):
                    claim(pipeline("true", sink=sink), spark, "another")
            for sink in (FileSink(str(tmp_path / "files")), TableSink(table)):
                with pytest.raises(ConfigurationError, match=r"sinks\.sink: The rows have a column 'Batch'.*Rename it"):
                    run(pipeline("true", "named", "Batch", sink=sink), spark=spark)
            assert (kept(), log(bus, target)) == ((1, 1), written)
            # A batch has a session of its own, which must not stay active.
            assert SparkSession.getActiveSession() is spark
    finally:
        for each in (table, f"{table}_strange"):
            spark.sql(f"drop table if exists {each}")


def test_files_of_a_failed_batch_are_replaced_whatever_the_session_overwrites(
    spark: SparkSession, tmp_path: Path
) -> None:
    sink = FileSink(str(tmp_path / "files"), partition_by=["colour"])
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        for colour in ("red", "blue"):
            rows = spark.createDataFrame([(1, colour)], "number bigint, colour string")
            write(make(tmp_path, files=sink), "files", sink, rows, 0, "query")
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert [row.colour for row in spark.read.parquet(sink.path).collect()] == ["blue"]
