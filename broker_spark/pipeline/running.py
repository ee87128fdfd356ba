"""Runs a pipeline: one streaming query whose batches go into all sinks before they are committed.

*Stopping.* A stop lets the running batch end and be committed. Spark may have planned the next batch already: it is not
begun, and the next run starts with it. *Failure.* The next run repeats a failed batch with the same rows and number, so
that sinks can replace or recognize what the failed attempt wrote. A crash is no different.

*Concurrency.* Blocking; driver only. Spark calls batches in its own thread. `Run.stop` may be called from any thread
and from signal handlers.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, NoReturn

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs]
from pyspark import Accumulator
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from broker.errors import ConfigurationError, Unsupported
from broker.hooks import logger
from broker.urls import mask_within
from broker_spark.checkpoint.checkpoint_log import CheckpointLog
from broker_spark.checkpoint.topic_ids import TopicIds
from broker_spark.kafka_connector import pipeline_stream
from broker_spark.pipeline.backlog import match_positions, unreported_rows
from broker_spark.pipeline.batch import Batch
from broker_spark.pipeline.batch_ranges import ranges_of
from broker_spark.pipeline.definition import AVAILABLE_NOW, Pipeline, TopicSink, errors_of
from broker_spark.pipeline.expectations import writes_letters
from broker_spark.pipeline.frames import counts_of, metrics_in_progress, metrics_of_running_batch, stream_of
from broker_spark.pipeline.letters import DeadPlaces, Places, origin_of
from broker_spark.pipeline.preflight import check_rows, check_topics, try_sinks
from broker_spark.pipeline.writing import claim
from broker_spark.progress import behind, late_rows, offsets_of
from broker_spark.runtime.hadoop import path_errors_as, protect_directory
from broker_spark.runtime.spark_errors import as_batch_error, broker_error_in, interrupted, plan_errors_as
from broker_spark.session import register, session

__all__ = ["BatchReport", "Run", "build_stream", "check_classic", "dead_places", "run", "session_for"]

_POLL_SECONDS: Final = 0.2
"""How often a query is polled."""
_PARK_MILLISECONDS: Final = 1000
_STARTS: Final = 3
"""How often a query is started if its sources do not start in time."""
_OTHER_SOURCES: Final = re.compile(r"There are \[\d+\] sources in the checkpoint offsets and now there are \[\d+\]")
"""Spark's error for a changed plan. It counts branches of its plan: a source joined with itself is two of them."""
_NOT_UP: Final = "Python worker failed to connect back"
_NO_STREAM: Final = 'Aggregates need a watermark, or output_mode "update"; a sort is for a sink, or a reader'
_ADDED: Final = "addBatch"
"""The duration that only a batch which was run has."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A committed batch.

    :ivar rows_in: rows read, of all sources.
    :ivar rows_out: rows written, by sink.
    :ivar dead: rows that became dead letters: they did not decode, or failed an expectation with the action "dead".
    :ivar lag: offsets behind the ends of all sources when the batch was planned, at most as many rows; for a batch that
        an earlier run planned, when it is reported.
    :ivar seconds: from planning to commit.
    :ivar failed: rows that failed an expectation, by `source.expectation`, whatever its action.
    :ivar late: rows that aggregates, joins and other state dropped, because they were behind the watermark.
    """

    pipeline: str
    batch: int
    rows_in: int
    rows_out: Mapping[str, int]
    dead: int
    lag: int
    seconds: float
    failed: Mapping[str, int] = field(default_factory=dict[str, int])
    late: int = 0

    def __str__(self) -> str:
        out = [f"{count} to {name}" for name, count in self.rows_out.items()]
        failed = [f"{count} failed {name}" for name, count in self.failed.items() if count]
        late = [f"{self.late} late"] if self.late else []
        said = ", ".join((*out, f"{self.dead} dead", *failed, *late))
        return (
            f"{self.pipeline}: batch {self.batch}: {self.rows_in} rows in, {said}, {self.lag} behind, "
            f"{self.seconds:.2f} s"
        )


