"""A lock on a directory, held by a process and let go by its end, however that comes. POSIX only.

Safe from any thread. A forked child gets no share of it: what a parent holds is free when the parent ends.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from broker import Unsupported

__all__ = ["DirectoryLock"]

_held: Final[set[DirectoryLock]] = set()


class DirectoryLock:
    """An open file with an exclusive `flock`; made by `take`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, path: Path) -> DirectoryLock | None:
        """The lock of this file, which is made if it is missing; None if somebody has it.

        :raises FileNotFoundError: the directory is gone.
        :raises Unsupported: this system has no such locks.
        """
        fcntl = _fcntl()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A file that was removed since it was opened locks nothing.
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return cls(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    @property
    def descriptor(self) -> int:
        """The open file, for a child process that is to hold the lock as well."""
        assert self._descriptor is not None  # not released
        return self._descriptor

    def release(self) -> None:
        """Let it go; may be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _held.discard(self)
            fcntl = _fcntl()
            # A child that was forked a moment ago may still have the file open: closing alone would leave it the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _disown(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _disown_all() -> None:
    for lock in tuple(_held):
        lock._disown()  # pyright: ignore[reportPrivateUsage]
    _held.clear()


def _fcntl() -> Any:
    try:
        return import_module("fcntl")
    except ImportError as error:
        raise Unsupported(
            "Embedded servers need the file locks of Linux, macOS and other POSIX systems",
            native=error,
            advice="Start a nats-server and use nats://host:port",
        ) from None


if hasattr(os, "register_at_fork"):
    # A child keeps its parent's files open, and with them the locks, for as long as it lives.
    os.register_at_fork(after_in_child=_disown_all)
