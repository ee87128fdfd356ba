"""`broker_spark.decode` of thirteen fields next to Spark's bare `from_json`, which checks nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

import broker_spark
from benchmarks.report import Finding, Section
from benchmarks.spark.stage import SparkStage
from benchmarks.spark.timing import Work, in_turn

__all__ = ["measure_decoding"]


@dataclass
class Leg:
    """Thirteen fields."""

    number: int
    carrier: str
    flight: str
    leg: int
    scheduled: datetime
    origin: str
    destination: str
    kind: Literal["cargo", "people"]
    price: Decimal
    cancelled: bool
    departure_delay: float | None = None
    arrival_delay: float | None = None
    aircraft: str | None = None


def measure_decoding(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Decode rows in memory, in two tasks."""
    section = Section(
        "Decoding JSON by a class",
        "Rows per second of 13 fields (texts, numbers, a time, a decimal, a literal; 300 B of JSON), from memory into "
        "the `noop` sink, two tasks. `from_json` takes the same schema and makes null of what is wrong; `decode` "
        "checks every field and gives the reason if a row does not decode.",
    )
    count = max(2000, int(100_000 * scale))
    frame = _json(stage.spark, count).persist()
    frame.count()
    schema = broker_spark.payload_schema(Leg)
    bare = frame.select(F.from_json(F.col("value").cast("string"), schema).alias("payload"))
    decoded = broker_spark.decode(frame, Leg)

    def to_noop(made: Any) -> Work:
        return Work(count, lambda _: made.write.format("noop").mode("overwrite").save())

    works = {
        "decode, rows": to_noop(decoded.rows),
        "decode, dead letters": to_noop(decoded.dead),
        "from_json": to_noop(bare),
    }
    series = in_turn(works, rounds, stage.roots, uncounted=stage.uncounted)
    frame.unpersist()
    section.runs.update(series)
    for name in ("decode, rows", "decode, dead letters"):
        ratio = series[name].times_rate_of(series["from_json"])
        section.findings.append(Finding(f"{name} / from_json", ratio, "x"))
    return [section]


def _json(spark: Any, count: int) -> Any:
    number = F.col("id")
    fields = {
        "number": number,
        "carrier": F.concat(F.lit("C"), number % 16),
        "flight": F.concat(F.lit("flight-"), number % 1000),
        "leg": number % 5,
        "scheduled": F.date_format(F.timestamp_seconds(1_700_000_000 + number), "yyyy-MM-dd'T'HH:mm:ss'Z'"),
        "origin": F.lit("JFK"),
        "destination": F.lit("SFO"),
        "kind": F.when(number % 2 == 0, "cargo").otherwise("people"),
        "price": (number % 10_000 / 100).cast("decimal(10,2)"),
        "cancelled": number % 7 == 0,
        "departure_delay": (number % 90 - 20).cast("double"),
        "arrival_delay": F.when(number % 3 == 0, (number % 70).cast("double")),
        "aircraft": F.concat(F.lit("N"), number % 500),
    }
    row = F.struct(*(column.alias(name) for name, column in fields.items()))
    return spark.range(0, count, 1, 2).select(F.to_json(row).cast("binary").alias("value"))
