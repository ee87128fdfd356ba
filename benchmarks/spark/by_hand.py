"""`broker_spark.pipeline` next to the streams on Kafka that a data engineer writes by hand."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import msgspec
import pyarrow
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.pandas.types import to_arrow_schema

import broker_spark
from benchmarks.measure import Spread
from benchmarks.report import Finding, Section
from benchmarks.spark.reading import finished
from benchmarks.spark.stage import Flight, SparkStage, fill
from benchmarks.spark.timing import Done, Work, in_turn
from broker_spark.pipeline import BatchReport, FileSink, Pipeline, Run, Sink, Source, TopicSink, run

__all__ = ["measure_by_hand"]

_BATCHES = 4
_PARTITIONS = 4
_SIZE = 200
_SECONDS = 300.0
_LOOK = 0.05
_SKIPPED = 4

Rows = Callable[[Any], Any]
"""A frame from another."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What is done with the flights of a topic.

    :ivar transform: of the columns of a flight.
    :ivar bar: the least ratio of `Pipeline` to `from_json` by hand.
    """

    title: str
    about: str
    transform: Rows
    bar: float
    into: Literal["files", "topic"]
    mode: Literal["append", "update"] = "append"


def _late(flights: Any) -> Any:
    return flights.where("delay > 0")


def _by_window(flights: Any) -> Any:
    window = F.window("at", "1 minute")
    timed = flights.withColumn("at", F.timestamp_seconds("id")).withWatermark("at", "1 hour")
    delays = timed.groupBy("carrier", window).agg(F.count("id").alias("flights"), F.avg("delay").alias("delay"))
    return delays.select("carrier", F.col("window.start").cast("string").alias("start"), "flights", "delay")


_TASKS = (
    _Task("Into Parquet, beside what is written by hand", "three quarters are kept", _late, 1.0, "files"),
    _Task("Into a topic, beside what is written by hand", "three quarters are kept", _late, 0.9, "topic"),
    _Task(
        "A windowed aggregate, beside what is written by hand",
        "flights and their mean delay by carrier and minute, with a watermark and in update mode, go into a topic",
        _by_window,
        0.95,
        "topic",
        "update",
    ),
)


def measure_by_hand(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure messages on their way into files, topics and windows, and what a batch and a restart cost at least."""
    count = max(4000, int(800_000 * scale))
    topic = fill(stage.kafka.bus, stage.kafka.target(_PARTITIONS), count, _SIZE)
    sections = [_compare(stage, topic, count, task, rounds) for task in _TASKS]
    stage.kafka.drop(topic)
    return [*sections, _fixed(stage, rounds, batches=3 if scale < 1 else 24)]


def _compare(stage: SparkStage, topic: str, count: int, task: _Task, rounds: int) -> Section:
    section = Section(
        task.title,
        f"Rows read per second from a topic of {_PARTITIONS} partitions on Kafka: {_SIZE} B of JSON are decoded into "
        f"four fields, and {task.about}; {_BATCHES} micro-batches, without the first. `Pipeline` has dead letters. By "
        "hand: Spark's Kafka source, then `from_json`, which makes null of what is wrong, or a strict decoder of "
        f"msgspec in `mapInArrow`, which fails for it, and Spark's own sink.",
    )
    most = count // _BATCHES

    def pipeline(target: str, connector: str = "auto") -> Done:
        reports: list[BatchReport] = []
        options = {"connector": connector, "maxRows": most, "columns": "value"}
        declared = _declared(stage, topic, options, task, target)
        run(declared, spark=stage.spark, on_batch=reports.append)
        counted = reports[1:] or reports
        return Done(sum(each.rows_in for each in counted), sum(each.seconds for each in counted))

    def by_hand(target: str, decoded: Rows) -> Done:
        return finished(_by_hand(stage, topic, most, task, target, decoded).trigger(availableNow=True).start())

    target = stage.kafka.target if task.into == "topic" else lambda: stage.place("files")
    ours = (
        {
            "Pipeline, by connector": Work(count, lambda target: pipeline(target, "always"), target),
            "Pipeline, Python source": Work(count, lambda target: pipeline(target, "never"), target),
        }
        if task.into == "files"
        else {"Pipeline": Work(count, pipeline, target)}
    )
    theirs = {
        "from_json by hand": Work(count, lambda target: by_hand(target, _by_from_json), target),
        "msgspec by hand": Work(count, lambda target: by_hand(target, _by_msgspec), target),
    }
    series = in_turn({**ours, **theirs}, rounds, stage.roots, uncounted=stage.uncounted)
    section.runs.update(series)
    for name in ours:
        for other, bar in zip(theirs, (task.bar, None), strict=True):
            ratio = series[name].times_rate_of(series[other])
            section.findings.append(Finding(f"{name} / {other}", ratio, "x", at_least=bar))
    return section


def _declared(
    stage: SparkStage, topic: str, options: Mapping[str, Any], task: _Task, target: str, trigger: str = "available-now"
) -> Pipeline:
    def transformed(flights: Any) -> Any:
        return task.transform(flights.select("payload.*"))

    sink: Sink = FileSink(target) if task.into == "files" else TopicSink(target)
    return Pipeline(
        name="bench",
        url=stage.kafka.url,
        sources={"flights": Source(topic, decode=Flight, options=options)},
        transform=transformed,
        sinks={"out": sink},
        dead_letters=FileSink(stage.place("dead")),
        checkpoint=stage.place(),
        trigger=trigger,
        output_mode=task.mode,
    )


