"""The brokers' HTTP API: administration, what a log holds, and who reads it.

*Concurrency.* Any number of calls at once, each in a thread with a connection of its own, which is kept and used again.
*Cancellation.* The caller goes on at once; the request ends by itself. *Failure.* No answer is ConnectionFailed, no
answer in time OperationTimeout, a refusal AuthenticationFailed or NotAuthorized, anything else what `http_error` says.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from broker.errors import BrokerError, Closed, ConnectionFailed, OperationTimeout
from broker_pulsar.errors import http_error
from broker_pulsar.security import Credentials, ssl_context
from broker_pulsar.settings import PulsarSettings

__all__ = ["Answer", "HttpApi"]

_BASE: Final = "/admin/v2"
_REDIRECTS: Final = 3
_THREADS: Final = 8


class Answer(NamedTuple):
    """Status and decoded body, None where it is empty."""

    status: int
    body: Any


class HttpApi:
    """Requests to one broker; answers that lead to another are followed."""

    def __init__(self, settings: PulsarSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self.url: Final = settings.http_url
        self._context: ssl.SSLContext | None = None
        self._idle: list[http.client.HTTPConnection] = []
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="broker-pulsar-http")
        self._closed = False

    async def get(self, path: str, what: str) -> Any:
        """The decoded body. :raises BrokerError: any status but success."""
        return (await self.request("GET", path, what)).body

    async def request(
        self, method: str, path: str, what: str, body: object = None, *, allow: Collection[int] = ()
    ) -> Answer:
        """One call. :param allow: statuses that are answers too. :raises BrokerError: any other but success."""
        if self._closed:
            raise Closed(f"{what}: the connection was closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, method, path, what, body, frozenset(allow))

    def close(self) -> None:
        """Close all connections; requests that are under way end by themselves."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _call(self, method: str, path: str, what: str, body: object, allow: frozenset[int]) -> Answer:
        headers = {"Accept": "application/json"}
        if self._credentials.has_token:
            headers["Authorization"] = f"Bearer {self._credentials.token()}"
        payload = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            payload = json.dumps(body).encode()
        status, told = self._exchange(method, f"{_BASE}{path}", payload, headers, what)
        decoded: Any = None
        if told:
            try:
                decoded = json.loads(told)
            except ValueError:
                decoded = told.decode("utf-8", "replace")
        if 200 <= status < 300 or status in allow:
            return Answer(status, decoded)
        raise _refusal(status, decoded, what)

    def _exchange(
        self, method: str, path: str, payload: bytes | None, headers: Mapping[str, str], what: str
    ) -> tuple[int, bytes]:
        connection = self._idle.pop() if self._idle else None
        fresh = connection is None
        url = self.url
        for _ in range(_REDIRECTS + 1):
            try:
                if connection is None:
                    connection, fresh = self._connect(url), True
                connection.request(method, path, body=payload, headers=dict(headers))
                answer = connection.getresponse()
                told, status = answer.read(), answer.status
            except TimeoutError as error:
                _close(connection)
                raise OperationTimeout(
                    f"{what}: {url} did not answer within {self._settings.request_timeout:g} seconds", native=error
                ) from error
            except (OSError, http.client.HTTPException) as error:
                _close(connection)
                connection = None
                if not fresh:
                    continue  # The broker has closed a connection that was kept.
                raise ConnectionFailed(
                    f"{what}: the HTTP API at {url} cannot be reached: {error}",
                    native=error,
                    advice="Check that the broker runs and that admin_url names its web service",
                ) from error
            if status not in (301, 302, 307, 308):
                if url == self.url and not self._closed:
                    self._idle.append(connection)
                else:
                    connection.close()
                return status, told
            place = urlsplit(answer.headers.get("Location", ""))
            connection.close()
            connection, url = None, f"{place.scheme}://{place.netloc}"
            path = f"{place.path}?{place.query}" if place.query else place.path
        raise ConnectionFailed(f"{what}: {self.url} redirects without end")

    def _connect(self, url: str) -> http.client.HTTPConnection:
        place = urlsplit(url)
        timeout = self._settings.request_timeout
        host = place.hostname or ""
        if place.scheme != "https":
            return http.client.HTTPConnection(host, place.port or 80, timeout=timeout)
        if self._context is None:
            self._context = ssl_context(self._settings)
        return http.client.HTTPSConnection(host, place.port or 443, timeout=timeout, context=self._context)


def _refusal(status: int, body: Any, what: str) -> BrokerError:
    reason = str(body.get("reason") or "") if isinstance(body, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return http_error(status, reason, what)


def _close(connection: http.client.HTTPConnection | None) -> None:
    if connection is not None:
        with suppress(OSError):
            connection.close()