def run(
    pipeline: Pipeline,
    *,
    spark: SparkSession | None = None,
    on_batch: Callable[[BatchReport], object] | None = None,
) -> int:
    """Run until stopped, or to the end with the trigger "available-now". Returns the number of batches.

    In the main thread, the first SIGTERM or SIGINT stops the run after the running batch, the second one at once. Each
    committed batch is logged by the logger "broker".

    :param spark: None uses the active session, or a new one.
    :param on_batch: called with each committed batch, for metrics; its exceptions are logged.
    :raises ConfigurationError, Unsupported: a part of the pipeline cannot be used, or the query was stopped from
        outside.
    :raises BrokerError, StreamingQueryException: a batch failed; committed batches stay.
    """
    started = Run(pipeline, on_batch)
    with _stopped_by_signals(started.stop):
        own_session = session_for(pipeline, spark)
        # Again: a new session installs PySpark's own SIGINT handler, which cancels all jobs.
        with _stopped_by_signals(started.stop):
            return started.execute_in(own_session)


class Run:
    """One run of a pipeline. `run` executes one; `Run(pipeline).execute()` can be stopped from elsewhere."""

    def __init__(self, pipeline: Pipeline, on_batch: Callable[[BatchReport], object] | None = None) -> None:
        self._pipeline = pipeline
        self._on_batch = on_batch
        self._stop = threading.Event()
        self._abort = threading.Event()
        self._id_known = threading.Event()
        self._parked = threading.Event()
        self._over = threading.Event()
        self._running = False
        self._has_begun = False
        self._query: StreamingQuery | None = None
        self._query_id = ""
        self._tried = False
        """Whether the sinks were tried in this run."""
        self._claimed = False
        self._topic_ids: TopicIds | None = None
        self._checkpoint: CheckpointLog | None = None
        self._dead_places: Mapping[str, Accumulator[Places]] = {}
        self._written: dict[int, dict[str, int]] = {}
        """The rows of each batch by sink, until Spark reports its commit."""
        self._failure: BaseException | None = None
        self._reported = -1
        self._reports = 0
        self._source_names: list[str | None] | None = None
        """The name of each source in Spark's progress, in its order."""

    def stop(self) -> None:
        """End after the running batch. The second call cancels the batch; the next run repeats it.

        A `CallSink` function without a Spark job cannot be cancelled.
        """
        if self._stop.is_set():
            self._abort.set()
        self._stop.set()

    def trouble(self) -> str:
        """Why no batches are processed, for a health check; empty while the query runs."""
        if self._stop.is_set():
            return "The pipeline stops"
        if self._over.is_set():
            return "The pipeline has ended"
        return "" if self._id_known.is_set() else "The pipeline starts"

    def execute(self, spark: SparkSession | None = None) -> int:
        """Run until stopped, or to the end with the trigger "available-now". Returns the number of batches.

        :param spark: None uses the active session, or a new one.
        :raises ConfigurationError, Unsupported: a part of the pipeline cannot be used, or the query was stopped from
            outside.
        :raises BrokerError, StreamingQueryException: a batch failed; committed batches stay.
        """
        return self.execute_in(session_for(self._pipeline, spark))

    def execute_in(self, spark: SparkSession) -> int:
        """`execute` in a session with `format("broker")`."""
        pipeline = self._pipeline
        check_classic(spark)
        _check_name_is_free(spark, pipeline.name)
        topic_ids = TopicIds(spark, pipeline.checkpoint)
        topic_ids.load()
        self._dead_places = dead_places(pipeline, spark)
        frame = build_stream(pipeline, spark, topic_ids, self._dead_places)
        writer = frame.writeStream.foreachBatch(self._batch).queryName(pipeline.name)
        writer = writer.outputMode(pipeline.output_mode).option("checkpointLocation", pipeline.checkpoint)
        if pipeline.trigger == AVAILABLE_NOW:
            writer = writer.trigger(availableNow=True)
        elif pipeline.trigger:
            writer = writer.trigger(processingTime=pipeline.trigger)
        check_topics(pipeline)
        if not topic_ids.has_batches:
            # Later runs try them before their first batch, so that a run without one takes no time for it.
            try_sinks(pipeline, frame)
            self._tried = True
        for name in pipeline.sources:
            with errors_of(f"sources.{name}"):
                topic_ids.check(name, pipeline.parsed_options(name))
        topic_ids.check_positions()
        with path_errors_as("checkpoint", pipeline.checkpoint):
            protect_directory(spark, pipeline.checkpoint)
        topic_ids.save()
        self._topic_ids = topic_ids
        self._checkpoint = CheckpointLog(spark, pipeline.checkpoint)
        try:
            for left in reversed(range(_STARTS)):
                if self._run_query(spark, writer, last_start=not left):
                    break
        finally:
            self._over.set()
        return self._reports

    def _run_query(self, spark: SparkSession, writer: DataStreamWriter, *, last_start: bool) -> bool:
        """Run the query to its end; False if it never came up and may be started again.

        Spark gives the Python process of a source ten seconds to start, which a busy machine may exceed. No setting
        changes this.
        """
        self._id_known.clear()
        with plan_errors_as("The rows cannot be those of a stream", _NO_STREAM):
            query = writer.start()
        self._query, self._query_id = query, str(query.id)
        self._id_known.set()
        try:
            self._watch(query)
            if not self._stop.is_set():
                _check_completed(self._pipeline, query)
        except StreamingQueryException as error:
            if last_start or self._has_begun or self._stop.is_set() or _NOT_UP not in str(error):
                raise
            logger.warning("%s: a source did not start within Spark's ten seconds; starting again", self._pipeline.name)
            return False
        finally:
            _stop_query(spark, query)
        return True

    def _watch(self, query: StreamingQuery) -> None:
        try:
            while not query.awaitTermination(_POLL_SECONDS):  # pyright: ignore[reportArgumentType]
                self._report_batches(query)
                if self._abort.is_set() or (self._stop.is_set() and self._may_end(query)):
                    break
            # Batches that were committed since the last poll.
            self._report_batches(query)
        except Exception as error:
            with contextlib.suppress(Exception):
                # The failure must not hide the batches before it.
                self._report_batches(query)
            if _OTHER_SOURCES.search(str(error)):
                raise ConfigurationError(
                    "checkpoint belongs to a pipeline with other sources, another decode or another transform",
                    advice="Use a new checkpoint with new files and tables, or restore the earlier pipeline",
                ) from error
            failure = self._failure or error
            if (known := broker_error_in(failure)) is not None:
                raise known from failure
            if self._failure is not None:
                # Instead of Spark's error, which has this one as text.
                raise self._failure from None
            raise

    def _may_end(self, query: StreamingQuery) -> bool:
        """Whether every batch that was started is committed."""
        if self._parked.is_set():
            return True
        if self._failure is not None:
            # Spark is about to end the query.
            return False
        return not self._running and self._reported >= max(self._written, default=-1)

    def _batch(self, frame: DataFrame, batch: int) -> None:
        self._running = self._has_begun = True
        if self._stop.is_set():
            # The batch is not started: `_watch` ends the query, and the next run starts with this batch.
            self._parked.set()
            self._park(frame)
        try:
            self._id_known.wait()
            self._written[batch] = self._write(frame, batch)
        except BaseException as error:
            self._failure = error
            raise as_batch_error(error) from None
        finally:
            self._running = False

    def _park(self, frame: DataFrame) -> NoReturn:
        """Wait for the end of the query: returning would commit a batch that was not written."""
        machine: Any = frame.sparkSession._jvm  # pyright: ignore[reportPrivateUsage]
        with contextlib.suppress(Exception):
            while not self._over.is_set():
                # Sleeps in Spark's thread, which the end of the query interrupts.
                machine.java.lang.Thread.sleep(_PARK_MILLISECONDS)
        raise interrupted()

    def _write(self, frame: DataFrame, batch: int) -> dict[str, int]:
        """Write a batch into all sinks; the rows by sink. A batch for one sink is read by the job that writes it."""
        pipeline = self._pipeline
        # Only the first batch of a run may have been started by an earlier run.
        again = not self._claimed
        if again:
            if not self._tried:
                try_sinks(pipeline, frame)
            claim(pipeline, frame.sparkSession, self._query_id)
            self._claimed = True
        for places in self._dead_places.values():
            places.value = {}
        try:
            self._recheck_topics()
            assert self._checkpoint is not None
            ranges = cache(partial(ranges_of, pipeline, self._checkpoint, batch))
            whole = Batch(pipeline, batch, self._query_id, ranges, again=again)
            written = whole.write_rows(frame)
            noted = {name: each.value for name, each in self._dead_places.items()}
            judged = any(writes_letters(source.expect) for source in pipeline.sources.values())
            metrics = metrics_of_running_batch(pipeline, self._query) if judged else {}
            whole.write_letters(frame.sparkSession, noted, metrics)
        finally:
            # Also after an error: a recreated topic may have caused it.
            self._recheck_topics()
        return written

    def _recheck_topics(self) -> None:
        if self._topic_ids is not None:
            self._topic_ids.recheck()

    def _report_batches(self, query: StreamingQuery) -> None:
        """Report the batches that were committed since the last call."""
        last = query.lastProgress
        if last is None or last["batchId"] <= self._reported:
            return
        for progress in query.recentProgress:
            batch = int(progress["batchId"])
            if batch <= self._reported or _ADDED not in progress["durationMs"]:
                # Spark also reports idle times, under the number of the next batch.
                continue
            written = self._written.pop(batch, None)
            if written is None:
                continue
            self._reported = batch
            self._reports += 1
            counts = counts_of(self._pipeline, metrics_in_progress(self._pipeline, progress))
            self._emit(
                BatchReport(
                    pipeline=self._pipeline.name,
                    batch=batch,
                    rows_in=counts.read,
                    rows_out=written,
                    dead=counts.dead,
                    lag=self._lag(progress),
                    seconds=progress["durationMs"].get("triggerExecution", 0) / 1000,
                    failed=counts.failed,
                    late=late_rows(progress),
                )
            )

    def _lag(self, progress: Any) -> int:
        """The lag; a source in two branches of Spark's plan counts once."""
        if self._source_names is None or None in self._source_names:
            # The order does not change during a run.
            ends = [offsets_of(source["endOffset"]) for source in progress["sources"]]
            self._source_names = match_positions(self._pipeline, ends)
        return behind(progress, self._source_names) + unreported_rows(self._pipeline, progress, self._source_names)

    def _emit(self, report: BatchReport) -> None:
        logger.info("%s", report)
        for callback in (self._pipeline.on_batch, self._on_batch):
            try:
                if callback is not None:
                    callback(report)
            except Exception:
                # A failing callback does not stop the pipeline.
                logger.exception("on_batch failed for batch %d of %s", report.batch, report.pipeline)


