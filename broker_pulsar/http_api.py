"""The brokers' HTTP API: administration, statistics and cursors.

*Trust.* A redirect never leaves TLS. With a token, it leads only to hosts of the settings, and to brokers that the
cluster lists; any other is an error, because the host would get the token.

*Concurrency.* Any number of calls at once, each in a thread with a pooled connection. *Cancellation.* The caller
continues at once; the request runs to its end and is not retried. *Failure.* No connection is ConnectionFailed, no
answer in time OperationTimeout, a refusal AuthenticationFailed or NotAuthorized, everything else see `http_error`.
Transient errors, while a broker restarts or a topic moves, are retried after growing pauses until
`request_timeout`; `close` ends the pauses.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from time import monotonic
from typing import Any, Final, NamedTuple
from urllib.parse import urljoin, urlsplit

from broker import BackendError, BrokerError, Closed, ConnectionFailed, OperationTimeout
from broker.driver import Backoff, pause, read_answer, read_body
from broker_pulsar.credentials import Credentials, ssl_context
from broker_pulsar.errors import http_error, is_transient_failure, is_transient_status
from broker_pulsar.settings import PulsarSettings

__all__ = ["Answer", "HttpApi"]

_BASE: Final = "/admin/v2"
_LOOKUP: Final = "/lookup/"
"""Prefix of paths outside of `_BASE`."""
_BROKERS: Final = f"{_BASE}/brokers"
"""The brokers of the cluster, as host:port; needs the rights of a superuser."""
_REDIRECTS: Final = 3
_THREADS: Final = 8
_LEAST_SECONDS: Final = 0.1
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0


class Answer(NamedTuple):
    """Status and decoded body, None if empty; and the number of tries."""

    status: int
    body: Any
    tries: int = 1

    @property
    def reason(self) -> str:
        """The broker's reason for a refusal; empty if it gives none."""
        return str(self.body.get("reason") or "") if isinstance(self.body, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


class HttpApi:
    """Requests to one broker; follows redirects to others."""

    def __init__(self, settings: PulsarSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self.url: Final = settings.http_url
        self._context: ssl.SSLContext | None = None
        self._idle: list[http.client.HTTPConnection] = []
        self._trusted: Final = {
            urlsplit(self.url).hostname,
            *(host.lower() for host, _ in settings.hosts),
            *(host.lower() for host in settings.admin_hosts),
        }
        """Host names that may get the token; those of brokers are added when a redirect names one."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="broker-pulsar-http")
        self._closing = asyncio.Event()

    async def get(self, path: str, what: str, *, once: bool = False) -> Any:
        """GET; returns the decoded body. :raises BrokerError: any status but success."""
        return (await self.request("GET", path, what, once=once)).body

    async def request(
        self,
        method: str,
        path: str,
        what: str,
        body: object = None,
        *,
        allow: Collection[int] = (),
        once: bool = False,
        media: str = "application/json",
    ) -> Answer:
        """Send a request; retries transient errors.

        :param allow: further statuses that are returned. "Already done" may refer to an earlier try.
        :param once: do not retry.
        :param media: the type of the body.
        :raises BrokerError: any other status but success.
        """
        loop = asyncio.get_running_loop()
        began, tries = loop.time(), 0
        until, backoff = began + self._settings.request_timeout, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        error: BrokerError | None = None
        while True:
            if self._closing.is_set():
                raise Closed(f"{what}: the connection was closed")
            seconds, tries = max(until - loop.time(), _LEAST_SECONDS), tries + 1
            try:
                answer = await loop.run_in_executor(self._threads, self._call, method, path, what, body, seconds, media)
            except OperationTimeout:
                if error is None:
                    raise
                # The earlier refusal says more.
                raise _with_tries(error, tries, loop.time() - began) from None
            except ConnectionFailed as failure:
                error, transient = failure, is_transient_failure(failure)
            else:
                if 200 <= answer.status < 300 or answer.status in allow:
                    return answer._replace(tries=tries - 1 + answer.tries)
                error = http_error(answer.status, answer.reason, what, path)
                transient = is_transient_status(answer.status, answer.reason)
            delay = backoff.next()
            if once or not transient or loop.time() + delay >= until:
                raise _with_tries(error, tries, loop.time() - began)
            await pause(delay, self._closing)

    def close(self) -> None:
        """Close all pooled connections; running requests finish, and no new one is sent."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _call(self, method: str, path: str, what: str, body: object, seconds: float, media: str) -> Answer:
        headers = {"Accept": "application/json"}
        if self._credentials.has_token:
            headers["Authorization"] = f"Bearer {self._credentials.token()}"
        payload = None
        if body is not None:
            headers["Content-Type"] = media
            payload = json.dumps(body).encode()
        place = path if path.startswith(_LOOKUP) else f"{_BASE}{path}"
        status, found, tries = self._exchange(method, place, payload, headers, what, seconds)
        decoded: Any = None
        if found:
            # A proxy may answer an error by a page.
            with nullcontext() if 200 <= status < 300 else suppress(BackendError):
                decoded = read_answer(found, f"{what}: {self.url}")
        return Answer(status, decoded, tries)

    def _exchange(
        self,
        method: str,
        path: str,
        payload: bytes | None,
        headers: Mapping[str, str],
        what: str,
        seconds: float,
        *,
        follow: bool = True,
    ) -> tuple[int, bytes, int]:
        connection = self._pooled()
        fresh = connection is None
        url, tries, until = self.url, 1, monotonic() + seconds
        for _ in range(_REDIRECTS + 1):
            try:
                if connection is None:
                    connection, fresh = self._connect(url, seconds), True
                elif connection.sock is not None:
                    connection.sock.settimeout(seconds)
                connection.request(method, path, body=payload, headers=dict(headers))
                answer = connection.getresponse()
                body, status = read_body(answer, until, f"{what}: {url}"), answer.status
                if _is_cut(answer):
                    raise http.client.IncompleteRead(body)
            except TimeoutError as error:
                _close(connection)
                raise OperationTimeout(
                    f"{what}: {url} did not answer within {self._settings.request_timeout:g} seconds", native=error
                ) from error
            except BrokerError:
                _close(connection)
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                _close(connection)
                connection = None
                if not fresh:
                    tries += 1
                    continue  # The broker had closed the pooled connection.
                raise ConnectionFailed(
                    f"{what}: the HTTP API at {url} cannot be reached: {error}",
                    native=error,
                    advice="Check that the broker runs and that admin_url names its web service",
                ) from error
            location = answer.headers.get("Location", "")
            if status not in (301, 302, 307, 308) or not location or not follow:
                if url == self.url and not self._closing.is_set():
                    self._idle.append(connection)
                else:
                    connection.close()
                return status, body, tries
            connection.close()
            connection, (url, path) = None, self._redirected(f"{url}{path}", location, headers, what, seconds)
        raise ConnectionFailed(f"{what}: {self.url} redirects endlessly")

    def _redirected(
        self, origin: str, location: str, headers: Mapping[str, str], what: str, seconds: float
    ) -> tuple[str, str]:
        """The server and path that a redirect leads to.

        :raises ConnectionFailed: it is no address of HTTP, leaves TLS, or leads to a host that must not get the token.
        """
        try:
            place = urlsplit(urljoin(origin, location))
            host, port = place.hostname or "", place.port
        except ValueError as error:
            raise _bad_redirect(what, origin, "an invalid address", native=error) from error
        shown = f"[{host}]" if ":" in host else host
        url = f"{place.scheme}://{shown}{'' if port is None else f':{port}'}"
        if place.scheme not in ("http", "https") or not host:
            raise _bad_redirect(what, origin, "an address that is not one of HTTP")
        if place.scheme == "http" and urlsplit(origin).scheme == "https":
            raise _bad_redirect(what, origin, f"{url}, without TLS", "Have the brokers advertise their TLS address")
        if "Authorization" in headers and not self._is_trusted(host, headers, seconds):
            raise _bad_redirect(
                what,
                origin,
                f"{url}, which is no host of the settings and no broker that the cluster lists, so it must not get "
                "the token",
                f"If {host} is a broker of this cluster, add it to the URL or to admin_hosts",
            )
        return url, f"{place.path or '/'}?{place.query}" if place.query else place.path or "/"

    def _is_trusted(self, host: str, headers: Mapping[str, str], seconds: float) -> bool:
        domains = self._settings.admin_hosts
        if host in self._trusted or any(each.startswith(".") and host.endswith(each.lower()) for each in domains):
            return True
        with suppress(BrokerError):
            status, body, _ = self._exchange(
                "GET", _BROKERS, None, headers, "Listing the brokers", seconds, follow=False
            )
            brokers: Any = read_answer(body, self.url) if status == 200 else ()
            if isinstance(brokers, list):
                self._trusted.update(_host_of(each) for each in brokers)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return host in self._trusted

    def _pooled(self) -> http.client.HTTPConnection | None:
        # Another thread may take the last one.
        with suppress(IndexError):
            return self._idle.pop()
        return None

    def _connect(self, url: str, timeout: float) -> http.client.HTTPConnection:
        place = urlsplit(url)
        host = place.hostname or ""
        if place.scheme != "https":
            return http.client.HTTPConnection(host, place.port or 80, timeout=timeout)
        if self._context is None:
            self._context = ssl_context(self._settings)
        return http.client.HTTPSConnection(host, place.port or 443, timeout=timeout, context=self._context)


def _host_of(broker: object) -> str:
    """The host of `host:port`, in lower case."""
    with suppress(ValueError):
        return urlsplit(f"//{broker}").hostname or ""
    return ""


def _bad_redirect(
    what: str, origin: str, where: str, advice: str = "Check admin_url", *, native: Exception | None = None
) -> ConnectionFailed:
    server = origin.partition("://")[2].partition("/")[0]
    return ConnectionFailed(f"{what}: {server} redirects to {where}", native=native, retriable=False, advice=advice)


def _is_cut(answer: http.client.HTTPResponse) -> bool:
    """Whether the connection ended within the headers, which http.client treats as an empty body."""
    if answer.status in (204, 304) or answer.headers.get("Connection", "").lower() == "close":
        return False
    return "Content-Length" not in answer.headers and "Transfer-Encoding" not in answer.headers


def _with_tries(error: BrokerError, tries: int, seconds: float) -> BrokerError:
    """Add the number of tries to the error's message, if there were several."""
    if tries > 1:
        error.message = f"{error.message} (tried {tries} times in {seconds:.1f} seconds)"
        error.args = (error.message,)
    return error


def _close(connection: http.client.HTTPConnection | None) -> None:
    if connection is not None:
        with suppress(OSError):
            connection.close()
