"""`RocksDb`: a store in files of RocksDB, for tables beyond memory. Needs the extra `rocksdb`.

Random writes are collected in memory and written in order, where `Lmdb` writes a page for each row; reads cost about
three times as much. All namespaces are in one column family, told apart by the start of the key.

*Durability.* A durable write syncs the write-ahead log before it returns. Writes with `durable=False` are in the log,
but not synced: a loss of power undoes the last of them, and no more.

*Concurrency.* RocksDB has locks of its own, and a lock on its files: no other process opens them.

*Failure.* After a write that failed, RocksDB may refuse all others until the store is closed and opened again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from os import getpid
from pathlib import Path
from typing import Any, ClassVar, Final

from broker import BrokerError, ConfigurationError, MissingClient
from broker_streams.stores.store import (
    CHUNK_BYTES,
    Rows,
    Store,
    StoreCorrupt,
    StoreLocked,
    disk_failed,
    disk_size,
    in_chunks,
    key_range,
    store_closed,
)

__all__ = ["RocksDb"]

_LEAST: Final = 1 << 16
_META: Final = ""
"""The namespace of named values."""
_UNREADABLE: Final = ("Corruption", "Invalid argument", "Not implemented", "IO error: No such file")
_IN_USE: Final = ("lock hold by current process", "While lock file")


@dataclass(frozen=True, kw_only=True)
class RocksDb:
    """Opens stores in files of RocksDB.

    :param write_buffer: the bytes of writes that each store collects in memory; up to two of them are in use.
    :param cache: the bytes of blocks that each store keeps in memory for reads.
    """

    format: ClassVar[str] = "rocksdb"
    write_buffer: int = 16 << 20
    cache: int = 32 << 20

    def __post_init__(self) -> None:
        for name, value in (("write_buffer", self.write_buffer), ("cache", self.cache)):
            if type(value) is not int or value < _LEAST:
                raise ConfigurationError(f"{name} is {value!r}", advice=f"It takes bytes, an int of {_LEAST} or more")

    def open(self, directory: Path | None, name: str) -> Store:
        if directory is None:
            raise ValueError("directory is None: RocksDb keeps its stores on disk")
        try:
            import rocksdict
        except ImportError as error:
            raise MissingClient(
                "The Python package that provides 'rocksdict' is not installed",
                native=error,
                advice="Run: pip install 'anybroker[rocksdb]', or choose another store, such as Lmdb()",
            ) from error
        path = directory / f"{name}.{self.format}"
        try:
            path.mkdir(0o700, exist_ok=True)
        except OSError as error:
            raise disk_failed(path, error) from error
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(self.cache))
        blocks.set_bloom_filter(10, block_based=False)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(blocks)
        options.set_compression_type(rocksdict.DBCompressionType.lz4())
        options.set_write_buffer_size(self.write_buffer)
        options.set_keep_log_file_num(2)
        return _RocksDbStore(path, rocksdict, options)


def _space(namespace: str) -> bytes:
    """What the keys of a namespace start with."""
    return namespace.encode() + b"\x00"


def _bounds(space: bytes, start: bytes | None, stop: bytes | None) -> tuple[bytes, bytes]:
    return space + (start or b""), space[:-1] + b"\x01" if stop is None else space + stop


class _RocksDbStore:
    quick_count: ClassVar[bool] = False

    def __init__(self, path: Path, library: Any, options: Any) -> None:
        self._path = path
        self._library = library
        self._closed = False
        self._synced = library.WriteOptions()
        self._synced.sync = True
        self._logged = library.WriteOptions()
        with self._translated():
            self._rows = library.Rdict(str(path), options)

    # -- rows ------------------------------------------------------------------------------------------------

    def get(self, namespace: str, key: bytes) -> bytes | None:
        with self._translated():
            return self._rows.get(_space(namespace) + key)

    def get_many(self, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]:
        space = _space(namespace)
        with self._translated():
            return self._rows.get([space + key for key in keys])

    def write(
        self,
        changes: Mapping[str, Mapping[bytes, bytes | None]],
        meta: Mapping[str, bytes] | None = None,
        *,
        durable: bool = True,
    ) -> None:
        batch = self._library.WriteBatch(raw_mode=True)
        for namespace, rows in changes.items():
            space = _space(namespace)
            # RocksDB finds the place of a key faster if it is near the last one.
            for key, value in sorted(rows.items()):
                if value is None:
                    batch.delete(space + key)
                else:
                    batch.put(space + key, value)
        for name, value in (meta or {}).items():
            batch.put(_space(_META) + name.encode(), value)
        self._write(batch, durable)

    def items(
        self,
        namespace: str,
        *,
        start: bytes | None = None,
        stop: bytes | None = None,
        prefix: bytes = b"",
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        space = _space(namespace)

        def read(start: bytes | None, stop: bytes | None, limit: int) -> tuple[Rows, bool]:
            lower, upper = _bounds(space, start, stop)
            chunk: Rows = []
            size = 0
            with self._translated():
                # Going back, it would begin at the lower bound.
                begin = None if reverse else lower
                rows = self._rows.items(backwards=reverse, from_key=begin, read_opt=self._until(upper))
                for key, value in islice(rows, limit):
                    if key < lower:
                        return chunk, False
                    chunk.append((key[len(space) :], value))
                    size += len(value)
                    if size >= CHUNK_BYTES:
                        return chunk, True
            if len(chunk) == limit:
                return chunk, True
            if chunk and reverse:
                upper = space + chunk[-1][0]
            elif chunk:
                lower = space + chunk[-1][0] + b"\x00"
            return chunk, self._has_more(lower, upper, reverse)

        return in_chunks(read, *key_range(start, stop, prefix), reverse)

    def count(self, namespace: str) -> int:
        lower, upper = _bounds(_space(namespace), None, None)
        counted = 0
        with self._translated():
            for key in self._rows.keys(from_key=lower, read_opt=self._until(upper)):
                counted += 1
                lower = key + b"\x00"
        self._has_more(lower, upper, reverse=False)
        return counted

    def meta(self, name: str) -> bytes | None:
        return self.get(_META, name.encode())

    def size(self) -> int:
        if self._closed:
            raise store_closed(self._path.name)
        return disk_size(self._path)

    def clear(self) -> None:
        batch = self._library.WriteBatch(raw_mode=True)
        # No namespace starts with this byte, which is not UTF-8.
        batch.delete_range(b"", b"\xff")
        self._write(batch, durable=True)

    def close(self) -> None:
        if self._closed:
            return
        with self._translated():
            self._closed = True
            try:
                self._rows.flush_wal(sync=True)
            finally:
                self._rows.close()

    @property
    def closed(self) -> bool:
        return self._closed

    # -- RocksDB ---------------------------------------------------------------------------------------------

    def _write(self, batch: Any, durable: bool) -> None:
        with self._translated():
            self._rows.write(batch, self._synced if durable else self._logged)

    def _until(self, upper: bytes) -> Any:
        # The binding ignores a lower bound.
        options = self._library.ReadOptions()
        options.set_iterate_upper_bound(upper)
        return options

    def _has_more(self, lower: bytes, upper: bytes, reverse: bool) -> bool:
        """Whether there are rows in a range.

        Iterators end at a block that cannot be read as if there were no more rows; a cursor says why it is at its end.
        """
        with self._translated():
            cursor = self._rows.iter(self._until(upper))
            try:
                if reverse:
                    cursor.seek_to_last()
                else:
                    cursor.seek(lower)
                cursor.status()
                return cursor.valid() and cursor.key() >= lower
            finally:
                # The frame of an error would keep it, and with it the store open.
                del cursor

    @contextmanager
    def _translated(self) -> Generator[None]:
        if self._closed:
            raise store_closed(self._path.name)
        try:
            yield
        except self._library.DbClosedError as error:
            raise store_closed(self._path.name) from error
        except Exception as error:
            # The binding has no other classes.
            if type(error) is not Exception:
                raise
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> BrokerError:
        text = str(error)
        if any(part in text for part in _IN_USE):
            own = "current process" in text
            return StoreLocked(
                f"The store {str(self._path)!r} is open in {'this' if own else 'another'} process already: {text}",
                directory=self._path,
                process=getpid() if own else None,
                advice="Close it before it is opened again",
            )
        if text.startswith(_UNREADABLE):
            return StoreCorrupt(f"The store {str(self._path)!r} cannot be read: {text}", path=self._path, native=error)
        return disk_failed(self._path, error)
