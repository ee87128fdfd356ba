"""One connection to one cluster: the client, its HTTP API, and what both are asked for.

*Concurrency.* Calls of the client that wait run in threads of this connection; the rest is used from the event loop
that opened it. *Failure.* `open` makes one honest try of both doors, so that a wrong credential is told as one: the
client itself would try until a time-out. Afterwards the client reconnects by itself.

MERGED broker_pulsar.connection: `Watch`: tells the hooks when the connection breaks and comes back, which the client keeps to itself.

Looks every half second at the consumers that are open; without any, at nothing. Runs on the loop, until it is closed.
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
from typing import Any, Final, TypeVar
from urllib.parse import quote

from broker import (
    AuthenticationFailed,
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidSetting,
    NotAuthorized,
    SubscriptionNotFound,
    TopicNotFound,
)
from broker.driver import Connected, Disconnected, Hooks
from broker_pulsar.client import Client, exceptions, pulsar
from broker_pulsar.credentials import Credentials, ssl_context
from broker_pulsar.ephemeral_cleanup import Leftovers
from broker_pulsar.errors import translate
from broker_pulsar.http_api import HttpApi
from broker_pulsar.names import TopicPath, subscription_place, topic_path
from broker_pulsar.settings import PulsarSettings

__all__ = ["Connection", "Watch"]


T = TypeVar("T")
_THREADS: Final = 16
_HEALTH: Final = "anybroker-health"
"""A topic in memory, which nobody has."""


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
        self.watch: Final = Watch(hooks, settings.service_url)
        self.committed: Final[dict[tuple[str, int, str], int]] = {}
        """What groups committed over this connection, by topic, partition and group."""
        self.leftovers: Final = Leftovers(lambda topic: self.stats(topic, once=True), self._delete_unused)
        self._forgetting: set[Callable[[str], None]] = set()

    @property
    def client(self) -> Client:
        """pulsar-client's own client, for what this library has no call for.

        :raises Closed: the backend is not open.
        """
        if self._client is None:
            raise Closed("The Pulsar connection is not open")
        return self._client

    async def open(self) -> None:
        """Try both doors, and make the client.

        :raises ConnectionFailed, AuthenticationFailed: after one honest try.
        :raises InvalidSetting: a file, a token or a listener that cannot be used.
        """
        settings = self.settings
        await self._knock()
        await self._ask_who_we_are()
        log = settings.client_log
        if log is not None:
            _check_log(log)
        logger = (
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
                    logger=logger,
                    **options,
                )
            )
        except Exception as error:
            raise translate(error, f"Connecting to {settings.service_url}") from error
        await self._shake_hands()
        await self._check_listener()
        if self.hooks.listening:
            self.hooks.emit(Connected(server=settings.service_url))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a call of the client that waits, in a thread; it ends even if the caller is cancelled."""
        if self._closed:
            raise Closed("The Pulsar connection was closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def make(self, function: Callable[[], T], discard: Callable[[T], object]) -> T:
        """As `call`, for what has to be closed: where the caller is cancelled, `discard` gets it in a thread."""
        making = asyncio.ensure_future(self.call(function))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(partial(self._unwanted, discard))
            raise

    def _unwanted(self, discard: Callable[[T], object], made: asyncio.Future[T]) -> None:
        if not made.cancelled() and made.exception() is None:
            self.later(partial(discard, made.result()))

    def later(self, function: Callable[[], object]) -> None:
        """Run it in a thread, for nobody who waits."""
        if not self._closed:
            self._threads.submit(function)

    def topic(self, name: str) -> TopicPath:
        """Where a topic of this name lives."""
        return topic_path(name, self.settings.tenant, self.settings.namespace)

    async def partitions(self, name: str, *, once: bool = False) -> int:
        """How many partitions a topic has; 0 for one without any, which is a log of its own.

        :param once: as `HttpApi.request` has it.
        :raises TopicNotFound: there is no such topic.
        """
        place = f"{self.topic(name).path}/partitions?checkAllowAutoCreation=false"
        answer = await self.http.get(place, f"Topic {name!r}", once=once)
        return int(answer.get("partitions") or 0) if isinstance(answer, Mapping) else 0  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    async def logs(self, name: str) -> Sequence[TopicPath]:
        """The log of each partition of a topic, or its only one.

        :raises TopicNotFound: there is no such topic.
        """
        path, count = self.topic(name), await self.partitions(name)
        return [path.partition(number) for number in range(count)] if count else [path]

    async def stats(self, name: str, *, once: bool = False) -> Mapping[int, Mapping[str, Any]]:
        """What the broker counts for each partition of a topic.

        :param once: as `HttpApi.request` has it.
        :raises TopicNotFound: there is no such topic.
        """
        path, what = self.topic(name), f"Topic {name!r}"
        count = await self.partitions(name, once=once)
        query = "getPreciseBacklog=true&subscriptionBacklogSize=false"
        if not count:
            return {0: await self.http.get(f"{path.path}/stats?{query}", what, once=once)}
        found = await self.http.get(f"{path.path}/partitioned-stats?perPartition=true&{query}", what, once=once)
        each: Mapping[str, Any] = found.get("partitions") or {}
        return {number: each.get(path.partition(number).url) or {} for number in range(count)}

    async def internal_stats(self, log: TopicPath) -> Mapping[str, Any]:
        """The ledgers and cursors of one log."""
        return await self.http.get(f"{log.path}/internalStats", f"Topic {log.url!r}")

    async def _delete_unused(self, topic: str, subscription: str) -> None:
        """Delete a subscription unless somebody is connected to it, which the broker refuses.

        :raises BrokerError: it refuses, or cannot be asked.
        """
        path = subscription_place(self.topic(topic), subscription)
        with suppress(SubscriptionNotFound):
            await self.http.request("DELETE", path, f"Subscription {subscription!r} of topic {topic!r}", once=True)

    async def check_health(self) -> float:
        """A round trip of the client to the broker; its seconds.

        :raises ConnectionFailed: no answer came.
        """
        client, began = self.client, monotonic()
        settings = self.settings
        # No answer keeps anything: a topic in memory that nobody uses has no partitions.
        topic = f"non-persistent://{settings.tenant}/{settings.namespace}/{_HEALTH}"
        asking = asyncio.ensure_future(self.call(lambda: client.get_topic_partitions(topic)))
        done, _ = await asyncio.wait({asking}, timeout=settings.connect_timeout)
        if not done:
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise ConnectionFailed(
                f"No broker at {settings.service_url} answered within {settings.connect_timeout:g} seconds"
            )
        try:
            asking.result()
        except (exceptions.TopicNotFound, exceptions.AuthorizationError):
            pass  # That is an answer.
        except Exception as error:
            raise translate(error, f"Asking {settings.service_url}") from error
        return monotonic() - began

    def on_topic_deleted(self, forget: Callable[[str], None]) -> Callable[[], None]:
        """Call `forget(name)` for topics that are deleted over this connection; returns the function that undoes it."""
        self._forgetting.add(forget)
        return lambda: self._forgetting.discard(forget)

    def topic_deleted(self, name: str) -> None:
        """Tell those who hold something of it."""
        for forget in tuple(self._forgetting):
            forget(name)

    async def missing(self, name: str) -> TopicNotFound | None:
        """The error that says so, if this topic is known not to exist."""
        try:
            await self.partitions(name, once=True)
        except TopicNotFound as error:
            return error
        except BrokerError:
            return None
        return None

    async def close(self) -> None:
        if self._closed:
            return
        self.watch.close()
        self.leftovers.close()
        client, self._client = self._client, None
        if client is not None:
            # An orderly close waits for the broker, which may be gone; a shutdown does not.
            closing = asyncio.get_running_loop().run_in_executor(self._threads, _close, client)
            done, _ = await asyncio.wait({closing}, timeout=self.settings.connect_timeout)
            if not done:
                client.shutdown()
        self._closed = True
        self.http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _knock(self) -> None:
        """Open and close a connection to a broker.

        :raises ConnectionFailed: none of them listens, or TLS does not come about.
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
                    advice="Name the authority that signed it in tls_ca",
                ) from error
            except (OSError, TimeoutError) as error:
                last = error
            else:
                return
        told = str(last) or type(last).__name__
        raise ConnectionFailed(
            f"No broker at {settings.service_url} can be reached{' by TLS' if context else ''}: {told}", native=last
        )

    async def _shake_hands(self) -> None:
        """:raises ConnectionFailed: what listens there is no broker."""
        try:
            await self.check_health()
        except ConnectionFailed as error:
            client, self._client = self.client, None
            self.later(client.shutdown)  # which takes its time there
            error.advice = "Check that the URL's port is the broker's own, such as 6650, and not its web service's"
            raise

    async def _check_listener(self) -> None:
        """:raises InvalidSetting: the brokers say that they have no listener of this name; the client times out."""
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
                    f"Setting 'listener_name' is {name!r}, which the broker does not have",
                    native=error,
                    advice="Name one of the broker's advertisedListeners, or leave it out",
                ) from None
            # Any other answer tells nothing of it: a proxy need not know where topics are.

    async def _ask_who_we_are(self) -> None:
        """Let the HTTP API judge our credentials, which are the client's too.

        :raises AuthenticationFailed: the broker does not accept them.
        :raises ConnectionFailed: it cannot be reached, or is no HTTP API of Pulsar.
        """
        try:
            told = await self.http.get("/clusters", f"Opening {self.settings.service_url}", once=True)
        except NotAuthorized:
            return  # It knows us; what we may do shows when we do it.
        except TopicNotFound as error:
            raise self._no_api("the answer is 404") from error
        except ConnectionFailed as error:
            native = error.native
            if isinstance(native, ssl.SSLError) and native.reason == "WRONG_VERSION_NUMBER":
                raise self._no_api("it speaks no TLS") from error
            if isinstance(native, ssl.SSLError) and not isinstance(native, ssl.SSLCertVerificationError):
                raise AuthenticationFailed(
                    f"The broker at {self.http.url} refuses our TLS certificate: {native}",
                    native=native,
                    advice="Give tls_cert and tls_key of a certificate that the broker trusts",
                ) from error
            raise
        if not isinstance(told, list):
            raise self._no_api("the answer is none of Pulsar's")

    def _no_api(self, why: str) -> ConnectionFailed:
        return ConnectionFailed(
            f"There is no HTTP API of Pulsar at {self.http.url}: {why}",
            retriable=False,
            advice="Name a broker's web service in admin_url, such as http://host:8080",
        )


def _check_log(path: Path) -> None:
    """:raises InvalidSetting: it cannot be written, of which the client says nothing."""
    try:
        path.open("a").close()
    except OSError as error:
        raise InvalidSetting(
            f"Setting 'client_log' {str(path)!r} cannot be written: {error}",
            native=error,
            advice="Name a file in a directory that is there",
        ) from error


def _close(client: Client) -> None:
    with suppress(Exception):
        client.close()


_PAUSE: Final = 0.5


class Watch:
    """One for a connection; `server` is what the events call it."""

    def __init__(self, hooks: Hooks, server: str) -> None:
        self._hooks = hooks
        self._server = server
        self._connected: set[Callable[[], bool]] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, is_connected: Callable[[], bool]) -> Callable[[], None]:
        """Look at this from now on; returns the function that ends it."""
        self._connected.add(is_connected)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look())
        return lambda: self._connected.discard(is_connected)

    def close(self) -> None:
        """Look at nothing any more."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        was = True
        while True:
            await asyncio.sleep(_PAUSE)
            now = all(each() for each in tuple(self._connected))
            if now != was:
                was = now
                event = Connected(server=self._server, again=True) if now else Disconnected(server=self._server)
                self._hooks.emit(event)
