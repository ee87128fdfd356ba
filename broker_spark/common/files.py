"""Files that are written atomically, in one directory of a disk or an object store. Blocking.

On a local disk a file is written under another name, synced and renamed, and its directory is synced: after `write` it
survives a power loss. Other users have no access to it. Object stores show complete objects only. Other file systems,
such as HDFS, need only to rename a file to an unused name.

*Concurrency.* Any thread. *Failure.* OSError of the file system; a missing file is FileNotFoundError.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import pyarrow

from broker.driver import check_owner, check_unshared, create_private_file, make_private_directory, narrow_mode
from broker.errors import BackendError, BrokerError, ConfigurationError
from broker.urls import mask_within

__all__ = [
    "NEXT",
    "Files",
    "LocalFiles",
    "StoredFiles",
    "check_place",
    "hdfs_advice",
    "masked_reason",
    "open_files",
    "replace_file",
    "spool_error",
]

_ATOMIC: Final = frozenset({"s3", "gcs"})
"""File systems of pyarrow in which an object appears when it is closed."""
_SETTING: Final = "option spool"
_HALF: Final = ".half"
"""What the name of a file ends with that is incomplete yet."""
NEXT: Final = ".next"
"""The suffix of a complete file that is about to replace the previous one."""
_OPEN_ATTEMPTS: Final = 3
"""How often both names of a file are tried before it is missing."""

P = TypeVar("P")
Fill = Callable[[Any], object]
"""Writes the contents into the open file."""


def check_place(place: str) -> str:
    """A directory in a form that all processes find. No I/O.

    :raises ConfigurationError: it is relative, or of a file system that pyarrow does not know.
    """
    place = place.strip()
    if Path(place).is_absolute():
        return place.rstrip("/") or "/"
    if not urlsplit(place).scheme:
        raise ConfigurationError(
            f"Option spool is {place!r}, which each process of Spark would look for in its own directory",
            advice="It takes an absolute path, or a URI such as s3://bucket/spools/orders, that all executors see",
        )
    open_files(place)
    return place


def open_files(place: str) -> Files:
    """The files of a directory.

    :raises ConfigurationError: pyarrow does not know this kind of place.
    """
    if Path(place).is_absolute():
        return LocalFiles(place)
    # Imports the clients of all stores, which a local directory does not need.
    from pyarrow import fs

    try:
        system, path = cast("tuple[Any, str]", cast("Any", fs.FileSystem).from_uri(place))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigurationError(
            f"Option spool is {mask_within(place)!r}: {masked_reason(error, place)}",
            advice=hdfs_advice(
                error, "It takes an absolute path, or a URI of pyarrow.fs such as s3://bucket/spools/orders"
            ),
        ) from None
    if not path:
        raise ConfigurationError(
            f"Option spool is {mask_within(place)!r}, which names no directory",
            advice="It takes a URI such as s3://bucket/spools/orders",
        )
    if isinstance(system, fs.LocalFileSystem):
        return LocalFiles(path)
    return StoredFiles(system, path)


def masked_reason(error: Exception, place: str) -> str:
    """The first line of a file system's error without the secrets of the place; libhdfs writes a hundred lines."""
    return str(error).partition("\n")[0].replace(place, mask_within(place))


def spool_error(error: BaseException, place: str) -> BaseException:
    """The error for the user: an OSError becomes one that names the spool."""
    if not isinstance(error, OSError) or isinstance(error, BrokerError):
        return error
    named = BackendError(
        f"The spool {mask_within(place)} cannot be written: {masked_reason(error, place)}",
        advice="Fix that or free space, and start the query again: messages that were not written were not acked",
        native=error,
    )
    named.__cause__ = error
    return named


def hdfs_advice(error: Exception, advice: str) -> str:
    """The advice, or that for a missing HDFS client."""
    if not any(name in str(error) for name in ("libhdfs", "libjvm")):
        return advice
    return (
        "HDFS needs libhdfs, Hadoop's client and Java on every node: set HADOOP_HOME or ARROW_LIBHDFS_DIR, JAVA_HOME, "
        "and CLASSPATH to what `hadoop classpath --glob` says"
    )


class Files(ABC):
    """One directory of files, and directories of them in it; names have `/` between."""

    @abstractmethod
    def write(self, name: str, fill: Fill) -> None:
        """Write or replace a file. When this returns, the file is durable and visible to all.

        Concurrent readers, and those after a crash, find the old or the new file, complete. One writer at a time per
        name.
        """

    @abstractmethod
    def open(self, name: str) -> Any:
        """A `pyarrow.NativeFile` to read from."""

    @abstractmethod
    def names(self, directory: str) -> list[str]:
        """The complete files of a directory, sorted, without its name; none if it does not exist."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file; a missing one is no error."""

    @abstractmethod
    def age(self, name: str) -> float:
        """Seconds since the file was written, by the clocks of both machines; 0 if unknown."""

    @abstractmethod
    def sweep(self, directory: str, below: str | None = None) -> None:
        """Remove incomplete files of a killed process. Only the owner of the directory may call this.

        :param below: only files with lower names.
        """

    def protect(self, names: Collection[str]) -> None:
        """Take the access of other users from what is there already of these files and directories.

        The directory itself is created if it is missing, and narrowed if it holds nothing else.

        :raises ConfigurationError: another user made one of them or a file in them, or others can still write there.
        """
        del names

    def read(self, name: str) -> bytes:
        """All of a small file."""
        with self.open(name) as file:
            return bytes(file.read())


