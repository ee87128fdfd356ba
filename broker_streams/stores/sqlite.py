"""`Sqlite`: a store in a file of SQLite. Nothing to install, and any SQLite tool can look inside.

It costs three to four times the CPU of `Lmdb`. All rows are in one table, `rows(namespace, key, value)`.

*Durability.* A durable write syncs the write-ahead log before it returns (`synchronous=FULL`). Writes with
`durable=False` are not synced (`synchronous=NORMAL`): a loss of power undoes the last of them, and no more.

*Concurrency.* One connection writes, another reads, each with a lock. Other processes may read while this one writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import ClassVar, Final

from broker_streams.stores.store import (
    CHUNK_BYTES,
    Rows,
    Store,
    StoreCorrupt,
    disk_failed,
    disk_size,
    in_chunks,
    key_range,
    store_closed,
)

__all__ = ["Sqlite"]

_FILE: Final = "rows.sqlite"
_ROWS: Final = """
    CREATE TABLE IF NOT EXISTS rows (
        namespace TEXT, key BLOB, value BLOB NOT NULL, PRIMARY KEY (namespace, key)
    ) WITHOUT ROWID
"""
_META: Final = "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
_GET: Final = "SELECT value FROM rows WHERE namespace = ? AND key = ?"
_PUT: Final = "REPLACE INTO rows VALUES (?, ?, ?)"
_DELETE: Final = "DELETE FROM rows WHERE namespace = ? AND key = ?"
_RANGE: Final = "SELECT key, value FROM rows WHERE namespace = ?"
_UNREADABLE: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_CODE: Final = 0xFF
"""The part of an error's code that is not a detail."""
_AT_ONCE: Final = 500
"""Keys of one SELECT."""


@dataclass(frozen=True)
class Sqlite:
    """Opens stores in files of SQLite."""

    format: ClassVar[str] = "sqlite"

    def open(self, directory: Path | None, name: str) -> Store:
        if directory is None:
            raise ValueError("directory is None: Sqlite keeps its stores on disk")
        path = directory / f"{name}.{self.format}"
        try:
            path.mkdir(0o700, exist_ok=True)
        except OSError as error:
            raise disk_failed(path, error) from error
        return _SqliteStore(path)


class _SqliteStore:
    quick_count: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = Lock()
        self._reading = Lock()
        self._closed = False
        self._connections: list[sqlite3.Connection] = []
        try:
            with self._translated():
                self._writer = self._connect()
                self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
                for statement in (_ROWS, _META):
                    self._writer.execute(statement)
                self._reader = self._connect()
                self._reader.execute("SELECT value FROM meta LIMIT 1").fetchone()
        except BaseException:
            for connection in self._connections:
                connection.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        # The locks here are stricter than the check of the module, which allows one thread only.
        connection = sqlite3.connect(self._path / _FILE, isolation_level=None, check_same_thread=False)
        self._connections.append(connection)
        return connection

    # -- rows ------------------------------------------------------------------------------------------------

    def get(self, namespace: str, key: bytes) -> bytes | None:
        with self._reads() as reader:
            row = reader.execute(_GET, (namespace, key)).fetchone()
        return None if row is None else row[0]

    def get_many(self, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]:
        found: dict[bytes, bytes] = {}
        with self._reads() as reader:
            # One transaction, so that all values are of one moment.
            reader.execute("BEGIN")
            try:
                for first in range(0, len(keys), _AT_ONCE):
                    some = keys[first : first + _AT_ONCE]
                    marks = ",".join("?" * len(some))
                    found.update(reader.execute(f"{_RANGE} AND key IN ({marks})", (namespace, *some)))
            finally:
                reader.execute("COMMIT")
        return [found.get(key) for key in keys]

    def write(
        self,
        changes: Mapping[str, Mapping[bytes, bytes | None]],
        meta: Mapping[str, bytes] | None = None,
        *,
        durable: bool = True,
    ) -> None:
        with self._writes(durable) as writer:
            for namespace, rows in changes.items():
                ordered = sorted(rows.items())
                writer.executemany(_PUT, [(namespace, key, value) for key, value in ordered if value is not None])
                writer.executemany(_DELETE, [(namespace, key) for key, value in ordered if value is None])
            if meta:
                writer.executemany("REPLACE INTO meta VALUES (?, ?)", meta.items())

    def items(
        self,
        namespace: str,
        *,
        start: bytes | None = None,
        stop: bytes | None = None,
        prefix: bytes = b"",
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        def read(start: bytes | None, stop: bytes | None, limit: int) -> tuple[Rows, bool]:
            statement = _RANGE
            values: list[str | bytes | int] = [namespace]
            if start is not None:
                statement += " AND key >= ?"
                values.append(start)
            if stop is not None:
                statement += " AND key < ?"
                values.append(stop)
            statement += f" ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT ?"
            values.append(limit)
            chunk: Rows = []
            size = 0
            with self._reads() as reader, closing(reader.execute(statement, values)) as found:
                for row in found:
                    chunk.append(row)
                    size += len(row[1])
                    if size >= CHUNK_BYTES:
                        return chunk, True
            return chunk, len(chunk) == limit

        return in_chunks(read, *key_range(start, stop, prefix), reverse)

    def count(self, namespace: str) -> int:
        with self._reads() as reader:
            return reader.execute("SELECT count(*) FROM rows WHERE namespace = ?", (namespace,)).fetchone()[0]

    def meta(self, name: str) -> bytes | None:
        with self._reads() as reader:
            row = reader.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def size(self) -> int:
        self._check_open()
        return disk_size(self._path)

    def clear(self) -> None:
        with self._writes(durable=True) as writer:
            writer.execute("DELETE FROM rows")
            writer.execute("DELETE FROM meta")

    def close(self) -> None:
        with self._writing, self._reading:
            if self._closed:
                return
            self._closed = True
            with self._translated():
                self._reader.close()
                # The last connection to close moves the log into the file and syncs it.
                self._writer.close()

    @property
    def closed(self) -> bool:
        return self._closed

    # -- the connections -------------------------------------------------------------------------------------

    @contextmanager
    def _reads(self) -> Generator[sqlite3.Connection]:
        with self._reading, self._translated():
            self._check_open()
            yield self._reader

    @contextmanager
    def _writes(self, durable: bool) -> Generator[sqlite3.Connection]:
        with self._writing, self._translated():
            self._check_open()
            writer = self._writer
            writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            writer.execute("BEGIN IMMEDIATE")
            try:
                yield writer
                writer.execute("COMMIT")
            except BaseException:
                # SQLite rolls back by itself after some errors.
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is None:
                # A mistake in a call, not an answer of SQLite.
                raise
            if code & _CODE in _UNREADABLE:
                raise StoreCorrupt(
                    f"The store {str(self._path)!r} cannot be read: {error}", path=self._path, native=error
                ) from error
            raise disk_failed(self._path, error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise store_closed(self._path.name)
