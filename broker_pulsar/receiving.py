"""`Receiver`: one consumer of the client and the thread that waits for its messages.

*Concurrency.* The thread receives when it was asked to, one batch per request, and tells the loop by one hop. What
must not run beside a receive (seeks, rewinds) is done by the thread in between, after at most the length of one wait.
*Cancellation.* A receive is never cancelled: what it brings is told, whoever asked. *Failure.* What ends the consumer
is told once; the thread ends then.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from broker import BrokerError, Closed
from broker.driver import logger
from broker_pulsar.client import Consumer, extension_of, pulsar
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate

__all__ = ["BATCH", "Receiver", "ReceiverHost", "batch_policy"]

T = TypeVar("T")
BATCH: Final = 1000
_WAIT: Final = 100
"""Milliseconds of one receive: the client has no call that ends it."""
_STOP: Final = 3.0


class ReceiverHost(Protocol):
    """Who hears of messages; called on the loop."""

    def arrived(self, receiver: Receiver, messages: Sequence[NativeMessage]) -> None: ...
    def failed(self, receiver: Receiver, error: BrokerError) -> None: ...


def batch_policy(queue: int) -> Any:
    """Whatever is there behind the first message, at most `BATCH` with it: the client waits its whole time for more.

    :param queue: the consumer's. More than what is left of a full one is hardly ever there to be had at once.
    """
    return pulsar.ConsumerBatchReceivePolicy(max(1, min(BATCH, queue) - 1), 8 << 20, 1)


class Receiver:
    """Owns the consumer; used from one loop."""

    def __init__(self, consumer: Consumer, host: ReceiverHost, what: str) -> None:
        self.consumer: Final = consumer
        self._extension = extension_of(consumer)
        self._host = host
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._wanted = threading.Event()
        self._receive = False
        self._stopping = False
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="broker-pulsar-receiver", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have one batch received, whenever it comes; asking again before that changes nothing."""
        self._receive = True
        self._wanted.set()

    async def call(self, function: Callable[[], T]) -> T:
        """Run this in the thread, beside no receive; what it brings about is received when it is asked for anew.

        :raises Closed: the consumer ended first. :raises BrokerError: the client's error.
        """
        if self._stopping or self._ended.done():
            raise Closed(f"{self._what} was closed")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.append((function, future))
        self._wanted.set()
        return await future

    async def close(self, connection: Connection) -> None:
        """Close the consumer, which gives back what was not settled, and end the thread."""
        if self._stopping:
            await asyncio.shield(self._ended)
            return
        self._stopping = True
        self._wanted.set()
        # The client's close also ends a receive that waits. It waits for a broker that may be away.
        closing = asyncio.ensure_future(connection.call(self._close))
        await asyncio.wait({closing}, timeout=_STOP)
        await asyncio.wait({self._ended}, timeout=_STOP)

    def _close(self) -> None:
        try:
            self.consumer.close()
        except Exception as error:
            logger.debug("%s: the client says of the close: %s", self._what, error)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wanted.wait()
                self._serve_calls()
                if self._stopping or not self._receive:
                    self._wanted.clear()
                    if self._calls or self._receive or self._stopping:
                        self._wanted.set()  # asked for between the look and the clearing
                    continue
                self._receive_once()
        except Exception as error:
            if not self._stopping:
                told = translate(error, self._what)
                self._hop(lambda: self._host.failed(self, told))
        finally:
            self._hop(self._finish)

    def _receive_once(self) -> None:
        consumer = self._extension
        try:
            messages = [consumer.receive(_WAIT)]
        except pulsar.Timeout:
            return
        messages += consumer.batch_receive()
        self._receive = False
        self._hop(lambda: self._host.arrived(self, messages))

    def _serve_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                result = function()
            except Exception as error:
                self._receive = False
                told = translate(error, self._what)
                self._hop(lambda future=future, told=told: future.done() or future.set_exception(told))
            else:
                # Before whoever called hears of it: what comes sooner would look like what came before the call.
                self._receive = False
                self._hop(lambda future=future, result=result: future.done() or future.set_result(result))

    def _hop(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            return  # The loop has ended, and nobody waits.

    def _finish(self) -> None:
        while self._calls:
            _, future = self._calls.popleft()
            if not future.done():
                future.set_exception(Closed(f"{self._what} was closed"))
        if not self._ended.done():
            self._ended.set_result(None)
