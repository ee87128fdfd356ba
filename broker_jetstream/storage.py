"""Whether an embedded server can write, and its restart when it can again.

nats-server answers no message that it cannot write. After such a failure its stream takes nothing more, also when there
is room again, until the server is restarted; what was confirmed before is kept. So every connection of an embedded
server reads the new lines of the server's log, and looks at the room on the disk, once a second. While the server
cannot write, `Connection.storage_failure` has the error, and an event was emitted. Once a file can be written again,
the connection that started the server restarts it; the others reconnect, as after any end of the server.

Runs on the event loop; files are read in threads. No failure ends the watch.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from broker import BrokerError, StorageFailed
from broker.driver import TaskSet, WritesFailed, logger
from broker_jetstream.connection import Connection
from broker_jetstream.server import EmbeddedServer

__all__ = ["StorageWatch", "read_failure"]

PERIOD: Final = 1.0
_FAILED: Final = ("critical write error", "failed to store a msg", "error creating store")
_STARTED: Final = "server is ready"
_LEAST_ROOM: Final = 64 * 1024
"""Bytes below which a write is tried: the server may not even be able to write its log."""
_ROOM: Final = 1 << 20
"""Bytes that can be written once there is room again."""
_FIRST_PART: Final = 1 << 20
"""Bytes at the end of the log that are read first; the server may have failed before this connection opened."""


class StorageWatch:
    """Watches the server of one directory.

    :param directory: of the server, which is running.
    """

    def __init__(self, connection: Connection, server: EmbeddedServer, directory: Path) -> None:
        self._connection = connection
        self._server = server
        self._directory = directory
        self._looking = asyncio.Lock()
        self._reason = ""
        self._position: int | None = None
        self._tasks = TaskSet("broker-jetstream-storage", lambda error: logger.error("Watching the storage: %r", error))

    def start(self) -> None:
        self._tasks.spawn(self._run())

    def close(self) -> None:
        self._tasks.cancel()

    async def _run(self) -> None:
        while True:
            await self.look()
            ours = self._server.process_id is not None
            if self._reason and ours and await asyncio.to_thread(_can_write, self._directory):
                logger.warning("There is room in %r again: its server is restarted", str(self._directory))
                try:
                    await self._server.restart()
                except BrokerError as error:
                    logger.error("%s", error)
            await asyncio.sleep(PERIOD)

    async def look(self) -> None:
        """Look at the log and the disk now."""
        async with self._looking:
            before = self._reason
            try:
                await asyncio.to_thread(self._look)
            except OSError as error:
                logger.debug("Looking at the storage of %r: %s", str(self._directory), error)
                return
            self._report(before)

    def _report(self, before: str) -> None:
        if not self._reason:
            self._connection.storage_failure = None
        elif not before:
            failure = StorageFailed(
                f"The embedded server cannot write in {str(self._directory)!r}: {self._reason}",
                advice=f"Make room on the disk of {str(self._directory)!r}; the server is then restarted, and what was "
                "not confirmed can be published again under the same id",
            )
            self._connection.storage_failure = failure
            logger.error("%s", failure)
            hooks = self._connection.hooks
            if hooks.listening:
                hooks.emit(WritesFailed(server=self._connection.server, error=failure))

    def _look(self) -> None:
        path = self._directory / "nats-server.log"
        size = path.stat().st_size
        if self._position is None or size < self._position:
            self._position = max(0, size - _FIRST_PART)  # first, or rotated
        if size > self._position:
            with path.open("rb") as file:
                file.seek(self._position)
                # A line that is written at this moment is read next time.
                new = file.read(size - self._position).rpartition(b"\n")[0]
            self._position += len(new)
            self._reason = read_failure(new.decode(errors="replace"), self._reason)
        if not self._reason and _room(self._directory) < _LEAST_ROOM and not _can_write(self._directory):
            self._reason = "no space left on device"


def read_failure(log: str, reason: str) -> str:
    """Why the server cannot write, after these lines of its log; "" if it can.

    :param reason: why it could not before them.
    """
    for line in log.splitlines():
        lowered = line.lower()
        if any(words in lowered for words in _FAILED):
            reason = line.rpartition(": ")[2] or "a write failed"
        elif _STARTED in lowered:
            reason = ""
    return reason


def _room(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _can_write(directory: Path) -> bool:
    """Whether a file of some size can be written; also a quota or a limit may prevent that."""
    try:
        # Without a name where the system can, so that nothing stays when this process is killed.
        with TemporaryFile(dir=directory) as file:
            file.write(bytes(_ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
