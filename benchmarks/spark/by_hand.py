"""`broker_spark.pipeline` into files, next to the streams on Kafka that a data engineer writes by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pyarrow
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.pandas.types import to_arrow_schema

import broker_spark
from benchmarks.report import Finding, Section
from benchmarks.spark.reading import finished
from benchmarks.spark.stage import Flight, SparkStage, fill
from benchmarks.spark.timing import Done, Work, in_turn
from broker_spark.pipeline import BatchReport, FileSink, Pipeline, Source, run

__all__ = ["measure_by_hand"]

_BATCHES = 4
_PARTITIONS = 4
_SIZE = 200


def measure_by_hand(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure the way from a topic into Parquet."""
    section = Section(
        "Into Parquet, beside what is written by hand",
        f"Rows per second from a topic of {_PARTITIONS} partitions on Kafka into Parquet: {_SIZE} B of JSON decoded "
        f"into four fields, three quarters kept; {_BATCHES} micro-batches, without the first. `Pipeline` has dead "
        "letters. By hand: Spark's Kafka source, then `from_json`, which makes null of what is wrong, or a strict "
        "decoder of msgspec in `mapInArrow`, which fails for it, and `writeStream.format('parquet')`.",
    )
    count = max(4000, int(800_000 * scale))
    kafka = stage.kafka
    topic = fill(kafka.bus, kafka.target(_PARTITIONS), count, _SIZE)
    most = count // _BATCHES
    spark = stage.spark

    def pipeline(connector: str) -> Done:
        reports: list[BatchReport] = []
        options = {"connector": connector, "maxRows": most, "columns": "value"}
        declared = Pipeline(
            name="bench",
            url=kafka.url,
            sources={"flights": Source(topic, decode=Flight, options=options)},
            transform=_late,
            sinks={"files": FileSink(stage.place("files"))},
            dead_letters=FileSink(stage.place("dead")),
            checkpoint=stage.place(),
            trigger="available-now",
        )
        run(declared, spark=spark, on_batch=reports.append)
        counted = reports[1:] or reports
        return Done(sum(each.rows_in for each in counted), sum(each.seconds for each in counted))

    def by_hand(decoded: Any) -> Done:
        writer = decoded(kafka_rows()).where("delay > 0").writeStream.format("parquet")
        writer = writer.option("path", stage.place("files")).option("checkpointLocation", stage.place())
        return finished(writer.trigger(availableNow=True).start())

    def kafka_rows() -> Any:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", kafka.raw.bootstrap)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", most)
            .load()
            .select("value")
        )

    schema = broker_spark.payload_schema(Flight)

    def from_json(frame: Any) -> Any:
        return frame.select(F.from_json(F.col("value").cast("string"), schema).alias("flight")).select("flight.*")

    def by_msgspec(frame: Any) -> Any:
        return frame.mapInArrow(_decoded, schema)

    series = in_turn(
        {
            "Pipeline, by connector": Work(count, lambda _: pipeline("always")),
            "Pipeline, Python source": Work(count, lambda _: pipeline("never")),
            "from_json by hand": Work(count, lambda _: by_hand(from_json)),
            "msgspec by hand": Work(count, lambda _: by_hand(by_msgspec)),
        },
        rounds,
        stage.roots,
        uncounted=stage.uncounted,
    )
    kafka.drop(topic)
    section.runs.update(series)
    for ours in ("Pipeline, by connector", "Pipeline, Python source"):
        for theirs, bar in (("from_json by hand", 1.0), ("msgspec by hand", None)):
            ratio = series[ours].times_rate_of(series[theirs])
            section.findings.append(Finding(f"{ours} / {theirs}", ratio, "x", at_least=bar))
    return [section]


def _late(flights: Any) -> Any:
    return flights.select("payload.*").where("delay > 0")


def _decoded(batches: Iterator[Any]) -> Iterator[Any]:
    decoder = msgspec.json.Decoder(Flight)
    arrow: Any = to_arrow_schema(broker_spark.payload_schema(Flight), timezone="UTC")
    for batch in batches:
        rows = [decoder.decode(value) for value in batch.column("value").to_pylist()]
        columns: list[Any] = [pyarrow.array([getattr(row, each.name) for row in rows], each.type) for each in arrow]
        yield cast("Any", pyarrow.RecordBatch).from_arrays(columns, schema=arrow)