def session_for(pipeline: Pipeline, spark: SparkSession | None) -> SparkSession:
    """The session of a run: the given one, the active one, or a new one with the settings of the pipeline."""
    if spark is not None:
        return register(spark)
    return session(pipeline.name, master=pipeline.master, config=pipeline.config)


def build_stream(
    pipeline: Pipeline,
    spark: SparkSession,
    topic_ids: TopicIds | None = None,
    places: Mapping[str, Accumulator[Places]] | None = None,
) -> DataFrame:
    """The rows of a pipeline for its sinks, as a streaming frame. Starts nothing.

    :param topic_ids: the topic ids of its checkpoint; None if the stream will not be started.
    :param places: notes the places of dead rows, by source; None if the stream will not be started.
    :raises ConfigurationError: transform or SQL cannot be used, or a sink cannot take the rows.
    :raises Unsupported: the session is one of Spark Connect.
    """
    check_classic(spark)
    writes_topics = any(isinstance(sink, TopicSink) for sink in pipeline.sinks.values())
    # The ids of messages have the numbers of their tasks.
    unless = "a sink is a topic, and the connector may give tasks other numbers when a batch runs again"
    sources: dict[str, DataFrame] = {}
    for name, source in pipeline.sources.items():
        options, parsed = pipeline.source_options(name), pipeline.parsed_options(name)
        if source.writes_letters:
            options["columns"] = ",".join(dict.fromkeys((*parsed.columns, *origin_of(parsed))))
        with errors_of(f"sources.{name}"):
            sources[name], by_connector = pipeline_stream(spark, unless=unless if writes_topics else "", **options)
            if by_connector and topic_ids is not None:
                topic_ids.watch(name, parsed)
    rows = stream_of(pipeline, sources, dead_places(pipeline, spark) if places is None else places)
    check_rows(pipeline, rows)
    return rows


