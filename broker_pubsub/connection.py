"""One gRPC channel to Pub/Sub, used from the loop of `open`. It reconnects by itself and emits events.

A call without a connection fails at once and may be repeated; a call whose connection breaks has an unknown outcome.
Cancelling a call cancels it on the server. `close` may be called twice and ends every running call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Any, Final

import grpc

from broker import BrokerError, Closed, ConnectionFailed, NotAuthorized
from broker.driver import Backoff, Connected, Disconnected, Hooks
from broker_pubsub import credentials
from broker_pubsub.errors import Kind, is_status, translate
from broker_pubsub.names import Names
from broker_pubsub.protocol import Method, Methods, request_of
from broker_pubsub.settings import PubSubSettings

__all__ = ["Connection"]

_Connectivity = grpc.ChannelConnectivity
_REPEATED: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
_KEEPALIVE_MS: Final = 30_000


class Connection:
    """The channel, and calls over it."""

    def __init__(self, settings: PubSubSettings, hooks: Hooks) -> None:
        self.settings = settings
        self.hooks = hooks
        self.server: Final = settings.server
        self.names = Names(settings.project_id)
        self._channel: Any = None
        self._calls: dict[Method, Callable[..., Any]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def channel(self) -> Any:
        """The gRPC channel, for calls that this library does not wrap. Do not close it.

        :raises Closed: the backend is not open.
        """
        if self._channel is None or self._closed:
            raise Closed(f"The connection to {self.server} is closed")
        return self._channel

    async def open(self) -> None:
        """Connect and make one call.

        :raises ConnectionFailed, AuthenticationFailed: after one attempt.
        """
        self._closed = False
        self._channel = await self._make_channel()
        try:
            async with asyncio.timeout(self.settings.connect_timeout):
                await self._ready()
        except TimeoutError:
            raise ConnectionFailed(f"Connecting to {self.server}: no answer in time") from None
        await self.check_health()
        if self.hooks.listening:
            self.hooks.emit(Connected(server=self.server))
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="broker-pubsub-watcher")

    async def _make_channel(self) -> Any:
        wait = round(self.settings.reconnect_wait * 1000)
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", wait),
            # The time that gRPC allows for one attempt, including a slow TLS handshake.
            ("grpc.min_reconnect_backoff_ms", round(self.settings.connect_timeout * 1000)),
            ("grpc.max_reconnect_backoff_ms", round(self.settings.longest_reconnect_wait * 1000)),
            # Each backend has its own connection.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.settings.emulator is not None:
            return grpc.aio.insecure_channel(self.settings.emulator, options=options)
        loaded = await asyncio.to_thread(credentials.load, self.settings)
        tls = credentials.channel_credentials(self.settings, credentials.call_credentials(loaded))
        # Pings detect a dead connection; emulators refuse them.
        options += [("grpc.keepalive_time_ms", _KEEPALIVE_MS), ("grpc.keepalive_timeout_ms", 10_000)]
        _keep_engine()
        return grpc.aio.secure_channel(self.settings.endpoint, tls, options=options)

    async def _ready(self) -> None:
        channel = self.channel
        state = channel.get_state(try_to_connect=True)
        while state is not _Connectivity.READY:
            if state is _Connectivity.TRANSIENT_FAILURE:
                raise ConnectionFailed(f"Connecting to {self.server} failed")
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    async def check_health(self) -> float:
        """Make a round trip; returns its seconds. A denied list call is an answer, too."""
        begin = monotonic()
        request = request_of(Methods.LIST_TOPICS, project=self.names.project, page_size=1)
        with suppress(NotAuthorized):
            await self.call(Methods.LIST_TOPICS, request, f"Checking {self.server}")
        return monotonic() - begin

    def start(self, method: Method, request: Any, timeout: float | None) -> Any:
        """Start a call; awaiting it returns the response or raises gRPC's error."""
        call = self._calls.get(method)
        if call is None:
            call = self._calls[method] = self.channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return call(request, timeout=timeout, metadata=_routing(method, request))

    def stream(self, method: Method, subscription: str) -> Any:
        """Start a bidirectional stream."""
        return self.channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(metadata=(("x-goog-request-params", f"subscription={subscription}"),))

    async def call(self, method: Method, request: Any, what: str, kind: Kind = "other", repeat: float = 0.0) -> Any:
        """Make a call and return the response.

        :param what: the object of the call, for errors.
        :param repeat: seconds for which an idempotent call is retried after transient errors.
        :raises BrokerError: the error of the server or of gRPC.
        """
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        until = monotonic() + repeat
        while True:
            if self._closed:
                raise Closed(f"{what}: the connection is closed")
            try:
                return await self.start(method, request, self.settings.request_timeout)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
                failure, pause = translate(error, what, kind), backoff.next()
                if failure.retriable and is_status(error, *_REPEATED) and monotonic() + pause <= until:
                    failure = None
            if failure is not None:
                raise failure
            await asyncio.sleep(pause)

    async def _watch(self) -> None:
        """Emit events for breaks and reconnects."""
        channel, down = self.channel, False
        state = channel.get_state(try_to_connect=True)
        while state is not _Connectivity.SHUTDOWN:
            if state is _Connectivity.READY:
                if down:
                    down = False
                    self.hooks.emit(Connected(server=self.server, again=True))
            elif not down:
                down = True
                self.hooks.emit(Disconnected(server=self.server))
            await channel.wait_for_state_change(state)
            # After a break the channel is idle until a connect is requested.
            state = channel.get_state(try_to_connect=True)

    async def close(self) -> None:
        self._closed = True
        self._calls.clear()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            with suppress(asyncio.CancelledError, BrokerError):
                await watcher
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


@cache
def _keep_engine() -> Any:
    """A channel that never connects and never closes, so that gRPC's threads stay for the life of the process.

    Closing the last channel waits for them while it holds the interpreter's lock, which one of them needs to drop the
    credentials: both would wait for ever (grpc/grpc#42247).
    """
    return grpc.insecure_channel("127.0.0.1:1")


def _routing(method: Method, request: Any) -> tuple[tuple[str, str], ...]:
    value = request
    for part in method.routing.split("."):
        value = getattr(value, part)
    return (("x-goog-request-params", f"{method.routing}={value}"),)
