"""Replays of a pipeline: a range of its topics as one batch, into places of its own.

A replay neither overwrites what the pipeline wrote nor touches its checkpoint, so it may run beside the pipeline. Its
sinks belong to its name as those of a pipeline belong to a query: a replay that runs again under its name replaces what
it wrote, and any other is refused.

*Concurrency.* Blocking; driver only. `Replay.stop` and `Replay.progress` may be called from any thread.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from pyspark.sql import Observation, SparkSession

from broker.errors import ConfigurationError
from broker.hooks import logger
from broker_spark.checkpoint.checkpoint_log import CheckpointLog
from broker_spark.common.connections import bus_of
from broker_spark.common.options import Position, plain_name
from broker_spark.common.schema import spark_schema
from broker_spark.log.ranges import Range
from broker_spark.log.reading import read_range
from broker_spark.pipeline.backlog import match_positions
from broker_spark.pipeline.batch import Batch
from broker_spark.pipeline.batch_ranges import BatchRanges, OffsetRange
from broker_spark.pipeline.definition import FileSink, Pipeline, Sink, Source, TableSink, errors_of
from broker_spark.pipeline.frames import counts_of, metrics_of_batch, stream_of
from broker_spark.pipeline.letters import origin_of, read_in_tasks
from broker_spark.pipeline.log_ranges import SourceLogs, as_position, check_named, logs_of, ranges_of
from broker_spark.pipeline.preflight import check_rows, check_topics, try_sinks
from broker_spark.pipeline.running import BatchReport, check_classic, dead_places, session_for
from broker_spark.pipeline.writing import claim
from broker_spark.progress import offsets_of
from broker_spark.runtime.spark_errors import broker_error_in

__all__ = ["Replay", "replay"]

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_QUEUE_ONLY: Final = frozenset({"subscription", "spool", "aheadrows", "aheadbytes", "tasks"})
"""Options of a source that a read of its log does not have."""
_LATEST: Final = Position("latest")
_BATCH: Final = 0


def replay(
    pipeline: Pipeline, *, name: str, start: Any, end: Any = None, spark: SparkSession | None = None
) -> BatchReport:
    """Read a range of the topics of a pipeline again, as one batch, into places of its own.

    Files go to `PATH-NAME/batch=0`, tables are `TABLE_NAME`, topics are those of the pipeline, and functions are called
    with batch 0; dead letters likewise. Run again under the same name, it replaces these, and publishes the same ids.

    :param name: of the replay: a letter, then letters, digits, - and _.
    :param start: "earliest", a time or offsets, as option `start` of a source takes it.
    :param end: likewise; None: where the next batch of the pipeline begins, or now if no batch is committed. For a
        source with a subscription None means now.
    :param spark: None uses the active session, or a new one.
    :raises ConfigurationError: the name, a position or a part of the pipeline cannot be used, or another query or
        replay owns a directory or table.
    :raises Unsupported: a broker has no log, or the session is one of Spark Connect.
    :raises BrokerError: a broker failed; run the replay again under its name.
    """
    return Replay(pipeline, session_for(pipeline, spark), name=name, start=start, end=end).execute()


class Replay:
    """A replay that is planned: positions are offsets. Creating it writes nothing. For parameters and errors see
    `replay`.

    :ivar name: its name.
    :ivar pipeline: the pipeline with the sinks of the replay.
    :ivar ranges: what it reads, by source.
    """

    def __init__(self, pipeline: Pipeline, spark: SparkSession, *, name: str, start: Any, end: Any = None) -> None:
        if not isinstance(cast("object", name), str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"name is {name!r}", advice="It takes a letter, then letters, digits, _ and -, 64 at most"
            )
        check_classic(spark)
        begin = as_position("start", start)
        until = None if end is None else as_position("end", end)
        sources = logs_of(pipeline)
        check_named("start", begin, sources)
        if until is not None:
            check_named("end", until, sources)
        committed = _committed(pipeline, spark, sources) if until is None else {}
        self.name = name
        self.pipeline = _moved(pipeline, name)
        self.ranges: Mapping[str, Sequence[Range]] = {
            each.source: ranges_of(
                each, begin, until or committed.get(each.source, _LATEST), tasks=each.options.tasks_per_partition
            )
            for each in sources
        }
        self._spark = spark
        self._sources = sources
        # The id by which its sinks know it, as they know a stream by that of its query.
        self._id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"anybroker:{pipeline.name}/{name}"))
        self._group = f"replay {uuid.uuid4()}"

    def execute(self) -> BatchReport:
        """Read, transform and write. Returns when all sinks have the rows."""
        context, session = self._spark.sparkContext, cast("Any", self._spark)
        # Spark looks for the sources of a session in the active one of the thread, and a new thread has none.
        session._jvm.SparkSession.setActiveSession(session._jsparkSession)
        context.setJobGroup(self._group, f"replay {self.name} of {self.pipeline.name}", interruptOnCancel=True)
        try:
            report = self._execute()
        except Exception as error:
            if (known := broker_error_in(error)) is not None:
                raise known from error
            raise
        finally:
            # The caller's next jobs in this thread are none of the replay.
            cast("Any", context)._jsc.clearJobGroup()
        logger.info("%s", report)
        return report

    def _execute(self) -> BatchReport:
        pipeline, spark = self.pipeline, self._spark
        begun = time.monotonic()
        places = dead_places(pipeline, spark)
        counts = {name: Observation() for name in pipeline.sources}
        out = stream_of(pipeline, {each.source: self._read(each) for each in self._sources}, places, counts)
        check_rows(pipeline, out)
        check_topics(pipeline)
        try_sinks(pipeline, out)
        claim(pipeline, spark, self._id)
        batch = Batch(pipeline, _BATCH, self._id, self._batch_ranges, again=True, replaces=True)
        written = batch.write_rows(out)
        metrics = metrics_of_batch(spark, counts)
        batch.write_letters(spark, {name: each.value for name, each in places.items()}, metrics)
        found = counts_of(pipeline, metrics)
        return BatchReport(
            pipeline=f"{pipeline.name}, replay {self.name}",
            batch=_BATCH,
            rows_in=found.read,
            rows_out=written,
            dead=found.dead,
            lag=0,
            seconds=time.monotonic() - begun,
            failed=found.failed,
        )

    def _batch_ranges(self) -> BatchRanges:
        found: dict[tuple[str, str, int], tuple[int, int]] = {}
        for source, parts in self.ranges.items():
            for each in parts:
                place = source, str(each.topic), each.partition
                first, end = found.get(place, (each.start, each.stop))
                found[place] = min(first, each.start), max(end, each.stop)
        return BatchRanges([OffsetRange(*place, *span) for place, span in found.items()], [])

    def stop(self) -> None:
        """Cancel the jobs of `execute`, also those to come: it raises. What is written stays, for the next run."""
        cast("Any", self._spark.sparkContext)._jsc.sc().cancelJobGroupAndFutureJobs(self._group)

    def progress(self) -> tuple[int, int]:
        """How many tasks of the current jobs are done, and how many there are."""
        tracker: Any = self._spark.sparkContext.statusTracker()
        done = total = 0
        for job in tracker.getJobIdsForGroup(self._group):
            found = tracker.getJobInfo(job)
            for stage in found.stageIds if found is not None else ():
                tasks = tracker.getStageInfo(stage)
                if tasks is not None:
                    done, total = done + tasks.numCompletedTasks, total + tasks.numTasks
        return done, total

    def _read(self, source: SourceLogs) -> Any:
        """The rows of the ranges of a source, each range in a task."""
        columns = source.options.columns
        if self.pipeline.sources[source.source].writes_letters:
            columns = tuple(dict.fromkeys((*columns, *origin_of(source.options))))
        options = replace(source.options, columns=columns)
        parts = self.ranges[source.source]
        return read_in_tasks(self._spark, parts, partial(read_range, options), spark_schema(columns))


def _committed(
    pipeline: Pipeline, spark: SparkSession, sources: Sequence[SourceLogs]
) -> dict[str, Mapping[str, Mapping[int, int]]]:
    """Where the next batch of the pipeline begins, by source, topic and partition.

    :raises ConfigurationError: the checkpoint cannot be read, or a topic was recreated.
    """
    log = CheckpointLog(spark, pipeline.checkpoint)
    last = max(log.batches("commits"), default=None)
    if last is None:
        return {}
    positions = [offsets_of(each) for each in log.positions(last)]
    logs = {each.source: each for each in sources}
    found: dict[str, Mapping[str, Mapping[int, int]]] = {}
    for position, name in zip(positions, match_positions(pipeline, positions), strict=True):
        if position is None or name is None:
            continue
        identities = {each.name: each.identity for each in logs[name].logs}
        with errors_of(f"sources.{name}"):
            position.check(bus_of(logs[name].options.url).capabilities.backend, identities, named=False)
        found[name] = {topic: kept.next for topic, kept in position.topics.items()}
    return found


def _moved(pipeline: Pipeline, name: str) -> Pipeline:
    """The pipeline with the sinks of a replay, and without subscriptions."""
    return replace(
        pipeline,
        sources={key: _as_log(each) for key, each in pipeline.sources.items()},
        sinks={key: _moved_sink(each, name) for key, each in pipeline.sinks.items()},
        dead_letters=None if pipeline.dead_letters is None else _moved_sink(pipeline.dead_letters, name),
    )


def _as_log(source: Source) -> Source:
    return replace(
        source, options={key: value for key, value in source.options.items() if plain_name(key) not in _QUEUE_ONLY}
    )


def _moved_sink(sink: Sink, name: str) -> Sink:
    match sink:
        case FileSink(path=path):
            return replace(sink, path=_beside(path, name))
        case TableSink(table=table, options=options):
            quote = "`" if table.endswith("`") else ""
            moved = {key: _beside(str(each), name) if key.lower() == "path" else each for key, each in options.items()}
            return replace(sink, table=f"{table.removesuffix(quote)}_{name.replace('-', '_')}{quote}", options=moved)
        case _:
            return sink


def _beside(path: str, name: str) -> str:
    return f"{path.rstrip('/')}-{name}"
