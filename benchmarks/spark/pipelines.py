"""Read, decode, filter, write: `broker_spark.pipeline` next to the same work by others; and the memory of a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from benchmarks.report import Finding, Section, Table
from benchmarks.spark import raw_clients
from benchmarks.spark.reading import finished
from benchmarks.spark.stage import Flight, KafkaSide, Side, SparkStage, sizes
from benchmarks.spark.timing import Done, Work, in_turn, memory_of
from broker_spark.pipeline import BatchReport, Pipeline, Source, TopicSink, run

__all__ = ["measure_pipelines"]

_BATCHES = 3
_SCHEMA = "id bigint, carrier string, delay double, pad string"


def measure_pipelines(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure a copy from a topic to a topic, and its memory."""
    section = Section(
        "Pipeline from end to end",
        "Rows read per second: each is decoded by a class of four fields, three quarters are kept and written as JSON "
        f"into another topic; {_BATCHES} micro-batches, without the first. `Pipeline` has dead letters, the others let "
        "what does not decode pass as null or fail.",
    )
    for side in stage.sides:
        for label, size in sizes(scale):
            # Enough rows that the fixed cost of a micro-batch, half a second, hardly counts.
            count = max(2000, int((120_000 if size < 1000 else 80_000) * scale * side.quick))
            topic = side.filled(count, size)
            works = _works(stage, side, topic, count)
            series = in_turn(works, rounds, stage.roots, uncounted=stage.uncounted)
            side.drop(topic)
            where = f"{side.name}, {label}"
            section.runs.update({f"{where}: {name}": runs for name, runs in series.items()})
            for theirs in [name for name in series if name != "Pipeline"]:
                ratio = series["Pipeline"].times_rate_of(series[theirs])
                section.findings.append(Finding(f"{where}: Pipeline / {theirs}", ratio, "x"))
    return [section, _memory(stage, scale)]


def _works(stage: SparkStage, side: Side, topic: str, count: int) -> dict[str, Work]:
    spark, most = stage.spark, count // _BATCHES

    def pipeline(target: str) -> Done:
        reports: list[BatchReport] = []
        declared = Pipeline(
            name="bench",
            url=side.url,
            sources={"flights": Source(topic, decode=Flight, options={"maxRows": most, "columns": "value"})},
            transform=_late,
            sinks={"late": TopicSink(target)},
            dead_letters=TopicSink(side.target()),
            checkpoint=stage.place(),
            trigger="available-now",
        )
        run(declared, spark=spark, on_batch=reports.append)
        counted = reports[1:] or reports
        return Done(sum(each.rows_in for each in counted), sum(each.seconds for each in counted))

    def by(form: str, options: Mapping[str, Any], sink: str, into: Mapping[str, str]) -> Done:
        frame = spark.readStream.format(form).options(**options).load()
        found = frame.select(F.from_json(F.col("value").cast("string"), _SCHEMA).alias("flight"))
        value = F.to_json(F.struct("flight.*")).cast("binary")
        late = found.where("flight.delay > 0").select(value.alias("value"), F.lit(b"").alias("key"))
        # The row-wise sink serves batches and streams, and takes only columns that it knows.
        writer = late.writeStream.format(sink).options(**into).option("checkpointLocation", stage.place())
        return finished(writer.trigger(availableNow=True).start())

    rows, few = f"rows-{side.name}", int(count * side.row_share)
    read_rows = {**side.rowwise(topic), "rows": few, "maxrows": few // _BATCHES}
    works = {
        "Pipeline": Work(count, pipeline, side.target),
        "raw client": Work(count, lambda target: raw_clients.copy_late(side, topic, target, count), side.target),
        "row-wise": Work(few, lambda target: by(rows, read_rows, rows, side.rowwise(target)), side.target),
    }
    if isinstance(side, KafkaSide):
        servers = {"kafka.bootstrap.servers": side.raw.bootstrap}
        read = {**servers, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": most}
        works["connector"] = Work(
            count, lambda target: by("kafka", read, "kafka", {**servers, "topic": target}), side.target
        )
    return works


def _late(flights: Any) -> Any:
    return flights.select("payload.*").where("delay > 0")


def _memory(stage: SparkStage, scale: float) -> Section:
    section = Section(
        "Memory of a query",
        "MiB after the query has copied all there is from a topic into a topic, two tasks at once, and waits for more: "
        "what each process has for itself and its share of what several have (PSS). The JVM's heap may take 2 GiB and "
        "gives back little, so read it as what Spark took, not as what it needs.",
    )
    rows: list[tuple[str, ...]] = [_remembered("a session that has run the above", stage)]
    for side in stage.sides:
        topic = side.filled(max(1000, int(50_000 * scale)), 100)
        options = {"url": side.url, "topic": topic, "tasksPerPartition": 2}
        frame = stage.spark.readStream.format("broker").options(**options).load()
        writer = frame.writeStream.format("broker").options(url=side.url, topic=side.target())
        query = writer.option("checkpointLocation", stage.place()).start()
        query.processAllAvailable()
        rows.append(_remembered(f"… and a query on {side.name}", stage))
        query.stop()
        side.drop(topic)
    section.tables.append(Table(("", "JVM", "Python", "Python processes", "all"), rows))
    return section


def _remembered(what: str, stage: SparkStage) -> tuple[str, ...]:
    found = memory_of(stage.jvm)
    return (what, f"{found.jvm:,.0f}", f"{found.python:,.0f}", str(found.processes), f"{found.jvm + found.python:,.0f}")