def dead_places(pipeline: Pipeline, spark: SparkSession) -> dict[str, Accumulator[Places]]:
    """Accumulators of the places of dead rows, by source."""
    return {
        name: spark.sparkContext.accumulator(Places(), DeadPlaces())
        for name, source in pipeline.sources.items()
        if source.decode is not None
    }


def check_classic(spark: SparkSession) -> None:
    """:raises Unsupported: the session is one of Spark Connect."""
    if not hasattr(spark, "_jvm"):
        # Spark Connect would run the batches in the server, without the state of this process.
        raise Unsupported(
            "A pipeline runs in the driver of Spark, and this session is one of Spark Connect",
            advice="Give it a classic session, for instance by spark-submit; sources, sinks and decode work with both",
        )


def _check_name_is_free(spark: SparkSession, name: str) -> None:
    """:raises ConfigurationError: a query of this session has the name."""
    if any(query.name == name for query in spark.streams.active):
        raise ConfigurationError(
            f"name is {name!r}, and a query of this name runs in this session",
            advice="Stop that query or wait for its end; another pipeline needs another name and another checkpoint",
        )


def _stop_query(spark: SparkSession, query: StreamingQuery) -> None:
    """Stop a query. Spark cancels its jobs only once, so jobs that the batch starts later are cancelled here."""
    with ThreadPoolExecutor(1, "broker-pipeline-stop") as pool:
        stopping = pool.submit(query.stop)
        while wait((stopping,), _POLL_SECONDS).not_done:
            spark.sparkContext.cancelJobGroup(str(query.runId))
        stopping.result()


def _check_completed(pipeline: Pipeline, query: StreamingQuery) -> None:
    """Check that a query which ended by itself had read everything.

    :raises ConfigurationError: it was stopped from outside.
    """
    if pipeline.trigger == AVAILABLE_NOW and _found_no_more(query):
        return
    raise ConfigurationError(
        f"The query was stopped from outside, or by another run on checkpoint {mask_within(pipeline.checkpoint)!r}",
        advice="Use a checkpoint in one run at a time; the next run continues after the last committed batch",
    )


def _found_no_more(query: StreamingQuery) -> bool:
    """Whether the query's last trigger found no new data, which its progress does not show."""
    inner: Any = query
    try:
        return bool(inner._jsq.streamingQuery().noNewData())
    except Py4JError:
        # Not a public API of Spark. If it is missing, assume that everything was read.
        return True


@contextmanager
def _stopped_by_signals(stop: Callable[[], object]) -> Generator[None]:
    """SIGTERM and SIGINT call `stop` within the block. Does nothing outside of the main thread."""
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
