"""`MessageConsumer`: consumes one subscription, one by one, in batches, or by handlers.

Several tasks may use all shapes at once; each message goes to one of them. Iterators buffer nothing, so `break` needs
no clean-up. Cancelling a call loses no message. A retriable error is an event, and the consumer tries again; a fatal
error stops the consumer and is raised once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import closing, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self

from typing_extensions import TypeVar

from broker.checks import (
    check_accepts,
    check_count,
    check_patience,
    check_seconds,
    is_async,
    is_whole,
    name_of,
    refused,
)
from broker.consumer_state import ConsumerState
from broker.consuming.engine import Engine
from broker.consuming.handlers import LAST_CHANCE, handle_batches, handle_each, work
from broker.driver.concurrency import check_loop
from broker.errors import Closed
from broker.messages import Message, MessageBatch
from broker.protocols import BatchHandler, Handler
from broker.threads.plain_handlers import ThreadedHandler
from broker.threads.portal import Portal

__all__ = ["Closable", "MessageConsumer", "Service", "Steps"]

S = TypeVar("S")
T = TypeVar("T", default=bytes)


class Steps(AsyncIterator[S]):
    """Iterates until a step returns nothing, or the consumer is closed.

    :param step: returns the next item; None, or an empty one, ends the iteration.
    :param is_over: whether `Closed`, raised by a step, ends the iteration; else it is raised.
    """

    __slots__ = ("_is_over", "_step")

    def __init__(self, step: Callable[[], Awaitable[S | None]], is_over: Callable[[], bool]) -> None:
        self._step = step
        self._is_over = is_over

    async def __anext__(self) -> S:
        try:
            item = await self._step()
        except Closed:
            if self._is_over():
                raise StopAsyncIteration from None
            raise
        if not item:
            raise StopAsyncIteration
        return item


class Closable(Protocol):
    """The bus of a consumer; `broker.run` closes it at the end."""

    async def close(self) -> None: ...


class MessageConsumer(Generic[T]):
    """Created by `bus.messages(...)`; opened and closed by `async with`.

    Implements `MessageIterator`, `BatchedMessageIterator`, `MessageStream`, `BatchedMessageStream`, `Receiver` and
    `BatchedReceiver`.
    """

    def __init__(
        self,
        make_engine: Callable[[], Awaitable[Engine]],
        *,
        name: str,
        max_outstanding: int,
        bus: Closable | None = None,
    ) -> None:
        self.bus = bus
        self._make_engine = make_engine
        self._name = name
        self._max_outstanding = max_outstanding
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that opened the consumer."""
        self._one_open = asyncio.Lock()
        self._opening: asyncio.Task[Any] | None = None
        self._stopped = False
        self._paused = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def state(self) -> ConsumerState:
        """What the consumer does now; makes no call."""
        if self._engine is not None:
            return self._engine.state
        return ConsumerState.STOPPED if self._closed else ConsumerState.NEW

    # -- opening and closing -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Subscribe and start to fetch; `async with` calls this.

        :raises NotFound: the topic, or with `create=False` the subscription, does not exist.
        :raises Unsupported: the broker does not support an option.
        :raises Closed: the consumer was closed, perhaps while it opened.
        """
        check_loop(self._loop)
        async with self._one_open:
            if self._closed:
                raise self._is_closed()
            if self._engine is not None:
                return
            self._loop = asyncio.get_running_loop()
            self._opening = task = asyncio.current_task()
            try:
                self._engine = engine = await self._make_engine()
            except asyncio.CancelledError:
                # `close` cancelled this task once, as asyncio.timeout does; any other cancellation is passed on.
                if task is not None and self._closed and task.uncancel() == 0:
                    raise self._is_closed() from None
                raise
            finally:
                self._opening = None
                if self._engine is None:
                    self._loop = None
            engine.owner = self
            if self._paused:
                engine.pause()
            if self._stopped:
                engine.end()
            if self._closed:
                if task is not None:
                    task.uncancel()
                await engine.close()
                raise self._is_closed()

    def stop(self) -> None:
        """Stop delivering: iterations end, and `receive` returns after its running handlers. Never waits.

        Undelivered messages are released at once. May be called before the consumer is open, or before `receive`: then
        nothing is delivered, and `receive` returns at once.
        """
        check_loop(self._loop)
        self._stopped = True
        if self._engine is not None:
            self._engine.end()

    def pause(self) -> None:
        """Hand nothing over until `resume`: calls wait, and handlers that run go on.

        Fetched messages stay leased, and fetching ends when the buffer is full, with `max_outstanding` messages at
        most. Failed messages are retried after `resume`. Calls still time out, and `stop_when_idle` does not end a
        paused consumer. Never waits. May be called before the consumer is open, and twice.
        """
        check_loop(self._loop)
        self._paused = True
        if self._engine is not None:
            self._engine.pause()

    def resume(self) -> None:
        """Undo `pause`. Does nothing if the consumer is not paused."""
        check_loop(self._loop)
        self._paused = False
        if self._engine is not None:
            self._engine.resume()

    async def close(self) -> None:
        """Release undelivered messages, and wait for running handlers, at most `close_timeout` seconds.

        Never deletes a subscription. May be called twice; cancelling the caller does not stop the close. A handler that
        calls this does not wait for itself. Ends a running `open`.
        """
        check_loop(self._loop)
        if self._opening is not None and not self._closed:
            self._opening.cancel()
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_CHANCE), self._one_open:
                pass
        if self._engine is not None:
            if self.runs_in(asyncio.current_task()):
                self._engine.end()
            else:
                await self._engine.close()

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether one of this consumer's handlers runs in the task."""
        return self._engine is not None and task in self._engine.receivers.workers

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- one by one --------------------------------------------------------------------------------------

    async def next_message(self, timeout: float | None = None) -> Message[T] | None:
        """The next message, or None after `timeout` idle seconds or when `stop_when_idle` ended the consumer.

        :raises Closed: the consumer is not open.
        :raises BrokerError: a fatal error, raised once.
        """
        engine = self._opened_engine()
        if timeout is not None:
            check_patience("timeout", timeout)
        now = engine.time()
        if now > engine.watch.turn_due:
            now = await engine.turn()
        message = engine.take(now)
        if message is not None:
            if engine.hooks.listening:
                engine.report_handed_over((message,), now)
            return message
        deadline = None if timeout is None else now + timeout
        while engine.check():
            left = None if deadline is None else max(0.0, deadline - engine.time())
            in_time = await engine.wait(1, left)
            message = engine.take(engine.time())
            if message is not None:
                if engine.hooks.listening:
                    engine.report_handed_over((message,), now)
                return message
            if not in_time and engine.running:
                return None
        return None

    def __aiter__(self) -> AsyncIterator[Message[T]]:
        return Steps(self.next_message, self._is_over)

    # -- by batch ----------------------------------------------------------------------------------------

    async def next_batch(
        self, max_messages: int = 100, timeout: float | None = None, *, max_wait: float | None = None
    ) -> MessageBatch[T]:
        """The available messages, 1 to `max_messages`; an empty batch after `timeout` idle seconds.

        :param max_wait: seconds for which the first message waits for a full batch. A batch comes earlier when it is
            full, at the `timeout`, and when `max_outstanding` and the like let nothing more be fetched.
        :raises ConfigurationError: `max_messages` is larger than `max_outstanding`.
        :raises Closed: the consumer is not open.
        """
        engine = self._opened_engine()
        self._check_batch(max_messages)
        check_patience("timeout", timeout)
        check_seconds("max_wait", max_wait, zero=True, optional=True)
        now = engine.time()
        if now > engine.watch.turn_due:
            now = await engine.turn()
        batch = [] if max_wait else engine.take_batch(max_messages, now)
        deadline = None if timeout is None else now + timeout
        while not batch and engine.check():
            left = None if deadline is None else max(0.0, deadline - engine.time())
            wait = engine.wait(max_messages, left) if not max_wait else engine.fill(max_messages, max_wait, left)
            in_time = await wait
            batch = engine.take_batch(max_messages, engine.time())
            if not in_time and engine.running:
                break
        if batch and engine.hooks.listening:
            engine.report_handed_over(batch, now)
        return MessageBatch(batch, engine)

    def batches(self, max_messages: int = 100, *, max_wait: float | None = None) -> AsyncIterator[MessageBatch[T]]:
        """Iterate over batches of at least one message: `async for batch in consumer.batches():`.

        :param max_wait: as for `next_batch`.
        :raises ConfigurationError: `max_messages` is larger than `max_outstanding`.
        """
        self._check_batch(max_messages)
        check_seconds("max_wait", max_wait, zero=True, optional=True)
        return Steps(lambda: self.next_batch(max_messages, max_wait=max_wait), self._is_over)

    # -- by handler --------------------------------------------------------------------------------------

    async def receive(self, handler: Handler[T], *, concurrency: int = 1) -> None:
        """Call the handler with every message, `concurrency` at once, until the consumer is stopped, closed or idle.

        Returning acks the message; raising settles it by the retry policy; the handler may also settle it. Each message
        is handled in a context of its own. After a stop or a fatal error, running handlers have `close_timeout` seconds
        to end; then they are cancelled, and their messages released. Cancelling the call cancels the handlers at once.

        An `async def` handler runs on the event loop, which it must not block. Any other function runs in a thread and
        gets a `BlockingMessage`, whose `ack()` waits instead of being awaited. A thread cannot be stopped: a close or
        `Retry(timeout=)` cancels an `async def` handler, but a plain function runs on while its message is redelivered.
        `message.lease_lost` is then True, a warning names the function, and the consumer ignores its outcome.

        :raises ConfigurationError: the handler cannot be called with a message, or is a plain function that returned an
            awaitable.
        :raises BrokerError: a fatal error, raised once.
        """
        check_accepts("handler", handler, "a message")
        check_count("concurrency", concurrency)
        if is_async(handler):
            await self._work(handler, concurrency, lambda engine: handle_each(engine, handler))
        else:
            with closing(self._in_threads(handler)) as threaded:
                await self._work(handler, concurrency, lambda engine: handle_each(engine, threaded.handle))

    async def receive_batches(
        self,
        handler: BatchHandler[T],
        *,
        max_messages: int = 100,
        max_wait: float | None = None,
        concurrency: int = 1,
    ) -> None:
        """Call the handler with batches. It returns None to ack all messages, or for each message None or an exception.

        A handler that is not `async def` runs in a thread, with a `BlockingMessageBatch`; see `receive`.

        :param max_wait: hand a batch over when it is full or its first message has waited so many seconds; None hands
            over what there is. As for `next_batch`.
        :raises ConfigurationError: the handler cannot be called with a batch, or returned anything else; or
            `max_messages` is larger than `max_outstanding`.
        """
        check_accepts("handler", handler, "a batch of messages")
        self._check_batch(max_messages)
        check_seconds("max_wait", max_wait, zero=True, optional=True)
        check_count("concurrency", concurrency)
        if is_async(handler):
            await self._work(
                handler, concurrency, lambda engine: handle_batches(engine, handler, max_messages, max_wait)
            )
        else:
            with closing(self._in_threads(handler)) as threaded:
                await self._work(
                    handler,
                    concurrency,
                    lambda engine: handle_batches(engine, threaded.handle_batch, max_messages, max_wait),
                )

    def handled_by(self, handler: Handler[T], *, concurrency: int = 1) -> Service:
        """This consumer and its handler, for `broker.run`.

        :raises ConfigurationError: the handler cannot be called with a message.
        """
        check_accepts("handler", handler, "a message")
        check_count("concurrency", concurrency)
        return Service(self, handler, concurrency)

    def _in_threads(self, handler: Callable[[Any], Any]) -> ThreadedHandler[T]:
        return ThreadedHandler(handler, Portal.to_running_loop(), self._opened_engine().hooks)

    async def _work(
        self, handler: object, concurrency: int, handle: Callable[[Engine], Coroutine[Any, Any, None]]
    ) -> None:
        engine = self._opened_engine()
        # A stop may come before the task that calls `receive` has begun.
        if not self._stopped or self._closed or engine.fatal_cause is not None:
            await work(engine, self._name, name_of(handler), concurrency, partial(handle, engine))

    def _opened_engine(self) -> Engine:
        engine = self._engine or self._not_open()
        check_loop(self._loop)
        return engine

    def _is_closed(self) -> Closed:
        return Closed(f"The consumer of {self._name} is closed", advice="Make a new one with bus.messages(...)")

    def _is_over(self) -> bool:
        """Whether the consumer was opened, and did not end with an error."""
        return self._engine is not None and self._engine.fatal_cause is None

    def _not_open(self) -> NoReturn:
        raise Closed(
            f"The consumer of {self._name} is not open", advice="Use it as `async with bus.messages(...) as inbox:`"
        )

    def _check_batch(self, max_messages: int) -> None:
        if not is_whole(max_messages) or not 1 <= max_messages <= self._max_outstanding:
            raise refused(
                "max_messages", max_messages, f"an int from 1 to max_outstanding, which is {self._max_outstanding}"
            )


class Service:
    """A consumer bound to its handler; `broker.run` opens, serves and closes it."""

    def __init__(self, consumer: MessageConsumer[Any], handler: Handler[Any], concurrency: int) -> None:
        self.consumer = consumer
        self._handler = handler
        self._concurrency = concurrency

    async def serve(self) -> None:
        """Open the consumer, receive until it is stopped, close it."""
        async with self.consumer:
            await self.consumer.receive(self._handler, concurrency=self._concurrency)
