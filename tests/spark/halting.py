"""A source and a sink that halt at one step of one batch, so that a SIGKILL hits exactly there.

`format("halting")` has one option more than `format("broker")`: `halt`, as `step:batch:file`. The first process that
reaches that step of that batch writes its pid into the file, and then blocks. The steps in Spark's order:

| step | what halts | what Spark has written by then |
|---|---|---|
| planned | `partitions` of the source | the batch's offsets |
| read | a task, after the first rows it read | |
| half | a task, half of whose rows are on the broker | |
| written | the commit of the sink, after all tasks | |
| committed | the planning of the next batch | that the batch is done |

The batch of a pipeline writes to a topic in a write of its own, which has step `half` only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from broker_spark.data_source import BrokerDataSource
from broker_spark.log.source import LogStreamReader
from broker_spark.sink.sink import MessageStreamWriter, MessageWriter, SinkOptions

__all__ = ["Halt", "HaltingSource", "stand"]


@dataclass(frozen=True)
class Halt:
    """Where to halt."""

    step: str = ""
    batch: int = 0
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> Halt:
        step, _, rest = text.partition(":")
        batch, _, file = rest.partition(":")
        return cls(step, int(batch or 0), file)

    def claims(self, step: str, batch: int) -> bool:
        """Whether this is the step; true once, for the first caller."""
        if (step, batch) != (self.step, self.batch):
            return False
        try:
            Path(self.file).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def at(self, step: str, batch: int) -> None:
        """Halt if this is the step."""
        if self.claims(step, batch):
            stand(self.file)


def stand(file: str) -> NoReturn:
    """Report it, and block."""
    half = Path(f"{file}.half")
    half.write_text(str(os.getpid()))
    half.replace(file)
    while True:
        threading.Event().wait()


def _batch() -> int:
    task: Any = TaskContext.get()
    return int(task.getLocalProperty("streaming.sql.batchId"))


class _HaltingReader(LogStreamReader):
    halt = Halt()
    batches = 0
    """Planned batches; a query that halts has no checkpoint when it starts."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        self.halt.at("committed", self.batches - 1)
        return super().latestOffset(start, limit)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self.halt.at("planned", self.batches)
        self.batches += 1
        return super().partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        for number, batch in enumerate(super().read(partition)):
            if number:
                self.halt.at("read", _batch())
            yield batch


class _HaltingWriter(MessageStreamWriter):
    halt = Halt()

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return _written(super().write, iterator, self.halt, _batch())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self.halt.at("written", batchId)
        super().commit(messages, batchId)


class _HaltingBatchWriter(MessageWriter):
    halt = Halt()

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        batch = (self._options.write_id or "").rpartition("-")[2]
        return _written(super().write, iterator, self.halt, int(batch or 0))


def _written(
    write: Callable[[Iterator[pyarrow.RecordBatch]], WriterCommitMessage],
    rows: Iterator[pyarrow.RecordBatch],
    halt: Halt,
    batch: int,
) -> WriterCommitMessage:
    """Write a task's rows, or only half of the first ones."""
    if halt.step == "half" and (first := next(rows, None)) is not None:
        if halt.claims("half", batch):
            write(iter([first.slice(0, max(1, first.num_rows // 2))]))
            stand(halt.file)
        rows = _with(first, rows)
    return write(rows)


def _with(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


class HaltingSource(BrokerDataSource):
    """`format("broker")` with option `halt`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        given = dict(options)
        self._halt = Halt.parse(given.pop("halt", ""))
        super().__init__(given)

    @classmethod
    def name(cls) -> str:
        return "halting"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        reader = _HaltingReader(self._source(schema).for_stream())
        reader.halt = self._halt
        return reader

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        writer = _HaltingBatchWriter(SinkOptions.parse(self._given, schema))
        writer.halt = self._halt
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        writer = _HaltingWriter(SinkOptions.parse(self._given, schema))
        writer.halt = self._halt
        return writer
