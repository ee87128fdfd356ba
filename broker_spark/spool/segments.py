"""Segments of a spool: Arrow files by number. Blocking where it reads and writes; any thread.

The name has all that planning needs: `<number>-<token of its owner>-<rows>-<bytes>.arrow`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import pyarrow

from broker.errors import OffsetOutOfRange
from broker_spark.common.files import Files
from broker_spark.common.schema import arrow_schema

__all__ = ["DIRECTORY", "IDENTITY", "Segment", "columns_of", "identities_of", "listed", "read", "sweep", "write"]

IDENTITY: Final = "identity"
"""The column with the identity of each message."""
DIRECTORY: Final = "segments"
_NAME: Final = re.compile(r"(\d{12})-(\w+)-(\d+)-(\d+)\.arrow")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of rows.

    :ivar bytes: of the rows in memory.
    """

    number: int
    token: str
    rows: int
    bytes: int

    @property
    def name(self) -> str:
        return f"{DIRECTORY}/{self.number:012d}-{self.token}-{self.rows}-{self.bytes}.arrow"


def listed(files: Files) -> list[Segment]:
    """All segments by number. A number may occur twice: an owner that lost the spool may have left a file."""
    matches = (_NAME.fullmatch(name) for name in files.names(DIRECTORY))
    return [Segment(int(each[1]), each[2], int(each[3]), int(each[4])) for each in matches if each is not None]


def sweep(files: Files) -> None:
    """Delete incomplete files."""
    files.sweep(DIRECTORY)


def write(files: Files, segment: Segment, table: pyarrow.Table, batch_rows: int) -> None:
    """Write a segment durably."""

    def fill(file: Any) -> None:
        whole: Any = table
        with cast("Any", pyarrow).ipc.new_file(file, whole.schema) as writer:
            writer.write_table(whole, max_chunksize=batch_rows)

    files.write(segment.name, fill)


def columns_of(files: Files, segment: Segment) -> list[str]:
    """The columns that its rows have."""
    with _opened(files, segment) as reader:
        return [name for name in reader.schema.names if name != IDENTITY]


def identities_of(files: Files, segment: Segment) -> list[str]:
    """The identities of its messages."""
    with _opened(files, segment) as reader:
        return [
            identity
            for number in range(reader.num_record_batches)
            for identity in reader.get_batch(number).column(IDENTITY).to_pylist()
        ]


def read(files: Files, place: str, segment: Segment, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
    """Its rows, in the order they were received.

    :raises OffsetOutOfRange: it is missing or incomplete.
    """
    schema: Any = arrow_schema(columns)
    rows = 0
    try:
        with _opened(files, segment) as reader:
            for number in range(reader.num_record_batches):
                batch: Any = reader.get_batch(number)
                rows += batch.num_rows
                yield cast("Any", pyarrow).RecordBatch.from_arrays(
                    [batch.column(name) for name in columns], schema=schema
                )
    except FileNotFoundError as error:
        raise OffsetOutOfRange(
            f"There is no {segment.name} in the spool {place} on this executor",
            native=error,
            advice="Set option spool to a directory that driver and executors all see",
        ) from error
    if rows != segment.rows:
        raise OffsetOutOfRange(f"{segment.name} in the spool {place} has {rows} rows, but {segment.rows} were written")


@contextmanager
def _opened(files: Files, segment: Segment) -> Generator[Any]:
    try:
        with files.open(segment.name) as file:
            yield cast("Any", pyarrow).ipc.open_file(file)
    except pyarrow.ArrowInvalid as error:
        raise OffsetOutOfRange(
            f"{segment.name} of the spool is incomplete: {error}",
            native=error,
            advice="Restore it if its messages are acked; else delete it, and they are redelivered",
        ) from error
