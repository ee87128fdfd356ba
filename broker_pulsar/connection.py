"""The connection to one cluster: the client, its HTTP API, and a monitor of breaks.

*Concurrency.* Blocking calls of the client run in threads of this connection; everything else belongs to the event loop
that opened it. *Failure.* `open` makes one attempt at the broker and at the HTTP API, so wrong credentials are reported
as such; the client alone would retry until a timeout. Afterwards the client reconnects by itself. It does not report
that, so `ConnectionMonitor` checks the open consumers every half second.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

from broker import (
    AuthenticationFailed,
    BackendError,
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidSetting,
    NotAuthorized,
    NotFound,
    SubscriptionNotFound,
    TopicNotFound,
)
from broker.driver import Connected, Disconnected, Hooks, create_private_file, logger, reads_answer, warn_of_clear_text
from broker_pulsar.client import Client, exceptions, pulsar
from broker_pulsar.credentials import Credentials, ssl_context
from broker_pulsar.ephemeral_cleanup import EphemeralCleanup
from broker_pulsar.errors import translate
from broker_pulsar.http_api import HttpApi
from broker_pulsar.names import COMPACTED, TopicPath, subscription_path, topic_path
from broker_pulsar.settings import PulsarSettings

__all__ = ["Connection", "ConnectionMonitor"]


T = TypeVar("T")
_THREADS: Final = 16
_MOST_PARTITIONS: Final = 100_000
"""A larger number is no answer of Pulsar; each partition takes requests."""
_HEALTH: Final = "anybroker-health"
"""A non-persistent topic that does not exist."""


class Connection:
    """The client and the HTTP API of one cluster."""

    def __init__(self, settings: PulsarSettings, hooks: Hooks) -> None:
        self.settings: Final = settings
        self.hooks: Final = hooks
        self._credentials = Credentials(settings)
        self.http: Final = HttpApi(settings, self._credentials)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="broker-pulsar")
        self._client: Client | None = None
        self._closed = False
        self.monitor: Final = ConnectionMonitor(hooks, settings.service_url)
        self.compacted: Final[set[str]] = set()
        """The topics that are compacted, of those whose partitions were read."""
        self.committed: Final[dict[tuple[str, int, str], int]] = {}
        """Committed positions of groups over this connection, by topic, partition and group."""
        self.cleanup: Final = EphemeralCleanup(lambda topic: self.stats(topic, once=True), self._delete_unused)
        self._deletion_callbacks: set[Callable[[str], None]] = set()

    @property
    def client(self) -> Client:
        """The client of pulsar-client.

        :raises Closed: the backend is not open.
        """
        if self._client is None:
            raise Closed("The Pulsar connection is not open")
        return self._client

    def is_open(self) -> bool:
        """Whether the client is open. Any thread."""
        return self._client is not None

    def reads_compacted(self, topic: str, position: int, first: int) -> bool:
        """Whether a reader that begins at this position reads the compacted log of the topic.

        Compaction removes tombstones, so whoever goes on in the middle needs the whole log, which is retained.

        :param first: the first position of the log.
        """
        return topic in self.compacted and position <= first

    async def open(self) -> None:
        """Probe broker and HTTP API, and create the client.

        :raises ConnectionFailed, AuthenticationFailed: after one attempt.
        :raises InvalidSetting: an invalid file, token or listener.
        """
        settings = self.settings
        self._warn_of_clear_text()
        await self._probe_brokers()
        await self._check_credentials()
        log = settings.client_log
        if log is not None:
            _check_log(log)
        client_logger = (
            pulsar.FileLogger(pulsar.LoggerLevel.Info, str(log))
            if log is not None
            else pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
        )
        options: dict[str, Any] = {}
        if settings.tls_cert is not None and settings.tls_key is not None:
            options.update(
                tls_certificate_file_path=str(settings.tls_cert), tls_private_key_file_path=str(settings.tls_key)
            )
        try:
            self._client = await self.call(
                lambda: pulsar.Client(
                    settings.service_url,
                    authentication=self._credentials.authentication(),
                    operation_timeout_seconds=max(1, round(settings.request_timeout)),
                    connection_timeout_ms=round(settings.connect_timeout * 1000),
                    io_threads=settings.io_threads,
                    stats_interval_in_seconds=0,
                    tls_trust_certs_file_path=str(settings.tls_ca) if settings.tls_ca is not None else None,
                    tls_validate_hostname=settings.tls_validate_hostname,
                    listener_name=settings.listener_name,
                    logger=client_logger,
                    **options,
                )
            )
        except Exception as error:
            raise translate(error, f"Connecting to {settings.service_url}") from error
        await self._check_protocol()
        await self._check_listener()
        if self.hooks.listening:
            self.hooks.emit(Connected(server=settings.service_url))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking call of the client in a thread; it runs to its end even if the caller is cancelled."""
        if self._closed:
            raise Closed("The Pulsar connection was closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def create(self, function: Callable[[], T], discard: Callable[[T], object]) -> T:
        """As `call`, for a result that must be closed: if the caller is cancelled, a thread calls `discard` with it."""
        creating = asyncio.ensure_future(self.call(function))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            creating.add_done_callback(partial(self._discard_result, discard))
            raise

    def _discard_result(self, discard: Callable[[T], object], created: asyncio.Future[T]) -> None:
        if not created.cancelled() and created.exception() is None:
            self.run_later(partial(discard, created.result()))

    def run_later(self, function: Callable[[], object]) -> None:
        """Run it in a thread without waiting."""
        if not self._closed:
            self._threads.submit(function)

    def topic(self, name: str) -> TopicPath:
        """The topic of this name."""
        return topic_path(name, self.settings.tenant, self.settings.namespace)

    async def partitions(self, name: str, *, once: bool = False) -> int:
        """The number of partitions of a topic; 0 for a non-partitioned one.

        :param once: see `HttpApi.request`.
        :raises TopicNotFound: the topic does not exist.
        """
        place = f"{self.topic(name).path}/partitions?checkAllowAutoCreation=false"
        what = f"Topic {name!r}"
        answer = await self.http.get(place, what, once=once)
        with reads_answer(what):
            found: Mapping[str, Any] = answer or {}
            count = int(found.get("partitions") or 0)
            compacted = COMPACTED in (found.get("properties") or {})
            if not 0 <= count <= _MOST_PARTITIONS:
                raise ValueError("a number of partitions that no topic has")
        (self.compacted.add if compacted else self.compacted.discard)(name)
        return count

    async def logs(self, name: str) -> Sequence[TopicPath]:
        """The log of each partition, or the only one.

        :raises TopicNotFound: the topic does not exist.
        """
        path, count = self.topic(name), await self.partitions(name)
        return [path.partition(number) for number in range(count)] if count else [path]

    async def log(self, name: str, partition: int) -> TopicPath:
        """The log of one partition.

        :raises NotFound: the topic or the partition does not exist.
        """
        logs = await self.logs(name)
        if not 0 <= partition < len(logs):
            raise NotFound(f"Topic {name!r} has no partition {partition}", advice="Call `partitions(topic)`")
        return logs[partition]

    async def stats(self, name: str, *, once: bool = False) -> Mapping[int, Mapping[str, Any]]:
        """The broker's statistics of each partition.

        :param once: see `HttpApi.request`.
        :raises TopicNotFound: the topic does not exist.
        """
        path, what = self.topic(name), f"Topic {name!r}"
        count = await self.partitions(name, once=once)
        query = "getPreciseBacklog=true&subscriptionBacklogSize=false"
        if not count:
            return {0: _mapping(await self.http.get(f"{path.path}/stats?{query}", what, once=once), what)}
        found = await self.http.get(f"{path.path}/partitioned-stats?perPartition=true&{query}", what, once=once)
        each = _mapping(_mapping(found, what).get("partitions"), what)
        return {number: _mapping(each.get(path.partition(number).url), what) for number in range(count)}

    async def internal_stats(self, log: TopicPath) -> Mapping[str, Any]:
        """The ledgers and cursors of one log."""
        what = f"Topic {log.url!r}"
        return _mapping(await self.http.get(f"{log.path}/internalStats", what), what)

    async def _delete_unused(self, topic: str, subscription: str) -> None:
        """Delete a subscription that has no consumer.

        :raises BrokerError: the broker refuses because it has one, or does not answer.
        """
        path = subscription_path(self.topic(topic), subscription)
        with suppress(SubscriptionNotFound):
            await self.http.request("DELETE", path, f"Subscription {subscription!r} of topic {topic!r}", once=True)

    async def check_health(self) -> float:
        """Make a round trip of the client to the broker; returns its seconds.

        :raises ConnectionFailed: no answer.
        """
        client, began = self.client, monotonic()
        settings = self.settings
        # Asking about a non-persistent topic creates nothing.
        topic = f"non-persistent://{settings.tenant}/{settings.namespace}/{_HEALTH}"
        request = asyncio.ensure_future(self.call(lambda: client.get_topic_partitions(topic)))
        done, _ = await asyncio.wait({request}, timeout=settings.connect_timeout)
        if not done:
            request.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise ConnectionFailed(
                f"No broker at {settings.service_url} answered within {settings.connect_timeout:g} seconds"
            )
        try:
            request.result()
        except (exceptions.TopicNotFound, exceptions.AuthorizationError):
            pass  # An answer nevertheless.
        except Exception as error:
            raise translate(error, f"Checking {settings.service_url}") from error
        return monotonic() - began

    def on_topic_deleted(self, forget: Callable[[str], None]) -> Callable[[], None]:
        """Call `forget(name)` when a topic is deleted over this connection; returns a function that undoes this."""
        self._deletion_callbacks.add(forget)
        return lambda: self._deletion_callbacks.discard(forget)

    def topic_deleted(self, name: str) -> None:
        """Call the `on_topic_deleted` callbacks."""
        for forget in tuple(self._deletion_callbacks):
            forget(name)

    async def close(self) -> None:
        if self._closed:
            return
        self.monitor.close()
        self.cleanup.close()
        client, self._client = self._client, None
        if client is not None:
            # close() waits for the broker, which may be down; shutdown() does not.
            closing = asyncio.get_running_loop().run_in_executor(self._threads, _close, client)
            done, _ = await asyncio.wait({closing}, timeout=self.settings.connect_timeout)
            if not done:
                client.shutdown()
        self._closed = True
        self.http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _warn_of_clear_text(self) -> None:
        settings = self.settings
        if settings.login is None:
            return
        servers = [] if settings.uses_tls else settings.service_url.partition("://")[2].split(",")
        advice = "use pulsar+ssl://"
        if self.http.url.startswith("http:"):
            servers.append(self.http.url.partition("://")[2])
            advice = "use https:// in admin_url" if settings.uses_tls else f"{advice}, and https:// in admin_url"
        warn_of_clear_text(self.hooks, settings.login, servers, advice)

    async def _probe_brokers(self) -> None:
        """Open and close a connection to a broker.

        :raises ConnectionFailed: no broker listens, or TLS fails.
        """
        settings = self.settings
        context = ssl_context(settings) if settings.uses_tls else None
        last: Exception | None = None
        for host, port in settings.hosts:
            try:
                async with asyncio.timeout(settings.connect_timeout):
                    _, writer = await asyncio.open_connection(host, port, ssl=context)
                writer.close()
                with suppress(OSError, ssl.SSLError):
                    await writer.wait_closed()
            except ssl.SSLCertVerificationError as error:
                raise ConnectionFailed(
                    f"The certificate of {host}:{port} is not accepted: {error.verify_message}",
                    native=error,
                    retriable=False,
                    advice="Set tls_ca to the authority that signed it",
                ) from error
            except (OSError, TimeoutError) as error:
                last = error
            else:
                return
        reason = str(last) or type(last).__name__
        raise ConnectionFailed(
            f"No broker at {settings.service_url} can be reached{' by TLS' if context else ''}: {reason}", native=last
        )

    async def _check_protocol(self) -> None:
        """:raises ConnectionFailed: the server at the address is not a Pulsar broker."""
        try:
            await self.check_health()
        except ConnectionFailed as error:
            client, self._client = self.client, None
            self.run_later(client.shutdown)  # it takes long with such a server
            error.advice = "Use the broker's binary port in the URL, such as 6650, not that of its web service"
            raise

    async def _check_listener(self) -> None:
        """:raises InvalidSetting: the broker has no listener of this name; the client alone would time out."""
        settings = self.settings
        name = settings.listener_name
        if name is None:
            return
        space = f"non-persistent/{quote(settings.tenant)}/{quote(settings.namespace)}"
        place = f"/lookup/v2/topic/{space}/{_HEALTH}?listenerName={quote(name, safe='')}"
        try:
            await self.http.get(place, f"Looking for listener {name!r}", once=True)
        except BrokerError as error:
            if f"do not have {name} listener" in error.message:
                raise InvalidSetting(
                    f"Setting 'listener_name' is {name!r}, and the broker has no such listener",
                    native=error,
                    advice="Name one of the broker's advertisedListeners, or omit the setting",
                ) from None
            # Any other answer is inconclusive: a proxy need not support lookups.

    async def _check_credentials(self) -> None:
        """Check the credentials, which the client uses as well, at the HTTP API.

        :raises AuthenticationFailed: the broker does not accept them.
        :raises ConnectionFailed: it is unreachable, or not an HTTP API of Pulsar.
        """
        try:
            answer = await self.http.get("/clusters", f"Opening {self.settings.service_url}", once=True)
        except NotAuthorized:
            return  # Authenticated, but without permission to list clusters.
        except TopicNotFound as error:
            raise self._no_api("the answer is 404") from error
        except ConnectionFailed as error:
            native = error.native
            if isinstance(native, ssl.SSLError) and native.reason == "WRONG_VERSION_NUMBER":
                raise self._no_api("it does not speak TLS") from error
            if isinstance(native, ssl.SSLError) and not isinstance(native, ssl.SSLCertVerificationError):
                raise AuthenticationFailed(
                    f"The broker at {self.http.url} refuses the client's TLS certificate: {native}",
                    native=native,
                    advice="Set tls_cert and tls_key to a certificate that the broker trusts",
                ) from error
            raise
        except BackendError as error:
            raise self._no_api(error.message) from error
        if not isinstance(answer, list):
            raise self._no_api("its answer is not one of Pulsar")

    def _no_api(self, why: str) -> ConnectionFailed:
        return ConnectionFailed(
            f"{self.http.url} is not an HTTP API of Pulsar: {why}",
            retriable=False,
            advice="Set admin_url to a broker's web service, such as http://host:8080",
        )


def _mapping(found: object, what: str) -> Mapping[str, Any]:
    """An object of an answer; a missing one is empty. :raises BackendError: it is something else."""
    with reads_answer(what):
        if found is not None and not isinstance(found, Mapping):
            raise TypeError("not an object")
    return cast("Mapping[str, Any]", found or {})


def _check_log(path: Path) -> None:
    """Create the file for the own user alone; one that exists keeps its mode.

    :raises InvalidSetting: the file cannot be written, which the client would not report.
    """
    try:
        try:
            create_private_file(path).close()
        except FileExistsError:
            # Creates nothing, so that a symbolic link to a missing file is refused.
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
    except OSError as error:
        raise InvalidSetting(
            f"Setting 'client_log' {str(path)!r} cannot be written: {error}",
            native=error,
            advice="Name a file in an existing directory",
        ) from error


def _close(client: Client) -> None:
    try:
        client.close()
    except Exception as error:
        logger.debug("Closing the Pulsar client: %s", error)


_PAUSE: Final = 0.5


class ConnectionMonitor:
    """Emits Connected and Disconnected for one connection, by checking its consumers every half second.

    :param server: the name in the events.
    """

    def __init__(self, hooks: Hooks, server: str) -> None:
        self._hooks = hooks
        self._server = server
        self._connected: set[Callable[[], bool]] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, is_connected: Callable[[], bool]) -> Callable[[], None]:
        """Check a consumer; returns a function that removes it."""
        self._connected.add(is_connected)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return lambda: self._connected.discard(is_connected)

    def close(self) -> None:
        """Stop checking."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        was = True
        while True:
            await asyncio.sleep(_PAUSE)
            now = all(each() for each in tuple(self._connected))
            if now != was:
                was = now
                event = Connected(server=self._server, again=True) if now else Disconnected(server=self._server)
                self._hooks.emit(event)
