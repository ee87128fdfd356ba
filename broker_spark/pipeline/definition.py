"""The parts of a pipeline: sources, transform, sinks, dead letters, checkpoint. Values only, no I/O.

`Pipeline` checks all of them when it is created: an error names the part, the value and the fix.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StructField, StructType

from broker.errors import ConfigurationError
from broker_spark.common.options import (
    CONNECTORS,
    SourceOptions,
    as_texts,
    find_url,
    is_spark_option,
    parse_choice,
    plain_name,
    topic_name,
)
from broker_spark.common.schema import nearest
from broker_spark.decode.decoding import PAYLOAD, payload_schema
from broker_spark.pipeline.expectations import Expect, check_expectation, writes_letters
from broker_spark.sink.sink import SinkOptions

__all__ = [
    "AVAILABLE_NOW",
    "BATCH",
    "DELTA",
    "CallSink",
    "FileSink",
    "Pipeline",
    "Sink",
    "Source",
    "TableSink",
    "TopicSink",
    "absolute",
    "check_key",
    "errors_of",
    "is_whole",
    "named_columns",
]


def is_whole(path: str) -> bool:
    """Whether a path is absolute, a URI (also one such as `file:/data`) or empty."""
    return not path or path.startswith("/") or ":" in path.partition("/")[0]


def absolute(path: Any) -> Any:
    """A path made absolute, since Spark's JVM may have another working directory."""
    path = str(path) if isinstance(path, Path) else path
    return path if not isinstance(path, str) or is_whole(path) else str(Path(path).absolute())


def _same_path(path: str) -> str:
    """A normal form of a directory, which is a prefix of that of each subdirectory."""
    scheme, colon, rest = path.rpartition("://")
    if not colon:
        scheme, rest = "", path.removeprefix("file:")
    scheme = {"file": "", "s3a": "s3", "s3n": "s3"}.get(scheme.lower(), scheme.lower())
    return f"path {scheme}:{posixpath.normpath(f'/{rest}').lstrip('/')}/"


def _same_table(table: str) -> str:
    """A normal form of a table name, for a session with the default database."""
    name = table.replace("`", "").lower().removeprefix("spark_catalog.").removeprefix("default.")
    return f"table {name} "


AVAILABLE_NOW: Final = "available-now"
"""The trigger of a run that ends where the topics ended at its start."""

BATCH: Final = "batch"
"""The column and directory that holds a batch's number in files and tables."""

DELTA: Final = "delta"
"""The format of the tables of Delta Lake."""

Transform = Callable[..., DataFrame]
"""Takes the frame of the only source, or one keyword argument per source; returns the rows for the sinks."""

