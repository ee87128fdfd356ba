"""`HealthServer`: serves `/health` and `/metrics` over HTTP/1.1, one request per connection.

`/health` is 200, or 503 with the reason; `/metrics` is in the text format of Prometheus. Slow and large requests, and
those above 64 at a time, are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Self

from broker.cli.errors import Exit, Failure
from broker.cli.output import escaped
from broker.exposition import CONTENT_TYPE, Histogram, Series, prometheus_text

__all__ = ["HealthServer"]

_PATIENCE: Final = 5.0
_LONGEST: Final = 8_192
_MOST: Final = 64
"""Requests at a time: connections of the broker need descriptors, too."""
_REASONS: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_PREFIX: Final = "anybroker_queue_"


class HealthServer:
    """Serves the health and the metrics of a tracker.

    :param port: 0 is any free port.
    :param trouble: returns the reason why the tracker is unhealthy; empty if it is healthy.
    :param metrics: returns the metrics by name. Names that end in `_total` are counters, other numbers gauges.
    """

    def __init__(
        self,
        host: str,
        port: int,
        subscription: str,
        trouble: Callable[[], str],
        metrics: Callable[[], Mapping[str, float | Histogram]],
    ) -> None:
        self._host, self._port = host, port
        self._subscription = subscription
        self._trouble = trouble
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._requests = 0

    @property
    def url(self) -> str:
        """The address of the open server."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"

    async def __aenter__(self) -> Self:
        """:raises Failure: the server cannot listen on the address."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host.strip("[]"), self._port, limit=_LONGEST)
        except OSError as error:
            raise Failure(
                f"--listen {self._host}:{self._port} cannot be used: {error.strerror or error}",
                advice="Choose another port",
                code=Exit.USAGE,
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
            status, body = 405, "Use GET /health or GET /metrics\n"
        elif path == "/health":
            trouble = self._trouble()
            status, body = (503, escaped(trouble) + "\n") if trouble else (200, "ok\n")
        elif path == "/metrics":
            status, body = 200, self._text()
        else:
            status, body = 404, "Use /health or /metrics\n"
        data = body.encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {CONTENT_TYPE}\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else data)

    def _text(self) -> str:
        metrics: dict[str, float | Histogram] = {**self._metrics(), "up": 0 if self._trouble() else 1}
        return prometheus_text(
            {Series.of(_PREFIX + name, subscription=self._subscription): value for name, value in metrics.items()}
        )
