"""`StateDirectory`: where the stores of one instance of a group lie, for as long as it holds their lock.

    <state_dir>/<group>/<instance>/lock
                                   <store>.lmdb/            a directory for each store; its suffix is the format
                                   <store>.lmdb.corrupt-1/  one that could not be read, set aside

An instance is one member of the group on this machine, by its name: it finds the stores that it left. Without a name it
is the first unused number, so that any number of processes can share a state_dir.

*Files.* Directories are for the own user alone. What another user owns, or can write to, is refused. By default the
state is kept under `XDG_STATE_HOME` or `~/.local/state`, never in a directory that a restart of the machine empties.

*Concurrency.* Any thread, one call at a time. The lock keeps other processes away, and goes with the process.

*Failure.* A store that cannot be read is set aside under another name, and an empty one opened, with a warning in the
log: its rows are recovered from the table topic. Nothing is deleted but by `remove`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote, unquote

from broker import BrokerError, Closed, ConfigurationError
from broker.driver import check_owner, check_unshared, make_private_directory, narrow_mode
from broker_streams.stores.locks import LOCK_FILE, DirectoryLock
from broker_streams.stores.store import Store, StoreCorrupt, StoreFactory, StoreLocked, disk_failed, disk_size

__all__ = ["StateDirectory", "StoredState", "default_state_dir", "instances"]

logger = logging.getLogger("broker_streams")

_SETTING: Final = "state_dir"
_MOST_INSTANCES: Final = 1000
_LONGEST: Final = 150
_STORE: Final = re.compile(r"(?P<name>.+?)\.(?P<format>[a-z0-9]+)(?P<aside>\.corrupt-\d+)?")
_REMOVED: Final = ".removed"
_TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108
"""Emptied when the machine starts, or at any time."""


@dataclass(frozen=True)
class StoredState:
    """A store that lies in a state directory.

    :ivar name: the name that it was opened with.
    :ivar format: what keeps it, for instance "lmdb".
    :ivar path: its directory.
    :ivar size: the bytes of its files.
    :ivar corrupt: whether it could not be read and was set aside.
    """

    name: str
    format: str
    path: Path
    size: int
    corrupt: bool


class StateDirectory:
    """Holds the directory of an instance, and opens stores in it. Use it in a `with` statement, or call `close`.

    :param path: the state_dir; None for `default_state_dir()`.
    :param group: the group whose stores these are.
    :param instance: a name that is unique among the members that share the state_dir; None for a free number.
    :raises StoreLocked: another process, or this one, has the instance.
    :raises ConfigurationError: the path cannot be used; the error says why.
    :raises StorageFailed: the disk is full, or fails.
    """

    def __init__(self, path: str | os.PathLike[str] | None, group: str, instance: str | None = None) -> None:
        base = default_state_dir() if path is None else Path(path)
        if instance is not None:
            self._hold(base, group, instance)
            return
        for number in range(_MOST_INSTANCES):
            try:
                self._hold(base, group, str(number))
            except StoreLocked:
                continue
            return
        raise ConfigurationError(
            f"All of {_MOST_INSTANCES} instances in {str(_group_directory(base, group))!r} are in use",
            advice="Set state_dir to another directory, or name the instance",
        )

    def _hold(self, base: Path, group: str, instance: str) -> None:
        self.path = _group_directory(base, group) / _file_name(instance)
        self.instance = instance
        self._closed = False
        self._open: dict[str, Store] = {}
        try:
            make_private_directory(self.path)
            check_owner(base, _SETTING)
            for private in (self.path.parent, self.path):
                check_unshared(private, _SETTING)
                narrow_mode(private)
            check_owner(self.path / LOCK_FILE, _SETTING)
            self._lock = DirectoryLock(self.path, instance)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise ConfigurationError(
                f"The state directory {str(self.path)!r} cannot be used: {error.strerror}",
                native=error,
                advice=f"Set {_SETTING} to a directory that this user can write to",
            ) from error
        except OSError as error:
            raise disk_failed(self.path, error) from error

    # -- stores ----------------------------------------------------------------------------------------------

    def open(self, factory: StoreFactory, name: str) -> Store:
        """Open a store, and create it if it is missing. One that cannot be read is set aside, and an empty one created.

        :raises StoreLocked: it is open already.
        :raises MissingClient: a package is not installed; the advice is the pip command.
        :raises StorageFailed: the disk is full, or fails.
        """
        self._check_open()
        before = self._open.get(name)
        if before is not None and not before.closed:
            raise StoreLocked(
                f"The store {name!r} in {str(self.path)!r} is open in this process (id {os.getpid()}) already",
                directory=self.path,
                process=os.getpid(),
                advice="Close it before it is opened again",
            )
        for other in self.stores():
            if other.name == name and other.format != factory.format and not other.corrupt:
                logger.warning(
                    "%s is opened as %s; its store as %s stays in %s, is not read, and gets old. Remove it if the "
                    "change was meant",
                    *(name, factory.format, other.format, other.path),
                )
        try:
            store = factory.open(self.path, _file_name(name))
        except StoreCorrupt as error:
            self.set_aside(error)
            store = factory.open(self.path, _file_name(name))
        self._open[name] = store
        return store

    def set_aside(self, reason: StoreCorrupt) -> Path:
        """Close a store that cannot be read and rename its directory, so that `open` starts a new one.

        :returns: where it is now.
        """
        self._check_open()
        source = reason.path
        if (parts := _STORE.fullmatch(source.name)) is not None:
            self._close_store(unquote(parts["name"]))
        number = 1
        while (target := source.with_name(f"{source.name}.corrupt-{number}")).exists():
            number += 1
        try:
            source.rename(target)
        except OSError as error:
            raise disk_failed(source, error) from error
        logger.warning(
            "The store %s cannot be read and is recovered from its topic; it lies in %s, and may be deleted: %s",
            *(source, target, reason.message),
        )
        return target

    def stores(self) -> list[StoredState]:
        """The stores that lie here, of every format, those set aside included."""
        self._check_open()
        return list(self._found())

    def remove(self, name: str) -> list[StoredState]:
        """Close and delete a store, in every format, with what was set aside of it.

        :returns: what was deleted.
        """
        self._check_open()
        self._close_store(name)
        removed = [found for found in self._found() if found.name == name]
        for found in removed:
            self._delete(found.path)
        return removed

    def clear(self) -> list[StoredState]:
        """Close and delete all stores.

        :returns: what was deleted.
        """
        return [found for name in {found.name for found in self.stores()} for found in self.remove(name)]

    def close(self) -> None:
        """Close all stores and release the directory; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            while self._open:
                self._open.popitem()[1].close()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The state directory {str(self.path)!r} is closed")

    def _close_store(self, name: str) -> None:
        store = self._open.pop(name, None)
        if store is not None:
            # What is to go, or cannot be read, need not be written.
            with suppress(BrokerError):
                store.close()

    def _found(self) -> Iterator[StoredState]:
        for path in sorted(self.path.iterdir()):
            if path.name.endswith(_REMOVED):
                # A process ended while it deleted this.
                self._delete(path)
                continue
            parts = _STORE.fullmatch(path.name)
            if parts is not None and path.is_dir():
                yield StoredState(
                    name=unquote(parts["name"]),
                    format=parts["format"],
                    path=path,
                    size=disk_size(path),
                    corrupt=parts["aside"] is not None,
                )

    def _delete(self, path: Path) -> None:
        try:
            if not path.name.endswith(_REMOVED):
                # A half-deleted store must not be taken for one that is whole.
                path = path.rename(path.with_name(path.name + _REMOVED))
            shutil.rmtree(path)
        except OSError as error:
            raise disk_failed(path, error) from error