_INTERVAL: Final = re.compile(r"[0-9]{1,9} *(milliseconds?|seconds?|minutes?|hours?)")
_MESSAGES: Final = StructType([StructField("value", BinaryType())])
_OWN_OPTIONS: Final = ("ids", "writeId")
"""Options of a topic sink that the pipeline sets itself."""
_TOPIC_SINK: Final = ("topic", "key", "where", "url", "keepPartition")
"""Fields and options of a `TopicSink`."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_LABEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Source:
    """Topics to read.

    :ivar topic: one topic, or several separated by commas; "" with option `topicPattern`.
    :ivar decode: a class or a codec, as `decode` takes it: column `value` becomes `payload`, and rows that do not
        decode go to the dead letters. None leaves `value` as it is.
    :ivar url: its broker; None uses that of the pipeline.
    :ivar options: other options of `format("broker")`, such as `maxRows`, and `connector` of
        `broker_spark.read_stream`.
    :ivar expect: what its rows should fulfil after decode, by name.
    """

    topic: str = ""
    decode: Any = None
    url: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    expect: Mapping[str, Expect] = field(default_factory=dict[str, Expect])

    @property
    def writes_letters(self) -> bool:
        """Whether some rows of it may become dead letters."""
        return self.decode is not None or writes_letters(self.expect)


@dataclass(frozen=True, slots=True)
class TopicSink:
    """Rows become messages of a topic, with deterministic ids: once each where the broker deduplicates.

    Rows with a column `value` are messages already; others become JSON objects.

    :ivar key: the column whose text becomes the key; only for rows that become JSON.
    :ivar where: a SQL condition: only these rows.
    """

    topic: str
    key: str | None = None
    where: str | None = None
    url: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)


@dataclass(frozen=True, slots=True)
class FileSink:
    """Rows become files in `path/batch=N`, which are replaced when a batch runs again: exactly once.

    :ivar partition_by: columns that become subdirectories.
    """

    path: str = field(repr=False)
    format: str = "parquet"
    partition_by: Sequence[str] = ()
    where: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute(self.path))


@dataclass(frozen=True, slots=True)
class TableSink:
    """Rows go into a table, each once.

    A table has a partition `batch`, which is replaced when a batch runs again. A Delta table has none: its log knows
    which batches it has, and a batch that it has is not written again. Several pipelines may write to a Delta table.

    :ivar merge_by: columns that are the key, for a Delta table: a row replaces the row with its key, if there is one.
    :ivar order_by: of rows of one batch with the same key, the one with the greatest values in these columns is
        written; without it, two such rows raise.
    """

    table: str
    format: str = "parquet"
    where: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    merge_by: Sequence[str] = ()
    order_by: Sequence[str] = ()

    @property
    def is_delta(self) -> bool:
        """Whether this is a table of Delta Lake."""
        return self.format.lower() == DELTA


@dataclass(frozen=True, slots=True)
class CallSink:
    """A function that is called with each batch and its number, at least once, with the same rows each time."""

    call: Callable[[DataFrame, int], object]
    where: str | None = None


Sink = TopicSink | FileSink | TableSink | CallSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Topics in, typed rows through a transform, rows out: a stream of Spark with one checkpoint.

    :ivar name: its name in logs and ids.
    :ivar sources: by name.
    :ivar sinks: by name; each gets every row of a batch before the batch is committed.
    :ivar checkpoint: a directory that the driver and all executors see, for the pipeline's positions.
    :ivar transform: called once, when the stream is created; None leaves the rows unchanged.
    :ivar sql: instead of `transform`: a query on the names of the sources.
    :ivar dead_letters: the sink for rows that do not decode, or fail an expectation with the action "dead"; required
        with either.
    :ivar url: the broker of all parts without one; None uses BROKER_URL.
    :ivar trigger: "" starts the next batch at once, "10 seconds" in this interval; "available-now" ends when everything
        that was there at the start is read.
    :ivar output_mode: "update" writes aggregates that have no watermark.
    :ivar on_batch: called with the `BatchReport` of each committed batch, for metrics; its exceptions are logged.
    :ivar master: where Spark runs, if this pipeline creates the session.
    :ivar config: settings of Spark, if this pipeline creates the session.
    :raises ConfigurationError: a part is wrong; the error names it.
    """

    name: str
    sources: Mapping[str, Source]
    sinks: Mapping[str, Sink]
    checkpoint: str = field(repr=False)
    transform: Transform | None = None
    sql: str | None = None
    dead_letters: Sink | None = None
    url: str | None = field(default=None, repr=False)
    trigger: str = ""
    output_mode: Literal["append", "update"] = "append"
    on_batch: Callable[[Any], object] | None = None
    master: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoint", absolute(self.checkpoint))
        self._check_kinds()
        self._check_names()
        if not self.sources or not self.sinks:
            _wrong("sources" if not self.sources else "sinks", {}, "one or more, by name")
        if self.url is not None:
            with errors_of("url"):
                find_url(self.url)
        if not self.checkpoint:
            _wrong("checkpoint", self.checkpoint, "a directory that the driver and all executors see")
        if self.transform is not None and self.sql is not None:
            raise ConfigurationError("transform and sql are both given", advice="Give one of them")
        if self.transform is None and self.sql is None and len(self.sources) > 1:
            raise ConfigurationError(
                f"There are {len(self.sources)} sources, and no transform that joins them",
                advice="Give transform or sql",
            )
        if self.transform is not None:
            self._check_transform(self.transform)
        if self.trigger not in ("", AVAILABLE_NOW) and not _INTERVAL.fullmatch(self.trigger):
            _wrong("trigger", self.trigger, f'"", "{AVAILABLE_NOW}" or an interval such as "10 seconds"')
        if self.on_batch is not None and not callable(self.on_batch):
            _wrong("on_batch", self.on_batch, "a function of a BatchReport")
        if self.output_mode not in ("append", "update"):
            _wrong("output_mode", self.output_mode, "append or update")
        for name, source in self.sources.items():
            with errors_of(f"sources.{name}"):
                self.parsed_options(name)
                _check_options(source.options)
                if source.decode is not None:
                    payload_schema(source.decode)
                    if self.dead_letters is None:
                        raise ConfigurationError(
                            "It has decode, but the pipeline has no dead_letters",
                            advice="Give dead_letters a topic, a path or a table, for rows that do not decode",
                        )
            self._check_expectations(name, source.expect)
        columns = self.known_columns()
        for name, sink in self.all_sinks().items():
            with errors_of(name):
                self._check_sink(sink)
                if columns is not None and name != "dead_letters":
                    _check_columns_of(sink, columns)
        self._check_targets()
        self._check_letters()

    def all_sinks(self) -> dict[str, Sink]:
        """The sinks by their names in errors and tables, dead letters last."""
        found: dict[str, Sink] = {f"sinks.{name}": sink for name, sink in self.sinks.items()}
        return found if self.dead_letters is None else {**found, "dead_letters": self.dead_letters}

    def known_columns(self) -> Sequence[str] | None:
        """The columns of the rows for the sinks; None if only Spark knows what the transform or the SQL returns."""
        if self.transform is not None or self.sql is not None:
            return None
        ((name, source),) = self.sources.items()
        columns = self.parsed_options(name).columns
        return columns if source.decode is None else [*(each for each in columns if each != "value"), PAYLOAD]

    def source_options(self, name: str) -> dict[str, str]:
        """The options of `broker_spark.read_stream` for a source."""
        source = self.sources[name]
        options = as_texts(source.options)
        if source.topic:
            options["topic"] = source.topic
        url = source.url or self.url
        return options if url is None else {**options, "url": url}

    def parsed_options(self, name: str) -> SourceOptions:
        """The same, checked.

        :raises ConfigurationError: one cannot be used.
        """
        options = self.source_options(name)
        parse_choice("connector", options.pop("connector", CONNECTORS[0]), CONNECTORS)
        return SourceOptions.parse(options).for_stream()

    def sink_options(self, sink: TopicSink) -> dict[str, str]:
        """The options of `write.format("broker")` for a sink."""
        options = as_texts(sink.options) | {"topic": sink.topic}
        url = sink.url or self.url
        return options if url is None else {**options, "url": url}

    def _check_kinds(self) -> None:
        """Check types at run time."""
        sources: Any = self.sources if isinstance(cast("object", self.sources), Mapping) else {}
        parts: tuple[tuple[str, Any, type, str], ...] = (
            ("name", self.name, str, "text"),
            ("sources", self.sources, Mapping, "Sources by name"),
            ("sinks", self.sinks, Mapping, "sinks by name"),
            ("checkpoint", self.checkpoint, str, "a directory that the driver and all executors see"),
            ("trigger", self.trigger, str, f'"", "{AVAILABLE_NOW}" or an interval such as "10 seconds"'),
            *((f"sources.{name}", each, Source, "a Source") for name, each in sources.items()),
        )
        for name, value, kind, takes in parts:
            if not isinstance(value, kind):
                _wrong(name, value, takes)

    def _check_expectations(self, source: str, expect: Any) -> None:
        if not isinstance(expect, Mapping):
            _wrong(f"sources.{source}.expect", expect, "Expects by name")
        for name, each in cast("Mapping[Any, Any]", expect).items():
            with errors_of(f"sources.{source}.expect.{name}"):
                check_expectation(name, each)
                if each.action == "dead" and self.dead_letters is None:
                    raise ConfigurationError(
                        "action is 'dead', but the pipeline has no dead_letters",
                        advice="Give dead_letters a topic, a path or a table; or use the action count or drop",
                    )

    def _check_transform(self, transform: Any) -> None:
        if not callable(transform):
            _wrong("transform", transform, "a function of the frames of the sources")
        try:
            signature = inspect.signature(transform)
        except ValueError:
            # Some C functions have no signature.
            return
        names = list(self.sources)
        try:
            signature.bind(None) if len(names) == 1 else signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigurationError(
                f"transform is {getattr(transform, '__qualname__', transform)}{signature}: {error}",
                advice=f"It gets the frames of {', '.join(names)} by these names"
                if len(names) > 1
                else "It gets the frame of the only source",
            ) from None

    def _check_names(self) -> None:
        for name in self.sources:
            # They become keyword arguments or SQL tables.
            if not _NAME.fullmatch(name):
                _wrong("sources", name, "a letter, then letters, digits and _, 64 at most")
        for what, name in (("name", self.name), *(("sinks", name) for name in self.sinks)):
            if not _LABEL.fullmatch(name):
                _wrong(what, name, "a letter, then letters, digits, _, . and -, 64 at most")

    def _check_sink(self, sink: Any) -> None:
        where = getattr(sink, "where", None)
        if where is not None and not isinstance(where, str):
            _wrong("where", where, "a condition of SQL on the columns, as text")
        match sink:
            case TopicSink():
                topic_name(sink.topic)
                _check_options(sink.options)
                _check_sink_options(sink.options)
                found = SinkOptions.parse(self.sink_options(sink), _MESSAGES)
                if found.write_id is not None or not found.ids:
                    name = "writeId" if found.ids else "ids"
                    raise ConfigurationError(f"Option {name} is set by the pipeline", advice="Leave it out")
            case FileSink(path=path) if not path or not isinstance(cast("object", path), str):
                _wrong("path", path, "a directory that all executors see")
            case TableSink(table=table) if not table or not isinstance(cast("object", table), str):
                _wrong("table", table, "a table's name")
            case FileSink(format=format) | TableSink(format=format) if not isinstance(cast("object", format), str):
                _wrong("format", format, "parquet, orc, json or a format that Spark has the jars for")
            case CallSink(call=call) if not callable(call):
                _wrong("call", call, "a function of a DataFrame and a batch's number")
            case FileSink(format=format) if format.lower() == DELTA:
                _wrong("format", format, "a format of files: write to a Delta table with a TableSink")
            case FileSink(partition_by=str(columns)) if columns:
                _wrong("partition_by", columns, f"a list of columns: [{columns!r}]")
            case FileSink(partition_by=columns) if clash := [each for each in columns if each.lower() == BATCH]:
                _wrong("partition_by", clash[0], f"other columns: the pipeline partitions all files by {BATCH}")
            case TableSink():
                _check_merge(sink)
            case FileSink() | CallSink():
                pass
            case _:
                _wrong("It", sink, "a TopicSink, FileSink, TableSink or CallSink")

    def _check_targets(self) -> None:
        """Refuse sinks that overlap each other or the checkpoint."""
        seen = [("checkpoint", _same_path(self.checkpoint))]
        for name, sink in self.all_sinks().items():
            if isinstance(sink, FileSink):
                what, mine = "path", _same_path(sink.path)
            elif isinstance(sink, TableSink):
                what, mine = "table", _same_table(sink.table)
            else:
                continue
            for other, theirs in seen:
                # A checkpoint may lie within a path: batches have directories of their own.
                if mine.startswith(theirs) or (other != "checkpoint" and theirs.startswith(mine)):
                    raise ConfigurationError(
                        f"The {what} of {name} overlaps with that of {other}",
                        advice=f"Give each its own {what}: they would overwrite each other",
                    )
            seen.append((name, mine))

    def _check_letters(self) -> None:
        """Refuse to filter dead letters, or to send them to a topic that the pipeline reads or writes."""
        letters = self.dead_letters
        if letters is not None and letters.where:
            _wrong("dead_letters.where", letters.where, "nothing: no row that does not decode may be lost")
        if isinstance(letters, TableSink) and letters.merge_by:
            _wrong("dead_letters.merge_by", letters.merge_by, "nothing: no row that does not decode may be lost")
        if not isinstance(letters, TopicSink):
            return
        if letters.key is not None:
            _wrong("dead_letters.key", letters.key, "nothing: a letter has the key of its message")
        topic, url = topic_name(letters.topic), find_url(letters.url or self.url)
        for name, sink in self.sinks.items():
            if isinstance(sink, TopicSink) and (topic_name(sink.topic), find_url(sink.url or self.url)) == (topic, url):
                raise ConfigurationError(
                    f"dead_letters: sinks.{name} writes to topic {topic!r} too, so its readers would read dead letters",
                    advice="Name another topic",
                )
        for name, source in self.sources.items():
            options = self.parsed_options(name)
            if source.writes_letters and "topic" not in options.columns and len(options.topics) != 1:
                raise ConfigurationError(
                    f"sources.{name}: Option columns has no topic, and a dead letter needs the topic of its row",
                    advice="Add topic to the columns, or read one topic, or send the letters to files",
                )
            if not source.writes_letters or options.url != url:
                continue
            if topic in options.topics if options.pattern is None else re.fullmatch(options.pattern, topic):
                raise ConfigurationError(
                    f"dead_letters: sources.{name} reads topic {topic!r}, so each letter would return without end",
                    advice="Name another topic"
                    if options.pattern is None
                    else f"Name another topic, or let {options.pattern!r} leave it out",
                )