class LocalFiles(Files):
    """On a local disk or a mounted file system."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def write(self, name: str, fill: Fill) -> None:
        path = self._root / name
        half = path.with_name(f"{path.name}.{os.getpid()}{_HALF}")
        if not path.parent.is_dir():
            _make_directory(path.parent)
        try:
            # Of a killed process.
            half.unlink(missing_ok=True)
            with create_private_file(half) as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            half.replace(path)
        except BaseException:
            half.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)

    def open(self, name: str) -> Any:
        return pyarrow.memory_map(str(self._root / name))

    def protect(self, names: Collection[str]) -> None:
        if not self._root.is_dir():
            _make_directory(self._root)
        there = {path.name for path in self._root.iterdir() if not path.name.endswith(_HALF)}
        entries = [self._root / name for name in sorted(there.intersection(names))]
        for path in entries:
            narrow_mode(path)
        if there.issubset(names):
            narrow_mode(self._root)
        check_unshared(self._root, _SETTING)
        for path in entries:
            check_unshared(path, _SETTING)
            if path.is_dir():
                for each in path.iterdir():
                    check_owner(each, _SETTING)

    def names(self, directory: str) -> list[str]:
        try:
            found = [path.name for path in (self._root / directory).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.endswith(_HALF))

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def age(self, name: str) -> float:
        return max(0.0, time() - (self._root / name).stat().st_mtime)

    def sweep(self, directory: str, below: str | None = None) -> None:
        for path in (self._root / directory).glob(f"*{_HALF}"):
            if below is None or path.name < below:
                path.unlink(missing_ok=True)


class StoredFiles(Files):
    """On any file system of pyarrow. Where objects do not appear atomically, `replace_file` is used."""

    def __init__(self, system: Any, root: str) -> None:
        self._fs = system
        self._root = root.rstrip("/")
        self._atomic = system.type_name in _ATOMIC

    def write(self, name: str, fill: Fill) -> None:
        path = self._path(name)
        target = path if self._atomic else f"{path}.{os.getpid()}{_HALF}"
        if not self._atomic:
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
        # In memory first: closing the stream after `fill` failed would complete the object.
        whole: Any = pyarrow.BufferOutputStream()
        fill(whole)
        with self._fs.open_output_stream(target) as stream:
            stream.write(whole.getvalue())
        if not self._atomic:
            replace_file(
                target, path, f"{path}{NEXT}", is_there=self._is_there, move=self._fs.move, delete=self._fs.delete_file
            )

    def open(self, name: str) -> Any:
        path = self._path(name)
        # The file may be renamed from the second name to the first between the two attempts.
        for each in () if self._atomic else (path, f"{path}{NEXT}") * _OPEN_ATTEMPTS:
            with suppress(FileNotFoundError):
                return self._fs.open_input_file(each)
        return self._fs.open_input_file(path)

    def names(self, directory: str) -> list[str]:
        found = {path.rpartition("/")[2] for path in self._paths(directory)}
        if not self._atomic:
            found = {name.removesuffix(NEXT) for name in found}
        return sorted(name for name in found if not name.endswith(_HALF))

    def delete(self, name: str) -> None:
        path = self._path(name)
        # The replacement first: otherwise it would become the file.
        for each in (path,) if self._atomic else (f"{path}{NEXT}", path):
            with suppress(FileNotFoundError):
                self._fs.delete_file(each)

    def age(self, name: str) -> float:
        path = self._path(name)
        stamp = self._fs.get_file_info(path).mtime_ns
        if not stamp and not self._atomic:
            stamp = self._fs.get_file_info(f"{path}{NEXT}").mtime_ns
        return 0.0 if not stamp else max(0.0, time() - stamp / 1e9)

    def _is_there(self, path: str) -> bool:
        from pyarrow import fs

        return self._fs.get_file_info(path).type == fs.FileType.File

    def sweep(self, directory: str, below: str | None = None) -> None:
        for path in self._paths(directory):
            if path.endswith(_HALF) and (below is None or path.rpartition("/")[2] < below):
                self._fs.delete_file(path)

    def _paths(self, directory: str) -> list[str]:
        from pyarrow import fs

        selector = cast("Any", fs.FileSelector)(self._path(directory), allow_not_found=True)
        return [info.path for info in self._fs.get_file_info(selector) if info.type == fs.FileType.File]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def replace_file(
    half: P,
    path: P,
    following: P,
    *,
    is_there: Callable[[P], bool],
    move: Callable[[P, P], object],
    delete: Callable[[P], object],
) -> None:
    """Replace a file on a file system that renames to unused names only.

    A rename to an existing name may be refused, or may delete the old file first (as pyarrow does on HDFS), so that a
    reader or a crash finds none. So the new file gets a second name first, which counts as the file while the first
    name is missing. A process that ends in between leaves at least one of the two.

    :param half: the new file.
    :param following: the second name of `path`.
    """
    if is_there(following):
        # From a process that ended: it is the file, unless the previous one still exists.
        if is_there(path):
            delete(following)
        else:
            move(following, path)
    if is_there(path):
        move(half, following)
        delete(path)
        half = following
    move(half, path)


def _make_directory(path: Path) -> None:
    """Create a directory and its missing parents durably."""
    for each in make_private_directory(path):
        _sync_directory(each.parent)


def _sync_directory(path: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
