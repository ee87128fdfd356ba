"""Files that are whole or not there, in one directory of a disk or an object store. Blocking.

On a local disk a file is written under another name, synced, renamed, and its directory synced: what `write` returned
from outlasts a loss of power. Stores of objects show an object when it is complete. Of others, such as HDFS, no
more is asked than that a file can be renamed to a name that is free.
*Concurrency.* Any thread. *Failure.* OSError of the file system; a missing file is FileNotFoundError.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import pyarrow

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
_HALF: Final = ".half"
"""What the name of a file ends with that is incomplete yet."""
NEXT: Final = ".next"
"""What the name of a file ends with that is whole, and on its way to the place of the one before."""
_LOOKS: Final = 3
"""How often both names of a file are tried before it counts as missing."""

P = TypeVar("P")
Fill = Callable[[Any], object]
"""Writes what is to be in a file into it."""


def check_place(place: str) -> str:
    """A directory, in the form in which all processes find it. No I/O.

    :raises ConfigurationError: it is relative, or no file system that pyarrow knows.
    """
    place = place.strip()
    if Path(place).is_absolute():
        return place.rstrip("/") or "/"
    if not urlsplit(place).scheme:
        raise ConfigurationError(
            f"Option spool is {place!r}, and each process of Spark has a directory of its own",
            advice="It takes an absolute path, or a URI such as s3://bucket/spools/orders, that all executors see",
        )
    open_files(place)
    return place


def open_files(place: str) -> Files:
    """The files of a directory.

    :raises ConfigurationError: it is no place that pyarrow knows.
    """
    if Path(place).is_absolute():
        return LocalFiles(place)
    # With the clients of all stores, which a directory does not need.
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
    """What a file system says in its first line, without the secrets of the place; libhdfs says a hundred lines."""
    return str(error).partition("\n")[0].replace(place, mask_within(place))


def spool_error(error: BaseException, place: str) -> BaseException:
    """What ended the writer of a spool, for people: of what its directory refuses, with its name."""
    if not isinstance(error, OSError) or isinstance(error, BrokerError):
        return error
    told = BackendError(
        f"The spool {mask_within(place)} cannot be written: {masked_reason(error, place)}",
        advice="Fix that or free space, and start the query again: messages that were not written were not acked",
        native=error,
    )
    told.__cause__ = error
    return told


def hdfs_advice(error: Exception, advice: str) -> str:
    """What to do about it.

    :param advice: unless it is that HDFS's client is missing.
    """
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
        """Write a file, or put it in the place of the one before; when this returns it is durable and all see it.

        Whoever reads meanwhile, and whoever comes after a process that ended in the midst of it, finds one of the two,
        and finds it whole. Of one name there is one writer at a time.
        """

    @abstractmethod
    def open(self, name: str) -> Any:
        """A `pyarrow.NativeFile` to read from."""

    @abstractmethod
    def names(self, directory: str) -> list[str]:
        """The whole files of a directory, sorted, without its name; none if there is no such directory."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file; a missing one is no error."""

    @abstractmethod
    def age(self, name: str) -> float:
        """Seconds since it was written, by the clocks of both; 0 if nobody knows."""

    @abstractmethod
    def sweep(self, directory: str, below: str | None = None) -> None:
        """Remove what a process left half written that was killed; only for who owns the directory.

        :param below: only of files whose names are lower.
        """

    def read(self, name: str) -> bytes:
        """All of a small file."""
        with self.open(name) as file:
            return bytes(file.read())


class LocalFiles(Files):
    """On a disk, or on what is mounted like one."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def write(self, name: str, fill: Fill) -> None:
        path = self._root / name
        half = path.with_name(f"{path.name}.{os.getpid()}{_HALF}")
        if not path.parent.is_dir():
            _make_directory(path.parent)
        try:
            with half.open("wb") as file:
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
    """On any file system of pyarrow; where an object is not there at once, by `replace_file`."""

    def __init__(self, system: Any, root: str) -> None:
        self._fs = system
        self._root = root.rstrip("/")
        self._atomic = system.type_name in _ATOMIC

    def write(self, name: str, fill: Fill) -> None:
        path = self._path(name)
        target = path if self._atomic else f"{path}.{os.getpid()}{_HALF}"
        if not self._atomic:
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
        # First in memory: a stream that is left because `fill` failed would complete the object.
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
        # Between the two looks it may have been renamed from the second name to the first.
        for each in () if self._atomic else (path, f"{path}{NEXT}") * _LOOKS:
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
        # What stands for it first: else that would be the file from then on.
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
    """Put a whole file in the place of another, on a file system that renames to free names only.

    A rename to a name that is taken may be refused, or removes what is there before (as pyarrow's of HDFS does), which
    a reader or a crash would find missing. So what is new waits under a second name, which stands for the file while
    it has no other. A process that ends meanwhile leaves one of the two.

    :param half: the new one.
    :param following: the second name of `path`.
    """
    if is_there(following):
        # Of a process that ended: it is what there is, unless the one before it is still there.
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
    """Make it, and what is missing above it, so that all of it outlasts a loss of power."""
    made = [path]
    while not made[-1].parent.is_dir():
        made.append(made[-1].parent)
    path.mkdir(parents=True, exist_ok=True)
    for each in made:
        _sync_directory(each.parent)


def _sync_directory(path: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
