"""The connection of one backend object to a cluster: its configuration, its admin client, and what becomes known of it.

*Concurrency.* Used on one event loop; the admin client lives in a thread of its own, where its calls run one after the
other. What coordinators of groups are asked has a client apart, which ends with a question that is given up. A client
that waits for a broker which is silent is replaced by `renew`, and ends when its last question is answered.
*Cancellation.* A cancelled `call` leaves what has begun to the thread. *Failure.* librdkafka reconnects by
itself. That every broker is out of reach is told once, as `Disconnected`, whichever client sees it first; a task then
asks until one answers, and tells `Connected`.
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
from broker.driver import Connected, Disconnected, Event, Hooks, Warned, logger
from broker_kafka.client.thread import AdminThread
from broker_kafka.cluster.names import check_id
from broker_kafka.config.properties import Role
from broker_kafka.config.security import protocol_of
from broker_kafka.errors import translate
from broker_kafka.settings import KafkaSettings

__all__ = ["NEVER", "Connection"]

R = TypeVar("R")
K = TypeVar("K")

NEVER: Final = 3600.0
"""The request timeout that `coordinated` wants: the longest that librdkafka takes."""
_ONE_TRY: Final = 0.5
_CLOSE: Final = 5.0
_ASK_AGAIN: Final = 0.2
_TRANSACTIONAL_IDLE_MS: Final = 3000
"""Without it, positions may wait for ever for a group coordinator that is gone: librdkafka 2.16 looks for another only
when some connection comes or goes, and does not heed the call's own time-out meanwhile."""

_REFUSALS: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED})
_DOWN: Final = frozenset({KafkaError._ALL_BROKERS_DOWN})
_REFUSED: Final = "The brokers refuse this client: check its credentials and the security settings"
_WRONG_LISTENER: Final = (
    "security.protocol",
    "broker listener?",
    "SSL handshake failed",
    "certificate verify failed",
    "SSL alert number",  # the broker refuses the client's certificate, or that there is none
)


class Closing(Protocol):
    """What uses the connection and ends before it."""

    async def close(self) -> None: ...


