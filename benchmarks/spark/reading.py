"""Batch and streaming reads, next to the raw client, our own log reader, the row-wise source and Spark's connector.

Everything reads one topic of one partition from its start, in one task; slow variants read fewer rows. Spark's rows go
to its `noop` sink. Of a stream, all batches but the first count, with the times that Spark reports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import broker_spark
from benchmarks.measure import Series, collected_seldom
from benchmarks.report import Finding, Section
from benchmarks.spark import raw_clients
from benchmarks.spark.rowwise import PLAIN
from benchmarks.spark.stage import KafkaSide, Side, SparkStage, sizes
from benchmarks.spark.timing import Done, Work, in_turn
from broker.blocking import Bus
from broker_spark.common.schema import COLUMNS, RECORD_COLUMNS

__all__ = ["finished", "measure_reading", "read_log"]

_BATCHES = 4


def measure_reading(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure batch and streaming reads."""
    batch = Section(
        "Batch read",
        'Rows per second of one task, as ratios. `broker` is `format("broker")`, by its Python source; five columns '
        "are topic, partition, offset, key and value, and all are all ten. `LogReader` is our reader without Spark, to "
        "Arrow, in a process as it is; `seldom collected` is one in which Python looks for garbage as seldom as our "
        "source has it do in Spark's workers. `connector` is Spark's own Kafka source, bare and by "
        "`broker_spark.read`. What a query costs whatever its rows is in it. No source is quicker than the client "
        "below it: `raw client / row-wise` is about the most that a ratio to `row-wise` can be.",
        "times as fast",
    )
    stream = Section(
        "Streaming read",
        f"Rows per second of one task in {_BATCHES} micro-batches or more, without the first, as ratios. In a "
        "comparison all micro-batches have equally many rows; on Kafka as many as `maxRows` is by default. `raw "
        "client` is that of a batch read, all at once.",
        "times as fast",
    )
    for side in stage.sides:
        for label, size in sizes(scale):
            most = max(500, int(50_000 * scale * side.quick))
            # Enough rows that the fixed cost of a query hardly counts, also where rows are small.
            count = most * _BATCHES * (2 if size < 1024 else 1)
            topic = side.filled(count, size)
            series = in_turn(_batch_works(stage, side, topic, count), rounds, stage.roots, uncounted=stage.uncounted)
            _tell(batch, f"{side.name}, {label}", series, side)
            works = _stream_works(stage, side, topic, count, most)
            series = in_turn(works, rounds, stage.roots, uncounted=stage.uncounted)
            _tell_streams(stream, f"{side.name}, {label}", series, side)
            side.drop(topic)
    return [batch, stream]


def read_log(bus: Bus, topic: str, columns: tuple[str, ...], stop: int | None = None) -> int:
    """Read with our reader, without Spark, to Arrow. Returns the bytes."""
    names = [RECORD_COLUMNS[name] for name in columns if name in RECORD_COLUMNS]
    found = bus.log.read(topic, 0, None, stop, max_records=10_000)
    return sum(batch.to_arrow(names).nbytes for batch in found)


def _batch_works(stage: SparkStage, side: Side, topic: str, count: int) -> Mapping[str, Work]:
    spark = stage.spark

    def to_noop(count: int, make: Callable[[], Any]) -> Work:
        return Work(count, lambda _: make().write.format("noop").mode("overwrite").save())

    options = {"url": side.url, "topic": topic}
    five = ",".join(PLAIN)
    few, rows = int(count * side.all_share), int(count * side.row_share)
    stop = side.bus.log.bounds(topic)[0].first + few
    part = {**options, "end": json.dumps({"0": stop})}
    rowwise = spark.read.format(f"rows-{side.name}").options(**side.rowwise(topic), rows=rows)
    log = partial(read_log, side.bus, topic)
    works: dict[str, Work] = {
        "raw client, five": Work(count, lambda _: raw_clients.read_columns(side, topic, count)),
        "LogReader, five": Work(count, lambda _: log(PLAIN)),
        "LogReader, five, seldom collected": Work(count, lambda _: _seldom(partial(log, PLAIN))),
        "LogReader, all": Work(few, lambda _: log(COLUMNS, stop)),
        "LogReader, all, seldom collected": Work(few, lambda _: _seldom(partial(log, COLUMNS, stop))),
        "broker, five": to_noop(count, spark.read.format("broker").options(**options, columns=five).load),
        "broker, all": to_noop(few, spark.read.format("broker").options(**part).load),
        "row-wise, five": to_noop(rows, rowwise.load),
    }
    if isinstance(side, KafkaSide):
        bare = {"kafka.bootstrap.servers": side.raw.bootstrap, "subscribe": topic}
        kafka = spark.read.format("kafka").options(**bare)
        headed = spark.read.format("kafka").options(**bare, includeHeaders="true")
        ours = partial(broker_spark.read, spark, connector="always", **options)
        works |= {
            "connector, five": to_noop(count, lambda: kafka.load().select(*PLAIN)),
            "connector, all": to_noop(count, headed.load),
            "broker by connector, five": to_noop(count, partial(ours, columns=five)),
            "broker by connector, all": to_noop(count, ours),
        }
    return works


