"""The writers of Spark: publish a DataFrame, and check every receipt before a task reports success.

Rows that a failed attempt wrote are written again by the next one: at least once, and once where the broker
deduplicates by id within its window. A commit only logs, and an abort cannot undo anything.

*Concurrency.* A task publishes one chunk while it prepares the next; rows of a key keep their order. *Failure.* A
message that the broker did not store fails the task; the error has the outcome of each message.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, cast

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, IntegerType, MapType, StringType, StructType, TimestampType

from broker.blocking import Bus
from broker.errors import BackendError, ConfigurationError, Unsupported
from broker.hooks import logger
from broker.outbound import OutboundMessage
from broker_spark.common.connections import bus_of, check_reachable
from broker_spark.common.options import canonical, find_url, parse_choice, refuse_option, topic_name
from broker_spark.common.schema import nearest
from broker_spark.runtime.workers import freeze_loaded_objects
from broker_spark.sink.duplicate_ids import IdCounter
from broker_spark.sink.rows import Outbound, messages_of

__all__ = ["MessageStreamWriter", "MessageWriter", "SinkOptions", "Written"]

_LONGEST_WRITE_ID: Final = 150
_CHUNK_ROWS: Final = 2000
_CHUNK_BYTES: Final = 4 << 20
_TEXT: Final = StringType()
_BODY: Final = (BinaryType(), _TEXT)
_ACCEPTED: Final[Mapping[str, tuple[DataType, ...]]] = {
    "value": _BODY,
    "key": _BODY,
    "attributes": (MapType(_TEXT, _TEXT), MapType(_TEXT, _TEXT, False)),
    "topic": (_TEXT,),
    "id": (_TEXT,),
    "partition": (IntegerType(),),
    "publish_time": (TimestampType(),),
    "deliver_at": (TimestampType(),),
}
_SOURCES: Final = frozenset({"offset", "broker_time", "delivery_attempt"})
"""Columns of a source that the broker assigns itself."""
_KNOWN: Final = {"url": "", "topic": "", "ids": "", "keepPartition": "", "writeId": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of a sink and the columns that it uses."""

    url: str = field(repr=False)
    topic: str | None
    ids: bool
    columns: tuple[str, ...]
    write_id: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], schema: StructType) -> SinkOptions:
        """Parse the options and the schema of a write. No I/O.

        :raises ConfigurationError: an option or a column is unknown, invalid or missing.
        :raises Unsupported: the broker does not support a column.
        """
        found = canonical(options, _KNOWN, "The sink")
        url = find_url(found.get("url"))
        keep = parse_choice("keepPartition", found.get("keepPartition", "false"), ("true", "false")) == "true"
        columns = _columns(schema, keep_partition=keep)
        if keep and "partition" not in columns:
            raise ConfigurationError(
                "Option keepPartition is true, and there is no column 'partition'",
                advice="Add one of type int, as a source does, or remove the option",
            )
        topic = topic_name(found["topic"]) if "topic" in found else None
        if topic is not None:
            # Rows read from a topic have its name there, and would be published to it again.
            columns = tuple(name for name in columns if name != "topic")
        if topic is None and "topic" not in columns:
            raise ConfigurationError(
                "Neither option topic nor a column topic is given",
                advice="Give one of them; the option takes precedence",
            )
        broker = check_reachable(url).capabilities
        able = {"deliver_at": broker.publish.deliver_at, "partition": broker.publish.partitions}
        for column in [name for name, is_able in able.items() if name in columns and not is_able]:
            way_out = f"Drop it before the write: {drop_advice(column)}"
            if (needed := broker.settings_needed.get(f"publish.{column}")) is not None:
                way_out += f"; or set what it needs: {needed}"
            raise Unsupported(f"This broker has no use for column {column!r}", advice=way_out)
        ids = parse_choice("ids", found.get("ids", "always"), ("always", "never")) == "always"
        write_id = found.get("writeId")
        if write_id is not None and (not ids or not 0 < len(write_id) <= _LONGEST_WRITE_ID):
            refuse_option("writeId", write_id, f"1 to {_LONGEST_WRITE_ID} characters, and only without ids=never")
        return cls(url=url, topic=topic, ids=ids, columns=columns, write_id=write_id)


def drop_advice(column: str) -> str:
    """The code that drops a column."""
    return f"df.drop({column!r})"


def _columns(schema: StructType, *, keep_partition: bool) -> tuple[str, ...]:
    found: list[str] = []
    for column in schema:
        if column.name in _SOURCES or (column.name == "partition" and not keep_partition):
            continue
        accepted = _ACCEPTED.get(column.name)
        if accepted is None:
            raise ConfigurationError(
                f"The sink has no column {column.name!r}",
                advice=f"{nearest(column.name, list(_ACCEPTED))}; or drop it: {drop_advice(column.name)}",
            )
        if column.dataType not in accepted:
            raise ConfigurationError(
                f"Column {column.name!r} is of type {column.dataType.simpleString()}",
                advice=f"It takes {' or '.join(dict.fromkeys(each.simpleString() for each in accepted))}: cast it",
            )
        if column.name in found:
            raise ConfigurationError(
                f"There are two columns {column.name!r}", advice="Rename or leave out one of them before the write"
            )
        found.append(column.name)
    if "value" not in found:
        raise ConfigurationError(
            "There is no column 'value'", advice="Make one of bytes or text, for instance with to_json(struct('*'))"
        )
    return tuple(found)


