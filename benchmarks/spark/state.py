"""State of one key: the figures of an aircraft by `transformWithState`, and by an aggregate of Spark's own.

The runs of late flights need the flights of an aircraft in order. An aggregate can only order what it has collected, so
it keeps all flights; a processor keeps one row of figures. A check comes first: both return the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from benchmarks.report import Finding, Section, Table
from benchmarks.spark.stage import SparkStage
from benchmarks.spark.timing import Done, Work, in_turn
from examples.flights.fold import LATE_AFTER
from examples.flights_pipeline.aircraft import FIGURES, AircraftProcessor

__all__ = ["measure_state"]

_BATCHES = 6
_AIRCRAFT = 4000

Stateful = Callable[[Any], Any]


def measure_state(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure files of flights in, `noop` sink out, so that only the state counts."""
    count = max(2000, int(180_000 * scale))
    section = Section(
        "State of a key",
        f"Rows per second of the demo's figures of each of {_AIRCRAFT:,} aircraft, over {count:,} flights in "
        f"{_BATCHES} micro-batches, without the first; state in RocksDB. `transformWithState` keeps a row of figures. "
        "The aggregate folds all flights that it has collected, in order, and its state grows with each.",
    )
    flights = _flights(stage, count)
    ways: dict[str, Stateful] = {"transformWithState": _processed, "aggregate": _aggregated}
    figures = [_figures(stage, flights, way) for way in ways.values()]
    if figures[0] != figures[1]:
        raise AssertionError("The two ways give different figures")
    results: dict[str, tuple[float, float, float]] = {}

    def work(name: str) -> Work:
        def run(_: object) -> Done:
            checkpoint = stage.place()
            batches = _run(stage, flights, ways[name], checkpoint, _to_noop)
            seconds = [each["durationMs"]["triggerExecution"] / 1000 for each in batches]
            results[name] = seconds[1 % len(seconds)], seconds[-1], _megabytes(checkpoint)
            return Done(sum(each["numInputRows"] for each in batches[1:]), sum(seconds[1:]))

        return Work(count, run)

    series = in_turn({name: work(name) for name in ways}, rounds, stage.roots, uncounted=min(1, stage.uncounted))
    section.runs.update(series)
    ratio = series["transformWithState"].times_rate_of(series["aggregate"])
    section.findings.append(Finding("transformWithState / aggregate", ratio, "x"))
    rows = [
        (name, f"{second:.2f} s", f"{last:.2f} s", f"{size:.1f} MB") for name, (second, last, size) in results.items()
    ]
    section.tables.append(Table(("The last run of each", "second batch", "last batch", "checkpoint"), rows))
    return [section]


def _flights(stage: SparkStage, count: int) -> str:
    """A directory with a file for each batch, whose rows are not in the order of the flights."""
    directory = Path(stage.place("flights"))
    directory.mkdir()
    number, each = F.col("id"), count // _BATCHES

    def delay(seed: int) -> Any:
        return F.when(F.abs(F.xxhash64("id")) % 40 != 0, F.abs(F.xxhash64("id", F.lit(seed))) % 60 - 20)

    for batch in range(_BATCHES):
        made = stage.spark.range(batch * each, (batch + 1) * each, 1, 1).select(
            F.concat(F.lit("N"), (number % _AIRCRAFT).cast("string")).alias("aircraft"),
            (number / _AIRCRAFT).cast("long").alias("leg"),
            delay(1).alias("departure_delay"),
            delay(2).alias("arrival_delay"),
        )
        place = stage.place("batch")
        made.orderBy(F.xxhash64("id", F.lit(3))).coalesce(1).write.parquet(place)
        [file] = Path(place).glob("*.parquet")
        file = file.rename(directory / f"{batch}.parquet")
        # Spark reads files in the order of their modification times.
        os.utime(file, (1_000_000_000 + batch, 1_000_000_000 + batch))
    return str(directory)


def _run(stage: SparkStage, flights: str, way: Stateful, checkpoint: str, call: Callable[[Any, int], object]) -> Any:
    """The progress of each batch."""
    schema = stage.spark.read.parquet(flights).schema
    frame = stage.spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(flights)
    writer = way(frame).writeStream.outputMode("update").foreachBatch(call).option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return [each for each in query.recentProgress if each["numInputRows"]]


def _figures(stage: SparkStage, flights: str, way: Stateful) -> dict[str, tuple[Any, ...]]:
    """The last figures of each aircraft."""
    found: dict[str, tuple[Any, ...]] = {}

    def keep(frame: Any, _: int) -> None:
        found.update({row["aircraft"]: tuple(row) for row in frame.collect()})

    _run(stage, flights, way, stage.place(), keep)
    return found


def _to_noop(frame: Any, _: int) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _megabytes(directory: str) -> float:
    return sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file()) / 1e6


def _processed(flights: Any) -> Any:
    return flights.groupBy("aircraft").transformWithState(AircraftProcessor(), FIGURES, "update", "none")


def _aggregated(flights: Any) -> Any:
    """The same as `Known.after` over the legs in their order."""
    names = [name for name in FIGURES.names if name != "aircraft"]
    zero = F.lit(0).cast("long")
    start = F.struct(*(zero.alias(name) for name in (*names, "run")), F.lit(False).alias("arrived_late"))
    legs = F.array_sort(F.collect_list(F.struct("leg", "departure_delay", "arrival_delay")))

    def fold(known: Any, leg: Any) -> Any:
        late = leg["departure_delay"] > LATE_AFTER
        run = F.when(late, known["run"] + 1).otherwise(zero)
        after = {
            "flights": known["flights"] + 1,
            "departed": known["departed"] + 1,
            "late": known["late"] + late.cast("long"),
            "longest": F.greatest(known["longest"], run),
            "handed_on": known["handed_on"] + (late & known["arrived_late"]).cast("long"),
            "run": run,
            "arrived_late": F.coalesce(leg["arrival_delay"] > LATE_AFTER, F.lit(False)),
        }
        gone = F.struct(*(column.alias(name) for name, column in after.items()))
        stayed = F.struct(
            after["flights"].alias("flights"), *(known[name].alias(name) for name in after if name != "flights")
        )
        return F.when(leg["departure_delay"].isNull(), stayed).otherwise(gone)

    folded = flights.groupBy("aircraft").agg(F.aggregate(legs, start, fold).alias("known"))
    return folded.select("aircraft", *(f"known.{name}" for name in names))
