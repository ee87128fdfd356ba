"""A disk that can be full: the log directory of one broker, filled and freed by the test.

It is a file system in memory, mounted in the namespace of one process, so that no test needs to be root and the
broker truly finds no space left on its device. Where a kernel gives ordinary users no such mounts, the broker's files
are kept from growing instead (`RLIMIT_FSIZE`), which to Kafka is the same failed write. Either way Kafka ends itself
when its only disk fails; after `free` it can be started again with all it had. Blocking; for one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Self

from tests.servers.kafka import KafkaServer

__all__ = ["SmallDisk"]

_LEAST_LIMIT = 1 << 20
_SMALL_INDEXES = {"log.index.size.max.bytes": "65536"}
"""Kafka lays indexes out in full before it writes to them."""


class SmallDisk:
    """The disk of `server`, which is not started yet; leave this context before the server's.

    :param by_limit: limit the file size even if mounting is possible.
    """

    def __init__(self, server: KafkaServer, megabytes: int = 64, *, by_limit: bool = False) -> None:
        assert not (server.directory / "data").exists(), "this broker was started already"
        self._server = server
        server.options = _SMALL_INDEXES | server.options
        self._holder = None if by_limit else _mount(server.directory, megabytes)
        if self._holder is not None:
            # The path through /proc to the namespace of the other process.
            server.data = Path(f"/proc/{self._holder.pid}/root{server.directory}/disk/data")

    @property
    def mounted(self) -> bool:
        """Whether it is a mounted file system, not a limit on file sizes."""
        return self._holder is not None

    def fill(self) -> None:
        """Fill the disk; the broker must run."""
        if self._holder is None:
            biggest = max(path.stat().st_size for path in self._server.data.rglob("*.log"))
            self._limit(max(biggest + 1, _LEAST_LIMIT))
            return
        with self._ballast.open("ab") as file, contextlib.suppress(OSError):
            while True:  # the broker may free some meanwhile
                room = os.fstatvfs(file.fileno())
                size = max(room.f_bavail, 1) * room.f_frsize
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)

    def free(self) -> None:
        """Free what `fill` took."""
        if self._holder is not None:
            self._ballast.unlink(missing_ok=True)
        elif self._server.running:
            self._limit(resource.RLIM_INFINITY)

    def close(self) -> None:
        """Kill the broker and drop the disk with its data."""
        self._server.kill()
        if self._holder is not None:
            self._holder.communicate()  # it reads to the end of its input

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _ballast(self) -> Path:
        return self._server.data.parent / "ballast"

    def _limit(self, size: int) -> None:
        resource.prlimit(self._server.process_id, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _mount(directory: Path, megabytes: int) -> subprocess.Popen[bytes] | None:
    """A process with a private file system at `directory/disk`; None if that is not allowed."""
    if shutil.which("unshare") is None:
        return None
    place = directory / "disk"
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
        return holder
    holder.communicate()
    return None
