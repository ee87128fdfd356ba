"""`Lmdb`: a store in a file of LMDB, the default. Needs the extra `streams`.

The file is mapped into memory: reads take a microsecond, and the page cache of the system is the only cache. It suits
tables up to about half of the memory; beyond that, `RocksDb` writes less.

| what LMDB does not do by itself | here |
|---|---|
| grow its map | a write that finds the map full doubles the map and runs again |
| empty keys | a byte is added to every key |
| keys above 511 bytes | from 480 bytes on, a key is stored as its first 448 and its SHA-256; the value has all of it |
| shrink its file | a file that is less than half full is copied when the store is opened |
| free pages that an old reader may need | reads are short: `items` reads chunks and holds nothing between them |
| find a file that was cut off | the store checks the length, since reading a missing page ends the process |

*Durability.* A durable write syncs the file before it returns. LMDB never overwrites a page that is in use, so a loss
of power leaves the last durable write. Writes with `durable=False`, as in recovery, are not synced: should the power
fail before the next durable write, the file is worth nothing. A mark beside the file, which names the boot of the
machine, says that it is in this state; after another boot, the store is reported as corrupt.

*Concurrency.* One lock for writes, one for reads and for what moves the map. LMDB itself would let two processes write
and lose rows: `StateDirectory` has the lock that keeps the second away. Other processes may read with LMDB's tools.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from itertools import dropwhile
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Final

from broker import BrokerError, MissingClient
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
    successor,
)

if TYPE_CHECKING:
    import lmdb

__all__ = ["Lmdb"]

_FIRST_MAP: Final = 16 << 20
_MOST_SPACES: Final = 64
_META: Final = b"meta"
_SPACE: Final = b"space:"
_LONG: Final = 480
_PREFIX: Final = _LONG - sha256().digest_size
_COMPACT_FROM: Final = 4 << 20
"""Smaller files are not copied."""
_META_PAGES: Final = 2


@dataclass(frozen=True)
class Lmdb:
    """Opens stores in files of LMDB."""

    format: ClassVar[str] = "lmdb"

    def open(self, directory: Path | None, name: str) -> Store:
        if directory is None:
            raise ValueError("directory is None: Lmdb keeps its stores on disk")
        try:
            import lmdb
        except ImportError as error:
            raise MissingClient(
                "The Python package that provides 'lmdb' is not installed",
                native=error,
                advice="Run: pip install 'anybroker[streams]', or choose another store, such as Sqlite()",
            ) from error
        path = directory / f"{name}.{self.format}"
        try:
            path.mkdir(0o700, exist_ok=True)
            return _LmdbStore(path, lmdb)
        except OSError as error:
            raise disk_failed(path, error) from error


def _stored(key: bytes) -> bytes:
    # A constant at the end keeps the order, and LMDB takes no empty key.
    return key + b"\x00" if len(key) < _LONG else key[:_PREFIX] + sha256(key).digest() + b"\x00"


def _entries(rows: Mapping[bytes, bytes | None]) -> Rows:
    """What to put for the rows that are not deleted, in order."""
    return [
        (key + b"\x00", value) if len(key) < _LONG else (_stored(key), len(key).to_bytes(4, "big") + key + value)
        for key, value in sorted(rows.items())
        if value is not None
    ]


def _unpacked(stored: bytes, value: bytes) -> tuple[bytes, bytes]:
    if len(stored) <= _LONG:
        return stored[:-1], value
    end = 4 + int.from_bytes(value[:4], "big")
    return value[4:end], value[end:]


def _in_order(stored: Iterable[tuple[bytes, bytes]], reverse: bool) -> Iterator[tuple[bytes, bytes]]:
    """Rows by their whole keys: those that share a long prefix are stored by their digests, and are sorted here."""
    alike: Rows = []
    prefix = b""
    for key, value in stored:
        if len(key) <= _PREFIX:
            if alike:
                yield from sorted(alike, reverse=reverse)
                alike = []
            yield key[:-1], value
            continue
        if alike and not key.startswith(prefix):
            yield from sorted(alike, reverse=reverse)
            alike = []
        prefix = key[:_PREFIX]
        alike.append(_unpacked(key, value))
    yield from sorted(alike, reverse=reverse)


class _LmdbStore:
    quick_count: ClassVar[bool] = True

    def __init__(self, path: Path, library: Any) -> None:
        self._path = path
        self._file = path / "data.mdb"
        self._unsynced = path / "unsynced"
        self._lmdb = library
        self._writing = Lock()
        self._reading = Lock()
        self._closed = False
        self._check_mark()
        self._open(sync=True)
        try:
            self._compact()
        except BaseException:
            self._environment.close()
            raise

    # -- rows ------------------------------------------------------------------------------------------------

    def get(self, namespace: str, key: bytes) -> bytes | None:
        with self._reading:
            space = self._space(namespace)
            if space is None:
                return None
            try:
                with self._environment.begin(space) as transaction:
                    value = transaction.get(_stored(key))
            except self._lmdb.Error as error:
                raise self._failed(error) from error
        return value if value is None or len(key) < _LONG else value[4 + len(key) :]

    def get_many(self, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._reading:
            space = self._space(namespace)
            if space is None:
                return [None] * len(keys)
            try:
                with self._environment.begin(space) as transaction:
                    get = transaction.get
                    found = [get(_stored(key)) for key in keys]
            except self._lmdb.Error as error:
                raise self._failed(error) from error
        return [
            value if value is None or len(key) < _LONG else value[4 + len(key) :]
            for key, value in zip(keys, found, strict=True)
        ]

    def write(
        self,
        changes: Mapping[str, Mapping[bytes, bytes | None]],
        meta: Mapping[str, bytes] | None = None,
        *,
        durable: bool = True,
    ) -> None:
        with self._writing:
            self._check_open()
            try:
                self._set_durable(durable)
                self._growing(lambda: self._put(changes, meta or {}))
            except (self._lmdb.Error, OSError) as error:
                raise self._failed(error) from error

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
            with self._reading:
                space = self._space(namespace)
                if space is None:
                    return [], False
                try:
                    with self._environment.begin(space) as transaction, transaction.cursor() as cursor:
                        found = _before(cursor, stop) if reverse else _from(cursor, start)
                        return _chunk(found, start if reverse else stop, reverse, limit)
                except self._lmdb.Error as error:
                    raise self._failed(error) from error

        return in_chunks(read, *key_range(start, stop, prefix), reverse)

    def count(self, namespace: str) -> int:
        with self._reading:
            space = self._space(namespace)
            if space is None:
                return 0
            try:
                with self._environment.begin() as transaction:
                    return transaction.stat(space)["entries"]
            except self._lmdb.Error as error:
                raise self._failed(error) from error

    def meta(self, name: str) -> bytes | None:
        with self._reading:
            self._check_open()
            try:
                with self._environment.begin(self._databases[_META]) as transaction:
                    return transaction.get(name.encode())
            except self._lmdb.Error as error:
                raise self._failed(error) from error

    def size(self) -> int:
        self._check_open()
        return disk_size(self._path)

    def clear(self) -> None:
        with self._writing:
            self._check_open()
            try:
                self._set_durable(True)
                self._growing(self._drop)
            except (self._lmdb.Error, OSError) as error:
                raise self._failed(error) from error

    def close(self) -> None:
        with self._writing:
            if self._closed:
                return
            try:
                self._set_durable(True)
            except (self._lmdb.Error, OSError) as error:
                raise self._failed(error) from error
            finally:
                with self._reading:
                    self._closed = True
                    self._environment.close()

    @property
    def closed(self) -> bool:
        return self._closed

    # -- the environment -------------------------------------------------------------------------------------

    def _open(self, *, sync: bool) -> None:
        library = self._lmdb
        size = self._file.stat().st_size if self._file.exists() else 0
        try:
            self._environment: lmdb.Environment = library.open(
                str(self._path),
                map_size=max(_FIRST_MAP, 2 * size // _FIRST_MAP * _FIRST_MAP),
                mode=0o600,
                max_dbs=_MOST_SPACES,
                max_spare_txns=4,
                sync=sync,
            )
        except library.Error as error:
            if "already open in this process" in str(error):
                raise StoreLocked(
                    f"The store {str(self._path)!r} is open in this process (id {os.getpid()}) already",
                    directory=self._path,
                    process=os.getpid(),
                    advice="Close it before it is opened again",
                ) from error
            raise self._failed(error) from error
        try:
            self._check_length()
            # Slots of readers that were killed would keep old pages from being used again.
            self._environment.reader_check()
            self._databases: dict[bytes, Any] = {}
            with self._environment.begin() as transaction:
                names = [name for name, _ in transaction.cursor()]
            for name in {*names, _META}:
                self._databases[name] = self._environment.open_db(name)
        except library.Error as error:
            self._environment.close()
            raise self._failed(error) from error
        except StoreCorrupt:
            self._environment.close()
            raise
        self._syncs = sync

    def _set_durable(self, durable: bool) -> None:
        """Open the environment again, with or without syncs. LMDB cannot change that while it is open."""
        if durable == self._syncs:
            return
        if not durable:
            self._mark_unsynced()
        if durable:
            self._environment.sync(True)
        with self._reading:
            self._environment.close()
            try:
                self._open(sync=durable)
            except BaseException:
                self._closed = True
                raise
        if durable:
            self._unsynced.unlink(missing_ok=True)

    def _mark_unsynced(self) -> None:
        with self._unsynced.open("wb") as file:
            file.write(_boot())
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(self._path)

    def _check_mark(self) -> None:
        try:
            boot = self._unsynced.read_bytes()
        except FileNotFoundError:
            return
        if not boot or boot != _boot():
            raise StoreCorrupt(
                f"The store {str(self._path)!r} was written without syncs, as in a recovery, when the machine stopped",
                path=self._path,
            )
        # The process was killed, and the system still has all pages that it wrote.

    def _check_length(self) -> None:
        """LMDB maps the file, and touching a page beyond its end kills the process."""
        pages = self._environment.info()["last_pgno"] + 1
        size = self._file.stat().st_size
        expected = pages * self._environment.stat()["psize"]
        if size >= expected:
            return
        # Pages at the end that were never used are not written, so only a walk over all of them can tell.
        verifier: Any = import_module("lmdb.verify")
        try:
            problems = verifier.verify(str(self._path))
        except verifier.VerifyError as error:
            problems = [error]
        if problems:
            raise StoreCorrupt(
                f"The store {str(self._path)!r} has {size} of {expected} bytes: {problems[0]}", path=self._path
            )

    def _compact(self) -> None:
        page = self._environment.stat()["psize"]
        last = self._environment.info()["last_pgno"] + 1
        try:
            with self._environment.begin() as transaction:
                stats = [transaction.stat(database) for database in (None, *self._databases.values())]
        except self._lmdb.Error as error:
            raise self._failed(error) from error
        used = _META_PAGES + sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        if last * page < _COMPACT_FROM or 2 * used >= last:
            return
        copy = self._path / "compact.mdb"
        copy.unlink(missing_ok=True)
        try:
            with copy.open("xb") as file:
                copy.chmod(0o600)
                self._environment.copyfd(file.fileno(), compact=True)
                os.fsync(file.fileno())
        except (self._lmdb.Error, OSError):
            # It serves as it is; a full disk, for instance, is reported when something is written.
            copy.unlink(missing_ok=True)
            return
        self._environment.close()
        copy.replace(self._file)
        _sync_directory(self._path)
        self._open(sync=True)

    def _growing(self, change: Callable[[], None]) -> None:
        """Make a change, a transaction, again with a map twice as large whenever the map is full."""
        while True:
            try:
                change()
            except self._lmdb.MapFullError:
                with self._reading:
                    self._environment.set_mapsize(2 * self._environment.info()["map_size"])
            else:
                return

    def _put(self, changes: Mapping[str, Mapping[bytes, bytes | None]], meta: Mapping[str, bytes]) -> None:
        for namespace in changes:
            name = _SPACE + namespace.encode()
            if name not in self._databases:
                # In a transaction of its own: the handle would not outlive the abort of another one.
                database = self._environment.open_db(name)
                with self._reading:
                    self._databases[name] = database
        with self._environment.begin(write=True) as transaction:
            for namespace, rows in changes.items():
                space = self._databases[_SPACE + namespace.encode()]
                with transaction.cursor(space) as cursor:
                    cursor.putmulti(_entries(rows))
                for key in sorted(key for key, value in rows.items() if value is None):
                    transaction.delete(_stored(key), db=space)
            for name, value in meta.items():
                transaction.put(name.encode(), value, db=self._databases[_META])

    def _drop(self) -> None:
        with self._environment.begin(write=True) as transaction:
            for database in self._databases.values():
                transaction.drop(database, delete=False)

    # -- errors ----------------------------------------------------------------------------------------------

    def _space(self, namespace: str) -> Any | None:
        self._check_open()
        return self._databases.get(_SPACE + namespace.encode())

    def _check_open(self) -> None:
        if self._closed:
            raise store_closed(self._path.name)

    def _failed(self, error: BaseException) -> BrokerError:
        library = self._lmdb
        unreadable = (
            library.BadTxnError,
            library.CorruptedError,
            library.InvalidError,
            library.PageNotFoundError,
            library.PanicError,
            library.VersionMismatchError,
        )
        if isinstance(error, unreadable):
            return StoreCorrupt(f"The store {str(self._path)!r} cannot be read: {error}", path=self._path, native=error)
        return disk_failed(self._path, error)


def _from(cursor: lmdb.Cursor[bytes], start: bytes | None) -> Iterator[tuple[bytes, bytes]]:
    """All rows from a key on."""
    if start is None:
        placed = cursor.first()
    elif len(start) < _PREFIX:
        placed = cursor.set_range(_stored(start))
    else:
        placed = cursor.set_range(start[:_PREFIX])
    rows = _in_order(cursor.iternext() if placed else (), reverse=False)
    return rows if start is None or len(start) < _PREFIX else dropwhile(lambda row: row[0] < start, rows)


def _before(cursor: lmdb.Cursor[bytes], stop: bytes | None) -> Iterator[tuple[bytes, bytes]]:
    """All rows before a key, the last one first."""
    after = stop
    if stop is not None:
        after = _stored(stop) if len(stop) < _PREFIX else successor(stop[:_PREFIX])
    placed = cursor.prev() if after is not None and cursor.set_range(after) else cursor.last()
    rows = _in_order(cursor.iterprev() if placed else (), reverse=True)
    return rows if stop is None or len(stop) < _PREFIX else dropwhile(lambda row: row[0] >= stop, rows)


def _chunk(rows: Iterator[tuple[bytes, bytes]], end: bytes | None, reverse: bool, limit: int) -> tuple[Rows, bool]:
    """Rows until the end of the range, or until there are enough."""
    chunk: Rows = []
    size = 0
    for row in rows:
        if end is not None and (row[0] < end if reverse else row[0] >= end):
            return chunk, False
        chunk.append(row)
        size += len(row[1])
        if len(chunk) >= limit or size >= CHUNK_BYTES:
            return chunk, True
    return chunk, False


def _boot() -> bytes:
    """Names the boot of the machine; empty if the system does not tell."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return b""


def _sync_directory(path: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
