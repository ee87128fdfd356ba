"""Messages without `await`: `MessageConsumer`, the messages that it delivers, and `run` for consuming processes.

*Concurrency.* Any number of threads may share a consumer; one thread at a time uses a message. Reading an attribute is
direct; settling is a round trip to the loop of the bus.

*Cancellation.* KeyboardInterrupt in a waiting call releases undelivered messages. In `receive` it waits for running
handlers, settles their messages and releases the others; a second KeyboardInterrupt ends `receive` at once. The
consumer stays usable. Interrupting a call that settles does not stop the settlement.

*Failure.* A retriable error is an event, a fatal error is raised once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self

from typing_extensions import TypeVar

from broker.checks import check_accepts, check_count, is_async
from broker.consumer_state import ConsumerState
from broker.consuming import consumer as asynchronous
from broker.consuming.runner import check_services
from broker.errors import Closed, ConfigurationError, SettleError
from broker.hooks import Hooks, logger
from broker.messages import Message, Outcome, SettleState
from broker.protocols import PlainBatchHandler, PlainHandler
from broker.threads.messages import BlockingMessage, BlockingMessageBatch
from broker.threads.plain_handlers import Late, ThreadedHandler
from broker.threads.portal import Call, Portal

__all__ = ["BatchHandler", "BlockingMessage", "BlockingMessageBatch", "Handler", "MessageConsumer", "Service", "run"]

T = TypeVar("T", default=bytes)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_GLANCE: Final = 0.5
"""Seconds between wake-ups of a waiting thread: some platforms deliver signals only then."""
_PLAIN: Final = "Pass a plain function, or use the asynchronous broker.connect"

Handler = PlainHandler
BatchHandler = PlainBatchHandler


class HostBus(Protocol):
    """The bus of a consumer; `run` closes it at the end if it was not open before."""

    @property
    def is_open(self) -> bool: ...
    def close(self) -> None: ...


class MessageConsumer(Generic[T]):
    """Created by `bus.messages(...)`; opened and closed by `with`."""

    def __init__(
        self,
        consumer: asynchronous.MessageConsumer[T],
        portal: Portal,
        hooks: Hooks,
        bus: HostBus | None = None,
    ) -> None:
        self.bus = bus
        self._consumer = consumer
        self._portal = portal
        self._hooks = hooks
        self._opened = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._consumer.closed

    @property
    def state(self) -> ConsumerState:
        """What the consumer does now; see `broker.MessageConsumer`."""
        return self._consumer.state

    def open(self) -> None:
        """Subscribe and start to fetch; `with` calls this.

        :raises NotFound: the topic, or with `create=False` the subscription, does not exist.
        :raises Unsupported: the broker does not support an option.
        """
        self._portal.call(self._consumer.open)
        self._opened = True

    def stop(self) -> None:
        """Stop delivering: iterations end, and `receive` returns after its running handlers. Never waits.

        May be called in a signal handler.
        """
        if self._portal.running:
            self._portal.call_soon(self._consumer.stop)
        elif not self._portal.ended:
            self._consumer.stop()

    def pause(self) -> None:
        """Hand nothing over until `resume`: calls wait, and handlers that run go on; see `broker.MessageConsumer`.

        May be called in a handler or in any other thread, before the consumer is open, and twice.
        """
        if not self._portal.ended:
            self._portal.run(self._consumer.pause)

    def resume(self) -> None:
        """Undo `pause`. Does nothing if the consumer is not paused."""
        if not self._portal.ended:
            self._portal.run(self._consumer.resume)

    def close(self) -> None:
        """Release undelivered messages, and wait for running handlers, at most `close_timeout` seconds.

        Never deletes a subscription. May be called twice.
        """
        if not self._portal.ended:
            self._portal.call(self._consumer.close)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one by one --------------------------------------------------------------------------------------

    def next_message(self, timeout: float | None = None) -> BlockingMessage[T] | None:
        """The next message, or None after `timeout` idle seconds or when `stop_when_idle` ended the consumer.

        :raises Closed: the consumer was closed.
        :raises BrokerError: a fatal error, raised once.
        """
        message = self._portal.wait(Call(self._consumer.next_message, (timeout,), undelivered=_release_one))
        return None if message is None else BlockingMessage(message, self._portal, self._hooks)

    def __iter__(self) -> Iterator[BlockingMessage[T]]:
        """Iterate over messages until the consumer is stopped, closed or idle. Leaving the loop loses no message."""
        messages = aiter(self._consumer)
        while True:
            message = self._portal.next(Call(anext, (messages, None), undelivered=_release_one), self._opened)
            if message is None:
                return
            yield BlockingMessage(message, self._portal, self._hooks)

    # -- by batch ----------------------------------------------------------------------------------------

    def next_batch(
        self, max_messages: int = 100, timeout: float | None = None, *, max_wait: float | None = None
    ) -> BlockingMessageBatch[T]:
        """The available messages, 1 to `max_messages`; an empty batch after `timeout` idle seconds.

        :param max_wait: seconds for which the first message waits for a full batch; see `broker.MessageConsumer`.
        :raises ConfigurationError: `max_messages` is larger than `max_outstanding`.
        :raises Closed: the consumer was closed.
        """
        call = Call(self._consumer.next_batch, (max_messages, timeout), {"max_wait": max_wait}, undelivered=_release)
        return BlockingMessageBatch(self._portal.wait(call), self._portal, self._hooks)

    def batches(self, max_messages: int = 100, *, max_wait: float | None = None) -> Iterator[BlockingMessageBatch[T]]:
        """Iterate over batches of at least one message: `for batch in consumer.batches():`.

        :param max_wait: as for `next_batch`.
        :raises ConfigurationError: `max_messages` is larger than `max_outstanding`.
        """
        return self._iterate_batches(self._consumer.batches(max_messages, max_wait=max_wait))

    def _iterate_batches(self, batches: Any) -> Iterator[BlockingMessageBatch[T]]:
        while True:
            batch: Any = self._portal.next(Call(anext, (batches, None), undelivered=_release), self._opened)
            if batch is None:
                return
            yield BlockingMessageBatch(batch, self._portal, self._hooks)

    # -- by handler --------------------------------------------------------------------------------------

    def receive(self, handler: Handler[T], *, concurrency: int = 1) -> None:
        """Call the handler with every message, in `concurrency` threads, until the consumer is stopped, closed or idle.

        Returning acks the message; raising settles it by the retry policy; the handler may also settle it. After
        `Retry(timeout=)` the message counts as failed and another thread continues; the late handler keeps running, and
        its outcome is ignored.

        :raises ConfigurationError: the handler cannot be called with a message, or is a coroutine function.
        :raises BrokerError: a fatal error, raised once.
        """
        _check_handler(handler, "a message")
        self._receive(handler, lambda receiving: self._consumer.receive(receiving.handle, concurrency=concurrency))

    def receive_batches(
        self,
        handler: BatchHandler[T],
        *,
        max_messages: int = 100,
        max_wait: float | None = None,
        concurrency: int = 1,
    ) -> None:
        """Call the handler with batches. It returns None to ack all messages, or for each message None or an exception.

        :param max_wait: hand a batch over when it is full or its first message has waited so many seconds; None hands
            over what there is.
        :raises ConfigurationError: the handler cannot be called with a batch, or returned anything else; or
            `max_messages` is larger than `max_outstanding`.
        """
        _check_handler(handler, "a batch of messages")
        self._receive(
            handler,
            lambda receiving: self._consumer.receive_batches(
                receiving.handle_batch, max_messages=max_messages, max_wait=max_wait, concurrency=concurrency
            ),
        )

    def handled_by(self, handler: Handler[T], *, concurrency: int = 1) -> Service:
        """This consumer and its handler, for `broker.blocking.run`.

        :raises ConfigurationError: the handler cannot be called with a message, or is a coroutine function.
        """
        _check_handler(handler, "a message")
        check_count("concurrency", concurrency)
        return Service(self, handler, concurrency)

    def _receive(self, handler: Callable[[Any], Any], start: Callable[[_Receiving[T]], Any]) -> None:
        receiving = _Receiving[T](handler, self._portal, self._hooks)
        try:
            self._portal.wait(Call(receiving.run, (partial(start, receiving),), on_interrupt=receiving.interrupt))
        except Closed:
            if receiving.exit is None:
                raise
            raise receiving.exit from None


class Service:
    """A consumer bound to its handler; `broker.blocking.run` opens, serves and closes it."""

    def __init__(self, consumer: MessageConsumer[Any], handler: Handler[Any], concurrency: int) -> None:
        self.consumer = consumer
        self._handler = handler
        self._concurrency = concurrency

    def serve(self) -> None:
        """Open the consumer, receive until it is stopped, close it."""
        with self.consumer:
            self.consumer.receive(self._handler, concurrency=self._concurrency)


def run(*services: Service) -> None:
    """Run services until a signal arrives, all are idle or stopped, or one fails; then stop all of them.

    The consumers open their buses; `run` closes at the end those that were not open before. SIGTERM and SIGINT stop the
    consumers: running handlers have `close_timeout` seconds to end, and other messages are released. A second signal
    ends the process as usual.

    `broker.blocking.run(bus.messages(...).handled_by(handle, concurrency=8))`, in the main thread.

    :raises ConfigurationError: `services` is empty, or this is not the main thread.
    :raises BrokerError: the error of the first service that failed, after the others were closed.
    """
    check_services(services, Service)
    buses = {id(bus): bus for service in services if (bus := service.consumer.bus) is not None and not bus.is_open}
    failures: list[BaseException] = []
    before: dict[int, Any] = {}

    def stop(*_: object) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        for service in services:
            service.consumer.stop()

    def serve(service: Service) -> None:
        try:
            service.serve()
        except BaseException as error:
            failures.append(error)
            for other in services:
                other.consumer.stop()

    before.update((number, signal.signal(number, stop)) for number in _SIGNALS)
    try:
        threads = [threading.Thread(target=serve, args=(service,), daemon=True) for service in services]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_GLANCE)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for bus in buses.values():
            bus.close()
    if failures:
        raise failures[0]


class _Receiving(ThreadedHandler[T]):
    """A running `receive`. Runs on the loop of the bus, except for the handlers."""

    def __init__(self, handler: Callable[[Any], Any], portal: Portal, hooks: Hooks) -> None:
        super().__init__(handler, portal, hooks, advice=_PLAIN)
        self.exit: BaseException | None = None
        self._task: asyncio.Task[Any] | None = None

    async def run(self, start: Callable[[], Any]) -> None:
        self._task = asyncio.current_task()
        try:
            await start()
        finally:
            self.close()

    def interrupt(self, task: asyncio.Task[None]) -> None:
        """Cancel, but wait for running handlers."""
        self.threads.finish = True
        task.cancel()

    async def exited(self, error: BaseException) -> None:
        """End `receive` in the calling thread."""
        self.exit = error
        if self._task is not None:
            self.interrupt(self._task)
        await asyncio.get_running_loop().create_future()

    def late(self, messages: Sequence[Message[T]]) -> Late:
        return lambda errors: _finish_late(messages, errors)


def _check_handler(handler: object, argument: str) -> None:
    """:raises ConfigurationError: the handler cannot be called with the argument, or is a coroutine function."""
    check_accepts("handler", handler, argument)
    if is_async(handler):
        raise ConfigurationError("The handler is a coroutine function", advice=_PLAIN)


async def _release_one(message: Message[Any] | None) -> None:
    if message is not None:
        await _release((message,))


async def _release(messages: Sequence[Message[Any]] | None) -> None:
    for message in messages or ():
        if message.owner is not None and message.state is SettleState.OPEN:
            await message.owner.settle(message, Outcome.RELEASE, None, "")


async def _finish_late(messages: Sequence[Message[Any]], results: Sequence[BaseException | None]) -> None:
    """Settle messages whose handler ended after `receive` was interrupted."""
    for message, error in zip(messages, results, strict=False):
        message.in_use = False
        if message.owner is not None:
            try:
                await message.owner.finish(message, error)
            except SettleError as refused:
                logger.warning("Settling a message at the end of receive failed: %s", refused)
