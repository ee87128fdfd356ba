"""`Sink` and `Source`: standard output and input in bytes, without blocking the event loop.

A full pipe, a pager or idle input suspends only the caller, while leases are renewed; cancellation takes effect at
once. `Sink.written` counts exactly the bytes that were written, and `Sink.taken` those that the reader of a pipe has
read, so that a message is acked only after its line. One task uses a stream at a time.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
import sys
from collections.abc import AsyncIterator
from typing import IO, Any, Final, cast

try:
    import fcntl
    import termios
except ImportError:  # Windows
    fcntl = termios = None

__all__ = ["Sink", "Source"]

_CHUNK: Final = 4096
"""A writable pipe accepts this many bytes without blocking (PIPE_BUF)."""
_READ: Final = 1 << 16
_POLLS: Final = hasattr(select, "poll")
_SHORTEST: Final = 0.001
_LONGEST: Final = 0.05
"""How often a writer looks whether the reader has read, since no event tells it; from the one to the other."""


def _binary(stream: IO[Any]) -> IO[bytes]:
    """The binary stream under a text stream."""
    return getattr(stream, "buffer", stream)


def _descriptor(stream: IO[Any]) -> int | None:
    """The file descriptor of a stream; None for a stream in memory, and on platforms without poll."""
    if not _POLLS:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _poll(fd: int, event: int) -> int:
    poller = select.poll()
    poller.register(fd, event)
    ready = poller.poll(0)
    return ready[0][1] if ready else 0


async def _wait(fd: int, event: int) -> None:
    """Return when the descriptor is ready, or its other end is closed."""
    if _poll(fd, event):
        return
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = (
        (loop.add_reader, loop.remove_reader) if event == select.POLLIN else (loop.add_writer, loop.remove_writer)
    )

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)


class Sink:
    """Standard output.

    :ivar written: number of bytes written to the operating system.
    """

    def __init__(self, stream: IO[Any] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._fd = _descriptor(self._stream)
        self._pipe = self._fd is not None and stat.S_ISFIFO(os.fstat(self._fd).st_mode)
        self.written = 0
        self._stream.flush()

    @property
    def taken(self) -> int:
        """How many of the written bytes the reader has read. Of what is not a pipe, and on systems whose pipes do not
        tell their writer, all count as read.
        """
        if not self._pipe or fcntl is None or termios is None:
            return self.written
        unread = int.from_bytes(fcntl.ioctl(cast("int", self._fd), termios.FIONREAD, bytes(4)), sys.byteorder)
        return max(0, self.written - unread)

    async def wait_taken(self, end: int) -> None:
        """Return when the reader has read up to `end`.

        :raises BrokenPipeError: the reader closed the pipe before.
        """
        pause = _SHORTEST
        while self.taken < end:
            if self.broken():
                raise BrokenPipeError
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    async def write(self, data: bytes) -> None:
        """Write all of the data.

        :raises BrokenPipeError: the reader closed the pipe; `written` counts the bytes before that.
        """
        fd = self._fd
        if fd is None:
            _binary(self._stream).write(data)
            self._stream.flush()
            self.written += len(data)
            return
        view = memoryview(data)
        while view:
            await _wait(fd, select.POLLOUT)
            try:
                count = os.write(fd, view[:_CHUNK])
            except BlockingIOError:
                await asyncio.sleep(0.01)  # Another process filled the shared pipe first.
                continue
            self.written += count
            view = view[count:]

    def broken(self) -> bool:
        """Whether the reader has closed the pipe."""
        return self._fd is not None and bool(_poll(self._fd, select.POLLOUT) & (select.POLLERR | select.POLLNVAL))


class Source:
    """Standard input, or a file."""

    def __init__(self, stream: IO[Any] | None = None) -> None:
        self._stream = sys.stdin if stream is None else stream
        self._fd = _descriptor(self._stream)

    async def read(self) -> bytes:
        """The next bytes; empty at the end."""
        if self._fd is None:
            return _binary(self._stream).read(_READ)
        await _wait(self._fd, select.POLLIN)
        return os.read(self._fd, _READ)

    async def read_all(self) -> bytes:
        """Everything up to the end."""
        parts: list[bytes] = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def lines(self) -> AsyncIterator[bytes]:
        """Each line without its newline; the last one may lack it."""
        rest: list[bytes] = []
        while part := await self.read():
            head, *tail = part.split(b"\n")
            rest.append(head)
            for piece in tail:
                yield b"".join(rest)
                rest = [piece]
        if last := b"".join(rest):
            yield last
