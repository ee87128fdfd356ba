"""`DirectoryLock`: one process, and one owner in it, uses a directory. Blocking; any thread.

The kernel releases the lock when the process ends, however it ends. The file says who holds it.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final
from weakref import WeakSet

import msgspec

from broker import ConfigurationError
from broker_streams.stores.store import StoreLocked

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["LOCK_FILE", "DirectoryLock"]

LOCK_FILE: Final = "lock"
_FAR: Final = 1 << 20
"""Windows lets no other process read the locked bytes, so the text lies before them."""


class _Holder(msgspec.Struct):
    process: int
    host: str
    instance: str


class DirectoryLock:
    """Holds a directory until it is released.

    :raises StoreLocked: somebody holds it; the error names the process.
    :raises ConfigurationError: the file system has no locks.
    """

    def __init__(self, directory: Path, instance: str) -> None:
        self._descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._take(directory)
            holder = msgspec.json.encode(_Holder(os.getpid(), socket.gethostname(), instance))
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, holder)
        except BaseException:
            os.close(self._descriptor)
            raise
        _held.add(self)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            _held.discard(self)
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self, directory: Path) -> None:
        try:
            if sys.platform == "win32":
                os.lseek(self._descriptor, _FAR, os.SEEK_SET)
                msvcrt.locking(self._descriptor, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = self._holder()
            who = "another process" if holder is None else f"process {holder.process} on {holder.host}"
            raise StoreLocked(
                f"The state directory {str(directory)!r} is locked by {who}",
                directory=directory,
                process=None if holder is None else holder.process,
                advice="End that process, or give this one an instance or a state_dir of its own",
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"The state directory {str(directory)!r} cannot be locked: {error}",
                native=error,
                advice="Set state_dir to a directory on a disk of this machine",
            ) from error

    def _holder(self) -> _Holder | None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        # The holder may be about to write it.
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(os.read(self._descriptor, 4096), type=_Holder)
        return None


_held: WeakSet[DirectoryLock] = WeakSet()


def _release_all() -> None:
    for lock in tuple(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    # A forked child would keep the locks of its parent for its lifetime.
    os.register_at_fork(after_in_child=_release_all)