def _seldom(run: Callable[[], object]) -> None:
    with collected_seldom():
        run()


def _tell(section: Section, where: str, series: Mapping[str, Series], side: Side) -> None:
    section.runs.update({f"{where}: {name}": runs for name, runs in series.items()})
    ratios: list[tuple[str, str, float | None]] = [
        ("broker, five", "LogReader, five", 0.7),
        ("broker, five", "LogReader, five, seldom collected", 0.7),
        ("broker, all", "LogReader, all", 0.7),
        ("broker, all", "LogReader, all, seldom collected", 0.7),
        ("broker, five", "row-wise, five", 3.0),
        ("raw client, five", "row-wise, five", None),
        ("broker, five", "raw client, five", None),
    ]
    if isinstance(side, KafkaSide):
        ratios += [
            ("broker by connector, five", "connector, five", 0.95),
            ("broker by connector, all", "connector, all", None),
            ("broker, five", "connector, five", None),
        ]
    for ours, theirs, bar in ratios:
        section.findings.append(
            Finding(f"{where}: {ours} / {theirs}", series[ours].times_rate_of(series[theirs]), "x", at_least=bar)
        )


def _stream_works(stage: SparkStage, side: Side, topic: str, count: int, most: int) -> dict[str, Work]:
    """:param most: rows of a micro-batch."""
    spark = stage.spark
    options = {"url": side.url, "topic": topic, "maxRows": most, "columns": ",".join(PLAIN)}

    def to_noop(make: Callable[[], Any], count: int = count) -> Work:
        def run(frame: Any) -> Done:
            writer = frame.writeStream.format("noop").option("checkpointLocation", stage.place())
            return finished(writer.trigger(availableNow=True).start())

        return Work(count, run, make)

    few = _BATCHES * most
    rows = spark.readStream.format(f"rows-{side.name}").options(**side.rowwise(topic), rows=few, maxrows=most)
    works: dict[str, Work] = {
        "raw client": Work(count, lambda _: raw_clients.read_columns(side, topic, count)),
        "broker": to_noop(spark.readStream.format("broker").options(**options).load),
        "row-wise": to_noop(rows.load, few),
    }
    if isinstance(side, KafkaSide):
        kafka = spark.readStream.format("kafka").options(
            **{"kafka.bootstrap.servers": side.raw.bootstrap, "subscribe": topic},
            startingOffsets="earliest",
            maxOffsetsPerTrigger=most,
        )
        works |= {
            "connector": to_noop(lambda: kafka.load().select(*PLAIN)),
            "broker by connector": to_noop(partial(broker_spark.read_stream, spark, connector="always", **options)),
        }
    return works


def finished(query: Any, *, skip: int = 1) -> Done:
    """Wait for the end of a query. Returns its rows and seconds, without the first batches."""
    query.awaitTermination()
    batches = [each for each in query.recentProgress if each["numInputRows"]]
    counted = batches[skip:] or batches
    return Done(
        sum(each["numInputRows"] for each in counted),
        sum(each["durationMs"]["triggerExecution"] for each in counted) / 1000,
    )


def _tell_streams(section: Section, where: str, series: Mapping[str, Series], side: Side) -> None:
    section.runs.update({f"{where}: {name}": runs for name, runs in series.items()})
    ratios: list[tuple[str, str, float | None]] = [
        ("broker", "row-wise", 3.0),
        ("raw client", "row-wise", None),
        ("broker", "raw client", None),
    ]
    if isinstance(side, KafkaSide):
        ratios += [("broker by connector", "connector", 0.95), ("broker", "connector", None)]
    for ours, theirs, bar in ratios:
        section.findings.append(
            Finding(f"{where}: {ours} / {theirs}", series[ours].times_rate_of(series[theirs]), "x", at_least=bar)
        )
