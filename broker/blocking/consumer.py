"""`MessageConsumer` without `await`: consumes a subscription from any number of threads.

*Cancellation.* KeyboardInterrupt in a waiting call releases undelivered messages. In `receive` it waits for running
handlers, settles their messages and releases the others; a second KeyboardInterrupt ends `receive` at once. The
consumer stays usable.

*Failure.* A retriable error is an event, a fatal error is raised once.
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
"""Handles one message in a thread. Returning acks the message; raising settles it by the retry policy."""
BatchHandler = Callable[[BlockingMessageBatch[T]], "Sequence[BaseException | None] | None"]
"""Handles a batch. Returns None to ack all open messages, or for each message None (ack) or an exception."""


class MessageConsumer(Generic[T]):
    """Created by `bus.messages(...)`; opened and closed by `with`."""

    def __init__(self, consumer: asynchronous.MessageConsumer[T], portal: Portal, hooks: Hooks) -> None:
        self._consumer = consumer
        self._portal = portal
        self._hooks = hooks

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._consumer.closed

    def open(self) -> None:
        """Subscribe and start to fetch; `with` calls this.

        :raises NotFound: the topic, or with `create=False` the subscription, does not exist.
        :raises Unsupported: the broker does not support an option.
        """
        self._portal.call(self._consumer.open)

    def stop(self) -> None:
        """Stop delivering: iterations end, and `receive` returns after its running handlers. Never waits.

        May be called in a signal handler.
        """
        self._portal.call_soon(self._consumer.stop)

    def close(self) -> None:
        """Release undelivered messages, and wait for running handlers, at most `close_timeout` seconds.

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
            message = self._portal.wait(Call(anext, (messages, None), undelivered=_release_one))
            if message is None:
                return
            yield BlockingMessage(message, self._portal, self._hooks)

    # -- by batch ----------------------------------------------------------------------------------------

    def next_batch(self, max_messages: int = 100, timeout: float | None = None) -> BlockingMessageBatch[T]:
        """The available messages, 1 to `max_messages`; an empty batch after `timeout` idle seconds.

        :raises ConfigurationError: `max_messages` is larger than `max_outstanding`.
        :raises Closed: the consumer was closed.
        """
        call = Call(self._consumer.next_batch, (max_messages, timeout), undelivered=_release)
        return BlockingMessageBatch(self._portal.wait(call), self._portal, self._hooks)

    def batches(self, max_messages: int = 100) -> Iterator[BlockingMessageBatch[T]]:
        """Iterate over batches of at least one message: `for batch in consumer.batches():`.

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
        """Call the handler with every message, in `concurrency` threads, until the consumer is stopped, closed or idle.

        Returning acks the message; raising settles it by the retry policy; the handler may also settle it. After
        `Retry(timeout=)` the message counts as failed and another thread continues; the late handler keeps running, and
        its outcome is ignored.

        :raises ConfigurationError: the handler is a coroutine function.
        :raises BrokerError: a fatal error, raised once.
        """
        self._receive(handler, lambda receiving: self._consumer.receive(receiving.handle, concurrency=concurrency))

    def receive_batches(self, handler: BatchHandler[T], *, max_messages: int = 100, concurrency: int = 1) -> None:
        """Call the handler with batches. It returns None to ack all messages, or for each message None or an exception.

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
                "The handler is a coroutine function",
                advice="Pass a plain function, or use the asynchronous broker.connect",
            )
        receiving = _Receiving[T](handler, self._portal, self._hooks)
        try:
            self._portal.wait(Call(receiving.run, (partial(start, receiving),), on_interrupt=receiving.interrupt))
        except Closed:
            if receiving.exit is None:
                raise
            raise receiving.exit from None


class _Receiving(Generic[T]):
    """A running `receive`. Runs on the loop of the bus, except for the handlers."""

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
        """Cancel, but wait for running handlers."""
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
            # SystemExit and the like end `receive` in the calling thread.
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
    """Settle messages whose handler ended after `receive` was interrupted."""
    for message, error in zip(messages, results, strict=False):
        message.in_use = False
        if message.owner is not None:
            try:
                await message.owner.finish(message, error)
            except SettleError as refused:
                logger.warning("Settling a message at the end of receive failed: %s", refused)
