"""Reports the plan and the progress of a pipeline. Blocking; changes nothing.

`status` reads the checkpoint and asks the brokers, without Spark. `explain` needs a session and starts no stream.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pyarrow import fs
from pyspark.sql import SparkSession

from broker.blocking import Bus
from broker.errors import BrokerError, ConfigurationError
from broker.urls import mask_url, mask_within
from broker_spark.common.connections import bus_of
from broker_spark.common.files import hdfs_advice, masked_reason, open_files
from broker_spark.common.json_state import parse_object
from broker_spark.common.offsets import Offsets
from broker_spark.common.options import find_url
from broker_spark.common.topics import identity_of
from broker_spark.decode.decoding import codec_of, payload_schema
from broker_spark.pipeline.backlog import match_positions, waiting_rows
from broker_spark.pipeline.definition import CallSink, FileSink, Pipeline, Sink, TableSink, TopicSink, named_columns
from broker_spark.pipeline.running import build_stream
from broker_spark.progress import offsets_of
from broker_spark.spool.positions import SPOOL_SOURCE, SpoolPosition, rows_behind

__all__ = ["Place", "Queue", "Status", "explain", "parts", "status", "unchecked"]


@dataclass(frozen=True, slots=True)
class Place:
    """How far one partition was read.

    :ivar next: the next offset to read.
    :ivar end: the offset after the last record; None if unknown.
    :ivar log: the same for all partitions that share their offsets, so that their lag counts once; else "".
    """

    topic: str
    partition: int
    next: int
    end: int | None
    log: str = ""

    @property
    def lag(self) -> int | None:
        """Offsets behind the end, at most as many rows."""
        return None if self.end is None else max(0, self.end - self.next)


@dataclass(frozen=True, slots=True)
class Queue:
    """How far one subscription was read.

    :ivar source: its name in the pipeline.
    :ivar next: the number of the next segment of the spool to read.
    :ivar spooled: rows that are received and not in a committed batch.
    :ivar waiting: messages at the broker, including leased ones; None if unknown.
    """

    source: str
    subscription: str
    next: int
    spooled: int
    waiting: int | None

    @property
    def lag(self) -> int | None:
        """At most how many messages are not in a committed batch: a spooled message may not be acked yet."""
        return None if self.waiting is None else self.spooled + self.waiting


@dataclass(frozen=True, slots=True)
class Status:
    """The progress of a pipeline.

    :ivar committed: the last committed batch, which all sinks have; None if there is none.
    :ivar planned: a batch that was planned and not committed: the next run starts with it.
    :ivar places: the partitions that are read by position.
    :ivar queues: the subscriptions.
    :ivar problem: why the lag is unknown; "" if it is known.
    """

    pipeline: str
    checkpoint: str
    committed: int | None
    planned: int | None
    places: list[Place] = field(default_factory=list[Place])
    queues: list[Queue] = field(default_factory=list[Queue])
    problem: str = ""

    @property
    def lag(self) -> int | None:
        """The lag of all partitions and subscriptions; None if one is unknown."""
        found = [each.lag for each in (*self.places, *self.queues)]
        if None in found or self.problem:
            return None
        total = sum(each.lag or 0 for each in (*self.places, *self.queues) if isinstance(each, Queue) or not each.log)
        for log in {each.log for each in self.places if each.log}:
            late = [each for each in self.places if each.log == log and each.lag]
            total += max((each.end or 0 for each in late), default=0) - min((each.next for each in late), default=0)
        return total


def status(pipeline: Pipeline) -> Status:
    """The last committed batch of a pipeline, its positions and its lag.

    :raises ConfigurationError: the checkpoint cannot be read, or belongs to no pipeline.
    :raises OSError: the spool of a source cannot be read.
    """
    try:
        files, root = _file_system(pipeline.checkpoint)
        commits, offsets = (_numbers(files, f"{root}/{name}") for name in ("commits", "offsets"))
        committed = max(commits, default=None)
        planned = next(
            (number for number in sorted(offsets) if number not in commits and number > (committed or -1)), None
        )
        if committed is None:
            return Status(pipeline.name, mask_within(pipeline.checkpoint), None, planned)
        with files.open_input_stream(f"{root}/offsets/{committed}") as file:
            lines = file.read().decode().splitlines()
    except (OSError, ValueError) as error:
        shown = mask_within(pipeline.checkpoint)
        raise ConfigurationError(
            f"The checkpoint {shown!r} cannot be read: {masked_reason(error, pipeline.checkpoint)}",
            advice=hdfs_advice(error, "Run where the checkpoint is readable, with the libraries of its file system"),
        ) from error
    positions, spools = _positions(lines, f"{mask_within(pipeline.checkpoint)}/offsets/{committed}")
    places: list[Place] = []
    queues, problems = _queues(pipeline, spools)
    names = match_positions(pipeline, positions)
    for number, (found, name) in enumerate(zip(positions, names, strict=True)):
        # Spark keeps a line for each branch of its plan, and a source may be in two.
        if name is not None and name in names[:number]:
            continue
        for topic, kept in found.topics.items():
            known: Mapping[int, int] = {}
            try:
                if name is None:
                    problems.append(f"No source of the pipeline reads {topic!r}, which the checkpoint has")
                else:
                    known = _ends(bus_of(pipeline.parsed_options(name).url), found, topic)
            except BrokerError as error:
                problems.append(str(error))
            log = f"{number} {topic}" if found.shared else ""
            places += [Place(topic, each, at, known.get(each), log) for each, at in sorted(kept.next.items())]
    for name in pipeline.sources:
        if name not in names and pipeline.parsed_options(name).subscription is None:
            problems.append(f"sources.{name}: The checkpoint has no position of it")
    problem = "; ".join(dict.fromkeys(problems))
    return Status(pipeline.name, mask_within(pipeline.checkpoint), committed, planned, places, queues, problem)


def parts(pipeline: Pipeline) -> list[tuple[str, str]]:
    """The parts of a pipeline as names and descriptions, without secrets. No I/O."""
    found = [("name", pipeline.name)]
    for name, source in pipeline.sources.items():
        options = pipeline.source_options(name)
        url = mask_url(find_url(options.pop("url", None)))
        found.append((f"sources.{name}", f"{_describe(options)} of {url}"))
        decode = source.decode
        text = "value as it is" if decode is None else f"{codec_of(decode)!r}: {payload_schema(decode).simpleString()}"
        found.append((f"sources.{name}.decode", text))
        found += [
            (f"sources.{name}.expect.{each}", f"{' '.join(expect.condition.split())}, {expect.action}")
            for each, expect in source.expect.items()
        ]
    if pipeline.sql is not None:
        found.append(("sql", " ".join(pipeline.sql.split())))
    elif pipeline.transform is not None:
        found.append(("transform", f"{pipeline.transform.__module__}:{pipeline.transform.__qualname__}"))
    found += [(name, _sink(pipeline, sink)) for name, sink in pipeline.all_sinks().items()]
    found.append(("trigger", pipeline.trigger or "the next batch at once"))
    found.append(("output_mode", pipeline.output_mode))
    return [*found, ("checkpoint", mask_within(pipeline.checkpoint))]


def unchecked(pipeline: Pipeline) -> list[str]:
    """The settings with columns or conditions that only Spark can check, such as `sinks.large.key`."""
    known = pipeline.known_columns() is not None
    found = [f"sources.{name}.expect.{each}" for name, source in pipeline.sources.items() for each in source.expect]
    for name, sink in pipeline.all_sinks().items():
        key = isinstance(sink, TopicSink) and sink.key is not None and not known
        columns = [] if known and name != "dead_letters" else list(named_columns(sink))
        given = [*(["key"] if key else []), *columns, *(["where"] if sink.where else [])]
        found += [f"{name}.{setting}" for setting in given]
    return found


def explain(pipeline: Pipeline, spark: SparkSession) -> str:
    """Spark's plan of the stream, and the schema of the rows for the sinks.

    :raises ConfigurationError: a part cannot be used.
    """
    frame = build_stream(pipeline, spark)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        # Spark takes the frame of a query in SQL, as it is, for one without streams.
        frame.select("*").explain("formatted")
    return f"Rows: {frame.schema.simpleString()}\n\n{text.getvalue().strip()}"


_ADVICE: Final = "Restore the checkpoint, or begin a new one"
_ONCE: Final = "each row once"


def _sink(pipeline: Pipeline, sink: Sink) -> str:
    where = f", where {sink.where}" if sink.where else ""
    match sink:
        case TopicSink():
            options = pipeline.sink_options(sink)
            url = mask_url(find_url(options.pop("url", None)))
            key = f", key {sink.key}" if sink.key else ""
            text = f"{_describe(options)} of {url}{key}, by deterministic ids"
        case FileSink():
            by = f", by {', '.join(sink.partition_by)}" if sink.partition_by else ""
            text = f"{sink.format} in {mask_within(sink.path)}/batch=N{by}, {_ONCE}"
        case TableSink():
            by = f", merged by {', '.join(sink.merge_by)}" if sink.merge_by else ""
            latest = f", latest by {', '.join(sink.order_by)}" if sink.order_by else ""
            text = f"{'Delta ' if sink.is_delta else ''}table {sink.table}{by}{latest}, {_ONCE}"
        case CallSink():
            text = f"function {getattr(sink.call, '__qualname__', sink.call)}, each batch at least once"
    return text + where


def _describe(options: Mapping[str, str]) -> str:
    rest = ", ".join(f"{name}={mask_within(value)}" for name, value in sorted(options.items()) if name != "topic")
    topic = f"topic {options['topic']}" if "topic" in options else "topics"
    return f"{topic} ({rest})" if rest else topic


def _file_system(checkpoint: str) -> tuple[Any, str]:
    if "://" in checkpoint or checkpoint.startswith("file:"):
        # Hadoop has three schemes for S3, Arrow one.
        return fs.FileSystem.from_uri(re.sub("^s3[an]://", "s3://", checkpoint, flags=re.IGNORECASE))
    return fs.LocalFileSystem(), checkpoint.rstrip("/")


def _numbers(files: Any, directory: str) -> set[int]:
    found = files.get_file_info(fs.FileSelector(directory, allow_not_found=True))
    return {int(info.base_name) for info in found if info.base_name.isdecimal()}


def _positions(lines: list[str], file: str) -> tuple[list[Offsets], list[SpoolPosition]]:
    """The positions of logs and of spools.

    :param lines: a version, Spark's metadata, and a line for each source.
    :raises ConfigurationError: a line is incomplete, or of a newer version.
    """
    logs: list[Offsets] = []
    spools: list[SpoolPosition] = []
    for number, line in enumerate(lines[2:], 3):
        where = f"{file}, line {number}"
        try:
            if SPOOL_SOURCE in line:
                spools.append(SpoolPosition.from_json(parse_object(line, where, _ADVICE)))
                continue
            # The connector's positions for a pattern that matches nothing.
            found = Offsets("kafka", {}) if line == "{}" else offsets_of(_positions_in(line, where))
        except ConfigurationError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{where} is incomplete: it holds no positions", advice=_ADVICE) from error
        if found is not None:
            logs.append(found)
    return logs, spools


def _positions_in(line: str, where: str) -> Mapping[str, Any] | None:
    """The object in a line; None if another kind of source wrote the line, such as a number."""
    return parse_object(line, where, _ADVICE) if line.startswith("{") else None


def _ends(bus: Bus, found: Offsets, topic: str) -> dict[int, int]:
    """The ends of the partitions.

    :raises ConfigurationError: the positions belong to another backend or topic, or the topic was recreated.
    """
    identities = {topic: identity_of(bus, topic)}
    Offsets(found.backend, {topic: found.topics[topic]}).check(bus.capabilities.backend, identities, named=False)
    return {partition: each.next for partition, each in bus.log.bounds(topic).items()}


def _queues(pipeline: Pipeline, positions: list[SpoolPosition]) -> tuple[list[Queue], list[str]]:
    """The subscriptions, and why the progress of some is unknown."""
    found: list[Queue] = []
    problems: list[str] = []
    for name in pipeline.sources:
        options = pipeline.parsed_options(name)
        if options.subscription is None:
            continue
        files = open_files(options.spool)
        for position in positions:
            spooled = rows_behind(files, mask_within(options.spool), position)
            if spooled is not None:
                break
        else:
            problems.append(f"sources.{name}: {mask_within(options.spool)} is not the spool of the checkpoint")
            continue
        waiting = None
        try:
            waiting = waiting_rows(options)
        except BrokerError as error:
            problems.append(str(error))
        found.append(Queue(name, options.subscription, position.next, spooled, waiting))
    return found, problems