class errors_of:  # noqa: N801 - used as a function
    """Prefixes errors within the block with the name of a part of the pipeline."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigurationError):
            raise cast("Any", type(error))(f"{self._name}: {error.message}", advice=error.advice) from None


def check_key(sink: TopicSink, columns: Sequence[str]) -> None:
    """:raises ConfigurationError: `key` names no column, or the rows are messages, which have a key of their own."""
    if sink.key is None:
        return
    if "value" in columns:
        raise ConfigurationError(
            f"key is {sink.key!r}, but rows with a column 'value' are already messages",
            advice="Remove key and add a column 'key' in the transform; or rename 'value'",
        )
    if sink.key not in columns:
        raise ConfigurationError(
            f"There is no column {sink.key!r} for the key", advice=f"There are {', '.join(columns)}"
        )


def _check_columns_of(sink: Sink, columns: Sequence[str]) -> None:
    """Check the columns that a sink names, as far as no session is needed: its case sensitivity is its own."""
    if isinstance(sink, TopicSink):
        check_key(sink, columns)
        return
    for setting, names in named_columns(sink).items():
        for name in names:
            if name.lower() not in {each.lower() for each in columns}:
                raise ConfigurationError(
                    f"{setting} has {name!r}, which is not a column of the rows", advice=nearest(name, columns)
                )


def named_columns(sink: Sink) -> dict[str, Sequence[str]]:
    """The columns that a sink of files or a table names, by setting."""
    match sink:
        case FileSink():
            found = {"partition_by": sink.partition_by}
        case TableSink():
            found = {"merge_by": sink.merge_by, "order_by": sink.order_by}
        case _:
            found = {}
    return {setting: names for setting, names in found.items() if names}


def _check_merge(sink: TableSink) -> None:
    for setting, columns in named_columns(sink).items():
        if isinstance(columns, str):
            _wrong(setting, columns, f"a list of columns: [{columns!r}]")
    if sink.order_by and not sink.merge_by:
        raise ConfigurationError(
            "order_by is given without merge_by", advice="Give merge_by the columns of the key, or leave order_by out"
        )
    if sink.merge_by and not sink.is_delta:
        raise ConfigurationError(
            f"merge_by is given, and a table of format {sink.format!r} has no MERGE",
            advice=f'Write to a Delta table, with format "{DELTA}", or leave merge_by out',
        )


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if is_spark_option(name):
            raise ConfigurationError(f"Option {name} is set by the pipeline", advice="Leave it out")


def _check_sink_options(options: Mapping[str, Any]) -> None:
    known = {plain_name(each) for each in (*_TOPIC_SINK, *_OWN_OPTIONS)} - {"key", "where"}
    for name in options:
        if plain_name(name) not in known:
            advice = "It is a field of TopicSink" if name in _TOPIC_SINK else nearest(name, _TOPIC_SINK)
            raise ConfigurationError(f"The sink has no option {name!r}", advice=advice)


def _wrong(name: str, value: object, takes: str) -> None:
    raise ConfigurationError(f"{name} is {value!r}", advice=f"It takes {takes}")
