"""`Store`: where the rows of one partition are kept, and `StoreFactory`, which opens it.

A store has named spaces of rows ("rows", "due"), each ordered by key bytes, and a few named values of its own ("meta").
Keys and values are any bytes, of any length. `write` is atomic over all of them: after a kill at any moment the store
holds each write whole or not at all.

*Durability.* A durable write that has returned survives a kill of the process and a loss of power. A write with
`durable=False` survives a kill of the process. A later durable write makes it durable too; until then, a loss of power
may undo it, or cost the whole store, which is then reported as corrupt and recovered.

*Concurrency.* Any thread; calls block. Writes happen one at a time. A read never waits for the disk of a write, and
never sees a part of it.

*Failure.* A full or failing disk raises `StorageFailed` and leaves the store as it was. What cannot be read raises
`StoreCorrupt`. Any call after `close` raises `Closed`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, Protocol

from broker import BrokerError, Closed, StorageFailed

__all__ = [
    "CHUNK_BYTES",
    "ReadChunk",
    "Rows",
    "Store",
    "StoreCorrupt",
    "StoreFactory",
    "StoreLocked",
    "disk_failed",
    "disk_size",
    "in_chunks",
    "key_range",
    "store_closed",
    "successor",
]

Rows = list[tuple[bytes, bytes]]
ReadChunk = Callable[[bytes | None, bytes | None, int], tuple[Rows, bool]]
"""Reads rows from `start` (included) to `stop` (excluded), at most about so many, and whether there may be more."""

CHUNK_BYTES: Final = 1 << 20
"""A chunk ends with the value that exceeds this size."""
_FIRST_CHUNK: Final = 16
_LARGEST_CHUNK: Final = 1024


class StoreCorrupt(BrokerError):
    """A store on disk cannot be read. Its state directory sets it aside, and its rows are recovered from their topic.

    :ivar path: the directory of the store.
    """

    default_advice = "Start again: the store is set aside, and its rows are recovered from their topic"

    def __init__(self, message: str, *, path: Path, native: BaseException | None = None) -> None:
        super().__init__(message, native=native)
        self.path = path


class StoreLocked(BrokerError):
    """A state directory, or a store in it, is in use.

    :ivar directory: the directory that is locked.
    :ivar process: the id of the process that holds the lock, or None if it is unknown.
    """

    default_retriable = True

    def __init__(self, message: str, *, directory: Path, process: int | None, advice: str) -> None:
        super().__init__(message, advice=advice)
        self.directory = directory
        self.process = process


class Store(Protocol):
    """The rows of one partition of a group, or of one partition of a table.

    :cvar quick_count: whether `count` takes the same time for any number of rows.
    """

    quick_count: ClassVar[bool]

    def get(self, namespace: str, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        ...

    def get_many(self, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, in the order of the keys, all of one moment."""
        ...

    def write(
        self,
        changes: Mapping[str, Mapping[bytes, bytes | None]],
        meta: Mapping[str, bytes] | None = None,
        *,
        durable: bool = True,
    ) -> None:
        """Write rows and named values, all or nothing.

        :param changes: rows by namespace; None deletes a row.
        :param durable: return only when a loss of power cannot undo the write.
        """
        ...

    def items(
        self,
        namespace: str,
        *,
        start: bytes | None = None,
        stop: bytes | None = None,
        prefix: bytes = b"",
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows in the order of their keys, from `start` (included) to `stop` (excluded), whatever the direction.

        Rows are read a chunk at a time, so an abandoned iterator holds nothing. A row that is there throughout the
        iteration is returned exactly once; a row that is written, changed or deleted meanwhile may or may not be
        returned, with its old value or its new one.
        """
        ...

    def count(self, namespace: str) -> int:
        """The number of rows, exactly. SQLite and RocksDB keep no count and read all keys."""
        ...

    def meta(self, name: str) -> bytes | None:
        """A named value of the store, or None."""
        ...

    def size(self) -> int:
        """The bytes that the store takes on its disk, or in memory."""
        ...

    def clear(self) -> None:
        """Delete all rows and all named values, durably."""
        ...

    def close(self) -> None:
        """Close the store. All that was written is durable afterwards. A second call does nothing."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the store was closed."""
        ...


class StoreFactory(Protocol):
    """Opens stores of one kind. `StateDirectory.open` is the safe way to call it: it holds the lock."""

    format: ClassVar[str]
    """Names the kind on disk: lower-case letters and digits, the suffix of the store's directory."""

    def open(self, directory: Path | None, name: str) -> Store:
        """Open the store `<name>.<format>` in a directory, and create it if it is missing.

        :param directory: an existing directory that the caller has locked; None if the kind keeps nothing on disk.
        :param name: a name for a file.
        :raises MissingClient: a package is not installed; the advice is the pip command.
        :raises StoreCorrupt: the store cannot be read.
        :raises StoreLocked: this process has it open already.
        :raises StorageFailed: the disk is full, or fails.
        """
        ...


def successor(prefix: bytes) -> bytes | None:
    """The least key after all keys with the prefix, or None if there is no such key."""
    shorter = prefix.rstrip(b"\xff")
    return shorter[:-1] + bytes((shorter[-1] + 1,)) if shorter else None


def key_range(start: bytes | None, stop: bytes | None, prefix: bytes) -> tuple[bytes | None, bytes | None]:
    """The bounds of a range of keys that have a prefix."""
    if not prefix:
        return start, stop
    after = successor(prefix)
    if stop is None or (after is not None and after < stop):
        stop = after
    return prefix if start is None else max(start, prefix), stop


def in_chunks(read: ReadChunk, start: bytes | None, stop: bytes | None, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
    """The rows of a range, read in chunks that grow, so that a caller who wants few rows pays for few."""
    limit = _FIRST_CHUNK
    while stop is None or start is None or start < stop:
        rows, more = read(start, stop, limit)
        yield from rows
        if not more or not rows:
            return
        last = rows[-1][0]
        if reverse:
            stop = last
        else:
            # The least key that is greater.
            start = last + b"\x00"
        limit = min(2 * limit, _LARGEST_CHUNK)


def store_closed(name: str) -> Closed:
    """The error of a call on a closed store."""
    return Closed(f"The store {name!r} is closed")


def disk_failed(path: Path, error: BaseException) -> StorageFailed:
    """The error of a write or read that the disk did not carry out."""
    return StorageFailed(
        f"The store {str(path)!r} failed: {str(error).rstrip('.')}",
        # A process that waits for room would look alive, and keep its partitions from others.
        retriable=False,
        native=error,
        advice=f"Check the space, the limits and the permissions of the disk of {str(path.parent)!r}, then start again",
    )


def disk_size(path: Path) -> int:
    """The bytes of the files of a directory and of those below it; what disappears meanwhile counts for nothing."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_size
    return total
