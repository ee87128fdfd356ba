"""One receiver link, which one call at a time uses.

azure-servicebus reads its socket in the task that waits, and two waiting tasks delay each other by a fifth of a second.
So a receive yields to every other call and continues afterwards: with the client's private calls it is cancelled, which
loses no arrived message; with its public calls it waits in short turns. The next call recreates a broken receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, TypeVar

from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusReceiver

from broker import BrokerError, Closed, ConfigurationError, LeaseLost, NotFound, OperationTimeout
from broker_servicebus import private_api
from broker_servicebus.connection import Connection
from broker_servicebus.errors import is_busy, translate

__all__ = ["ReceiverLink"]

T = TypeVar("T")

_TURN: Final = 0.25
"""Seconds of one receive by public calls."""
_AGAIN: Final = 0.01
_CLOSE_SECONDS: Final = 3.0


class ReceiverLink:
    """A receiver that is recreated after a break.

    :param create: creates a receiver of the client.
    :param missing: the error for an entity that does not exist.
    :param single_use: do not recreate the receiver: its messages are lost with it.
    :param open_seconds: time for opening in addition to `connect_timeout`.
    """

    def __init__(
        self,
        connection: Connection,
        create: Callable[[], ServiceBusReceiver],
        what: str,
        missing: type[NotFound],
        *,
        single_use: bool = False,
        open_seconds: float = 0.0,
    ) -> None:
        self._connection = connection
        self._create = create
        self._what = what
        self._missing = missing
        self._single_use = single_use
        self._opened = False
        self._open_seconds = connection.settings.connect_timeout + open_seconds
        self._fast = connection.fast
        self._lock = asyncio.Lock()
        self._receiver: ServiceBusReceiver | None = None
        self._receiving: asyncio.Task[list[ServiceBusReceivedMessage]] | None = None
        self._waiting = 0
        self._idle = asyncio.Event()
        self._interrupted = False
        self._closed = False

    @property
    def receiver(self) -> ServiceBusReceiver | None:
        """The current receiver."""
        return self._receiver

    async def open(self) -> None:
        async with self._lock:
            await self._ensure()

    async def receive(self, most: int, wait: float) -> list[ServiceBusReceivedMessage]:
        """Receive at most `most` messages; returns as soon as some arrive, or empty after `wait` seconds or an
        interrupt.

        :raises BrokerError: the receiver broke, or could not be opened.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        self._interrupted = False
        while True:
            while self._waiting:
                self._idle.clear()
                await self._idle.wait()
            async with self._lock:
                receiver = await self._ensure()
                left = until - loop.time()
                if self._fast and (self._interrupted or left <= 0):
                    return private_api.buffered(receiver, most)
                if self._interrupted or left <= 0:
                    return []
                found = await self._receive(receiver, most, left)
            if found:
                return found

    def interrupt(self) -> None:
        """End the running receive with the messages that have arrived."""
        self._interrupted = True
        self._preempt()

    async def run(self, call: Callable[[ServiceBusReceiver], Awaitable[T]]) -> T:
        """Call a function with exclusive use of the receiver.

        :raises BrokerError: the call failed.
        """
        with self.busy():
            async with self._lock:
                receiver = await self._ensure()
                try:
                    return await call(receiver)
                except Exception as error:
                    raise await self._failed(receiver, error, answered=True) from None

    async def release_prefetched(self, *, stopped: bool = False) -> None:
        """Withdraw the link credit and release prefetched messages.

        :param stopped: the credit is withdrawn already, but messages may be in flight.
        :raises BrokerError: the receiver broke.
        """

        async def drain(receiver: ServiceBusReceiver) -> None:
            if not stopped:
                if not private_api.may_receive(receiver):
                    return
                await private_api.withdraw_credit(receiver)
            # The answer arrives after all messages in flight.
            await receiver.peek_messages(1, timeout=self._connection.settings.request_timeout)
            for native in private_api.buffered(receiver, 1 << 30):
                await private_api.release(receiver, native)

        if self._receiver is not None:
            await self.run(drain)

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Suspend receives during several calls."""
        self._waiting += 1
        self._preempt()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._idle.set()

    async def close(self) -> None:
        """Release messages that were not fetched, and close."""
        self._closed = True
        self._preempt()
        async with self._lock:
            receiver, self._receiver = self._receiver, None
            if receiver is None:
                return
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    if self._fast and not receiver.session:
                        await private_api.withdraw_credit(receiver)
                        # Messages in flight arrive before the answer; the client's close releases them.
                        await receiver.peek_messages(1, timeout=_CLOSE_SECONDS)
            await private_api.close(receiver, _CLOSE_SECONDS)

    async def _ensure(self) -> ServiceBusReceiver:
        self._connection.check_open()
        if self._single_use and self._opened and (self._closed or self._receiver is None):
            raise LeaseLost(f"{self._what}: the session was lost")
        if self._closed:
            raise Closed(f"{self._what} was closed")
        if self._receiver is not None:
            return self._receiver
        receiver = self._create()
        try:
            async with asyncio.timeout(self._open_seconds):
                await (private_api.open_(receiver) if self._fast else receiver.__aenter__())
        except BaseException as error:
            await private_api.close(receiver, _CLOSE_SECONDS)
            if not isinstance(error, Exception):
                raise
            raise self._translate(receiver, error) from None
        # If no session is free, the server attaches a link without one and detaches it a moment later.
        if self._single_use and not private_api.has_session(receiver):
            refused = await private_api.refusal(receiver)
            await private_api.close(receiver, _CLOSE_SECONDS)
            translated = None if refused is None else translate(refused, self._what)
            if isinstance(translated, ConfigurationError):
                raise translated from None
            raise OperationTimeout(f"{self._what}: no session is free")
        private_api.remember_connection(receiver)
        self._receiver = receiver
        self._opened = True
        self._connection.on_open()
        return receiver

    async def _receive(self, receiver: ServiceBusReceiver, most: int, left: float) -> list[ServiceBusReceivedMessage]:
        if not self._fast:
            try:
                return await receiver.receive_messages(most, max_wait_time=min(left, _TURN))
            except Exception as error:
                raise await self._failed(receiver, error) from None
        task = asyncio.get_running_loop().create_task(private_api.receive(receiver, most, left))
        self._receiving = task
        if self._waiting or self._interrupted:
            self._preempt()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # The next holder of the lock needs exclusive use of the connection.
            self._cancel(task)
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._receiving = None
        if task.cancelled():
            return []
        error = task.exception()
        if error is None:
            return task.result()
        if not isinstance(error, Exception):
            raise error
        # Messages that arrived before the break are still ours.
        if found := private_api.buffered(receiver, most):
            return found
        raise await self._failed(receiver, error) from None

    def _preempt(self) -> None:
        if self._receiving is not None:
            self._cancel(self._receiving)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if not task.done():
            task.cancel()
            # Python 3.11's wait_for swallows a cancellation that comes together with a result.
            asyncio.get_running_loop().call_later(_AGAIN, self._cancel, task)

    async def _failed(self, receiver: ServiceBusReceiver, error: Exception, *, answered: bool = False) -> BrokerError:
        explained = self._translate(receiver, error)
        broken = explained.retriable or isinstance(explained, NotFound)
        if answered and is_busy(explained):
            # A throttled request keeps the link, and its session.
            broken = False
        if broken:
            self._connection.on_broken(explained)
        # The client closes a receiver whose session was lost; reopened, it would accept another session.
        if broken or private_api.is_closed(receiver):
            if self._receiver is receiver:
                self._receiver = None
            await private_api.close(receiver, _CLOSE_SECONDS)
        return explained

    def _translate(self, receiver: ServiceBusReceiver, error: Exception) -> BrokerError:
        # The arguments are ours, so an unexpected exception means that the link ended during the call.
        return translate(
            private_api.explained(receiver, error), self._what, missing=self._missing, retry_unexpected=True
        )
