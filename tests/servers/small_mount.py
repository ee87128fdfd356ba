"""A small file system that a test fills and frees.

It is in memory, mounted in the namespace of one process, so that no test needs to be root, and reached by the path
through `/proc` to that namespace. Some kernels give ordinary users no such mounts. Blocking; for one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

__all__ = ["SmallMount"]


class SmallMount:
    """The file system that `holder` has mounted at `place`, in its namespace.

    :ivar path: the way to it from other processes.
    """

    def __init__(self, holder: subprocess.Popen[bytes], place: Path) -> None:
        self._holder = holder
        self.path = Path(f"/proc/{holder.pid}/root{place}")

    @classmethod
    def make(cls, place: Path, megabytes: int) -> Self | None:
        """A file system of this size, at a directory that does not exist yet; None if mounting is not allowed."""
        if shutil.which("unshare") is None:
            return None
        place.mkdir()
        script = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && echo mounted && exec cat'
        # It ends with its input, also when this process dies.
        holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", f"{megabytes}m", str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert holder.stdout is not None
        if holder.stdout.readline() == b"mounted\n":
            return cls(holder, place)
        holder.communicate()
        return None

    def fill(self) -> None:
        """Take all the room that is left."""
        with self._ballast.open("ab") as file, contextlib.suppress(OSError):
            while True:  # others may free some meanwhile
                room = os.fstatvfs(file.fileno())
                size = max(room.f_bavail, 1) * room.f_frsize
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)

    def free(self) -> None:
        """Give back what `fill` took."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Drop the file system with its data, once nothing uses it."""
        self._holder.communicate()  # it reads to the end of its input

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"