def default_state_dir() -> Path:
    """Where state is kept unless state_dir says so: below `XDG_STATE_HOME` or `~/.local/state`.

    :raises ConfigurationError: there is no such directory, or it is one for temporary files.
    """
    chosen = os.environ.get("XDG_STATE_HOME", "")
    try:
        # The standard says that a relative path is to be ignored.
        home = Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise ConfigurationError(
            "This user has no home directory to keep state in", native=error, advice=f"Set {_SETTING}"
        ) from error
    resolved = home.resolve()
    for temporary in (*_TEMPORARY, tempfile.gettempdir()):
        if resolved.is_relative_to(Path(temporary).resolve()):
            raise ConfigurationError(
                f"State would be kept in {str(home)!r}, below {temporary!r}, which may be emptied at any time",
                advice=f"Set {_SETTING} to a directory that stays",
            )
    return home / "anybroker" / "streams"


def instances(path: str | os.PathLike[str] | None, group: str) -> list[str]:
    """The instances of a group that have a state directory, in use or not."""
    directory = _group_directory(default_state_dir() if path is None else Path(path), group)
    with suppress(FileNotFoundError):
        return sorted(unquote(found.name) for found in directory.iterdir() if found.is_dir())
    return []


def _group_directory(base: Path, group: str) -> Path:
    return base / _file_name(group)


def _file_name(name: str) -> str:
    """A name as the name of a file, whatever its characters; `unquote` is the way back."""
    quoted = quote(name, safe="", errors="surrogateescape")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if not quoted or len(quoted) > _LONGEST:
        raise ConfigurationError(
            f"{name!r} cannot be the name of a directory", advice=f"Use 1 to {_LONGEST} characters"
        )
    return quoted
