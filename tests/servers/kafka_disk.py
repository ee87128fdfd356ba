"""A disk that can be full: the log directory of one broker, filled and freed by the test.

It is a `SmallMount`, so that the broker truly finds no space left on its device. Where that is not allowed, the
broker's files are kept from growing instead (`RLIMIT_FSIZE`), which to Kafka is the same failed write. Either way Kafka
ends itself when its only disk fails; after `free` it can be started again with all it had. Blocking; for one thread at
a time.
"""

from __future__ import annotations

import resource
from typing import Self

from tests.servers.kafka import KafkaServer
from tests.servers.small_mount import SmallMount

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
        self._mount = None if by_limit else SmallMount.make(server.directory / "disk", megabytes)
        if self._mount is not None:
            server.data = self._mount.path / "data"

    @property
    def mounted(self) -> bool:
        """Whether it is a mounted file system, not a limit on file sizes."""
        return self._mount is not None

    def fill(self) -> None:
        """Fill the disk; the broker must run."""
        if self._mount is None:
            biggest = max(path.stat().st_size for path in self._server.data.rglob("*.log"))
            self._limit(max(biggest + 1, _LEAST_LIMIT))
            return
        self._mount.fill()

    def free(self) -> None:
        """Free what `fill` took."""
        if self._mount is not None:
            self._mount.free()
        elif self._server.running:
            self._limit(resource.RLIM_INFINITY)

    def close(self) -> None:
        """Kill the broker and drop the disk with its data."""
        self._server.kill()
        if self._mount is not None:
            self._mount.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _limit(self, size: int) -> None:
        resource.prlimit(self._server.process_id, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
