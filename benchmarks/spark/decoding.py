"""`broker_spark.decode` of thirteen fields next to bare msgspec in `mapInArrow`, and to Spark's `from_json`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, cast

import msgspec
import pyarrow
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.pandas.types import to_arrow_schema

import broker_spark
from benchmarks.report import Finding, Section
from benchmarks.spark.stage import SparkStage
from benchmarks.spark.timing import Work, in_turn

__all__ = ["measure_decoding"]


class Leg(msgspec.Struct):
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
        "the `noop` sink, two tasks. `from_json` takes the same schema and makes null of what is wrong; bare msgspec "
        "in `mapInArrow` fails the task for it; `decode` gives the reason of each row that does not decode.",
    )
    count = max(2000, int(100_000 * scale))
    frame = _json(stage.spark, count).persist()
    frame.count()
    schema = broker_spark.payload_schema(Leg)
    arrow: Any = to_arrow_schema(schema, timezone="UTC")
    arrays, from_arrays = pyarrow.array, cast("Any", pyarrow.RecordBatch).from_arrays

    def by_msgspec(batches: Iterator[Any]) -> Iterator[Any]:
        decoder = msgspec.json.Decoder(Leg)
        for batch in batches:
            rows = [decoder.decode(value) for value in batch.column("value").to_pylist()]
            columns: list[Any] = [arrays([getattr(row, each.name) for row in rows], each.type) for each in arrow]
            yield from_arrays(columns, schema=arrow)

    decoded = broker_spark.decode(frame, Leg)

    def to_noop(made: Any) -> Work:
        return Work(count, lambda _: made.write.format("noop").mode("overwrite").save())

    works = {
        "decode, rows": to_noop(decoded.rows.select("payload.*")),
        "decode, dead letters": to_noop(decoded.dead),
        "msgspec in mapInArrow": to_noop(frame.mapInArrow(by_msgspec, schema)),
        "from_json": to_noop(frame.select(F.from_json(F.col("value").cast("string"), schema).alias("payload"))),
    }
    series = in_turn(works, rounds, stage.roots, uncounted=stage.uncounted)
    frame.unpersist()
    section.runs.update(series)
    for name in ("decode, rows", "decode, dead letters"):
        for other in ("msgspec in mapInArrow", "from_json"):
            ratio = series[name].times_rate_of(series[other])
            section.findings.append(Finding(f"{name} / {other}", ratio, "x"))
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
