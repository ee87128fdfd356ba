"""`MessageConsumer` without `await`: one subscription, consumed in whichever shape suits, from any number of threads.

*Cancellation.* KeyboardInterrupt in a waiting call gives back what was not handed over. In `receive` it lets the
handlers that run come to their end, whose outcome counts, and gives back all else; a second one leaves at once. The
consumer can be used on.

*Failure.* As in the asynchronous consumer: a retriable error is an event, a fatal one is raised once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self

from typing_extensions import TypeVar

from broker.blocking.handler_threads import HandlerExit, HandlerThreads
from broker.blocking.portal import Call, Portal
from broker.blocking.settling import BlockingMessage, BlockingMessageBatch
from broker.consuming import consumer as asynchronous
from broker.errors import Closed, ConfigurationError, SettleError
from broker.hooks import Hooks
from broker.messages import Message, MessageBatch, Outcome, SettleState

__all__ = ["BatchHandler", "Handler", "MessageConsumer", "Service"]

T = TypeVar("T", default=bytes)

logger = logging.getLogger("broker")

Handler = Callable[[BlockingMessage[T]], object]
"""Handles one message in a thread: returning acks it, raising settles it by the retry policy."""
BatchHandler = Callable[[BlockingMessageBatch[T]], "Sequence[BaseException | None] | None"]
"""Handles a batch: None acks all that it left open; a sequence tells per message None (ack) or the failure."""


class MessageConsumer(Generic[T]):
    """Made by `bus.messages(...)`; opened and closed by `with`."""

    def __init__(self, consumer: asynchronous.MessageConsumer[T], portal: Portal, hooks: Hooks) -> None:
        self._consumer = consumer
        self._portal = portal
        self._hooks = hooks

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._consumer.closed

    def open(self) -> None:
        """Subscribe and begin to fetch; `with` does it.

        :raises NotFound: the topic, or the subscription with `create=False`, does not exist.
        :raises Unsupported: the backend cannot honour an option.
        """
        self._portal.call(self._consumer.open)

    def stop(self) -> None:
        """Hand nothing more over: iterations end, `receive` returns when its handlers have. Never waits.

        May be called in a signal handler.
        """
        self._portal.call_soon(self._consumer.stop)

    def close(self) -> None:
        """Wait for running handlers, at most `close_timeout` seconds; give everything else back at once.

        Never deletes a subscription. May be called twice.
        """
        if self._portal.running:
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
        """The next message; None after `timeout` idle seconds, or when `stop_when_idle` ended the consumer.

        :raises Closed: the consumer was closed.
        :raises BrokerError: a fatal error, once.
        """
        message = self._portal.wait(Call(self._consumer.next_message, (timeout,), undelivered=_release_one))
        return None if message is None else BlockingMessage(message, self._portal, self._hooks)

    def __iter__(self) -> Iterator[BlockingMessage[T]]:
        """The messages one by one, until the consumer is stopped, closed or idle. Leaving the loop loses none."""
        messages = aiter(self._consumer)
        while True:
            message = self._portal.wait(Call(anext, (messages, None), undelivered=_release_one))
            if message is None:
                return
            yield BlockingMessage(message, self._portal, self._hooks)

    # -- by batch ----------------------------------------------------------------------------------------

    def next_batch(self, max_messages: int = 100, timeout: float | None = None) -> BlockingMessageBatch[T]:
        """What is there, at least one and at most `max_messages`; empty after `timeout` idle seconds.

        :raises ConfigurationError: `max_messages` is larger than `max_outstanding`.
        :raises Closed: the consumer was closed.
        """
        call = Call(self._consumer.next_batch, (max_messages, timeout), undelivered=_release)
        return BlockingMessageBatch(self._portal.wait(call), self._portal, self._hooks)

    def batches(self, max_messages: int = 100) -> Iterator[BlockingMessageBatch[T]]:
        """`for batch in consumer.batches():`; each has at least one message.

        :raises ConfigurationError: `max_messages` is larger than `max_outstanding`.
        """
        return self._iterate_batches(self._consumer.batches(max_messages))

    def _iterate_batches(self, batches: Any) -> Iterator[BlockingMessageBatch[T]]:
        while True:
            batch = self._portal.wait(Call(anext, (batches, None), undelivered=_release))
            if batch is None:
                return
            yield BlockingMessageBatch(batch, self._portal, self._hooks)

    # -- by handler --------------------------------------------------------------------------------------

    def receive(self, handler: Handler[T], *, concurrency: int = 1) -> None:
        """Run the handler on every message, in `concurrency` threads, until the consumer is stopped, closed or idle.

        Returning acks the message, raising settles it by the retry policy; a handler may settle it itself.
        `Retry(timeout=)` settles a message whose handler takes too long and goes on with another thread; the
        late handler cannot be stopped, and its outcome is dropped.

        :raises ConfigurationError: the handler is a coroutine function.
        :raises BrokerError: a fatal error, once.
        """
        self._receive(handler, lambda receiving: self._consumer.receive(receiving.handle, concurrency=concurrency))

    def receive_batches(self, handler: BatchHandler[T], *, max_messages: int = 100, concurrency: int = 1) -> None:
        """Run the handler on batches; it returns None to ack all, or per message None or its failure.

        :raises ConfigurationError: `max_messages` is larger than `max_outstanding`.
        """
        self._receive(
            handler,
            lambda receiving: self._consumer.receive_batches(
                receiving.handle_batch, max_messages=max_messages, concurrency=concurrency
            ),
        )

    def handled_by(self, handler: Handler[T], *, concurrency: int = 1) -> Service:
        """This consumer and its handler, for `broker.blocking.run`."""
        return Service(self, handler, concurrency)

    def _receive(self, handler: Callable[[Any], Any], start: Callable[[_Receiving[T]], Any]) -> None:
        if inspect.iscoroutinefunction(handler):
            raise ConfigurationError(
                "The handler is a coroutine function", advice="Use a plain function here, or broker.connect"
            )
        receiving = _Receiving[T](handler, self._portal, self._hooks)
        try:
            self._portal.wait(Call(receiving.run, (partial(start, receiving),), on_interrupt=receiving.interrupt))
        except Closed:
            if receiving.exit is None:
                raise
            raise receiving.exit from None


class _Receiving(Generic[T]):
    """One `receive` under way; all of it runs on the loop, but the handlers."""

    def __init__(self, handler: Callable[[Any], Any], portal: Portal, hooks: Hooks) -> None:
        self.exit: BaseException | None = None
        self._handler = handler
        self._portal = portal
        self._hooks = hooks
        self._threads = HandlerThreads("broker-handler")
        self._task: asyncio.Task[Any] | None = None

    async def run(self, start: Callable[[], Any]) -> None:
        self._task = asyncio.current_task()
        try:
            await start()
        finally:
            self._threads.close()

    def interrupt(self, task: asyncio.Task[None]) -> None:
        """Cancel, but let handlers that run come to their end."""
        self._threads.finish = True
        task.cancel()

    async def handle(self, message: Message[T]) -> None:
        argument = BlockingMessage(message, self._portal, self._hooks)
        await self._run(argument, lambda _, error: _finish_late((message,), [error]))

    async def handle_batch(self, batch: MessageBatch[T]) -> Sequence[BaseException | None] | None:
        argument = BlockingMessageBatch(batch, self._portal, self._hooks)
        return await self._run(argument, lambda results, error: _finish_late(batch, results or [error] * len(batch)))

    async def _run(self, argument: object, late: Callable[[Any, BaseException | None], Awaitable[object]]) -> Any:
        try:
            return await self._threads.run(partial(self._handler, argument), late=late)
        except HandlerExit as raised:
            # It ends `receive` in the thread that called it, as it would end a loop written there.
            self.exit = raised.error
            if self._task is not None:
                self.interrupt(self._task)
            await asyncio.get_running_loop().create_future()


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


async def _release_one(message: Message[Any] | None) -> None:
    if message is not None:
        await _release((message,))


async def _release(messages: Sequence[Message[Any]] | None) -> None:
    for message in messages or ():
        if message.owner is not None and message.state is SettleState.OPEN:
            await message.owner.settle(message, Outcome.RELEASE, None, "")


async def _finish_late(messages: Sequence[Message[Any]], results: Sequence[BaseException | None]) -> None:
    """Settle by the outcome of a handler that ended after its `receive` was interrupted."""
    for message, error in zip(messages, results, strict=False):
        message.in_use = False
        if message.owner is not None:
            try:
                await message.owner.finish(message, error)
            except SettleError as refused:
                logger.warning("A message settled at the end of receive was refused: %s", refused)
