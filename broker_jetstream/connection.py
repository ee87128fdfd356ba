"""One connection to the server, that comes back by itself, and what is sent and awaited over it.

All calls run on the event loop of `open`. nats-py reconnects; where it gives up (the server closed the
connection with an error, a private server got another port) a new client takes its place, and everything that
listens goes on listening. What was written and not answered when a connection broke is unknown: whoever sent it
sends it again after `on_connected`. Nothing is written while the connection is down, so nothing old can overtake
what is sent again. `request` raises; callbacks never do.

MERGED broker_jetstream.connection: The first connection of a client: one honest try, every way in, and an error that says what to do.

`connect` may be cancelled; what it had begun is closed. Credential files are read at each call, so that a renewed one
is used when a client has to be made again. nats-py would try for ever and reads a malformed credentials file without
end: both are cut short here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Protocol

import msgspec
import nats.errors
import nkeys  # pyright: ignore[reportMissingTypeStubs]
from nats.aio.client import Client, Server

from broker import (
    AuthenticationFailed,
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidSetting,
    NotAuthorized,
    OperationTimeout,
)
from broker.driver import Connected, Disconnected, Event, Hooks, Warned, jitter, mask_url
from broker_jetstream.codec import status_of
from broker_jetstream.errors import api_error, classify, connect_error
from broker_jetstream.inbox import Inbox
from broker_jetstream.settings import JetStreamSettings
from broker_jetstream.transport import FastClient, Outgoing, PublicClient, RawHandler, drop_socket, hang_up, make_client

__all__ = ["Connection", "Listening", "Watcher", "connect", "discard", "located"]


logger = logging.getLogger("broker")
_FLUSH_SECONDS: Final = 2
REFUSED_PAUSE: Final = 1.0
"""Seconds between attempts, on average, while the server refuses who we are."""


class Listening:
    """A subscription that outlives the client it was made with."""

    __slots__ = ("_connection", "handler", "native", "subject")

    def __init__(self, connection: Connection, subject: str, handler: RawHandler) -> None:
        self._connection = connection
        self.subject = subject
        self.handler = handler
        self.native: Any = None

    async def close(self) -> None:
        """Stop listening; what the server had sent by then has been handed over when this returns."""
        await self._connection.unlisten(self)


class Connection:
    """See the module's words."""

    def __init__(self, settings: JetStreamSettings, hooks: Hooks) -> None:
        self.settings = settings
        self.hooks = hooks
        self.servers: Sequence[str] = settings.servers
        self.token: str | None = settings.token.get_secret_value() if settings.token else None
        self.inbox = Inbox(f"{settings.inbox_prefix}.{token_hex(8)}")
        self.connected = False
        self.closed = False
        self.epoch = 0
        """How many times the connection has come up; what was sent in an earlier one may be lost."""
        self.last_error: BaseException | None = None
        self.max_payload = 1024 * 1024
        self.server_version: tuple[int, int] = (2, 15)
        self.relocate: Callable[[], Any] | None = None
        """Awaited when the connection broke, for a private server: brings it back and sets `servers` and `token`."""
        self._transport: FastClient | PublicClient | None = None
        self._listening: list[Listening] = []
        self._on_connected: list[Callable[[], None]] = []
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._reviving: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._api = f"$JS.{settings.domain}.API." if settings.domain else "$JS.API."

    async def open(self) -> None:
        """Connect, once.

        :raises ConnectionFailed: no server answered within `connect_timeout`.
        :raises AuthenticationFailed: it refused the credentials or demands some.
        """
        self._transport = await self._connect()
        self._listening.append(listening := Listening(self, self.inbox.pattern, self.inbox.handle))
        listening.native = await self._transport.listen(listening.subject, listening.handler)
        self._note_connected(again=False)

    async def _connect(self) -> FastClient | PublicClient:
        transport = await connect(self.settings, self.servers, self.token, self)
        client = transport.client
        self.max_payload = client.max_payload
        version = client.connected_server_version
        self.server_version = (version.major, version.minor)
        return transport

    # What the client tells.

    def _note_connected(self, *, again: bool) -> None:
        self.connected = True
        self.epoch += 1
        self.last_error = None
        self._emit(lambda: Connected(server=self.server, again=again))
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
        self.inbox.wake_all()
        for callback in tuple(self._on_connected):
            callback()

    def reconnected(self, transport: FastClient | PublicClient) -> None:
        if transport is self._transport and not self.closed:
            self._note_connected(again=True)

    def gave_up(self, transport: FastClient | PublicClient) -> None:
        """nats-py does so when the server closes a connection with an error."""
        if transport is self._transport and not self.closed:
            self._revive()

    def disconnected(self, transport: FastClient | PublicClient) -> None:
        if transport is not self._transport:
            return
        transport.forget_unwritten()
        if self.connected and not self.closed:
            self.connected = False
            self._emit(lambda: Disconnected(server=self.server, error=self.last_error))
            self.inbox.wake_all()
            if self.relocate is not None:
                self._revive()

    def error(self, error: Exception) -> None:
        self.last_error = error
        text = str(error).lower()
        if "permissions violation" in text:
            # nats: permissions violation for publish to "subject"
            self.inbox.refuse(text.partition('"')[2].partition('"')[0].encode())
            self._emit(lambda: Warned(text=f"The server refused an operation: {error}"))
        elif not self.connected and isinstance(classify(error, ""), AuthenticationFailed):
            # nats-py leaves a socket behind at each refusal, and would go on without a pause.
            self._revive(replace=True)

    def _revive(self, *, replace: bool = False) -> None:
        if self._reviving is None or self._reviving.done():
            work = self._bring_back(replace=replace)
            self._reviving = asyncio.get_running_loop().create_task(work, name="broker-jetstream-revive")

    async def _bring_back(self, *, replace: bool) -> None:
        """Replace a client that gave up or is refused, or that looks for a private server where it no longer is."""
        if replace and self._transport is not None:
            await discard(self._transport.client)
        pause = self.settings.reconnect_wait
        while not self.closed:
            try:
                if self.relocate is not None:
                    before = tuple(self.servers)
                    await self.relocate()
                    old = self._transport
                    if tuple(self.servers) == before and old is not None and not old.client.is_closed:
                        return  # nats-py finds it at the same place
                await self._replace(await self._connect())
            except Exception as error:  # whatever it was, the connection is down and is tried again
                self.last_error = error
                if isinstance(error, AuthenticationFailed):
                    pause = max(pause, REFUSED_PAUSE)
                await asyncio.sleep(pause * jitter.uniform(0.5, 1.5))
            else:
                return

    async def _replace(self, transport: FastClient | PublicClient) -> None:
        old, self._transport = self._transport, transport
        for listening in tuple(self._listening):
            listening.native = await transport.listen(listening.subject, listening.handler)
        if old is not None:
            await discard(old.client)
        # If it broke again meanwhile, nats-py brings it back and says so.
        if transport.client.is_connected:
            self._note_connected(again=True)

    def _emit(self, event: Callable[[], Event]) -> None:
        if self.hooks.listening:
            self.hooks.emit(event())

    # What others use.

    @property
    def server(self) -> str:
        """The server of the moment, without secrets."""
        client = self._transport.client if self._transport else None
        url = client.connected_url if client is not None else None
        if url is not None:
            return f"{url.scheme}://{url.hostname}:{url.port}"
        return ", ".join(mask_url(server) for server in self.servers)

    @property
    def joins(self) -> bool:
        """Whether nothing that was not written when a connection broke is written later."""
        return self._transport is not None and self._transport.joins

    @property
    def client(self) -> Client:
        """nats-py's client of the moment.

        :raises Closed: the connection is not open.
        """
        if self._transport is None or self.closed:
            raise Closed("The connection to NATS is not open")
        return self._transport.client

    def on_connected(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call this each time the connection is up again; returns the function that ends that."""
        self._on_connected.append(callback)
        return lambda: self._on_connected.remove(callback) if callback in self._on_connected else None

    async def wait_connected(self, timeout: float) -> None:
        """Return when the connection is up.

        :raises ConnectionFailed, AuthenticationFailed: it did not come up within `timeout` seconds.
        :raises Closed: it was closed.
        """
        deadline = time.monotonic() + timeout
        while not self.connected:
            self.check_open()
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.broken()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await asyncio.wait((waiter,), timeout=left)
            finally:
                self._waiting.pop(waiter, None)
        self.check_open()

    def broken(self) -> BrokerError:
        """The error that says why the connection is down."""
        where = located(self.settings, self.server)
        if self.last_error is not None:
            return connect_error(self.last_error, where, tls=self.settings.uses_tls)
        return ConnectionFailed(f"The connection to {where} is down and has not come back")

    def check_open(self) -> None:
        """:raises Closed: the connection was closed."""
        if self.closed:
            raise Closed("The connection to NATS was closed")

    async def listen(self, subject: str, handler: RawHandler) -> Listening:
        """Hand every message of a subject to `handler`, until it is closed, over all reconnects."""
        self.check_open()
        assert self._transport is not None  # open() ran
        listening = Listening(self, subject, handler)
        self._listening.append(listening)
        listening.native = await self._transport.listen(subject, handler)
        return listening

    async def unlisten(self, listening: Listening) -> None:
        if listening not in self._listening:
            return
        self._listening.remove(listening)
        if self._transport is not None and listening.native is not None:
            try:
                # Not cancelled with the caller: nats-py's reading ends at the pong of a ping that was.
                await asyncio.shield(self._transport.unlisten(listening.native))
            except (nats.errors.Error, OSError) as error:
                logger.debug("Unsubscribing %s: %r", listening.subject, error)

    async def send(self, messages: Sequence[Outgoing]) -> None:
        """Write these, in one go where that is possible.

        :raises ConnectionFailed: the connection is down; nothing was written.
        """
        if not self.connected or self._transport is None:
            self.check_open()
            raise self.broken()
        try:
            await self._transport.send(messages)
        except (nats.errors.Error, OSError) as error:
            raise classify(error, "Sending") from error

    async def send_empty(self, subjects: Sequence[bytes]) -> None:
        """Write an empty message to each, which is how most acks look.

        :raises ConnectionFailed: the connection is down; nothing was written.
        """
        if not self.connected or self._transport is None:
            self.check_open()
            raise self.broken()
        try:
            await self._transport.send_empty(subjects)
        except (nats.errors.Error, OSError) as error:
            raise classify(error, "Acknowledging") from error

    async def request(self, subject: str, data: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        """Ask, and give back header block and body of the answer; what a broken connection swallowed is asked again.

        :raises OperationTimeout: no answer within `timeout` seconds, or `request_timeout`.
        :raises ConnectionFailed: the connection stayed down.
        :raises NotAuthorized: the server refused the subject.
        """
        timeout = self.settings.request_timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        target = subject.encode()
        while True:
            await self.wait_connected(deadline - time.monotonic())
            replies = self.inbox.expect(1, frozenset((target,)))
            try:
                await self.send((Outgoing(target, replies.subject(0), b"", data),))
                await replies.wait(deadline - time.monotonic())
            finally:
                replies.close()
            answer = replies.answers[0]
            if answer is not None:
                if not answer[1] and status_of(answer[0])[0] == 403:
                    raise NotAuthorized(f"The server refused {subject!r} to this user")
                return answer
            if time.monotonic() >= deadline:
                raise OperationTimeout(f"No answer to {subject!r} within {timeout:g} seconds")

    async def api(
        self, subject: str, body: Mapping[str, Any] | None = None, *, what: str, timeout: float | None = None
    ) -> dict[str, Any]:
        """Ask the JetStream API.

        :param subject: without the prefix: "STREAM.INFO.orders".
        :param what: what is asked for, for errors.
        :raises BrokerError: by what the answer says.
        """
        deadline = time.monotonic() + (self.settings.request_timeout if timeout is None else timeout)
        data = msgspec.json.encode(body) if body is not None else b""
        pause = 0.05
        while True:
            block, answer = await self.request(self._api + subject, data, max(deadline - time.monotonic(), 0.01))
            # No responders: JetStream is off, or not ready yet after a start.
            if answer or status_of(block)[0] != 503:
                break
            if time.monotonic() + pause > deadline:
                raise api_error({"code": 503, "description": "nobody answers for JetStream"}, what)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.5)
        result: dict[str, Any] = msgspec.json.decode(answer)
        error = result.get("error")
        if error:
            raise api_error(error, what)
        return result

    def pull_inbox(self) -> str:
        """A subject of its own for the answers of pulls; they go to one token below it."""
        return f"{self.inbox.prefix.decode()}.pull.{next(self._numbers)}"

    def api_subject(self, subject: str) -> str:
        """A subject of the JetStream API with its prefix."""
        return self._api + subject

    async def flush(self, timeout: float = _FLUSH_SECONDS) -> float:
        """One round trip; its seconds.

        :raises ConnectionFailed: the connection is down. :raises OperationTimeout: no answer in time.
        """
        if not self.connected or self._transport is None:
            self.check_open()
            raise self.broken()
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(timeout):
                # Not cancelled with the caller, as in `unlisten`.
                await asyncio.shield(self._transport.client.flush(max(1, round(timeout))))
        except (nats.errors.Error, OSError) as error:
            raise classify(error, "Waiting for the server") from error
        return time.perf_counter() - begin

    async def close(self) -> None:
        """Write what is pending and disconnect, also when it is cancelled. May be called twice."""
        if self.closed:
            return
        self.closed = True
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.wait((self._reviving,))
        if self._transport is not None:
            try:
                if self.connected:
                    async with asyncio.timeout(_FLUSH_SECONDS):
                        await self._transport.client.flush(_FLUSH_SECONDS)
            except (nats.errors.Error, OSError) as error:
                logger.debug("Flushing at close: %r", error)
            finally:
                self.connected = False
                await discard(self._transport.client)
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
        self.inbox.wake_all()


_CLOSE_SECONDS = 2.0


class Watcher(Protocol):
    """Who is told what becomes of a client once it was connected."""

    def error(self, error: Exception) -> None: ...
    def disconnected(self, transport: FastClient | PublicClient) -> None: ...
    def reconnected(self, transport: FastClient | PublicClient) -> None: ...
    def gave_up(self, transport: FastClient | PublicClient) -> None: ...


class _FirstConnectFailed(Exception):
    """Carries the reason out of nats-py's connect, which would try for ever."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


async def connect(
    settings: JetStreamSettings, servers: Sequence[str], token: str | None, watcher: Watcher
) -> FastClient | PublicClient:
    """A connected client, that reconnects by itself from now on.

    :raises ConnectionFailed: no server answered within `connect_timeout`; each was tried once.
    :raises AuthenticationFailed: one refused the credentials or demands some.
    :raises InvalidSetting: a file that a setting names cannot be used.
    """
    tls = settings.ssl_context()
    transport = make_client(settings.fast_path)
    client = transport.client
    failures = 0
    connecting = True

    async def on_error(error: Exception) -> None:
        nonlocal failures
        if not connecting:
            watcher.error(error)
            return
        failures += 1
        # Each server gets one try; a refusal is final at once.
        if failures >= len(servers) or not isinstance(error, OSError | nats.errors.TimeoutError | TimeoutError):
            raise _FirstConnectFailed(error)

    async def on_disconnected() -> None:
        if not connecting:
            watcher.disconnected(transport)

    async def on_reconnected() -> None:
        watcher.reconnected(transport)

    async def on_closed() -> None:
        watcher.gave_up(transport)

    options: dict[str, Any] = {
        **_options(settings, client),
        **_credentials(settings, token),
        "servers": list(servers),
        "tls": tls,
        "error_cb": on_error,
        "disconnected_cb": on_disconnected,
        "reconnected_cb": on_reconnected,
        "closed_cb": on_closed,
    }
    try:
        # A timeout around all, because several servers and TLS each have their own.
        async with asyncio.timeout(settings.connect_timeout + 0.5):
            await client.connect(**options)
            # nats-py takes a connection that the server closed right after the greeting for a good one.
            if not client.is_connected:
                raise nats.errors.UnexpectedEOF
            await client.flush(max(1, round(settings.connect_timeout)))
    except BaseException as error:
        reason = error.reason if isinstance(error, _FirstConnectFailed) else error
        # After a failed handshake nothing tells nats-py that the connection is closed.
        await discard(client, 0.1)
        if isinstance(reason, BrokerError) or not isinstance(reason, Exception):
            raise reason from None
        shown = located(settings, ", ".join(mask_url(server) for server in servers))
        raise connect_error(reason, shown, tls=tls is not None or _demands_tls(client)) from reason
    connecting = False
    return transport


def located(settings: JetStreamSettings, servers: str) -> str:
    """Servers that do not answer, by the URL that users gave as well: the address of one that is ours says little."""
    return f"{settings.private} at {servers}" if settings.private else servers


async def discard(client: Client, seconds: float = _CLOSE_SECONDS) -> None:
    """Close a client, whatever state it is in."""
    try:
        async with asyncio.timeout(seconds):
            await hang_up(client)
    except Exception as error:  # a client that never connected may fail in any way to close
        logger.debug("Closing a connection: %r", error)


def _options(settings: JetStreamSettings, client: Client) -> dict[str, Any]:
    def pick(pool: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
        # nats-py leaves behind the socket of an attempt that failed after it was connected.
        drop_socket(client)
        # Spread, so that many clients do not come back in the same moment.
        return jitter.choice(pool), settings.reconnect_wait * jitter.uniform(0.5, 1.5)

    return {
        "name": settings.name,
        "reconnect_to_server_handler": pick,
        "allow_reconnect": True,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": settings.reconnect_wait,
        "connect_timeout": settings.connect_timeout,
        "ping_interval": settings.ping_interval,
        "max_outstanding_pings": settings.max_outstanding_pings,
        "inbox_prefix": settings.inbox_prefix,
        "tls_hostname": settings.tls_hostname,
        "tls_handshake_first": settings.tls_handshake_first,
    }


def _credentials(settings: JetStreamSettings, token: str | None) -> dict[str, Any]:
    seed = settings.nkey_seed.get_secret_value() if settings.nkey_seed else None
    if settings.nkey_seed_file is not None:
        seed = _read(settings.nkey_seed_file, "nkey_seed_file").strip()
    if seed is not None:
        _check_seed(seed, "nkey_seed" if settings.nkey_seed else "nkey_seed_file")
    if settings.creds_file is not None:
        text = _read(settings.creds_file, "creds_file")
        # nats-py reads a file without these lines for ever.
        if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
            raise InvalidSetting(
                f"Setting 'creds_file' {str(settings.creds_file)!r} is no credentials file",
                advice="Name a file with the user's JWT and NKey seed, as `nsc generate creds` writes it",
            )
    found: dict[str, Any] = {
        "user": settings.user,
        "password": settings.password.get_secret_value() if settings.password else None,
        "token": token,
        "user_credentials": str(settings.creds_file) if settings.creds_file else None,
        "nkeys_seed_str": seed,
    }
    return {name: value for name, value in found.items() if value is not None}


def _demands_tls(client: Client) -> bool:
    return bool(getattr(client, "_server_info", {}).get("tls_required"))


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(
            f"Setting {setting!r} {str(path)!r} cannot be read: {error}", native=error, advice="Name a readable file"
        ) from error


def _check_seed(seed: str, setting: str) -> None:
    from_seed: Any = nkeys.from_seed  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        from_seed(bytearray(seed.encode())).wipe()
    except Exception as error:  # the library raises what base32 and libsodium raise, too
        raise InvalidSetting(
            f"Setting {setting!r} is no NKey seed", native=error, advice="A seed begins with 'SU'"
        ) from None
