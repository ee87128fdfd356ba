"""The clients of one namespace, for messages and for administration, and the events of its connection.

Created without I/O. azure-servicebus opens a connection for each sender and receiver; breaks and reconnects are
reported once for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from azure.core.pipeline.transport import AioHttpTransport
from azure.servicebus import TransportType
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from broker import (
    AuthenticationFailed,
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidSetting,
    NotAuthorized,
    NotFound,
    OperationTimeout,
    TopicNotFound,
)
from broker.driver import Backoff, Connected, Disconnected, Hooks, logger, warn_of_clear_text
from broker_servicebus import private_api
from broker_servicebus.errors import translate
from broker_servicebus.settings import ServiceBusSettings

__all__ = ["Connection"]

_AMQPS: Final = 5671
_AMQP: Final = 5672
_HTTPS: Final = 443
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_GREETING: Final = b"AMQP\x03\x01\x00\x00"


class _PlainTransport(AioHttpTransport):
    """HTTP without TLS, for an emulator: the client always uses https."""

    async def send(self, request: Any, **options: Any) -> Any:
        request.url = request.url.replace("https://", "http://", 1)
        call: Any = super()
        return await call.send(request, **options)


class Connection:
    """The clients of sources, targets and the admin."""

    def __init__(self, settings: ServiceBusSettings, hooks: Hooks) -> None:
        self.settings = settings
        self.hooks = hooks
        self.fast = settings.private_calls and private_api.available()
        self._client: ServiceBusClient | None = None
        self._admin: ServiceBusAdministrationClient | None = None
        self._credential: Any = None
        self._up = False
        self.closed = False
        text = settings.connection_string.get_secret_value() if settings.connection_string else ""
        found = re.search(r"(?i)Endpoint=\w+://([^/;]+)", text)
        self.host = settings.namespace or (found.group(1) if found else "")
        """The host of the namespace, with the port of an emulator."""
        if not self.host:
            raise InvalidSetting(
                "No namespace is given",
                advice="Write servicebus://mine.servicebus.windows.net, or set connection_string",
            )

    @property
    def client(self) -> ServiceBusClient:
        """The client of azure-servicebus.

        :raises Closed: the backend is not open.
        """
        if self._client is None:
            raise Closed(f"The connection to {self.host} is not open")
        return self._client

    @property
    def admin(self) -> ServiceBusAdministrationClient:
        """The client for administration.

        :raises Closed: the backend is not open.
        """
        if self._admin is None:
            raise Closed(f"The connection to {self.host} is not open")
        return self._admin

    async def open(self) -> None:
        """Make one attempt to connect.

        :raises ConnectionFailed, AuthenticationFailed: it failed.
        :raises InvalidSetting: `connection_string` or `tls_ca` cannot be used.
        """
        self._create_clients()
        if self.settings.is_emulator:
            self._warn_of_clear_text()
        await self._probe()
        # A user without administration rights may still send and receive.
        with contextlib.suppress(NotAuthorized):
            await self.request("Connecting", lambda admin: admin.get_namespace_properties(), once=True)
        self._up = True
        if self.hooks.listening:
            self.hooks.emit(Connected(server=self.host))

    def _create_clients(self) -> None:
        settings = self.settings
        options: dict[str, Any] = {
            "retry_total": 0,
            "try_timeout": settings.request_timeout,
            "transport_type": TransportType.AmqpOverWebsocket
            if settings.transport == "websocket" or settings.proxy
            else TransportType.Amqp,
            "user_agent": "anybroker",
        }
        admin: dict[str, Any] = {
            "retry_total": 0,
            "connection_timeout": settings.connect_timeout,
            "read_timeout": settings.request_timeout,
            # The service sends none, and the client would sign the request to any host again.
            "permit_redirects": False,
        }
        if settings.proxy is not None:
            name, _, port = settings.proxy.rpartition(":")
            options["http_proxy"] = {"proxy_hostname": name, "proxy_port": int(port)}
            admin["proxies"] = {"https": f"http://{settings.proxy}"}
        if settings.custom_endpoint is not None:
            options["custom_endpoint_address"] = f"sb://{settings.custom_endpoint}"
        if settings.tls_ca is not None:
            _check_authorities(settings.tls_ca)
            options["connection_verify"] = admin["connection_verify"] = str(settings.tls_ca)
        where = self.host
        if settings.admin_endpoint is not None:
            split = urlsplit(settings.admin_endpoint)
            where = split.netloc
            if split.scheme == "http":
                admin["transport"] = _PlainTransport(**admin)
        text = self._connection_string(self.host)
        if text is not None:
            try:
                self._client = ServiceBusClient.from_connection_string(text, **options)
                self._admin = ServiceBusAdministrationClient.from_connection_string(
                    self._connection_string(where) or "", **admin
                )
            except ValueError as error:
                raise InvalidSetting(
                    f"Setting 'connection_string' cannot be used: {error}",
                    native=error,
                    advice="Copy the whole string: Endpoint=sb://…;SharedAccessKeyName=…;SharedAccessKey=…",
                ) from None
            return
        self._credential = _default_credential()
        self._client = ServiceBusClient(self.host, self._credential, **options)
        self._admin = ServiceBusAdministrationClient(where, self._credential, **admin)

    def _warn_of_clear_text(self) -> None:
        settings = self.settings
        login = next(name for name in ("key", "sas_token", "connection_string") if getattr(settings, name) is not None)
        servers = [self.host]
        if settings.admin_endpoint is not None and settings.admin_endpoint.startswith("http:"):
            servers.append(urlsplit(settings.admin_endpoint).netloc)
        warn_of_clear_text(self.hooks, login, servers, "reach emulators over the loopback or a private network only")

    def _connection_string(self, host: str) -> str | None:
        settings = self.settings
        if settings.connection_string is not None:
            # The string of an entity's policy names that entity, and the client then accepts no other.
            text = re.sub(r"(?i)(^|;)EntityPath=[^;]*", "", settings.connection_string.get_secret_value())
            return re.sub(r"(?i)(Endpoint=\w+://)[^/;]+", rf"\g<1>{host}", text, count=1)
        emulator = "UseDevelopmentEmulator=true;" if settings.emulator else ""
        if settings.key is not None:
            key = settings.key.get_secret_value()
            return f"Endpoint=sb://{host};SharedAccessKeyName={settings.key_name};SharedAccessKey={key};{emulator}"
        if settings.sas_token is not None:
            return f"Endpoint=sb://{host};SharedAccessSignature={settings.sas_token.get_secret_value()};{emulator}"
        return None

    async def _probe(self) -> None:
        """Exchange AMQP's first eight bytes; with WebSockets or a gateway, only connect.

        :raises ConnectionFailed: the messaging endpoint does not answer.
        """
        settings = self.settings
        name, port, emulated = self._address()
        plain = settings.transport == "amqp" and settings.proxy is None and settings.custom_endpoint is None
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(settings.connect_timeout):
                ca = str(settings.tls_ca) if settings.tls_ca else None
                tls = ssl.create_default_context(cafile=ca) if plain and not emulated else None
                reader, writer = await asyncio.open_connection(name, port, ssl=tls)
                if plain:
                    writer.write(_GREETING)
                    await reader.readexactly(len(_GREETING))
        except (OSError, EOFError) as error:
            if isinstance(error, ssl.SSLError):
                raise translate(error, f"Connecting to {name}:{port}") from None
            reason = str(error) or "no answer in time"
            raise ConnectionFailed(f"Connecting to {name}:{port}: {reason}", native=error) from None
        finally:
            if writer is not None:
                writer.transport.abort()

    def _address(self) -> tuple[str, int, bool]:
        """Host, port, and whether it is an emulator."""
        settings = self.settings
        if settings.proxy is not None:
            name, _, port = settings.proxy.rpartition(":")
            return name, int(port), False
        emulated = settings.is_emulator
        default = _AMQP if emulated else _HTTPS if settings.transport == "websocket" else _AMQPS
        split = urlsplit(f"//{settings.custom_endpoint or self.host}")
        port = split.port if emulated or settings.custom_endpoint else None
        return split.hostname or "", port or default, emulated

    async def request(
        self,
        what: str,
        call: Callable[[ServiceBusAdministrationClient], Awaitable[Any]],
        *,
        missing: type[NotFound] = TopicNotFound,
        once: bool = False,
    ) -> Any:
        """Call the administration endpoint; transient errors are retried until `request_timeout`.

        :param call: idempotent, because it is repeated if its answer is lost.
        :param once: do not retry.
        :raises BrokerError: the endpoint's error, or no answer.
        """
        loop = asyncio.get_running_loop()
        until, backoff = loop.time() + self.settings.request_timeout, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        failure: BrokerError | None = None
        while True:
            try:
                async with asyncio.timeout_at(until):
                    return await call(self.admin)
            except Exception as error:
                found = translate(error, what, missing=missing)
                # An earlier refusal says more than the timeout.
                if failure is None or not isinstance(found, OperationTimeout):
                    failure = found
            pause = backoff.next()
            if once or not failure.retriable or loop.time() + pause >= until:
                raise failure from None
            await asyncio.sleep(pause)

    # Breaks and reconnects.

    def on_broken(self, error: BrokerError) -> None:
        """A link or connection broke."""
        if isinstance(error, AuthenticationFailed) or not self._up or self.closed:
            return
        self._up = False
        self.hooks.emit(Disconnected(server=self.host, error=error))

    def on_open(self) -> None:
        """A link was opened."""
        if not self._up and not self.closed:
            self._up = True
            self.hooks.emit(Connected(server=self.host, again=True))

    def check_open(self) -> None:
        """:raises Closed: the connection is closed."""
        if self.closed:
            raise Closed(f"The connection to {self.host} was closed")

    async def check_health(self) -> float:
        """Make a round trip; returns its seconds."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await self._probe()
        return loop.time() - begin

    async def close(self) -> None:
        self.closed = True
        client, self._client = self._client, None
        admin, self._admin = self._admin, None
        credential, self._credential = self._credential, None
        for each in (client, admin, credential):
            if each is not None:
                try:
                    await each.close()
                except Exception as error:  # the clients raise errors of many libraries
                    logger.debug("Closing %s: %s", type(each).__name__, error)


def _check_authorities(path: Path) -> None:
    """:raises InvalidSetting: not a file of certificates."""
    try:
        ssl.create_default_context(cafile=str(path))
    except OSError as error:
        raise InvalidSetting(
            f"Setting 'tls_ca' {str(path)!r} cannot be used: {error}",
            native=error,
            advice="Name a PEM file of certificates",
        ) from None


def _default_credential() -> Any:
    # Imported here, because the import is slow and most connections have a key.
    from azure.identity.aio import DefaultAzureCredential

    return DefaultAzureCredential()
