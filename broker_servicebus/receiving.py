"""One receiver of the client, whose connection one caller at a time may drive.

azure-servicebus reads its socket in whoever waits, and two that wait hold each other up by a fifth of a second. So a
receive gives way to every other call, and goes on after it: with the client's private calls it is cancelled, which
loses nothing that has arrived; with its public ones it waits in short turns. A receiver that broke is made anew by the
next call.
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
from broker_servicebus.errors import classify, is_busy

__all__ = ["Wire"]

T = TypeVar("T")

_TURN: Final = 0.25
"""Seconds of one receive by public calls."""
_AGAIN: Final = 0.01
_CLOSE_SECONDS: Final = 3.0


class Wire:
    """A receiver, and its successors.

    :param make: a new receiver of the client.
    :param missing: what an entity that is not there is.
    :param once: it has no successors: what came by it is lost with it.
    :param open_seconds: how much longer than `connect_timeout` an opening may take.
    """

    def __init__(
        self,
        connection: Connection,
        make: Callable[[], ServiceBusReceiver],
        what: str,
        missing: type[NotFound],
        *,
        once: bool = False,
        open_seconds: float = 0.0,
    ) -> None:
        self._connection = connection
        self._make = make
        self._what = what
        self._missing = missing
        self._once = once
        self._opened = False
        self._open_seconds = connection.settings.connect_timeout + open_seconds
        self._fast = connection.fast
        self._lock = asyncio.Lock()
        self._receiver: ServiceBusReceiver | None = None
        self._receiving: asyncio.Task[list[ServiceBusReceivedMessage]] | None = None
        self._waiting = 0
        self._calm = asyncio.Event()
        self._interrupted = False
        self._closed = False

    @property
    def receiver(self) -> ServiceBusReceiver | None:
        """The receiver of the moment."""
        return self._receiver

    async def open(self) -> None:
        async with self._lock:
            await self._ensure()

    async def receive(self, most: int, wait: float) -> list[ServiceBusReceivedMessage]:
        """At most so many messages, as soon as there are some; none after `wait` seconds or when interrupted.

        :raises BrokerError: the receiver broke, or could not be opened.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        self._interrupted = False
        while True:
            while self._waiting:
                self._calm.clear()
                await self._calm.wait()
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
        """End the running receive with what it has."""
        self._interrupted = True
        self._preempt()

    async def run(self, call: Callable[[ServiceBusReceiver], Awaitable[T]]) -> T:
        """Call with the receiver, which nobody else uses meanwhile.

        :raises BrokerError: what became of it.
        """
        with self.busy():
            async with self._lock:
                receiver = await self._ensure()
                try:
                    return await call(receiver)
                except Exception as error:
                    raise await self._failed(receiver, error, answered=True) from None

    async def give_back(self) -> None:
        """Take the credit back, and give back what has come by it: nobody receives for now.

        :raises BrokerError: the receiver broke.
        """

        async def ask(receiver: ServiceBusReceiver) -> None:
            if private_api.expects(receiver):
                await private_api.stop(receiver)
                # The answer comes behind all that was on its way.
                await receiver.peek_messages(1, timeout=self._connection.settings.request_timeout)
                for native in private_api.buffered(receiver, 1 << 30):
                    await private_api.release(receiver, native)

        if self._receiver is not None:
            await self.run(ask)

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Keep receives waiting while several calls are made, one after the other."""
        self._waiting += 1
        self._preempt()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._calm.set()

    async def close(self) -> None:
        """Give back what has arrived and nobody took, and close."""
        self._closed = True
        self._preempt()
        async with self._lock:
            receiver, self._receiver = self._receiver, None
            if receiver is None:
                return
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    if self._fast and not receiver.session:
                        await private_api.stop(receiver)
                        # What was on its way comes before the answer; the client's close gives it back.
                        await receiver.peek_messages(1, timeout=_CLOSE_SECONDS)
            await private_api.close(receiver, _CLOSE_SECONDS)

    async def _ensure(self) -> ServiceBusReceiver:
        self._connection.check_open()
        if self._once and self._opened and (self._closed or self._receiver is None):
            raise LeaseLost(f"{self._what}: the session was lost")
        if self._closed:
            raise Closed(f"{self._what} was closed")
        if self._receiver is not None:
            return self._receiver
        receiver = self._make()
        try:
            async with asyncio.timeout(self._open_seconds):
                await (private_api.open_(receiver) if self._fast else receiver.__aenter__())
        except BaseException as error:
            await private_api.close(receiver, _CLOSE_SECONDS)
            if not isinstance(error, Exception):
                raise
            raise self._explained(receiver, error) from None
        # The server attaches a link without a session, too, where none was free, and ends it a moment later.
        if self._once and not private_api.has_session(receiver):
            refused = await private_api.refusal(receiver)
            await private_api.close(receiver, _CLOSE_SECONDS)
            told = None if refused is None else classify(refused, self._what)
            if isinstance(told, ConfigurationError):
                raise told from None
            raise OperationTimeout(f"{self._what}: no session is free")
        private_api.remember(receiver)
        self._receiver = receiver
        self._opened = True
        self._connection.reached()
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
            # Whoever has the lock next must find nobody else at the connection.
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
        # What came before it broke is ours still.
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
        explained = self._explained(receiver, error)
        broken = explained.retriable or isinstance(explained, NotFound)
        if answered and is_busy(explained):
            # A request that was throttled leaves the link as it is, and with it the session.
            broken = False
        if broken:
            self._connection.broke(explained)
        # A receiver whose session was lost is closed by the client itself, and would take another session in its place.
        if broken or private_api.is_closed(receiver):
            if self._receiver is receiver:
                self._receiver = None
            await private_api.close(receiver, _CLOSE_SECONDS)
        return explained

    def _explained(self, receiver: ServiceBusReceiver, error: Exception) -> BrokerError:
        # Nothing that a user gave is in a call: what the client trips over is a link that ended under its hands.
        return classify(private_api.explained(receiver, error), self._what, missing=self._missing, trips=True)
