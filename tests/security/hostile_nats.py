"""A server that speaks the beginning of NATS: a greeting, TLS if it has a certificate, and a PONG for each PING."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from typing import Any, Self

import trustme

__all__ = ["HostileNats", "context_of"]


class HostileNats:
    """Records every line that clients send; `greeting` and `tls` may change between two connections.

    :ivar answer: the answer to every request; None: none.
    :ivar plain: the lines that came without TLS.
    :ivar secured: the lines that came over TLS.
    """

    def __init__(
        self, *, port: int = 0, tls: ssl.SSLContext | None = None, greeting: bytes | None = None, **info: Any
    ) -> None:
        self._port = port
        self.tls = tls
        self.info: dict[str, Any] = {"version": "2.15.0", "max_payload": 1 << 20, "headers": True, **info}
        self.greeting = greeting
        self.answer: bytes | None = None
        self.plain: list[bytes] = []
        self.secured: list[bytes] = []
        self.greeted = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    @property
    def connects(self) -> list[dict[str, Any]]:
        """The content of every CONNECT."""
        lines = [line for line in (*self.plain, *self.secured) if line.startswith(b"CONNECT ")]
        return [json.loads(line.removeprefix(b"CONNECT ")) for line in lines]

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()

    def say(self, line: bytes) -> None:
        """Send a line to every client."""
        for writer in self._writers:
            writer.write(line)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        with contextlib.suppress(OSError, ssl.SSLError):
            tls = self.tls
            greeting = b"INFO %b\r\n" % json.dumps({"tls_required": tls is not None, **self.info}).encode()
            writer.write(greeting if self.greeting is None else self.greeting)
            self.greeted += 1
            if tls is not None:
                await writer.start_tls(tls)
            listening = b""
            while line := await reader.readline():
                (self.plain if tls is None else self.secured).append(line)
                fields = line.split()
                if line == b"PING\r\n":
                    writer.write(b"PONG\r\n")
                elif fields[0] == b"SUB":
                    listening = fields[2]
                elif fields[0] == b"PUB":
                    await reader.readexactly(int(fields[-1]) + 2)
                    if self.answer is not None and len(fields) == 4:
                        writer.write(b"MSG %b %b %d\r\n" % (fields[2], listening, len(self.answer)))
                        writer.write(self.answer + b"\r\n")
        writer.transport.abort()
        self._writers.discard(writer)
        self._tasks.discard(task)


def context_of(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    """The context of a server whose certificate has these names."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context