@dataclass
class Written(WriterCommitMessage):
    """What one task wrote.

    :ivar duplicates: rows that the broker already had from an earlier attempt; None if it does not report duplicates.
    """

    rows: int
    duplicates: int | None


class MessageWriter(DataSourceArrowWriter):
    """Writes a DataFrame once."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        # Pickled into every task, so that each attempt generates the same ids.
        self._id = options.write_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Publish a task's rows. Returns when the broker has stored them all."""
        return _publish(self._options, iterator, f"{self._id}-{_task().partitionId()}")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _report(messages, "A write")
        freeze_loaded_objects()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _report_failure(messages, "A write")


class MessageStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a query."""

    def __init__(self, options: SinkOptions) -> None:
        if options.write_id is not None:
            raise ConfigurationError(
                "Option writeId is for a batch write only", advice="Leave it out: a stream makes ids of its batches"
            )
        self._options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Publish a task's rows. Returns when the broker has stored them all."""
        task = _task()
        query = task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            # Otherwise rows of different queries could get the same ids.
            query, batch = uuid.uuid4().hex, "0"
        return _publish(self._options, iterator, f"{query}-{batch}-{task.partitionId()}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _report(messages, f"Batch {batchId}")
        freeze_loaded_objects()

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _report_failure(messages, f"Batch {batchId}")


def _task() -> Any:
    found = TaskContext.get()
    assert found is not None, "a writer writes in a task"
    return found


def _publish(options: SinkOptions, batches: Iterator[pyarrow.RecordBatch], prefix: str) -> Written:
    bus = bus_of(options.url)
    prepared = _rows(options, batches, prefix if options.ids else None)
    rows = duplicates = 0
    with ThreadPoolExecutor(1, thread_name_prefix="broker-spark-sink") as sender:
        sending: Future[int] | None = None
        for chunk in _chunks(prepared):
            following = sender.submit(_send, bus, chunk) if sending is None else None
            if sending is not None:
                duplicates += sending.result()
                following = sender.submit(_send, bus, chunk)
            sending = following
            rows += len(chunk)
        if sending is not None:
            duplicates += sending.result()
    freeze_loaded_objects()
    return Written(rows, duplicates if bus.capabilities.publish.reports_duplicates else None)


def _rows(options: SinkOptions, batches: Iterable[pyarrow.RecordBatch], prefix: str | None) -> Iterator[Outbound]:
    first = 0
    given = IdCounter()
    seen = None if options.write_id is None else IdCounter()
    for batch in batches:
        yield from messages_of(
            batch,
            topic=options.topic,
            columns=options.columns,
            prefix=prefix,
            first_row=first,
            given=given,
            seen=seen,
        )
        first += batch.num_rows


def _chunks(rows: Iterator[Outbound]) -> Iterator[list[Outbound]]:
    chunk: list[Outbound] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row[1].data or b"") + len(row[1].key or b"")
        if len(chunk) >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _send(bus: Bus, chunk: list[Outbound]) -> int:
    """Publish a chunk. Returns how many of its messages the broker already had."""
    by_topic: dict[str, list[OutboundMessage]] = {}
    for topic, message in chunk:
        by_topic.setdefault(topic, []).append(message)
    duplicates = 0
    for topic, messages in by_topic.items():
        if not bus.capabilities.publish.deduplication:
            # Receipts would add nothing: the call returns when every message is stored.
            bus.topic(topic).publish_batch(messages, receipts=False)
            continue
        receipts = bus.topic(topic).publish_batch(messages)
        if len(receipts) != len(messages):
            raise BackendError(
                f"{len(messages)} rows were published to {topic!r}, but {len(receipts)} receipts arrived"
            )
        duplicates += sum(receipt.duplicate for receipt in receipts)
    return duplicates


def _report(messages: list[WriterCommitMessage | None], what: str) -> None:
    written = [cast("Written", each) for each in messages if each is not None]
    duplicates = [each.duplicates for each in written if each.duplicates is not None]
    logger.info(
        "%s: %d rows written by %d tasks%s",
        what,
        sum(each.rows for each in written),
        len(written),
        f", {sum(duplicates)} of them duplicates" if duplicates else "",
    )


def _report_failure(messages: list[WriterCommitMessage | None], what: str) -> None:
    logger.warning(
        "%s failed: %d of its %d tasks had written their rows, which stay",
        what,
        sum(each is not None for each in messages),
        len(messages),
    )
