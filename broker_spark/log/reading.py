"""One task's range of a log as Arrow batches. Blocking; runs on executors.

*Failure.* Offsets that retention removed raise OffsetOutOfRange; with `onDataLoss=skip` they are skipped, logged and
counted. A range that ends early for another reason raises, and so does a topic that is recreated during the read. A
retried task reads the same range. *Concurrency.* For expensive columns a thread prepares one batch ahead; it ends with
the read or after this batch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

import pyarrow

from broker.blocking import BlockingRecordBatch, Bus
from broker.errors import ConfigurationError, OffsetOutOfRange
from broker.hooks import logger
from broker_spark.common.connections import bus_of
from broker_spark.common.options import SourceOptions
from broker_spark.common.schema import RECORD_COLUMNS, arrow_schema
from broker_spark.common.topics import advise_if_missing, identity_of
from broker_spark.log.ranges import Range
from broker_spark.runtime.workers import freeze_loaded_objects, switch_threads_faster

__all__ = ["read_range"]

_BATCH_BYTES: Final = 16 << 20
"""The approximate largest Arrow batch; a larger one is split between rows."""
_COSTLY: Final = frozenset({"id", "attributes", "publish_time", "broker_time"})
"""Columns that Python computes per record, which takes as long as Spark takes to read them."""
_NEW_CHECKPOINT: Final = "Begin a new checkpoint for the new topic"
_GONE: Final = f"It was deleted after planning, and a new topic of its name has other records. {_NEW_CHECKPOINT}"


def read_range(options: SourceOptions, wanted: Range) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a range, in the order of their offsets.

    :raises OffsetOutOfRange: the log no longer has the range.
    :raises ConfigurationError: the topic was recreated after planning.
    :raises BrokerError: the broker does not answer, or refuses.
    """
    bus = bus_of(options.url)
    columns = _Columns(options.columns)
    batches = (batch for table in _tables(bus, options, wanted, columns) for batch in columns.batches(table))
    with advise_if_missing(_GONE):
        if not _COSTLY.isdisjoint(options.columns) and wanted.stop - wanted.start > options.arrow_rows:
            yield from _ahead(batches)
        else:
            yield from batches
        _check_identity(bus, wanted)
    freeze_loaded_objects()


def _ahead(batches: Generator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """The batches, each prepared while Spark reads the previous one."""
    switch_threads_faster()
    pool = ThreadPoolExecutor(1, "broker-spark-read")
    try:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch
    finally:
        # A caller that stops early must not wait for the broker.
        pool.shutdown(wait=False, cancel_futures=True)


def _tables(bus: Bus, options: SourceOptions, wanted: Range, columns: _Columns) -> Iterator[Any]:
    """What was read, as Arrow tables."""
    position = wanted.start
    while position < wanted.stop:
        try:
            found = bus.log.read(wanted.topic, wanted.partition, position, wanted.stop, max_records=options.arrow_rows)
            for records in found:
                table = columns.table(records)
                offsets = table.column("offset")
                first, last = offsets[0].as_py(), offsets[-1].as_py()
                if not position <= first <= last < wanted.stop:
                    raise OffsetOutOfRange(f"Offsets {first} to {last} arrived instead of {position} to {wanted.stop}")
                position = last + 1
                yield table
            return
        except OffsetOutOfRange as error:
            _check_identity(bus, wanted)
            position = _after_loss(bus, options, wanted, position, error)


def _after_loss(bus: Bus, options: SourceOptions, wanted: Range, position: int, error: OffsetOutOfRange) -> int:
    """The position to continue at after retention removed records."""
    bounds = bus.log.bounds(wanted.topic).get(wanted.partition)
    where = f"{wanted.topic!r}[{wanted.partition}]"
    if bounds is None or bounds.first <= position:
        raise OffsetOutOfRange(
            f"The range {wanted.start} to {wanted.stop} of {where} cannot be read at {position}: {error.message}",
            native=error,
            advice="The end of this log was lost: begin a new checkpoint, and find out what happened to the broker",
        ) from error
    if options.on_data_loss == "fail":
        raise OffsetOutOfRange(
            f"Retention removed unread records of {where} from offset {position} on; the log begins at {bounds.first}",
            native=error,
            advice="Keep messages longer, or set option onDataLoss to skip, which counts and logs what is missing",
        ) from error
    following = min(bounds.first, wanted.stop)
    logger.warning(
        "Data lost: retention removed offsets %d to %d of %s before they were read, %d at most",
        position,
        following - 1,
        where,
        following - position,
    )
    return following


def _check_identity(bus: Bus, wanted: Range) -> None:
    if wanted.identity is None:
        return
    found = identity_of(bus, wanted.topic)
    if found not in {None, wanted.identity}:
        raise ConfigurationError(
            f"Topic {wanted.topic!r} was deleted and recreated while it was read ({wanted.identity} then, {found} now)",
            advice=_NEW_CHECKPOINT,
        )


class _Columns:
    """Makes Arrow batches of exactly the schema that Spark expects."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._schema: Any = arrow_schema(columns)
        needed = [RECORD_COLUMNS[name] for name in columns if name in RECORD_COLUMNS]
        self._needed = needed if "offset" in needed else ["offset", *needed]

    def table(self, records: BlockingRecordBatch[bytes]) -> Any:
        """The columns that the schema has of records, and their offsets in any case."""
        return records.to_arrow(self._needed)

    def batches(self, table: Any) -> Iterator[pyarrow.RecordBatch]:
        """A result of `table` as batches of the schema."""
        count: int = table.num_rows
        arrays: list[Any] = []
        for field in self._schema:
            if field.name in RECORD_COLUMNS:
                arrays.append(_whole(table.column(RECORD_COLUMNS[field.name])))
            else:
                # A log does not count deliveries.
                arrays.append(pyarrow.nulls(count, field.type))
        batch: Any = cast("Any", pyarrow.RecordBatch).from_arrays(arrays, schema=self._schema)
        rows = max(1, count * _BATCH_BYTES // max(batch.nbytes, 1))
        for start in range(0, count, rows):
            yield batch.slice(start, rows)


def _whole(column: Any) -> Any:
    """A column in one piece."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