def _by_hand(stage: SparkStage, topic: str, most: int, task: _Task, target: str, decoded: Rows) -> Any:
    """The writer of a stream by Spark's own source and sink."""
    servers = {"kafka.bootstrap.servers": stage.kafka.raw.bootstrap}
    read = {**servers, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": most}
    values = stage.spark.readStream.format("kafka").options(**read).load().select("value")
    rows = task.transform(decoded(values))
    if task.into == "files":
        writer = rows.writeStream.format("parquet").option("path", target)
    else:
        value = F.to_json(F.struct("*"), {"ignoreNullFields": "false"}).alias("value")
        writer = rows.select(value).writeStream.format("kafka").options(**servers, topic=target)
    return writer.outputMode(task.mode).option("checkpointLocation", stage.place())


def _by_from_json(values: Any) -> Any:
    flight = F.from_json(F.col("value").cast("string"), broker_spark.payload_schema(Flight))
    return values.select(flight.alias("flight")).select("flight.*")


def _by_msgspec(values: Any) -> Any:
    return values.mapInArrow(_decoded, broker_spark.payload_schema(Flight))


def _decoded(batches: Iterator[Any]) -> Iterator[Any]:
    decoder = msgspec.json.Decoder(Flight)
    arrow: Any = to_arrow_schema(broker_spark.payload_schema(Flight), timezone="UTC")
    for batch in batches:
        rows = [decoder.decode(value) for value in batch.column("value").to_pylist()]
        columns: list[Any] = [pyarrow.array([getattr(row, each.name) for row in rows], each.type) for each in arrow]
        yield cast("Any", pyarrow.RecordBatch).from_arrays(columns, schema=arrow)


def _fixed(stage: SparkStage, rounds: int, *, batches: int) -> Section:
    section = Section(
        "What a batch and a restart cost at least",
        "Seconds. A batch of one row from Kafka into Parquet, in the median: `Pipeline` by the connector less the same "
        "by hand with `from_json`. And a run with the trigger `available-now` when there is nothing to read, in a "
        "session that is up.",
    )
    found = [_least(stage, batches) for _ in range(stage.uncounted + rounds)][stage.uncounted :]
    for what, seconds, bar in (
        ("Pipeline, a batch of one row, less by hand", [each.more for each in found], 0.06),
        ("Pipeline, a restart with nothing to do", [each.restart for each in found], 0.5),
        ("by hand, a restart with nothing to do", [each.bare for each in found], None),
    ):
        section.findings.append(Finding(what, Spread.of(seconds), "s", at_most=bar))
    return section


class _Least(NamedTuple):
    """Seconds.

    :ivar more: of a batch of one row, more than by hand.
    :ivar restart: of a run with nothing to do.
    :ivar bare: the same by hand.
    """

    more: float
    restart: float
    bare: float


def _least(stage: SparkStage, batches: int) -> _Least:
    task, options = _TASKS[0], {"connector": "always", "columns": "value"}
    topic = stage.kafka.target()
    declared = _declared(stage, topic, options, task, stage.place("files"), trigger="")
    by_hand = _by_hand(stage, topic, 1000, task, stage.place("files"), _by_from_json)
    more = _batch_of_pipeline(stage, topic, declared, batches) - _batch_by_hand(stage, topic, by_hand, batches)
    ended = replace(declared, trigger="available-now")
    restart = _seconds(lambda: run(ended, spark=stage.spark))
    bare = _seconds(lambda: by_hand.trigger(availableNow=True).start().awaitTermination())
    stage.kafka.drop(topic)
    return _Least(more, restart, bare)


def _batch_of_pipeline(stage: SparkStage, topic: str, declared: Pipeline, batches: int) -> float:
    reports: list[BatchReport] = []
    started = Run(declared, reports.append)
    thread = threading.Thread(target=started.execute, args=(stage.spark,))
    thread.start()
    try:
        _publish_one_by_one(stage, topic, batches, lambda: len(reports))
    finally:
        started.stop()
        thread.join()
    return statistics.median(each.seconds for each in reports[_SKIPPED:])


def _batch_by_hand(stage: SparkStage, topic: str, writer: Any, batches: int) -> float:
    query = writer.start()
    try:
        _publish_one_by_one(stage, topic, batches, lambda: len(_with_rows(query)))
    finally:
        query.stop()
    return statistics.median(each["durationMs"]["triggerExecution"] / 1000 for each in _with_rows(query)[_SKIPPED:])


def _with_rows(query: Any) -> list[Any]:
    return [each for each in query.recentProgress if each["numInputRows"]]


def _publish_one_by_one(stage: SparkStage, topic: str, batches: int, count: Callable[[], int]) -> None:
    """Publish each message when the batch of the one before is committed."""
    until = time.monotonic() + _SECONDS
    for number in range(_SKIPPED + batches):
        fill(stage.kafka.bus, topic, 1, _SIZE)
        while count() <= number:
            if time.monotonic() > until:
                raise RuntimeError(f"Only {number} batches ran")
            time.sleep(_LOOK)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
