"""SIGTERM and SIGINT as a wish to stop, for as long as a block lasts.

How many tasks a pipeline's batch has behind its reads. Blocking; driver only.

The query of a pipeline beside others: whether it may begin, and who ended it.

Runs a pipeline: one stream of Spark, whose every batch goes into all sinks before it is committed.

*Stopping.* A stop lets the running batch end and be committed; the one behind it, which Spark may have planned by then,
is not begun, and a later run begins with it. *Failure.* A batch that failed is run again by the next run, with the
same rows and number; sinks take it for the one of before where they can. A crash is no different.

*Concurrency.* Blocking. Spark calls a batch in a thread of its own; `stop` may be called from any thread and signal.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from broker.errors import ConfigurationError, Unsupported
from broker.hooks import logger
from broker.urls import mask_within
from broker_spark.checkpoint.topic_ids import Identities
from broker_spark.common.schema import unused
from broker_spark.kafka_connector.connector import pipeline_stream
from broker_spark.pipeline.backlog import rows_untold
from broker_spark.pipeline.definition import AVAILABLE_NOW, Pipeline, TopicSink, part_of
from broker_spark.pipeline.frames import DEAD, OUT, ROWS, as_letters, counted_frames_of, joined
from broker_spark.pipeline.ownership import claim, clear, paired
from broker_spark.pipeline.preflight import check_rows, check_topics, try_sinks
from broker_spark.pipeline.writing import write
from broker_spark.progress import behind, offsets_of
from broker_spark.runtime.spark_errors import in_short, interrupted, ours, planned
from broker_spark.session import register, session

__all__ = [
    "LOOK_SECONDS",
    "BatchReport",
    "Run",
    "check_ended",
    "check_name",
    "end",
    "run",
    "stopped_by_signals",
    "stream",
    "tasks_of",
]


@contextmanager
def stopped_by_signals(stop: Callable[[], object]) -> Generator[None]:
    """Have each of them call `stop` within the block; nothing but in the main thread, which alone may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def called(number: int, frame: object) -> None:
        del number, frame
        stop()

    before = {number: signal.signal(number, called) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SET: Final = "spark.default.parallelism"
_STILL: Final = 2.0
"""Seconds in which no executor has come or gone, so that all are there."""
_LONGEST: Final = 30.0
"""Seconds for the first one, as Spark itself waits for resources."""
_LOOK: Final = 0.1


def tasks_of(spark: SparkSession) -> int:
    """As many as the session runs at once: on a cluster, once its executors are there.

    They come some seconds after a session is made, and until then Spark tells two. What `spark.default.parallelism`
    says goes first, and is the way where executors come as there is work.

    :param spark: a classic session.
    """
    context: Any = spark.sparkContext
    is_local = context.master == "local" or context.master.startswith("local[")
    if not is_local and not context.getConf().contains(_SET):
        _wait_for_executors(context)
    return int(context.defaultParallelism)


def _wait_for_executors(context: Any) -> None:
    def count() -> int:
        # The driver is one of them.
        return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1

    begun = since = time.monotonic()
    found = count()
    while (now := time.monotonic()) - begun < _LONGEST and (found == 0 or now - since < _STILL):
        time.sleep(_LOOK)
        if (found_now := count()) != found:
            found, since = found_now, time.monotonic()
    if found == 0:
        logger.warning("No executor has come in %g s; the pipeline is planned for two tasks a batch", _LONGEST)


LOOK_SECONDS: Final = 0.2
"""How often a query is looked at."""


def check_name(spark: SparkSession, name: str) -> None:
    """Make sure that no query of this session has this name.

    :raises ConfigurationError: one has, and Spark starts none beside it.
    """
    if any(query.name == name for query in spark.streams.active):
        raise ConfigurationError(
            f"name is {name!r}, and a query of this name runs in this session",
            advice="Wait for its end, or stop it; another pipeline needs another name, and another checkpoint",
        )


def end(spark: SparkSession, query: StreamingQuery) -> None:
    """Stop a query. Spark cancels the jobs of its batch once and waits; what the batch begins then is cancelled too."""
    with ThreadPoolExecutor(1, "broker-pipeline-stop") as pool:
        stopping = pool.submit(query.stop)
        while wait((stopping,), LOOK_SECONDS).not_done:
            spark.sparkContext.cancelJobGroup(str(query.runId))
        stopping.result()


def check_ended(pipeline: Pipeline, query: StreamingQuery) -> None:
    """Make sure that a query that its run did not stop has read all that it was to read.

    :raises ConfigurationError: somebody else stopped it.
    """
    if pipeline.trigger == AVAILABLE_NOW and _found_no_more(query):
        return
    raise ConfigurationError(
        f"The query was stopped from outside, or by another run on checkpoint {mask_within(pipeline.checkpoint)!r}",
        advice="Let one run at a time have this checkpoint; the next one goes on from what is committed",
    )


def _found_no_more(query: StreamingQuery) -> bool:
    """Whether the last that it did was to look for a batch and find none. Its progress does not tell."""
    inner: Any = query
    try:
        return bool(inner._jsq.streamingQuery().noNewData())
    except Py4JError:
        # It is no public part of Spark. Where it is none at all, the end is believed.
        return True


_PARK_MILLISECONDS: Final = 1000
_STARTS: Final = 3
_OTHER_SOURCES: Final = re.compile(r"There are \[\d+\] sources in the checkpoint offsets and now there are \[\d+\]")
"""What Spark counts there are branches of its plan: a source with `decode` may be two of them."""
_NOT_UP: Final = "Python worker failed to connect back"
_NO_STREAM: Final = 'Aggregates need a watermark, or output_mode "update"; a sort is for a sink, or a reader'
_ADDED: Final = "addBatch"
"""What the durations of a batch have that was run."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch that is committed.

    :ivar rows_in: rows read, of all sources.
    :ivar rows_out: rows written, by sink.
    :ivar dead: rows that did not decode.
    :ivar lag: offsets behind the end when it was planned, of all sources; rows at most. Of a batch that an earlier run
        planned, when it is told.
    :ivar seconds: from its planning to its commit.
    """

    pipeline: str
    batch: int
    rows_in: int
    rows_out: Mapping[str, int]
    dead: int
    lag: int
    seconds: float

    def __str__(self) -> str:
        out = ", ".join(f"{count} to {name}" for name, count in self.rows_out.items())
        return (
            f"{self.pipeline}: batch {self.batch}: {self.rows_in} rows in, {out}, {self.dead} dead, "
            f"{self.lag} behind, {self.seconds:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class _Written:
    """What a batch wrote, until Spark tells that it is committed."""

    dead: int
    rows_out: Mapping[str, int]


class Run:
    """One run of a pipeline. Make it with `run`, or to stop it from elsewhere: `Run(pipeline)`, then `execute()`."""

    def __init__(self, pipeline: Pipeline, on_batch: Callable[[BatchReport], object] | None = None) -> None:
        self._pipeline = pipeline
        self._on_batch = on_batch
        self._stop = threading.Event()
        self._abort = threading.Event()
        self._named = threading.Event()
        self._parked = threading.Event()
        self._over = threading.Event()
        self._running = False
        self._began = False
        self._query_id = ""
        self._claimed = False
        self._identities: Identities | None = None
        self._written: dict[int, _Written] = {}
        self._failure: BaseException | None = None
        self._reported = -1
        self._reports = 0
        self._owners: list[str | None] | None = None
        """The names of the sources that Spark's plan has, in its order."""

    def stop(self) -> None:
        """End after the running batch; asked for twice, cancel it, and let the next run do it again.

        A function of a `CallSink` that runs no job of Spark is waited for.
        """
        if self._stop.is_set():
            self._abort.set()
        self._stop.set()

    def execute(self, spark: SparkSession | None = None) -> int:
        """Run until it is stopped, or until there is no more where the trigger says so; how many batches it was.

        :param spark: None is the active session, or a new one.
        :raises ConfigurationError, Unsupported: a part cannot be used as it is, or something else stopped the query.
        :raises BrokerError, StreamingQueryException: a batch failed; what was committed stays.
        """
        return self.carry_out(_session_of(self._pipeline, spark))

    def carry_out(self, spark: SparkSession) -> int:
        """The same in a session that has `format("broker")`."""
        pipeline = self._pipeline
        check_name(spark, pipeline.name)
        identities = Identities(spark, pipeline.checkpoint)
        frame = stream(pipeline, spark, identities)
        writer = frame.writeStream.foreachBatch(self._batch).queryName(pipeline.name)
        writer = writer.outputMode(pipeline.output_mode).option("checkpointLocation", pipeline.checkpoint)
        if pipeline.trigger == AVAILABLE_NOW:
            writer = writer.trigger(availableNow=True)
        elif pipeline.trigger:
            writer = writer.trigger(processingTime=pipeline.trigger)
        check_topics(pipeline)
        try_sinks(pipeline, frame)
        for name in pipeline.sources:
            with part_of(f"sources.{name}"):
                identities.check(name, pipeline.parsed_options(name))
        identities.check_positions()
        identities.keep()
        self._identities = identities
        try:
            for left in reversed(range(_STARTS)):
                if self._ran(spark, writer, last_start=not left):
                    break
        finally:
            self._over.set()
        return self._reports

    def _ran(self, spark: SparkSession, writer: DataStreamWriter, *, last_start: bool) -> bool:
        """Run the query to its end; False where it never came up and may be started again.

        Spark gives the Python process of a source ten seconds to come up, which no setting changes, and a busy machine
        may need more.
        """
        with planned("The rows cannot be those of a stream", _NO_STREAM):
            query = writer.start()
        self._query_id = str(query.id)
        self._named.set()
        try:
            self._watch(query)
            if not self._stop.is_set():
                check_ended(self._pipeline, query)
        except StreamingQueryException as error:
            if last_start or self._began or self._stop.is_set() or _NOT_UP not in str(error):
                raise
            logger.warning("%s: a source did not come up in Spark's ten seconds; started again", self._pipeline.name)
            return False
        finally:
            end(spark, query)
        return True

    def _watch(self, query: StreamingQuery) -> None:
        try:
            while not query.awaitTermination(LOOK_SECONDS):  # pyright: ignore[reportArgumentType]
                self._report(query)
                if self._abort.is_set() or (self._stop.is_set() and self._may_end(query)):
                    break
            # What was committed since the last look, too.
            self._report(query)
        except Exception as error:
            with contextlib.suppress(Exception):
                # A failure is no reason not to tell of the batches before it.
                self._report(query)
            if _OTHER_SOURCES.search(str(error)):
                raise ConfigurationError(
                    "checkpoint was made with other sources, another decode or another transform",
                    advice="Begin a new checkpoint, and with it new files and tables, or bring back what it was "
                    "made with",
                ) from error
            failure = self._failure or error
            if (known := ours(failure)) is not None:
                raise known from failure
            if self._failure is not None:
                # Spark shows it as text at the end of its own.
                raise self._failure from None
            raise

    def _may_end(self, query: StreamingQuery) -> bool:
        """Whether every batch that was begun is committed."""
        if self._parked.is_set():
            return True
        if self._failure is not None:
            # Spark ends the query with it.
            return False
        return not self._running and self._reported >= max(self._written, default=-1)

    def _batch(self, frame: DataFrame, batch: int) -> None:
        self._running = self._began = True
        if self._stop.is_set():
            # Not begun: the watcher ends the query, and the next run begins with it.
            self._parked.set()
            self._park(frame)
        try:
            self._named.wait()
            self._written[batch] = self._write(frame, batch)
        except BaseException as error:
            self._failure = error
            raise in_short(error) from None
        finally:
            self._running = False

    def _park(self, frame: DataFrame) -> NoReturn:
        """Wait for the end of the query. To return would commit what was not written."""
        machine: Any = frame.sparkSession._jvm  # pyright: ignore[reportPrivateUsage]
        with contextlib.suppress(Exception):
            while not self._over.is_set():
                # In Spark's own thread, which the end of the query interrupts.
                machine.java.lang.Thread.sleep(_PARK_MILLISECONDS)
        raise interrupted()

    def _write(self, frame: DataFrame, batch: int) -> _Written:
        """Put a batch into all sinks. It is read, decoded and transformed once, whatever the number of sinks."""
        pipeline = self._pipeline
        # Only the first batch of a run may be one that another run began.
        again = not self._claimed
        if again:
            claim(pipeline, frame.sparkSession, self._query_id)
            self._claimed = True
        kept = frame.persist()
        try:
            try:
                counts = _counted(pipeline, kept)
            finally:
                # Of a topic that was made anew Spark may have told something else, or nothing.
                if self._identities is not None:
                    self._identities.check_again()
            out = kept.where(F.col(DEAD).isNull()).select(f"{OUT}.*")
            for name, sink in pipeline.sinks.items():
                if counts.rows_out[name]:
                    rows = out.where(sink.where) if sink.where else out
                    write(pipeline, name, sink, rows, batch, self._query_id)
                elif again:
                    clear(sink, frame.sparkSession, batch)
            sink = pipeline.dead_letters
            if sink is not None and counts.dead:
                dead = kept.where(F.col(DEAD).isNotNull()).select(f"{DEAD}.*")
                letters = as_letters(dead, pipeline.name) if isinstance(sink, TopicSink) else dead
                write(pipeline, "dead_letters", sink, letters, batch, self._query_id)
            elif sink is not None and again:
                clear(sink, frame.sparkSession, batch)
            return counts
        finally:
            kept.unpersist()

    def _report(self, query: StreamingQuery) -> None:
        """Tell of the batches that were committed since the last call."""
        last = query.lastProgress
        if last is None or last["batchId"] <= self._reported:
            return
        for progress in query.recentProgress:
            batch = int(progress["batchId"])
            if batch <= self._reported or _ADDED not in progress["durationMs"]:
                # Spark also tells of times when there was nothing to do, by the number of the batch to come.
                continue
            written = self._written.pop(batch, None)
            if written is None:
                continue
            self._reported = batch
            self._reports += 1
            self._tell(
                BatchReport(
                    pipeline=self._pipeline.name,
                    batch=batch,
                    rows_in=_rows_in(progress),
                    rows_out=written.rows_out,
                    dead=written.dead,
                    lag=self._behind(progress),
                    seconds=progress["durationMs"].get("triggerExecution", 0) / 1000,
                )
            )

    def _behind(self, progress: Any) -> int:
        """The lag, with a source once that is in two branches of Spark's plan."""
        if self._owners is None or None in self._owners:
            # The plan, and so their order, stays what it is in a run.
            ends = [offsets_of(source["endOffset"]) for source in progress["sources"]]
            self._owners = paired(self._pipeline, ends)
        return behind(progress, self._owners) + rows_untold(self._pipeline, progress, self._owners)

    def _tell(self, report: BatchReport) -> None:
        logger.info("%s", report)
        for tell in (self._pipeline.on_batch, self._on_batch):
            try:
                if tell is not None:
                    tell(report)
            except Exception:
                # What watches a pipeline does not end it.
                logger.exception("on_batch failed for batch %d of %s", report.batch, report.pipeline)


def run(
    pipeline: Pipeline,
    *,
    spark: SparkSession | None = None,
    on_batch: Callable[[BatchReport], object] | None = None,
) -> int:
    """Run until it is stopped, or until there is no more where the trigger says so; how many batches it was.

    SIGTERM and SIGINT stop it after the running batch; the second of them at once. Only in the main thread, and only
    while it runs. Each batch is a line of the log "broker".

    :param spark: None is the active session, or a new one.
    :param on_batch: called with each committed batch, for metrics; what it raises is logged.
    :raises ConfigurationError, Unsupported: a part cannot be used as it is, or something else stopped the query.
    :raises BrokerError, StreamingQueryException: a batch failed; what was committed stays.
    """
    under_way = Run(pipeline, on_batch)
    with stopped_by_signals(under_way.stop):
        ours = _session_of(pipeline, spark)
        # Again, since a session that was made now brought PySpark's own handler of SIGINT, which cancels all jobs.
        with stopped_by_signals(under_way.stop):
            return under_way.carry_out(ours)


def stream(pipeline: Pipeline, spark: SparkSession, identities: Identities | None = None) -> DataFrame:
    """The rows of a pipeline as a stream that was not started, `out` and `dead` beside each other.

    :param identities: of its checkpoint, where it is to be run.
    :raises ConfigurationError: the transform or the SQL of the pipeline cannot be used, or a sink cannot take its rows.
    :raises Unsupported: the session is one of Spark Connect.
    """
    if not hasattr(spark, "_jvm"):
        # Its batches are called at the server, where neither sinks nor counts of this process are.
        raise Unsupported(
            "A pipeline runs in the driver of Spark, and this session is one of Spark Connect",
            advice="Give it a classic session, for instance by spark-submit; sources, sinks and decode work with both",
        )
    sources: dict[str, DataFrame] = {}
    for name in pipeline.sources:
        with part_of(f"sources.{name}"):
            sources[name], by_connector = pipeline_stream(spark, **pipeline.source_options(name))
            if by_connector and identities is not None:
                identities.watch(name, pipeline.parsed_options(name))
    now = spark.sparkContext.defaultParallelism
    decodes = any(source.decode is not None for source in pipeline.sources.values())
    tasks = now if identities is None else identities.tasks(lambda: tasks_of(spark) if decodes else now)
    frames = counted_frames_of(pipeline, sources, tasks)
    check_rows(pipeline, frames)
    return joined(frames)


def _session_of(pipeline: Pipeline, spark: SparkSession | None) -> SparkSession:
    if spark is not None:
        return register(spark)
    return session(pipeline.name, master=pipeline.master, config=pipeline.config)


def _counted(pipeline: Pipeline, kept: DataFrame) -> _Written:
    """How many rows go where; it also reads the batch, once for all that follows."""
    columns = cast("StructType", kept.schema[OUT].dataType).names
    flag = unused("__dead", {each.lower() for each in columns})
    is_dead = F.col(flag)
    found = (
        kept.select(F.col(DEAD).isNotNull().alias(flag), f"{OUT}.*")
        .agg(
            F.count_if(is_dead),
            *(F.count_if(~is_dead & F.expr(sink.where or "true")) for sink in pipeline.sinks.values()),
        )
        .collect()[0]
    )
    return _Written(int(found[0]), {name: int(count) for name, count in zip(pipeline.sinks, found[1:], strict=True)})


def _rows_in(progress: Any) -> int:
    observed: Mapping[str, Any] = progress["observedMetrics"] or {}
    return sum(int(row["rows"]) for name, row in observed.items() if name.startswith(ROWS))
