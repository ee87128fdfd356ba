"""`HealthServer`: `/health` and `/metrics` of a process that runs on, for what starts and watches it. Nothing else.

HTTP/1.1 with one answer per connection, on asyncio; a request that is slow or large is dropped. `/health` is 200, or
503 with the reason; `/metrics` is the text format of Prometheus. *Concurrency.* On the loop. *Close.* At once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Self

from broker.cli.exits import Exit, Failure
from broker.driver.queue_tracking import Histogram
from broker.exposition import CONTENT_TYPE, Series, prometheus_text

__all__ = ["HealthServer"]

_PATIENCE: Final = 5.0
_LONGEST: Final = 8_192
_REASONS: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_PREFIX: Final = "anybroker_queue_"


class HealthServer:
    """:param port: 0 is any that is free.
    :param trouble: why it is not well; empty if it is.
    :param metrics: by name; those that end in `_total` are counters, and other numbers gauges.
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

    @property
    def url(self) -> str:
        """Where it is; it is open."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"

    async def __aenter__(self) -> Self:
        """:raises Failure: the address cannot be used."""
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
        try:
            async with asyncio.timeout(_PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.partition(b"\r\n")[0].decode("latin-1")))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            writer.close()

    def _answer(self, request: str) -> bytes:
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            status, body = 405, "GET /health or /metrics\n"
        elif path == "/health":
            trouble = self._trouble()
            status, body = (503, trouble + "\n") if trouble else (200, "ok\n")
        elif path == "/metrics":
            status, body = 200, self._text()
        else:
            status, body = 404, "There are /health and /metrics\n"
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