class Connection:
    """What the parts of the backend share.

    :ivar settings: as given.
    :ivar changed: when a topic was last made or changed here, by `monotonic`; producers read it in their threads.
    """

    def __init__(self, settings: KafkaSettings, hooks: Hooks) -> None:
        self.settings: Final = settings
        self.changed: Final[dict[str, float]] = {}
        self._hooks = hooks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._admin: AdminThread | None = None
        self._groups: AdminThread | None = None
        self._making = asyncio.Lock()
        self._retired: set[asyncio.Task[bool]] = set()
        self._refused: KafkaError | None = None
        self._unreachable: KafkaError | None = None
        self._last = ""
        self._opened = False
        self._down = False
        self._watching: asyncio.Task[None] | None = None
        self._attached: set[Closing] = set()

    @property
    def servers(self) -> str:
        """The bootstrap servers, for people."""
        return ",".join(self.settings.servers)

    @property
    def down(self) -> bool:
        """Whether no broker has answered since one was last heard of to be out of reach."""
        return self._down

    # -- opening and closing -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, once.

        :raises AuthenticationFailed: the brokers refuse the credentials, TLS fails, or `oauth_cb` gives no token.
        :raises ConnectionFailed: no broker answers within `connect_timeout`.
        :raises ConfigurationError: librdkafka does not take the settings.
        """
        self._loop = asyncio.get_running_loop()
        self._admin = AdminThread(self.client_config("admin"))
        await self._admin.start()
        await self._admin.call(self._first_contact)
        self._opened = True
        if self._hooks.listening:
            self._hooks.emit(Connected(server=self.servers))

    def attach(self, opened: Closing) -> None:
        """Close this along with the backend, unless it is detached before."""
        self._attached.add(opened)

    def detach(self, closed: Closing) -> None:
        """Forget a client that was closed."""
        self._attached.discard(closed)

    async def close_attached(self) -> None:
        """Close all clients that are attached."""
        attached, self._attached = self._attached, set()
        await asyncio.gather(*(each.close() for each in attached))

    async def close(self) -> None:
        """End the admin client; may be called twice."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        admin, self._admin = self._admin, None
        if self._groups is not None:
            self._groups.asking = 0
            self._forget(self._groups)
        if admin is not None:
            await asyncio.gather(admin.stop(_CLOSE), *self._retired)

    def _first_contact(self, client: AdminClient) -> None:
        deadline = monotonic() + self.settings.connect_timeout
        while True:
            try:
                client.list_topics(timeout=min(_ONE_TRY, max(0.01, deadline - monotonic())))
                return
            except KafkaException as error:
                client.poll(0)
                if self._refused is not None:
                    raise self._refusal(self._refused) from error
                if monotonic() >= deadline or self._unreachable is not None:
                    said = f": {self._last}" if self._last else ""
                    raise ConnectionFailed(
                        f"No broker at {self.servers} answers{said}", native=error, advice=self._way_in()
                    ) from error

    def _refusal(self, error: KafkaError) -> BrokerError:
        return AuthenticationFailed(
            f"Connecting to {self.servers} was refused: {error.str()}", native=KafkaException(error)
        )

    def _way_in(self) -> str:
        """What to look at where no broker answers: a listener that wants more than it gets only closes connections."""
        protocol = protocol_of(self.settings)
        advice = f"Check that the server runs, that the URL names it, and that it takes security_protocol={protocol}"
        wants = {"PLAINTEXT": "TLS or a login", "SASL_PLAINTEXT": "TLS"}.get(protocol)
        return f"{advice}: one that wants {wants} hangs up on it" if wants else advice

    # -- for the other parts -------------------------------------------------------------------------------

    def client_config(self, role: Role) -> dict[str, Any]:
        """The configuration of a client whose errors this connection hears of; its owner adds what is its own."""
        return {**self.settings.client_config(role), "error_cb": self._hear}

    def transactional_config(self, transactional_id: str, timeout_ms: int | None = None) -> dict[str, Any]:
        """The configuration of a producer of transactions. What the settings say of idle connections goes before.

        :param timeout_ms: of a transaction, in milliseconds; None is that of the settings.
        :raises InvalidName: no publisher can have this id.
        """
        config = self.client_config("producer")
        # librdkafka refuses settings under which a message or a request could outlive its transaction.
        longest = self.settings.transaction_timeout_ms if timeout_ms is None else timeout_ms
        config["transactional.id"] = check_id(transactional_id, "transactional id")
        config["transaction.timeout.ms"] = longest
        config["message.timeout.ms"] = min(self.settings.message_timeout_ms, longest)
        config["socket.timeout.ms"] = min(config["socket.timeout.ms"], longest)
        config.setdefault("connections.max.idle.ms", _TRANSACTIONAL_IDLE_MS)
        return config

    async def call(self, function: Callable[[AdminClient], R], what: str) -> R:
        """Run a blocking call of the admin client in its thread.

        :param what: what it does, for the error: "Describing topic 'orders'".
        :raises BrokerError: what it raised.
        """
        try:
            return await self._open_admin().call(function)
        except (KafkaException, ValueError, TypeError) as error:
            told = translate(error, what)
            raise (self.unreachable(told.message, error) if isinstance(told, ConnectionFailed) else told) from error

    def unreachable(self, text: str = "", native: Exception | None = None) -> ConnectionFailed:
        """The error of there being no broker; with the reason, if they are there and refuse us."""
        text = text or f"No broker at {self.servers} can be reached"
        refused = self._refused
        if refused is None or not self._down:
            return ConnectionFailed(text, native=native)
        return ConnectionFailed(f"{text}; {refused.str()}", native=KafkaException(refused), advice=_REFUSED)

    async def outcomes(
        self, start: Callable[[AdminClient], Mapping[K, Future[R]]], what: str
    ) -> dict[K, R | BrokerError]:
        """Start a request of the admin client and wait for the answer of each item; an error is in its place."""
        client = self._open_admin()
        client.asking += 1
        try:
            return await client.outcomes(start, what)
        finally:
            client.asking -= 1
            if client is not self._admin:
                self._retire(client)

    async def coordinated(
        self,
        start: Callable[[AdminClient], Mapping[K, Future[R]]],
        what: str,
        timeout: float | None = None,
    ) -> dict[K, R | BrokerError]:
        """`outcomes` of a request to the coordinator of a group; `start` gives it the request timeout `NEVER`.

        librdkafka frees a request that times out before its coordinator is reached, and uses it once that is: the
        process ends. So none does, and the client is given up instead of the request.

        :param timeout: seconds; the settings' if None.
        :raises OperationTimeout: there was no answer.
        """
        client = await self._group_client()
        client.asking += 1
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
            client.asking -= 1
            if client is not self._groups:
                self._retire(client)

    @property
    def client(self) -> object:
        """Which admin client `call` and `outcomes` use now, for `renew`."""
        return self._admin

    async def renew(self, client: object) -> None:
        """Have another admin client than this one from now on; what is under way goes on.

        :raises BrokerError: it cannot be made.
        """
        async with self._making:
            old = self._open_admin()
            if old is client:
                self._admin = await self._make()
                self._retire(old)

    def forget_coordinators(self) -> None:
        """Have the next `coordinated` look its coordinator up; what is under way goes on."""
        if self._groups is not None:
            self._forget(self._groups)

    def event(self, event: Event) -> None:
        """Tell the listeners of the bus; on the loop."""
        if self._hooks.listening:
            self._hooks.emit(event)

    def warn(self, text: str) -> None:
        """Tell operators; on the loop."""
        logger.warning(text)
        self.event(Warned(text=text))

    # -- inside --------------------------------------------------------------------------------------------

    def _open_admin(self) -> AdminThread:
        if self._admin is None:
            raise Closed("The connection to Kafka is not open", advice="Use it within `async with`")
        return self._admin

    async def _group_client(self) -> AdminThread:
        async with self._making:
            self._open_admin()
            if self._groups is None:
                self._groups = await self._make()
            return self._groups

    async def _make(self) -> AdminThread:
        made = AdminThread(self.client_config("admin"))
        try:
            await made.start()
        except BaseException:
            self._retire(made)
            raise
        if self._admin is None:
            self._retire(made)
            self._open_admin()
        return made

    def _forget(self, client: AdminThread) -> None:
        """Have the next request make another client of groups."""
        if self._groups is client:
            self._groups = None
            self._retire(client)

    def _retire(self, client: AdminThread) -> None:
        """End a client unless it is still asking for somebody, who ends it then."""
        if not client.asking:
            ending = asyncio.get_running_loop().create_task(client.stop(_CLOSE), name="broker-kafka-retiring")
            self._retired.add(ending)
            ending.add_done_callback(self._retired.discard)

    def _hear(self, error: KafkaError) -> None:
        """An error callback of a client; in that client's thread, where nothing may be raised."""
        code = error.code()
        if code in _REFUSALS:
            self._refused = error
        elif code in _DOWN:
            self._unreachable = error
            self._post(self._lost, error)
        else:
            self._last = error.str()
            # This is how a listener that wants TLS, or none, looks from here.
            if any(sign in self._last for sign in _WRONG_LISTENER):
                self._refused = error

    def _post(self, function: Callable[..., object], *args: object) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("Nobody runs the loop any more")

    def _lost(self, error: KafkaError) -> None:
        if self._down or not self._opened or self._admin is None:
            return
        self._down = True
        self.event(Disconnected(server=self.servers, error=translate(error, "The connection")))
        self._watching = asyncio.get_running_loop().create_task(self._await_return(), name="broker-kafka-return")

    async def _await_return(self) -> None:
        while True:
            try:
                await self.call(lambda client: client.list_topics(timeout=_ONE_TRY), "Asking for a sign of life")
                break
            except Closed:
                return
            except BrokerError:
                await asyncio.sleep(_ASK_AGAIN)
        self._down = False
        self._refused = self._unreachable = None
        self.event(Connected(server=self.servers, again=True))
