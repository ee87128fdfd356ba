"""The connection to NATS: it restores itself and carries requests, publishes and listeners.

*Concurrency.* All calls run on the event loop of `open`. *Failure.* nats-py reconnects. When nats-py gives up (the
server closed the connection with an error), a new client replaces the old one and takes over its listeners. The same
happens after each break with an embedded server: its port may be another user's by then, who must not get the token. A
write without an answer has an unknown outcome when the connection breaks; the sender repeats it after `on_connected`.
Nothing is written while the connection is down, so an old write cannot overtake its repetition. Callbacks never raise.

A new client makes one attempt per server, because nats-py would retry for ever. It reads the credential files, so it
uses renewed ones. A cancelled connect closes what it had opened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

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
    StorageFailed,
)
from broker.driver import Backoff, Connected, Disconnected, Event, Hooks, Warned, WritesFailed, jitter, logger, mask_url
from broker_jetstream.codec import status_of
from broker_jetstream.errors import api_error, connect_error, read_answer, translate
from broker_jetstream.inbox import Inbox
from broker_jetstream.settings import JetStreamSettings
from broker_jetstream.transport import (
    LARGEST_PAYLOAD,
    Outgoing,
    RawHandler,
    Transport,
    close_now,
    drop_socket,
    make_client,
)

__all__ = ["Connection", "Listener"]

_FLUSH_SECONDS: Final = 2
_CLOSE_SECONDS: Final = 2.0
_FOREVER: Final = 1e9
"""Seconds."""
_UNWRITTEN_SECONDS: Final = 60.0
"""How long a failed publish counts for the health, at least; a later success ends it."""
_LONGEST_WAIT: Final = 1.0
"""Longest seconds between attempts with a new client."""


class Listener:
    """A core NATS subscription that survives reconnects, until `unlisten`."""

    __slots__ = ("handler", "native", "subject")

    def __init__(self, subject: str, handler: RawHandler) -> None:
        self.subject = subject
        self.handler = handler
        self.native: Any = None


class Connection:
    """The connection of one backend; see the module's docstring."""

    def __init__(self, settings: JetStreamSettings, hooks: Hooks) -> None:
        self.settings = settings
        self.hooks = hooks
        self.servers: Sequence[str] = settings.servers
        self.token: str | None = settings.token.get_secret_value() if settings.token else None
        self.inbox = Inbox(f"{settings.inbox_prefix}.{token_hex(8)}")
        self.connected = False
        self.closed = False
        self.epoch = 0
        """How many times the connection has come up; writes of an earlier epoch may be lost."""
        self.last_error: BaseException | None = None
        self.max_payload = 1024 * 1024
        self.server_version: tuple[int, int] = (2, 15)
        self.storage_failure: StorageFailed | None = None
        """Why the embedded server cannot write; None if it can, and for other servers."""
        self.look_at_storage: Callable[[], Awaitable[None]] | None = None
        """For an embedded server: updates `storage_failure` now."""
        self._unwritten: dict[str, tuple[float, BrokerError]] = {}
        """By topic, when and why its last publish was not stored."""
        self.restart_server: Callable[[], Any] | None = None
        """For an embedded server: awaited after a break; restarts the server and sets `servers` and `token`."""
        self._transport: Transport | None = None
        self._listening: list[Listener] = []
        self._on_connected: list[Callable[[], None]] = []
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._warned_of_clear_text = False
        self._replacing: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._api = f"$JS.{settings.domain}.API." if settings.domain else "$JS.API."

    async def open(self) -> None:
        """Connect, with one attempt per server.

        :raises ConnectionFailed: no server answered within `connect_timeout`.
        :raises AuthenticationFailed: the server refused the credentials, or requires some.
        """
        self._warn_of_secrets_in_clear(self.settings.servers)
        self._transport = await self._connect()
        await self.listen(self.inbox.pattern, self.inbox.handle)
        self._note_connected(again=False)
        if not self._transport.client.is_connected:
            self._disconnected(self._transport)

    def _warn_of_secrets_in_clear(self, servers: Sequence[str]) -> None:
        """Warn once if a secret may go to one of these servers without TLS."""
        secrets = ((server, self.settings.secret_in_clear(server)) for server in servers)
        found = next(((server, setting) for server, setting in secrets if setting is not None), None)
        if found is None or self._warned_of_clear_text:
            return
        self._warned_of_clear_text = True
        server, setting = found
        where = mask_url(server)
        text = f"Setting {setting!r} goes to {where} in clear, unless it demands TLS: use tls:// or set tls_ca"
        logger.warning(text)
        self._emit(lambda: Warned(text=text))

    async def _connect(self) -> Transport:
        """A connected client, which reconnects by itself afterwards.

        :raises ConnectionFailed: no server answered within `connect_timeout`; each was tried once.
        :raises AuthenticationFailed: one refused the credentials or demands some.
        :raises InvalidSetting: a file that a setting names cannot be used.
        """
        settings, servers = self.settings, self.servers
        tls = settings.ssl_context()
        transport = make_client(settings.fast_path, tls_only=tls is not None)
        client = transport.client
        failures = 0
        connecting = True

        async def on_error(error: Exception) -> None:
            nonlocal failures
            if not connecting:
                self._error(error)
                return
            failures += 1
            # One attempt per server; a refusal is final.
            if failures >= len(servers) or not isinstance(error, OSError | nats.errors.TimeoutError | TimeoutError):
                raise _FirstConnectFailed(error)

        async def on_disconnected() -> None:
            if not connecting:
                self._disconnected(transport)

        async def on_reconnected() -> None:
            self._reconnected(transport)

        async def on_closed() -> None:
            self._client_closed(transport)

        options: dict[str, Any] = {
            **_options(settings, client, self._warn_of_secrets_in_clear),
            **_credentials(settings, self.token),
            "servers": list(servers),
            "tls": tls,
            "error_cb": on_error,
            "disconnected_cb": on_disconnected,
            "reconnected_cb": on_reconnected,
            "closed_cb": on_closed,
        }
        try:
            # One timeout around all, because each server and TLS have their own.
            async with asyncio.timeout(settings.connect_timeout + 0.5):
                await client.connect(**options)
                # nats-py reports success even if the server closes right after its greeting.
                if not client.is_connected:
                    raise nats.errors.UnexpectedEOF
                await client.flush(max(1, round(settings.connect_timeout)))
        except BaseException as error:
            reason = error.reason if isinstance(error, _FirstConnectFailed) else error
            # After a failed handshake nats-py does not notice that the connection is closed.
            await _close_client(client, 0.1)
            if isinstance(reason, BrokerError) or not isinstance(reason, Exception):
                raise reason from None
            where = _describe_servers(settings, ", ".join(mask_url(server) for server in servers))
            raise connect_error(reason, where, tls=tls is not None or _demands_tls(client)) from reason
        connecting = False
        self.max_payload = min(client.max_payload, LARGEST_PAYLOAD)
        version = client.connected_server_version
        with suppress(ValueError):  # a version of another form says nothing
            self.server_version = (version.major, version.minor)
        return transport

    # Callbacks of the client.

    def _note_connected(self, *, again: bool) -> None:
        self.connected = True
        self.epoch += 1
        self.last_error = None
        self.hooks.emit(Connected(server=self.server, again=again))
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
        self.inbox.wake_all()
        for callback in tuple(self._on_connected):
            callback()

    def _reconnected(self, transport: Transport) -> None:
        if transport is self._transport and not self.closed:
            self._note_connected(again=True)

    def _client_closed(self, transport: Transport) -> None:
        """nats-py gives up when the server closes a connection with an error."""
        if transport is self._transport and not self.closed:
            self._replace_client()

    def _disconnected(self, transport: Transport) -> None:
        if transport is not self._transport:
            return
        transport.forget_unwritten()
        if self.connected and not self.closed:
            self.connected = False
            self.hooks.emit(Disconnected(server=self.server, error=self.last_error))
            self.inbox.wake_all()
            if self.restart_server is not None:
                self._replace_client()

    def _error(self, error: Exception) -> None:
        self.last_error = error
        text = str(error).lower()
        if "permissions violation" in text:
            # nats: permissions violation for publish to "subject"
            self.inbox.refuse(text.partition('"')[2].partition('"')[0].encode())
            self._emit(lambda: Warned(text=f"The server denied an operation: {error}"))
        elif not self.connected and isinstance(translate(error, ""), AuthenticationFailed):
            # nats-py leaks a socket at each refusal, and retries without a pause.
            self._replace_client(close_first=True)

    def _replace_client(self, *, close_first: bool = False) -> None:
        if self._replacing is None or self._replacing.done():
            work = self._connect_again(close_first=close_first)
            self._replacing = asyncio.get_running_loop().create_task(work, name="broker-jetstream-reconnect")

    async def _connect_again(self, *, close_first: bool) -> None:
        """Replace a client that gave up, is refused, or was connected to an embedded server."""
        if close_first and self._transport is not None:
            await _close_client(self._transport.client)
        backoff = Backoff(self.settings.reconnect_wait, max(self.settings.reconnect_wait, _LONGEST_WAIT))
        while not self.closed:
            try:
                if self.restart_server is not None:
                    await self.restart_server()
                await self._take_over(await self._connect())
                if self.connected or self.restart_server is None:
                    return
            except Exception as error:  # every failure is retried
                self.last_error = error
            await asyncio.sleep(backoff.next())

    async def _take_over(self, transport: Transport) -> None:
        old, self._transport = self._transport, transport
        for listener in tuple(self._listening):
            listener.native = await transport.listen(listener.subject, listener.handler)
        if old is not None:
            await _close_client(old.client)
        # If it broke meanwhile, nats-py reconnects and calls back, or the caller connects again.
        if transport.client.is_connected:
            self._note_connected(again=True)

    def _emit(self, event: Callable[[], Event]) -> None:
        if self.hooks.listening:
            self.hooks.emit(event())

    # Public calls.

    @property
    def server(self) -> str:
        """The address of the current server, without secrets."""
        client = self._transport.client if self._transport else None
        url = client.connected_url if client is not None else None
        if url is not None:
            return f"{url.scheme}://{url.hostname}:{url.port}"
        return ", ".join(mask_url(server) for server in self.servers)

    @property
    def forgets_unwritten(self) -> bool:
        """Whether writes that a broken connection did not take are forgotten."""
        return self._transport is not None and self._transport.forgets_unwritten

    @property
    def client(self) -> Client:
        """The current client of nats-py.

        :raises Closed: the connection is not open.
        """
        if self._transport is None or self.closed:
            raise Closed("The connection to NATS is not open")
        return self._transport.client

    def on_connected(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each reconnect; returns a function that removes it."""
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
                raise self.down_error()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await asyncio.wait((waiter,), timeout=left)
            finally:
                self._waiting.pop(waiter, None)
        self.check_open()

    def down_error(self) -> BrokerError:
        """The error with the reason why the connection is down."""
        where = _describe_servers(self.settings, self.server)
        if self.last_error is not None:
            return connect_error(self.last_error, where, tls=self.settings.uses_tls)
        return ConnectionFailed(f"The connection to {where} is down")

    def check_open(self) -> None:
        """:raises Closed: the connection was closed."""
        if self.closed:
            raise Closed("The connection to NATS was closed")

    async def listen(self, subject: str, handler: RawHandler) -> Listener:
        """Pass every message of a subject to `handler` until `unlisten`, across reconnects."""
        self.check_open()
        assert self._transport is not None  # open() ran
        listener = Listener(subject, handler)
        self._listening.append(listener)
        listener.native = await self._transport.listen(subject, handler)
        return listener

    async def unlisten(self, listener: Listener) -> None:
        """Unsubscribe; returns after the handler got every message that the server had sent."""
        if listener not in self._listening:
            return
        self._listening.remove(listener)
        if self._transport is not None and listener.native is not None:
            try:
                await _to_the_end(self._transport.unlisten(listener.native))
            except (nats.errors.Error, OSError) as error:
                logger.debug("Unsubscribing %s: %r", listener.subject, error)

    async def send(self, messages: Sequence[Outgoing]) -> None:
        """Write messages, joined into one write if the transport can.

        :raises ConnectionFailed: the connection is down; nothing was written.
        """
        if not self.connected or self._transport is None:
            self.check_open()
            raise self.down_error()
        try:
            await self._transport.send(messages)
        except (nats.errors.Error, OSError) as error:
            raise translate(error, "Sending") from error

    async def send_empty(self, subjects: Sequence[bytes]) -> None:
        """Write an empty message to each subject: the shortest ack.

        :raises ConnectionFailed: the connection is down; nothing was written.
        """
        if not self.connected or self._transport is None:
            self.check_open()
            raise self.down_error()
        try:
            await self._transport.send_empty(subjects)
        except (nats.errors.Error, OSError) as error:
            raise translate(error, "Acknowledging") from error

    async def request(self, subject: str, data: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        """Send a request and return header block and body of the answer; repeats it after a reconnect.

        :raises OperationTimeout: no answer within `timeout` seconds, or `request_timeout`.
        :raises ConnectionFailed: the connection stayed down.
        :raises NotAuthorized: the server refused the subject.
        """
        timeout = self.settings.request_timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        target = subject.encode()
        while True:
            await self.wait_connected(deadline - time.monotonic())
            answer = await self.request_once(target, b"", data, deadline - time.monotonic())
            if answer is not None:
                if not answer[1] and status_of(answer[0])[0] == 403:
                    raise NotAuthorized(f"The server denies {subject!r} to this user")
                return answer
            if time.monotonic() >= deadline:
                raise OperationTimeout(f"No answer to {subject!r} within {timeout:g} seconds")

    async def request_once(
        self, subject: bytes, block: bytes, data: bytes, timeout: float
    ) -> tuple[bytes, bytes] | None:
        """Send a request and return header block and body of the answer; None without an answer in time.

        :raises ConnectionFailed: the connection is down; nothing was written.
        """
        with self.inbox.expect(1, frozenset((subject,))) as replies:
            await self.send((Outgoing(subject, replies.subject(0), block, data),))
            await replies.wait(timeout)
        return replies.answers[0]

    async def api(self, subject: str, body: Mapping[str, Any] | None = None, *, what: str) -> dict[str, Any]:
        """Call the JetStream API.

        :param subject: without the prefix: "STREAM.INFO.orders".
        :param what: the object of the call, for errors: "Topic 'orders'".
        :raises BrokerError: the error in the answer.
        """
        deadline = time.monotonic() + self.settings.request_timeout
        data = msgspec.json.encode(body) if body is not None else b""
        backoff = Backoff(0.05, 0.5)
        while True:
            block, answer = await self.request(self._api + subject, data, max(deadline - time.monotonic(), 0.01))
            # Status 503: JetStream is off, or still starting.
            if answer or status_of(block)[0] != 503:
                break
            if time.monotonic() + (pause := backoff.next()) > deadline:
                raise api_error({"code": 503, "description": "JetStream does not answer"}, what)
            await asyncio.sleep(pause)
        result = read_answer(answer, what)
        error = result.get("error")
        if error:
            raise api_error(error, what)
        return result

    def note_publish(self, topic: str, failure: BrokerError | None) -> None:
        """A publish to a topic was not stored, or was."""
        if failure is None:
            self._unwritten.pop(topic, None)
            return
        # The watch of an embedded server has reported its failure.
        if isinstance(failure, StorageFailed) and topic not in self._unwritten and self.storage_failure is None:
            self._emit(lambda: WritesFailed(server=self.server, error=failure))
        self._unwritten[topic] = time.monotonic(), failure

    @property
    def publish_failed(self) -> bool:
        """Whether the last publish to a topic was not stored."""
        return bool(self._unwritten)

    def check_writes(self) -> None:
        """Check that the server stores messages, as far as this connection knows.

        :raises BrokerError: the embedded server cannot write, or the last publish to a topic was not stored lately.
        """
        if self.storage_failure is not None:
            raise self.storage_failure
        since = time.monotonic() - max(_UNWRITTEN_SECONDS, 2 * self.settings.publish_timeout)
        for topic, (when, failure) in tuple(self._unwritten.items()):
            if when > since:
                raise failure
            del self._unwritten[topic]

    def pull_inbox(self) -> str:
        """A new inbox for the answers of pull requests."""
        return f"{self.inbox.prefix.decode()}.pull.{next(self._numbers)}"

    def api_subject(self, subject: str) -> str:
        """The subject of a JetStream API call, with its prefix."""
        return self._api + subject

    async def flush(self, timeout: float = _FLUSH_SECONDS) -> float:
        """Make a round trip; returns its seconds.

        :raises ConnectionFailed: the connection is down. :raises OperationTimeout: no answer in time.
        """
        if not self.connected or self._transport is None:
            self.check_open()
            raise self.down_error()
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(timeout):
                await _to_the_end(self._transport.client.flush(max(1, round(timeout))))
        except (nats.errors.Error, OSError) as error:
            raise translate(error, "Waiting for the server") from error
        return time.perf_counter() - begin

    async def close(self) -> None:
        """Flush and disconnect, even when cancelled. May be called twice."""
        if self.closed:
            return
        self.closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait((self._replacing,))
        if self._transport is not None:
            try:
                if self.connected:
                    async with asyncio.timeout(_FLUSH_SECONDS):
                        await self._transport.client.flush(_FLUSH_SECONDS)
            except (nats.errors.Error, OSError) as error:
                logger.debug("Flushing at close: %r", error)
            finally:
                self.connected = False
                await _close_client(self._transport.client)
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
        self.inbox.wake_all()


class _FirstConnectFailed(Exception):
    """Carries the reason out of nats-py's connect, which would retry for ever."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _describe_servers(settings: JetStreamSettings, servers: str) -> str:
    """The servers in an error; for an embedded one with the URL, because its address means nothing to the user."""
    return f"{settings.embedded_url} at {servers}" if settings.embedded_url else servers


async def _to_the_end(flushing: Coroutine[Any, Any, None]) -> None:
    """Await what flushes; it goes on if the caller is cancelled: nats-py's read loop would end at a lost pong."""
    task = asyncio.ensure_future(flushing)
    # After a cancellation no caller awaits the task; asyncio would log its failure as never retrieved.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.shield(task)


async def _close_client(client: Client, seconds: float = _CLOSE_SECONDS) -> None:
    """Close a client in any state."""
    try:
        async with asyncio.timeout(seconds):
            await close_now(client)
    except Exception as error:  # closing a client that never connected may raise anything
        logger.debug("Closing a connection: %r", error)


def _options(settings: JetStreamSettings, client: Client, chosen: Callable[[Sequence[str]], None]) -> dict[str, Any]:
    """:param chosen: called with the server of each reconnect attempt, which another server may have named."""

    def pick(pool: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
        # nats-py leaks the socket of an attempt that failed after connecting.
        drop_socket(client)
        if settings.embedded is not None:
            return pool[0], _FOREVER  # until another client replaces this one
        # Jitter, so many clients do not reconnect at once.
        server = jitter.choice(pool)
        chosen((server.uri.geturl(),))
        return server, settings.reconnect_wait * jitter.uniform(0.5, 1.5)

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
    if settings.embedded is not None:
        return {"token": token}
    seed = settings.nkey_seed.get_secret_value() if settings.nkey_seed else None
    if settings.nkey_seed_file is not None:
        seed = _read(settings.nkey_seed_file, "nkey_seed_file").strip()
    if seed is not None:
        _check_seed(seed, "nkey_seed" if settings.nkey_seed else "nkey_seed_file")
    if settings.creds_file is not None:
        text = _read(settings.creds_file, "creds_file")
        # nats-py reads a file without these lines in an endless loop.
        if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
            raise InvalidSetting(
                f"Setting 'creds_file' {str(settings.creds_file)!r} is not a credentials file",
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
    except Exception as error:  # nkeys passes on errors of base32 and libsodium
        raise InvalidSetting(
            f"Setting {setting!r} is not an NKey seed", native=error, advice="A seed begins with 'SU'"
        ) from None
