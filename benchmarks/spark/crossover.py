"""The number of rows from which Spark is faster than a plain consumer at the same job on the same topic.

The plain consumer is our log reader with Arrow, in one process; Spark has two cores and its fastest source, with two
tasks. Spark is warm: its start is reported apart, and added where the table says so.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import pyarrow
from pyarrow import compute
from pyarrow import json as arrow_json
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

import broker_spark
from benchmarks.measure import Series
from benchmarks.report import Curve, Section, Table
from benchmarks.spark.stage import Side, SparkStage
from benchmarks.spark.timing import Work, in_turn

__all__ = ["crossing", "measure_crossover"]

_SCHEMA = "id bigint, carrier string, delay double"
_SPAN = 60
_ROUNDS_OF_HASH = 60
_OFTEN = 100_000
"""Up to this many rows a job runs once per round; above, once in all."""
_arrow: Any = pyarrow
_compute: Any = compute
_json: Any = arrow_json


@dataclass(frozen=True)
class _Job:
    """A job that both run. Their results are compared.

    :ivar most: maximum rows, to bound the benchmark's time.
    """

    name: str
    plain: Callable[[Iterator[Any]], object]
    spark: Callable[[Any], object]
    most: int


def measure_crossover(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Seconds by rows, and where the two cross."""
    section = Section(
        "When Spark is worth it",
        "Seconds of one job over a topic of 100 B messages: `LogReader` with pyarrow in one process, and Spark on two "
        f"cores, already running. Its start took {_started(stage)} s here: {_start_steps(stage)}. Rows at which Spark "
        "becomes quicker are read off between the sizes that were measured, or beyond them by the last slope.",
    )
    section.curve_axes, section.logarithmic = ("rows", "seconds"), True
    rows: list[tuple[str, ...]] = []
    crossings: list[tuple[str, ...]] = []
    for side, sizes in (
        (stage.kafka, (10_000, 100_000, 500_000, 2_000_000)),
        (stage.jetstream, (10_000, 100_000, 500_000)),
    ):
        counts = [max(1000, int(size * scale)) for size in sizes] if scale >= 1 else [1000, 2000]
        topic = side.filled(counts[-1], 100)
        first = side.bus.log.bounds(topic)[0].first
        for job in _JOBS:
            times: dict[str, list[tuple[float, float]]] = {"plain": [], "spark": []}
            for count in [each for each in counts if each <= job.most]:
                series = _run(stage, side, topic, job, first, first + count, rounds if count <= _OFTEN else 1)
                for name, found in series.items():
                    seconds = sorted(sample.seconds for sample in found.samples)[len(found.samples) // 2]
                    times[name].append((count, seconds))
                plain, spark = times["plain"][-1][1], times["spark"][-1][1]
                rows.append(
                    (
                        f"{side.name}: {job.name}",
                        f"{count:,}",
                        f"{plain:.2f}",
                        f"{spark:.2f}",
                        f"{count / plain:,.0f}",
                        f"{count / spark:,.0f}",
                    )
                )
            section.curves += [
                Curve(f"{side.name}: {job.name}, plain", times["plain"]),
                Curve("… Spark", times["spark"], beside=True),
            ]
            start = sum(seconds for _, seconds in stage.started)
            cold = [(count, seconds + start) for count, seconds in times["spark"]]
            crossings.append(
                (f"{side.name}: {job.name}", crossing(times["plain"], times["spark"]), crossing(times["plain"], cold))
            )
        side.drop(topic)
    section.tables += [
        Table(("Spark is quicker from … rows on", "running", "with its start"), crossings),
        Table(("Job", "Rows", "plain, s", "Spark, s", "plain, rows/s", "Spark, rows/s"), rows),
    ]
    return [section]


def crossing(plain: Sequence[tuple[float, float]], spark: Sequence[tuple[float, float]]) -> str:
    """The rows from which on the second is faster, in words.

    :param plain: rows and seconds, in order of rows; both have the same rows.
    """
    gaps = [(rows, theirs - ours) for (rows, ours), (_, theirs) in zip(plain, spark, strict=True)]
    if gaps[0][1] <= 0:
        return f"under {gaps[0][0]:,.0f}"
    for (few, above), (many, below) in pairwise(gaps):
        if below <= 0:
            return f"{_round(few + (many - few) * above / (above - below)):,}"
    (few, before), (many, after) = gaps[-2:] if len(gaps) > 1 else (gaps[0], gaps[0])
    if after >= before:
        return "never"
    return f"about {_round(many + (many - few) * after / (before - after)):,}"


def _round(rows: float) -> int:
    """Round to two digits, which is the precision of the measurement."""
    return int(float(f"{rows:.1e}"))


def _run(
    stage: SparkStage, side: Side, topic: str, job: _Job, start: int, stop: int, rounds: int
) -> Mapping[str, Series]:
    results: dict[str, object] = {}

    def plain(_: object) -> None:
        values = (
            batch.to_arrow(["data"]).column(0) for batch in side.bus.log.read(topic, 0, start, stop, max_records=10_000)
        )
        results["plain"] = job.plain(values)

    def spark(_: object) -> None:
        frame = broker_spark.read(
            stage.spark,
            url=side.url,
            topic=topic,
            columns="value",
            tasksPerPartition=2,
            start={"0": start},
            end={"0": stop},
        )
        results["spark"] = job.spark(frame)

    works = {"plain": Work(stop - start, plain), "spark": Work(stop - start, spark)}
    found = in_turn(works, rounds, stage.roots, uncounted=stage.uncounted)
    if results["plain"] != results["spark"]:
        raise RuntimeError(f"{job.name}: {results['plain']} by the plain consumer, {results['spark']} by Spark")
    return found


# -- filter and count -----------------------------------------------------------------------------------------


def _parsed(values: Any) -> Any:
    return _json.read_json(io.BytesIO(b"\n".join(values.to_pylist())))


def _count_plain(batches: Iterator[Any]) -> object:
    return sum(_compute.sum(_compute.greater(_parsed(values)["delay"], 0.0)).as_py() or 0 for values in batches)


def _flights(frame: Any) -> Any:
    return frame.select(F.from_json(F.col("value").cast("string"), _SCHEMA).alias("flight")).select("flight.*")


def _count_spark(frame: Any) -> object:
    return _flights(frame).where("delay > 0").count()


# -- windows by carrier ---------------------------------------------------------------------------------------


def _windows_plain(batches: Iterator[Any]) -> object:
    parts: list[Any] = []
    for values in batches:
        found = _parsed(values)
        window = _compute.divide(found["id"], _SPAN)
        table = _arrow.table({"window": window, "carrier": found["carrier"], "delay": found["delay"]})
        parts.append(table.group_by(["window", "carrier"]).aggregate([("delay", "count"), ("delay", "sum")]))
    whole = _arrow.concat_tables(parts).group_by(["window", "carrier"])
    made = whole.aggregate([("delay_count", "sum"), ("delay_sum", "sum")])
    return sorted(tuple(row.values()) for row in made.to_pylist())


def _windows_spark(frame: Any) -> object:
    window = F.window(F.timestamp_seconds("id"), f"{_SPAN} seconds").start
    grouped = _flights(frame).groupBy((F.unix_timestamp(window) / _SPAN).cast("bigint").alias("window"), "carrier")
    rows = cast("Sequence[Sequence[Any]]", grouped.agg(F.count("delay"), F.sum("delay")).collect())
    return sorted(map(tuple, rows))


# -- a Python function for each row ---------------------------------------------------------------------------


def _costly(value: bytes) -> int:
    """About 30 µs of work."""
    return hashlib.pbkdf2_hmac("sha256", value, b"salt", _ROUNDS_OF_HASH)[0]


def _function_plain(batches: Iterator[Any]) -> object:
    return sum(_costly(value) for values in batches for value in values.to_pylist())


def _function_spark(frame: Any) -> object:
    def each(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            found = [_costly(value) for value in batch.column(0).to_pylist()]
            yield _arrow.RecordBatch.from_arrays([_arrow.array(found, "int64")], ["made"])

    return frame.mapInArrow(each, "made bigint").agg(F.sum("made")).collect()[0][0]


_JOBS = (
    _Job("filter and count", _count_plain, _count_spark, 2_000_000),
    _Job("count and mean by window", _windows_plain, _windows_spark, 2_000_000),
    _Job("a costly function of Python", _function_plain, _function_spark, 100_000),
)


def _started(stage: SparkStage) -> str:
    return f"{sum(seconds for _, seconds in stage.started):.0f}"


def _start_steps(stage: SparkStage) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in stage.started)
