"""The cost of an almost empty micro-batch, next to Spark's `rate-micro-batch`; and queues through the spool.

All have the same session, `noop` sink, trigger (the next batch at once) and checkpoint settings. A batch has one task
and one row, because `rate-micro-batch` makes no batch without a row. The figure is `triggerExecution` of Spark's
progress.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import broker_spark
from benchmarks.measure import Spread
from benchmarks.report import Finding, Section, Table
from benchmarks.spark.reading import finished
from benchmarks.spark.rowwise import PLAIN
from benchmarks.spark.stage import Side, SparkStage, sizes
from benchmarks.spark.timing import Done, Work, in_turn

__all__ = ["measure_micro_batches"]

_STEPS = ("latestOffset", "queryPlanning", "getBatch", "walCommit", "addBatch", "commitOffsets", "triggerExecution")
_SKIPPED = 4
_SECONDS = 300.0
_LOOK = 0.5
_GLANCE = 0.1
"""Seconds between polls of the progress, which cost a little themselves."""


class _Case(NamedTuple):
    """A stream of one row in each batch.

    :ivar publish: adds a row; None if the stream has or makes its own rows.
    """

    frame: Any
    publish: Callable[[], object] | None = None


def measure_micro_batches(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure micro-batches, then queues."""
    return [_fixed(stage, scale, rounds), _spool(stage, scale, rounds)]


def _fixed(stage: SparkStage, scale: float, rounds: int) -> Section:
    section = Section(
        "A micro-batch of one row",
        "Its time, against that of `rate-micro-batch` with one row in the same session: one task, the `noop` sink, the "
        "next batch at once, checkpoints as Spark has them by default. `the least in Python` is a source without "
        "a broker: what Spark itself takes for a row from Python. While rows wait, our source asks the broker once a "
        "second where a topic ends; `rows one by one` never wait, so it asks for each. The table has the "
        "milliseconds of each step, as Spark's progress names them, in the median.",
        "times as long",
    )
    batches = 3 if scale < 1 else 24
    spark = stage.spark
    topics = {side.name: side.filled(_SKIPPED + batches + 20, 100) for side in stage.sides}

    def ours(side: Side, topic: str) -> Any:
        options = {"url": side.url, "topic": topic, "maxRows": 1, "columns": ",".join(PLAIN)}
        return spark.readStream.format("broker").options(**options).load()

    def waiting(side: Side) -> Callable[[], _Case]:
        return lambda: _Case(ours(side, topics[side.name]))

    def coming(side: Side) -> Callable[[], _Case]:
        def make() -> _Case:
            topic = side.target()
            return _Case(ours(side, topic), lambda: side.bus.topic(topic).publish(b"one"))

        return make

    rate = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=1, numPartitions=1)
    kafka = stage.kafka
    one_row = spark.readStream.format("one-row")
    by_connector = partial(broker_spark.read_stream, spark, connector="always", url=kafka.url, topic=topics["kafka"])
    sources: Mapping[str, Callable[[], _Case]] = {
        "rate-micro-batch": lambda: _Case(rate.load()),
        "the least in Python": lambda: _Case(one_row.load()),
        "broker on jetstream": waiting(stage.jetstream),
        "broker on kafka": waiting(kafka),
        "broker on jetstream, rows one by one": coming(stage.jetstream),
        "broker on kafka, rows one by one": coming(kafka),
        "broker by connector": lambda: _Case(by_connector(maxRows=1, columns=",".join(PLAIN))),
    }
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for number in range(stage.uncounted + rounds):
        for name in list(sources) if number % 2 == 0 else list(sources)[::-1]:
            steps[name].append(_medians(stage, sources[name](), batches))
    steps = {name: found[stage.uncounted :] for name, found in steps.items()}
    rate_name, least, *ours_names = sources
    for name, base, bar in [
        *((name, rate_name, 1.2) for name in ours_names),
        *((name, least, None) for name in ours_names if "connector" not in name),
        (least, rate_name, None),
    ]:
        pairs = zip(steps[name], steps[base], strict=True)
        ratio = Spread.of([one["triggerExecution"] / other["triggerExecution"] for one, other in pairs])
        section.findings.append(Finding(f"{name} / {base}", ratio, "x", at_most=bar))
    section.tables.append(
        Table(
            ("", *_STEPS),
            [
                (name, *(f"{statistics.median(each[step] for each in found):.0f}" for step in _STEPS))
                for name, found in steps.items()
            ],
        )
    )
    return section


def _medians(stage: SparkStage, case: _Case, batches: int) -> dict[str, float]:
    """Milliseconds of each step of a query's batches."""
    query = case.frame.writeStream.format("noop").option("checkpointLocation", stage.place()).start()
    until = time.monotonic() + _SECONDS
    done: list[Any] = []
    published = 0
    while len(done) < _SKIPPED + batches:
        if case.publish is not None and published == len(done):
            case.publish()
            published += 1
        if not query.isActive or time.monotonic() > until:
            raise RuntimeError(f"Only {len(done)} batches ran: {query.exception()}")
        time.sleep(_GLANCE if case.publish is not None else _LOOK)
        done = [each for each in query.recentProgress if each["numInputRows"]]
    query.stop()
    counted = done[_SKIPPED : _SKIPPED + batches]
    return {step: statistics.median(each["durationMs"].get(step, 0) for each in counted) for step in _STEPS}


def spooled(stage: SparkStage, url: str, topic: str, chosen: Mapping[str, str]) -> Callable[[str, str], Done]:
    """A function that drains a subscription, by its name, through a spool at a path.

    :param chosen: options that choose the columns.
    """

    def run(subscription: str, place: str) -> Done:
        options = {"url": url, "topic": topic, "subscription": subscription, "spool": place, **chosen}
        frame = stage.spark.readStream.format("broker").options(**options).load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", stage.place())
        # The first batch counts too: later ones read what is received meanwhile.
        return finished(writer.trigger(availableNow=True).start(), skip=0)

    return run


def _spool(stage: SparkStage, scale: float, rounds: int) -> Section:
    section = Section(
        "A queue through the spool",
        "Rows per second of a subscription on JetStream: received, written and synced, acked, read by Spark into the "
        "`noop` sink; all micro-batches, without the start of the query. Five columns and all, as of a batch read; the "
        "bar was set by a prototype that kept five.",
        "k rows/s",
    )
    side = stage.jetstream
    columns = {"five": {"columns": ",".join(PLAIN)}, "all": dict[str, str]()}
    for label, size in sizes(scale):
        count = max(2000, int((1_200_000 if size < 1000 else 400_000) * scale))
        topic = side.filled(count, size)

        def work(chosen: Mapping[str, str], topic: str = topic, count: int = count) -> Work:
            run = spooled(stage, side.url, topic, chosen)
            return Work(count, lambda place: run(place.rpartition("/")[2], place), lambda: stage.place("spool"))

        works = {name: work(chosen) for name, chosen in columns.items()}
        for name, series in in_turn(works, rounds, stage.roots, uncounted=stage.uncounted).items():
            what = f"jetstream, {label}: spool, {name}"
            section.runs[what] = series
            rate = Spread.of([sample.rate / 1000 for sample in series.samples])
            judged = size < 1000 and name == "five"
            section.findings.append(Finding(what, rate, "k rows/s", at_least=50.0 if judged else None))
        side.drop(topic)
    return section
