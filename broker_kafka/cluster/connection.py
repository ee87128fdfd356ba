"""The connection of a backend to a cluster: client configurations, admin clients, and connection events.

Two admin clients, each in its thread: one for requests that any broker answers, one for coordinators of groups. An
abandoned request to a coordinator takes its client with it. A client that waits for a silent broker is replaced
by `replace_client`. A client that was replaced ends with its last request.

*Concurrency.* Used on one event loop. *Cancellation.* A cancelled `call` leaves what has begun to the thread.
*Failure.* librdkafka reconnects by itself. `Disconnected` is emitted once when no broker can be reached, whichever
client reports it first; a task then polls the brokers, and emits `Connected` when one answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from time import monotonic
from typing import Any, Final, Protocol

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from typing_extensions import TypeVar

from broker import AuthenticationFailed, BrokerError, Closed, ConnectionFailed, OperationTimeout
from broker.driver import Backoff, Connected, Disconnected, Event, Hooks, TaskSet, Warned, logger, warn_of_clear_text
from broker_kafka.client.thread import AdminThread
from broker_kafka.cluster.names import check_id
from broker_kafka.config.properties import Role
from broker_kafka.config.security import login_of, protocol_of
from broker_kafka.errors import translate
from broker_kafka.settings import KafkaSettings

__all__ = ["LONGEST_TIMEOUT", "Connection"]

R = TypeVar("R")
K = TypeVar("K")

LONGEST_TIMEOUT: Final = 3600.0
"""Seconds; the longest request timeout of librdkafka, which requests of `coordinator_outcomes` must have."""
_ATTEMPT_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 5.0
_RECONNECT_PAUSE: Final = 0.2
_LONGEST_RECONNECT_PAUSE: Final = 2.0
_TRANSACTIONAL_IDLE_MS: Final = 3000
"""Without it, sending offsets to a transaction may hang after the group's coordinator is lost: librdkafka 2.16 looks up
another only when a connection opens or closes, and ignores the timeout of the call until then."""

_AUTH_CODES: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED})
_AUTH_ADVICE: Final = "The brokers refuse this client: check its credentials and the security settings"
_WRONG_LISTENER: Final = (
    "security.protocol",
    "broker listener?",
    "SSL handshake failed",
    "certificate verify failed",
    "SSL alert number",  # the broker refuses the client's certificate, or wants one
)
"""Log texts of a listener whose protocol is not ours."""


class Closing(Protocol):
    """A client of the connection, which is closed before it."""

    async def close(self) -> None: ...


class Connection:
    """:ivar changed: when this process last created or changed a topic, by `monotonic`; producers' threads read it."""

    def __init__(self, settings: KafkaSettings, hooks: Hooks) -> None:
        self.settings: Final = settings
        self.changed: Final[dict[str, float]] = {}
        self._hooks = hooks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._admin: AdminThread | None = None
        self._group_admin: AdminThread | None = None
        self._replacing = asyncio.Lock()
        self._retired = TaskSet(
            "broker-kafka-retiring", lambda error: logger.warning("A client did not close: %r", error)
        )
        self._auth_error: KafkaError | None = None
        self._down_error: KafkaError | None = None
        self._last_error = ""
        self._opened = False
        self._down = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._attached: set[Closing] = set()

    @property
    def servers(self) -> str:
        """The bootstrap servers, for messages."""
        return ",".join(self.settings.servers)

    @property
    def down(self) -> bool:
        """Whether every broker was reported down, and none has answered since."""
        return self._down

    # -- opening and closing -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, without retries.

        :raises AuthenticationFailed: the brokers refuse the credentials, TLS fails, or `oauth_cb` returns no token.
        :raises ConnectionFailed: no broker answers within `connect_timeout`.
        :raises ConfigurationError: librdkafka rejects the settings.
        """
        self._loop = asyncio.get_running_loop()
        login = login_of(self.settings)
        if self.settings.protocol == "SASL_PLAINTEXT" and login is not None:
            warn_of_clear_text(self._hooks, login, self.settings.servers, "use security_protocol=SASL_SSL")
        self._admin = AdminThread(self.client_config("admin"))
        await self._admin.start()
        await self._admin.call(self._first_contact)
        self._opened = True
        if self._hooks.listening:
            self._hooks.emit(Connected(server=self.servers))

    def attach(self, opened: Closing) -> None:
        """Close this client with the backend, unless it is detached before."""
        self._attached.add(opened)

    def detach(self, closed: Closing) -> None:
        """Forget a closed client."""
        self._attached.discard(closed)

    async def close_attached(self) -> None:
        """Close the attached clients."""
        attached, self._attached = self._attached, set()
        await asyncio.gather(*(each.close() for each in attached))

    async def close(self) -> None:
        """Close the admin clients. May be called twice."""
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            self._reconnecting = None
        admin, self._admin = self._admin, None
        if self._group_admin is not None:
            self._group_admin.pending = 0
            self._forget(self._group_admin)
        if admin is not None:
            await asyncio.gather(admin.stop(_CLOSE_SECONDS), *self._retired)

    def _first_contact(self, client: AdminClient) -> None:
        deadline = monotonic() + self.settings.connect_timeout
        while True:
            try:
                client.list_topics(timeout=min(_ATTEMPT_SECONDS, max(0.01, deadline - monotonic())))
                return
            except KafkaException as error:
                client.poll(0)
                if self._auth_error is not None:
                    raise self._authentication_failed(self._auth_error) from error
                if monotonic() >= deadline or self._down_error is not None:
                    detail = f": {self._last_error}" if self._last_error else ""
                    raise ConnectionFailed(
                        f"No broker at {self.servers} answers{detail}", native=error, advice=self._connect_advice()
                    ) from error

    def _authentication_failed(self, error: KafkaError) -> BrokerError:
        return AuthenticationFailed(
            f"Connecting to {self.servers} was refused: {error.str()}", native=KafkaException(error)
        )

    def _connect_advice(self) -> str:
        # A listener that wants TLS or a login from a client that does neither only closes the connection.
        protocol = protocol_of(self.settings)
        advice = f"Check that the server runs, that the URL names it, and that it accepts security_protocol={protocol}"
        wants = {"PLAINTEXT": "TLS or a login", "SASL_PLAINTEXT": "TLS"}.get(protocol)
        return f"{advice}: a listener that requires {wants} closes such connections" if wants else advice

    # -- clients and requests -------------------------------------------------------------------------------

    def client_config(self, role: Role) -> dict[str, Any]:
        """The configuration of a client that reports its errors to this connection; the owner adds `group.id` etc."""
        return {**self.settings.client_config(role), "error_cb": self._on_error}

    def transactional_config(self, transactional_id: str, timeout_ms: int | None = None) -> dict[str, Any]:
        """The configuration of a transactional producer.

        :param timeout_ms: of a transaction; None is that of the settings.
        :raises InvalidName: no publisher can have this id.
        """
        config = self.client_config("producer")
        # librdkafka rejects settings with which a message or a request could outlive its transaction.
        longest = self.settings.transaction_timeout_ms if timeout_ms is None else timeout_ms
        config["transactional.id"] = check_id(transactional_id, "transactional id")
        config["transaction.timeout.ms"] = longest
        config["message.timeout.ms"] = min(self.settings.message_timeout_ms, longest)
        config["socket.timeout.ms"] = min(config["socket.timeout.ms"], longest)
        config.setdefault("connections.max.idle.ms", _TRANSACTIONAL_IDLE_MS)
        return config

    async def call(self, function: Callable[[AdminClient], R], what: str) -> R:
        """Run a blocking call of the admin client in its thread.

        :param what: for the error: "Describing topic 'orders'".
        :raises BrokerError: the call failed.
        """
        try:
            return await self._open_admin().call(function)
        except (KafkaException, ValueError, TypeError) as error:
            failure = translate(error, what)
            if isinstance(failure, ConnectionFailed):
                failure = self.unreachable(failure.message, error)
            raise failure from error

    def unreachable(self, text: str = "", native: Exception | None = None) -> ConnectionFailed:
        """The error when no broker can be reached; it names the reason if the brokers refuse this client."""
        text = text or f"No broker at {self.servers} can be reached"
        refused = self._auth_error
        if refused is None or not self._down:
            return ConnectionFailed(text, native=native)
        return ConnectionFailed(f"{text}; {refused.str()}", native=KafkaException(refused), advice=_AUTH_ADVICE)

    async def outcomes(
        self, start: Callable[[AdminClient], Mapping[K, Future[R]]], what: str
    ) -> dict[K, R | BrokerError]:
        """Start a request of the admin client and wait for its answers; a failed one is a BrokerError in the result."""
        client = self._open_admin()
        client.pending += 1
        try:
            return await client.outcomes(start, what)
        finally:
            client.pending -= 1
            if client is not self._admin:
                self._retire(client)

    async def coordinator_outcomes(
        self,
        start: Callable[[AdminClient], Mapping[K, Future[R]]],
        what: str,
        timeout: float | None = None,
    ) -> dict[K, R | BrokerError]:
        """`outcomes` of a request to the coordinator of a group.

        librdkafka 2.16 frees a request that times out before its coordinator is reached, and uses it afterwards, which
        ends the process. So the request never times out; its client is given up instead.

        :param start: passes `LONGEST_TIMEOUT` as the request timeout.
        :param timeout: seconds; None is `request_timeout`.
        :raises OperationTimeout: there was no answer.
        """
        client = await self._group_client()
        client.pending += 1
        try:
            async with asyncio.timeout(self.settings.request_timeout if timeout is None else timeout):
                return await client.outcomes(start, what)
        except TimeoutError as error:
            self._forget(client)
            raise OperationTimeout(f"{what}: the group's coordinator did not answer in time") from error
        except asyncio.CancelledError:
            self._forget(client)
            raise
        finally:
            client.pending -= 1
            if client is not self._group_admin:
                self._retire(client)

    @property
    def client(self) -> object:
        """The admin client that `call` and `outcomes` use now, for `replace_client`."""
        return self._admin

    async def replace_client(self, client: object) -> None:
        """Use another admin client than this one from now on; its pending requests go on.

        :raises BrokerError: no client could be opened.
        """
        async with self._replacing:
            old = self._open_admin()
            if old is client:
                self._admin = await self._open_client()
                self._retire(old)

    def forget_coordinators(self) -> None:
        """Have the next `coordinator_outcomes` look up its coordinator; pending requests go on."""
        if self._group_admin is not None:
            self._forget(self._group_admin)

    def event(self, event: Event) -> None:
        """Emit an event to the listeners of the bus. Call it on the loop."""
        if self._hooks.listening:
            self._hooks.emit(event)

    def warn(self, text: str) -> None:
        """Log a warning and emit it as an event. Call it on the loop."""
        logger.warning(text)
        self.event(Warned(text=text))

    # -- inside --------------------------------------------------------------------------------------------

    def _open_admin(self) -> AdminThread:
        if self._admin is None:
            raise Closed("The connection to Kafka is not open", advice="Use it within `async with`")
        return self._admin

    async def _group_client(self) -> AdminThread:
        async with self._replacing:
            self._open_admin()
            if self._group_admin is None:
                self._group_admin = await self._open_client()
            return self._group_admin

    async def _open_client(self) -> AdminThread:
        client = AdminThread(self.client_config("admin"))
        try:
            await client.start()
        except BaseException:
            self._retire(client)
            raise
        if self._admin is None:
            self._retire(client)
            self._open_admin()  # raises Closed
        return client

    def _forget(self, client: AdminThread) -> None:
        """Have the next request to a coordinator open another client."""
        if self._group_admin is client:
            self._group_admin = None
            self._retire(client)

    def _retire(self, client: AdminThread) -> None:
        """End a client, or leave that to its last pending request."""
        if not client.pending:
            self._retired.spawn(client.stop(_CLOSE_SECONDS))

    def _on_error(self, error: KafkaError) -> None:
        """`error_cb` of a client, called in its thread; never raises."""
        code = error.code()
        if code in _AUTH_CODES:
            self._auth_error = error
        elif code == KafkaError._ALL_BROKERS_DOWN:
            self._down_error = error
            self._post(self._on_down, error)
        else:
            self._last_error = error.str()
            if any(sign in self._last_error for sign in _WRONG_LISTENER):
                self._auth_error = error

    def _post(self, function: Callable[..., object], *args: object) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("The event loop is closed; an error of a client is dropped")

    def _on_down(self, error: KafkaError) -> None:
        if self._down or not self._opened or self._admin is None:
            return
        self._down = True
        self._hooks.emit(Disconnected(server=self.servers, error=translate(error, "The connection")))
        self._reconnecting = asyncio.get_running_loop().create_task(
            self._await_reconnect(), name="broker-kafka-reconnect"
        )

    async def _await_reconnect(self) -> None:
        backoff = Backoff(_RECONNECT_PAUSE, _LONGEST_RECONNECT_PAUSE)
        while True:
            try:
                await self.call(lambda client: client.list_topics(timeout=_ATTEMPT_SECONDS), "Reconnecting")
                break
            except Closed:
                return
            except BrokerError:
                await asyncio.sleep(backoff.next())
        self._down = False
        self._auth_error = self._down_error = None
        self._hooks.emit(Connected(server=self.servers, again=True))
