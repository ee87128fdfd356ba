"""The Message family on subscriptions.

Unary pulls request only what `fetch` has room for; a pull that no fetch waits for is cancelled after a moment. Messages
beyond that, by bytes or from a stream, are buffered with their leases renewed; the next fetch returns them, or `close`
releases them. A stream buffers at most `max_outstanding` messages, the most bytes of a fetch, and one answer of the
server. The lease is measured by our own clock: after its ack deadline a message is reported lost and not settled,
because a subscription without exactly-once delivery accepts every ack.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from broker import BrokerError, Closed, Message
from broker.driver import LeaseRenewer, Settlement, SourceListener, TaskSet, Waker, logger, take_from
from broker_pubsub import subscriptions
from broker_pubsub.codec import NULL, MessageView
from broker_pubsub.connection import Connection
from broker_pubsub.receiving import Puller, StreamPuller, UnaryPuller
from broker_pubsub.settling import SAFE_PART, Settler

__all__ = ["PubSubMessageSource"]

VIEW: Final = MessageView()
CANCEL_AFTER_SECONDS: Final = 0.1
CLOSE_SECONDS: Final = 3.0


class PubSubMessageSource:
    """Implements `MessageSource` and `ReportsLeaseLeft`.

    :param made: the service's subscription.
    """

    def __init__(
        self,
        connection: Connection,
        topic: str,
        name: str,
        made: Any,
        listener: SourceListener,
        *,
        max_outstanding: int,
        ephemeral: bool,
        on_close: Callable[[PubSubMessageSource], object],
    ) -> None:
        self._connection = connection
        self._on_close = on_close
        self._topic = topic
        self._path: str = made.name
        self._listener = listener
        self._ephemeral = ephemeral
        self._name = f"Subscription {name!r} of topic {topic!r}"
        self._lease = int(connection.settings.lease_seconds)
        # New messages have the subscription's lease until ours is set.
        self._sets_lease = made.ack_deadline_seconds != self._lease
        self._first_lease = SAFE_PART * min(self._lease, made.ack_deadline_seconds)
        self._settler = Settler(connection, self._path, self._name, self._lease)
        self._max_outstanding = max_outstanding
        self._max_bytes = 0
        """The largest `max_bytes` of a fetch."""
        self._puller = self._make_puller()
        self._buffer: deque[Message[Any]] = deque()
        self._mean = 1.0
        self._waker = Waker()
        self._interrupted = False
        self._fetching = False
        self._failure: BrokerError | None = None
        self._cancel_timer: asyncio.TimerHandle | None = None
        self._leases = LeaseRenewer(self._name, self._lease, lambda: self._buffer, self._settler.extend)
        self._tasks = TaskSet("broker-pubsub-lease", lambda error: logger.error("%s: %r", self._name, error))
        self._closed = False

    def _make_puller(self) -> Puller:
        where = (self._connection, self._path, self._name, self._arrived, self._fail)
        if self._connection.settings.pull_mode == "unary":
            return UnaryPuller(*where)
        return StreamPuller(
            *where, lease=self._lease, max_outstanding=self._max_outstanding, full=lambda: self._is_full()
        )

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self._check_open()
        self._fetching = True
        self._max_bytes = max(self._max_bytes, max_bytes)
        deadline = 0.0
        try:
            while True:
                if self._buffer and (messages := self._take(max_messages, max_bytes)):
                    return messages
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if self._interrupted:
                    await self._puller.cancelled()
                    return self._take(max_messages, max_bytes) if self._buffer else []
                now = monotonic()
                if not deadline:
                    deadline = now + wait
                if now >= deadline:
                    return []
                # A pull cannot bound bytes, so they are converted by the mean size.
                self._puller.request(max(1, min(max_messages, int(max_bytes / self._mean))), max_bytes)
                await self._waker.wait(deadline - now)
                self._check_open()
        finally:
            self._fetching = False
            self._interrupted = False
            self._idle()

    def interrupt(self) -> None:
        # Before any release: the service would redeliver into the open pull.
        self._puller.cancel()
        self._interrupted = self._fetching
        self._waker.wake()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._settler.settle(settlements)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self._check_open()
        return await self._settler.extend(messages)

    def lease_left(self, message: Message[Any]) -> float:
        return message.lease - monotonic()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._cancel_timer is not None:
            self._cancel_timer.cancel()
        self._leases.close()
        self._waker.wake()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._puller.close()
                await self._settler.close()
                if self._ephemeral:
                    await subscriptions.delete(self._connection, self._path, self._name)
                else:
                    await self._settler.release([message.raw.ack_id for message in self._buffer])
        except (BrokerError, TimeoutError) as error:
            logger.debug("Closing %s: %s", self._name, error)
        finally:
            self._buffer.clear()
            self._tasks.cancel()
            self._on_close(self)

    def _is_full(self) -> bool:
        size = sum([message.size for message in self._buffer])
        return len(self._buffer) >= self._max_outstanding or size >= self._max_bytes

    def _arrived(self, received: Sequence[Any], since: float | None = None) -> None:
        # Called for every answer of the server.
        until = (since or monotonic()) + self._first_lease
        topic, view, total = self._topic, VIEW, 0
        messages: list[Message[Any]] = []
        for raw in received:
            message = raw.message
            data = message.data
            if not data and NULL in message.attributes:
                data = None
            size = message.ByteSize()
            total += size
            messages.append(Message(topic, data, raw, view, until, size))
        self._buffer += messages
        if total:
            self._mean = total / len(received)
            if self._sets_lease and not self._closed:
                self._tasks.spawn(self._set_lease(messages))
        if self._waker.waiter is not None:
            self._waker.wake()
        elif self._buffer:
            self._idle()

    async def _set_lease(self, messages: list[Message[Any]]) -> None:
        until = monotonic() + SAFE_PART * self._lease
        results = await self._settler.set_lease([message.raw.ack_id for message in messages])
        for message, error in zip(messages, results, strict=True):
            if error is None:
                message.lease = max(message.lease, until)

    def _fail(self, error: BrokerError) -> None:
        self._failure = error
        self._waker.wake()

    def _take(self, max_messages: int, max_bytes: int) -> list[Message[Any]]:
        buffer = self._buffer
        now = monotonic()
        if buffer[0].lease < now:
            # The process was suspended for longer than the lease: the service redelivers these.
            self._buffer = buffer = deque(message for message in buffer if message.lease >= now)
        if messages := take_from(buffer, max_messages, max_bytes):
            self._puller.made_room()
        return messages

    def _idle(self) -> None:
        """Between fetches: cancel the pull after a moment, and renew the leases of buffered messages."""
        if self._closed:
            return
        if self._puller.pending and self._cancel_timer is None:
            self._cancel_timer = asyncio.get_running_loop().call_later(CANCEL_AFTER_SECONDS, self._cancel_pull)
        if self._buffer:
            self._leases.watch()

    def _cancel_pull(self) -> None:
        self._cancel_timer = None
        if not self._fetching and not self._closed:
            self._puller.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._name} was closed")
