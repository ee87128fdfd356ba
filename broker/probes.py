"""`ProbeServer`: serves probes and metrics over HTTP/1.1, one request per connection.

A probe is 200, or 503 with the reason. Slow and large requests, and those above 64 at a time, are dropped. A page is
made on the event loop, so a probe also says that the loop is not blocked; none of them asks a broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Self

from broker.errors import ConfigurationError
from broker.exposition import CONTENT_TYPE

__all__ = ["Page", "ProbeServer", "probe"]

_PATIENCE: Final = 5.0
_LONGEST: Final = 8_192
_MOST: Final = 64
"""Requests at a time: connections of the broker need descriptors, too."""
_REASONS: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

Page = Callable[[], tuple[int, str]]
"""Returns the status and the text of a page."""


def probe(trouble: Callable[[], str]) -> Page:
    """The page of a probe.

    :param trouble: returns the reason for 503; empty is 200.
    """

    def answer() -> tuple[int, str]:
        reason = trouble()
        return (503, _on_one_line(reason) + "\n") if reason else (200, "ok\n")

    return answer


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


class ProbeServer:
    """Serves pages while it is entered.

    :param host: a name or an address; "0.0.0.0" is every network of the machine.
    :param port: 0 is any free port.
    :param pages: by path, such as `/metrics`.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self._host, self._port = host, port
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._requests = 0

    @property
    def url(self) -> str:
        """The address of the open server."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"

    async def __aenter__(self) -> Self:
        """:raises ConfigurationError: the server cannot listen on the address."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host.strip("[]"), self._port, limit=_LONGEST)
        except (OSError, UnicodeError) as error:
            # A name with an empty label, for instance, cannot even be looked up.
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigurationError(
                f"The address {self._host}:{self._port} cannot be used: {reason}", advice="Choose another one"
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._requests == _MOST:
            writer.transport.abort()
            return
        self._requests += 1
        try:
            async with asyncio.timeout(_PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.partition(b"\r\n")[0].decode("latin-1")))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            self._requests -= 1
            # A client that reads nothing would keep the connection open.
            writer.transport.abort()

    def _answer(self, request: str) -> bytes:
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            status, body = 405, "Use GET\n"
        elif (page := self._pages.get(path)) is not None:
            status, body = page()
        else:
            status, body = 404, f"Use {' or '.join(self._pages)}\n"
        data = body.encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {CONTENT_TYPE}\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else data)
