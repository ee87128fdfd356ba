"""`App`: registers handlers and runs them on a bus.

A thin layer over `bus.messages(...).receive(...)`, whose options it passes on.

*Concurrency.* One event loop. *Failure.* A handler that raises fails its message, by the retry policy of its
consumer. The first consumer that fails for good stops the others. *The end.* Consumers stop, running handlers have
`drain` seconds, then the lifespan ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, Unpack

from typing_extensions import TypeVar

from broker.app.context import BlockingContext, Context
from broker.app.layers import Call, CircuitBreaker, Layer
from broker.app.signatures import Signature, read_signature
from broker.bus import Bus, connect
from broker.checks import check_count, check_seconds, name_of
from broker.consumer_state import ConsumerState
from broker.consuming.consumer import MessageConsumer
from broker.consuming.options import MessageOptions
from broker.consuming.runner import in_new_loop, stopping_on_signals
from broker.errors import ConfigurationError
from broker.hooks import logger
from broker.messages import Message
from broker.names import check_name
from broker.protocols import AnyCodec
from broker.threads.messages import BlockingMessage
from broker.threads.plain_handlers import ThreadedHandler
from broker.threads.portal import Portal
from broker.topic_patterns import TopicPattern

__all__ = ["App", "Running"]

S = TypeVar("S", default=None)

Lifespan = Callable[[Bus], AbstractAsyncContextManager[S]]
"""Yields the state of an app: `@asynccontextmanager async def lifespan(bus): ...`."""


@dataclass(frozen=True, slots=True)
class _Handler:
    """A registered function."""

    topics: str | TopicPattern | Sequence[str]
    subscription: str
    function: Callable[..., Any]
    signature: Signature
    into: str | None
    concurrency: int
    layers: tuple[Layer, ...]
    options: MessageOptions

    def __str__(self) -> str:
        return f"{name_of(self.function)} of {self.topics!r}"


class App(Generic[S]):
    """Handlers, and what they share. Does no I/O before it runs.

    :param name: also the subscription of handlers that name none.
    :param lifespan: called with the open bus; what it yields is the state of every context.
    :param layers: async functions around every message, the first outermost.
    :param drain: seconds that running handlers have at the end. Kubernetes kills 30 seconds after SIGTERM.
    :raises ConfigurationError: the name is not portable, or `drain` is no number above 0.
    """

    def __init__(
        self,
        name: str,
        *,
        lifespan: Lifespan[S] | None = None,
        layers: Sequence[Layer] = (),
        drain: float = 25.0,
    ) -> None:
        self.name: Final = check_name(name, "app")
        check_seconds("drain", drain)
        self._lifespan = lifespan
        self._layers = tuple(layers)
        self._drain = drain
        self._handlers: list[_Handler] = []

    def handle(
        self,
        topics: str | TopicPattern | Sequence[str],
        function: Callable[..., Any],
        *,
        subscription: str | None = None,
        codec: AnyCodec[Any] | None = None,
        into: str | None = None,
        into_codec: AnyCodec[Any] | None = None,
        concurrency: int = 1,
        layers: Sequence[Layer] = (),
        **options: Unpack[MessageOptions],
    ) -> None:
        """Register a handler: `async def bill(order: Order, context: Context[State]) -> Invoice | None`.

        The first parameter gets the payload, and one of type `Context` the context, if there is one. A function that is
        not `async def` runs in threads, and may have a `BlockingContext`. Returning acks the message, after the result
        was published; raising settles it by the retry policy.

        :param topics: as for `bus.messages`, like `options`.
        :param subscription: by default the name of the app.
        :param codec: of payloads; by default by the annotation: bytes, text, Protobuf, else JSON.
        :param into: the topic to which results other than None are published, with the trace of the message. For a key
            and other fields, return an `OutboundPayload`.
        :param into_codec: of results; by default by the annotation.
        :param concurrency: how many messages are handled at once.
        :param layers: around this handler only, within those of the app.
        :raises ConfigurationError: the function cannot be called with a payload, its types have no codec, a result has
            no topic, or another handler has the same topic and subscription.
        """
        check_count("concurrency", concurrency)
        if into is not None:
            check_name(into, "topic")
        chosen = check_name(self.name if subscription is None else subscription, "subscription")
        signature = read_signature(function, codec, into, into_codec)
        for other in self._handlers:
            if (other.topics, other.subscription) == (topics, chosen):
                raise ConfigurationError(
                    f"Handler {name_of(function)} and {other} share subscription {chosen!r}, so that each would get "
                    "some of the messages",
                    advice="Give one of them another subscription=",
                )
        options.setdefault("close_timeout", self._drain)
        self._handlers.append(
            _Handler(topics, chosen, function, signature, into, concurrency, (*self._layers, *layers), options)
        )

    @asynccontextmanager
    async def running(self, bus: Bus) -> AsyncGenerator[Running]:
        """Run on this bus within the block: for tests, and for the lifespan of a web server. Takes no signals.

        At the end of the block running handlers have `drain` seconds; if the block is cancelled, they are cancelled.

        :param bus: is opened if it is not open, and then closed at the end.
        :raises ConfigurationError: there is no handler, or an option is invalid.
        :raises BrokerError: at the end of the block, the error of the first consumer that failed.
        """
        if not self._handlers:
            raise ConfigurationError(f"App {self.name!r} has no handler", advice="Call app.handle(topic, function)")
        async with AsyncExitStack() as stack:
            if not bus.is_open:
                await stack.enter_async_context(bus)
            state: Any = None
            if self._lifespan is not None:
                state = await stack.enter_async_context(self._lifespan(bus))
            running = Running(bus, self.name)
            stack.push_async_callback(running.close)
            try:
                await running.start(self._handlers, state)
                yield running
            except asyncio.CancelledError:
                running.cancel()
                raise
        running.check()

    async def serve(self, bus: Bus) -> None:
        """Run until SIGTERM or SIGINT arrives, all consumers are idle, or one fails. A second signal kills.

        :raises ConfigurationError: this is not the main thread, or as for `running`.
        :raises BrokerError: the error of the first consumer that failed, after the others were closed.
        """
        async with self.running(bus) as running:
            with stopping_on_signals(running.stop):
                await running.wait()

    def run(self, broker: str | Bus | None = None) -> None:
        """`serve` in a new event loop: the main function of a process.

        :param broker: a URL, or a bus; by default the one that `connect()` returns.
        :raises ConfigurationError: as for `serve`, or a loop runs already.
        """
        bus = broker if isinstance(broker, Bus) else connect(broker)

        async def main() -> None:
            await self.serve(bus)

        in_new_loop(main, "app.serve(bus)")


class Running:
    """An app at work."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._name = name
        self._consumers: list[MessageConsumer[Any]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()
        self._stopped = False

    async def start(self, handlers: Sequence[_Handler], state: Any) -> None:
        """Open all consumers, or none, then receive."""
        portal = Portal.to_running_loop()
        for handler in handlers:
            consumer: MessageConsumer[Any] = self._bus.messages(
                handler.topics, subscription=handler.subscription, codec=handler.signature.codec, **handler.options
            )
            await self._stack.enter_async_context(consumer)
            self._consumers.append(consumer)
            for layer in handler.layers:
                if isinstance(layer, CircuitBreaker):
                    layer.guard(consumer)
                    self._stack.callback(layer.release, consumer)
        for handler, consumer in zip(handlers, self._consumers, strict=True):
            call = self._call(handler, state, portal)
            for layer in reversed(handler.layers):
                call = _within(layer, call)
            work = consumer.receive(call, concurrency=handler.concurrency)
            self._tasks.append(asyncio.create_task(work, name=f"broker-app-{self._name}"))
        logger.info("App %s runs %s", self._name, ", ".join(map(str, handlers)))

    def _call(self, handler: _Handler, state: Any, portal: Portal) -> Call:
        """What calls the function, and publishes what it returns."""
        function, signature, bus = handler.function, handler.signature, self._bus
        context = signature.context
        result_topic = None if handler.into is None else bus.topic(handler.into, signature.result_codec)

        async def on_loop(message: Message[Any]) -> Any:
            if context is None:
                return await function(message.payload)
            return await function(message.payload, **{context: Context(message, state, bus)})

        def in_thread(message: BlockingMessage[Any]) -> Any:
            if context is None:
                return function(message.payload)
            return function(message.payload, **{context: BlockingContext(message, state, bus, portal)})

        answer: Callable[[Message[Any]], Awaitable[Any]] = on_loop
        if not signature.is_async:
            threaded = ThreadedHandler[Any](in_thread, portal, bus.hooks)
            self._stack.callback(threaded.close)
            answer = threaded.handle

        async def call(message: Message[Any]) -> object:
            result = await answer(message)
            if result_topic is not None and result is not None:
                await result_topic.publish(result)
            return result

        return call

    @property
    def trouble(self) -> str:
        """Why the app is not ready, for a probe; empty if it is. Makes no call."""
        if self._stopped:
            return f"app {self._name} stops"
        if not self._bus.connected:
            return "the connection to the broker is broken"
        for consumer in self._consumers:
            if consumer.state not in (ConsumerState.RUNNING, ConsumerState.PAUSED):
                return f"a consumer of app {self._name} is {consumer.state}"
        return ""

    def stop(self) -> None:
        """Take no more messages; the block may end now. Never waits."""
        self._stopped = True
        for consumer in self._consumers:
            consumer.stop()

    async def wait(self) -> None:
        """Wait until all consumers are stopped or idle, or one fails; then stop all of them."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        self.stop()
        await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel running handlers; their messages are released."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stop, wait for running handlers, and close the consumers."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._stack.aclose()

    def check(self) -> None:
        """:raises BrokerError: the error of the first consumer that failed."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


def _within(layer: Layer, call: Call) -> Call:
    async def layered(message: Message[Any]) -> object:
        return await layer(message, call)

    return layered
