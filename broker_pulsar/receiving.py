"""One consumer of the client with the thread that waits for its messages, and the base of the sources that use it.

*Concurrency.* The thread receives one batch per request and passes it to the loop in one call. Calls that must not run
beside a receive (seeks, rewinds) run in the thread between receives, after at most one wait. *Cancellation.* A receive
is never cancelled, and its batch is always passed on. *Failure.* An error that ends the consumer is reported once; the
thread then ends.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from broker import BrokerError, Closed, ConnectionFailed
from broker.driver import TaskSet, Waker, logger
from broker_pulsar.client import Consumer, extension_of, pulsar
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate

__all__ = ["Receiver", "ReceiverListener", "ReceivingSource", "batch_policy"]

T = TypeVar("T")
_BATCH: Final = 1000
_WAIT: Final = 100
"""Milliseconds of one receive, which cannot be interrupted."""
_STOP: Final = 3.0


class ReceiverListener(Protocol):
    """Callbacks of a receiver, called on the loop."""

    def arrived(self, receiver: Receiver, messages: Sequence[NativeMessage]) -> None: ...
    def failed(self, receiver: Receiver, error: BrokerError) -> None: ...


def batch_policy(queue: int) -> Any:
    """A policy that takes what is queued after the first message, at most `_BATCH` in all, without waiting for more.

    :param queue: the consumer's queue size, an upper bound of what is queued.
    """
    return pulsar.ConsumerBatchReceivePolicy(max(1, min(_BATCH, queue) - 1), 8 << 20, 1)


class Receiver:
    """Owns the consumer; used from one loop."""

    def __init__(self, consumer: Consumer, listener: ReceiverListener, what: str) -> None:
        self.consumer: Final = consumer
        self._extension = extension_of(consumer)
        self._listener = listener
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Event()
        self._receive = False
        self._stopping = False
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._results: set[asyncio.Future[Any]] = set()
        """Of calls that wait or run."""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="broker-pulsar-receiver", daemon=True)
        self._thread.start()

    def is_open(self) -> bool:
        """Whether it is not being closed. Any thread."""
        return not self._stopping

    def request(self) -> None:
        """Request one batch; a repeated request before it arrives has no effect."""
        self._receive = True
        self._wake.set()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, between receives; later messages need a new `request`.

        :raises Closed: the receiver was closed, or ended, before the function. :raises BrokerError: the client's error.
        """
        if self._stopping or self._ended.done():
            raise Closed(f"{self._what} was closed")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._results.add(future)
        future.add_done_callback(self._results.discard)
        self._calls.append((function, future))
        self._wake.set()
        return await future

    async def close(self, connection: Connection) -> None:
        """Close the consumer, which releases unsettled messages, end the thread, and all calls with Closed."""
        if self._stopping:
            await asyncio.shield(self._ended)
            return
        self._stopping = True
        self._wake.set()
        # close() ends a waiting receive, but waits for the broker, which may be down.
        closing = asyncio.ensure_future(connection.call(self._close))
        await asyncio.wait({closing}, timeout=_STOP)
        await asyncio.wait({self._ended}, timeout=_STOP)
        # The thread may be held up by the client.
        self._finish()

    def _close(self) -> None:
        try:
            self.consumer.close()
        except Exception as error:
            logger.debug("%s: closing the consumer: %s", self._what, error)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait()
                self._run_calls()
                if self._stopping or not self._receive:
                    self._wake.clear()
                    if self._calls or self._receive or self._stopping:
                        self._wake.set()  # requested between the check and the clear
                    continue
                self._receive_once()
        except Exception as error:
            if not self._stopping:
                translated = translate(error, self._what)
                self._call_loop(lambda: self._listener.failed(self, translated))
        finally:
            self._call_loop(self._finish)

    def _receive_once(self) -> None:
        consumer = self._extension
        try:
            messages = [consumer.receive(_WAIT)]
        except pulsar.Timeout:
            return
        messages += consumer.batch_receive()
        self._receive = False
        self._call_loop(lambda: self._listener.arrived(self, messages))

    def _run_calls(self) -> None:
        while self._calls and not self._stopping:
            function, future = self._calls.popleft()
            try:
                result = function()
            except Exception as error:
                self._receive = False
                translated = translate(error, self._what)
                self._call_loop(
                    lambda future=future, translated=translated: future.done() or future.set_exception(translated)
                )
            else:
                # Before the caller resumes: earlier receives belong to the time before the call.
                self._receive = False
                self._call_loop(lambda future=future, result=result: future.done() or future.set_result(result))

    def _call_loop(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            return  # The loop has ended; no caller waits.

    def _finish(self) -> None:
        self._calls.clear()
        for future in tuple(self._results):
            if not future.done():
                future.set_exception(Closed(f"{self._what} was closed"))
        if not self._ended.done():
            self._ended.set_result(None)


class ReceivingSource(ABC):
    """What the sources of messages and of records share: the wait of `fetch`, and failures of the consumer.

    :ivar _unwatch: functions that end what watches the source, called at close.
    """

    def __init__(self, connection: Connection, what: str, on_close: Callable[[ReceivingSource], object]) -> None:
        self._connection = connection
        self._what = what
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._waker = Waker()
        self._failure: BrokerError | None = None
        self._tasks = TaskSet("broker-pulsar-source", lambda error: self._fail(translate(error, what)))
        self._operations: set[asyncio.Future[Any]] = set()
        """What callers of `_until_closed` wait for."""
        self._unwatch: list[Callable[[], None]] = []
        self._interrupted = self._fetching = self._closed = False

    def interrupt(self) -> None:
        self._interrupted = self._fetching
        self._waker.wake()

    def failed(self, receiver: Receiver, error: BrokerError) -> None:
        """Implements `ReceiverListener`."""
        if not self._closed:
            self._tasks.spawn(self._explain(error))

    async def _wait_for(self, take: Callable[[], list[T]], wait: float) -> list[T]:
        """Wait until `take` returns something; empty after `wait` seconds, an interrupt or at close.

        :raises BrokerError: the source failed, or the connection is down.
        """
        self._check_open()
        self._fetching = True
        until = self._loop.time() + wait
        try:
            while not self._closed:
                if found := take():
                    return found
                if self._failure is not None:
                    raise self._failure
                left = until - self._loop.time()
                if self._interrupted:
                    break
                if left <= 0:
                    if not self._is_connected():
                        # The client retries a deleted topic for ever.
                        await self._check_exists()
                        raise ConnectionFailed(f"{self._what}: the connection to the broker is being restored")
                    break
                self._request()
                await self._waker.wait(left)
            return []
        finally:
            self._fetching = self._interrupted = False

    @abstractmethod
    async def close(self) -> None: ...
    @abstractmethod
    def _is_connected(self) -> bool: ...
    @abstractmethod
    def _request(self) -> None:
        """Request messages from the consumer, before a wait."""

    @abstractmethod
    async def _check_exists(self) -> None:
        """:raises BrokerError: the topic or subscription was deleted, or the broker does not answer."""

    async def _explain(self, error: BrokerError) -> None:
        if isinstance(error, Closed):
            # The client closes a consumer when its topic or subscription is deleted.
            error = ConnectionFailed(f"{self._what}: the client closed a consumer", retriable=False)
        try:
            await self._check_exists()
        except BrokerError as found:
            error = error if found.retriable else found
        self._fail(error)

    def _fail(self, error: BrokerError) -> None:
        self._failure = self._failure or error
        self._waker.wake()

    def _stop(self) -> None:
        """End a waiting fetch, operations, and all background work."""
        self._closed = True
        for unwatch in self._unwatch:
            unwatch()
        self._waker.wake()
        self._tasks.cancel()
        for operation in self._operations:
            operation.cancel()

    async def _until_closed(self, operation: Coroutine[Any, Any, T]) -> T:
        """The result of an operation, which a close of the source cancels.

        :raises Closed: it did.
        """
        running = asyncio.ensure_future(operation)
        self._operations.add(running)
        running.add_done_callback(self._operations.discard)
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            running.cancel()
            raise
        if running.cancelled():
            raise Closed(f"{self._what} was closed")
        return running.result()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._what} was closed")
