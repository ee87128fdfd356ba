"""Batch writes, next to the raw client, the row-wise sink and Spark's Kafka sink: one task, every row confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from benchmarks.report import Finding, Section
from benchmarks.spark import raw_clients
from benchmarks.spark.stage import KafkaSide, Side, SparkStage, sizes
from benchmarks.spark.timing import Work, in_turn

__all__ = ["measure_writing", "to_write"]


def measure_writing(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure writes of generated rows to a new topic of one partition."""
    section = Section(
        "Write",
        "Rows per second of one task, as ratios. Rows have a key and a value; the sink of `broker` gives each its "
        "deterministic id as well.",
        "times as fast",
    )
    for side in stage.sides:
        for label, size in sizes(scale):
            count = max(1000, int((100_000 if size < 1000 else 50_000) * scale))
            series = in_turn(_works(stage, side, count, size), rounds, stage.roots, uncounted=stage.uncounted)
            where = f"{side.name}, {label}"
            section.runs.update({f"{where}: {name}": runs for name, runs in series.items()})
            for theirs in [name for name in series if name != "broker"]:
                ratio = series["broker"].times_rate_of(series[theirs])
                section.findings.append(Finding(f"{where}: broker / {theirs}", ratio, "x"))
    return [section]


def to_write(spark: Any, count: int, size: int) -> Any:
    """A frame of one partition that Spark makes cheaply."""
    value = F.rpad(F.col("id").cast("string"), size, "x").cast("binary")
    key = F.concat(F.lit("key-"), F.col("id") % 1000).cast("binary")
    return spark.range(0, count, 1, 1).select(key.alias("key"), value.alias("value"))


def _works(stage: SparkStage, side: Side, count: int, size: int) -> Mapping[str, Work]:
    few = int(count * side.row_share)

    def into(form: str, options: Callable[[str], Mapping[str, str]], count: int = count) -> Work:
        frame = to_write(stage.spark, count, size)

        def run(topic: str) -> None:
            frame.write.format(form).options(**options(topic)).mode("append").save()

        return Work(count, run, side.target)

    def raw() -> Any:
        return side.target(), raw_clients.outbound(count, size)

    works = {
        "broker": into("broker", lambda topic: {"url": side.url, "topic": topic}),
        "raw client": Work(count, lambda made: raw_clients.write(side, *made), raw),
        "row-wise": into(f"rows-{side.name}", side.rowwise, few),
    }
    if isinstance(side, KafkaSide):
        servers = {"kafka.bootstrap.servers": side.raw.bootstrap}
        works["connector"] = into("kafka", lambda topic: {**servers, "topic": topic})
    return works
