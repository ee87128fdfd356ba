"""`Topic` without `await`: publishes one message, a batch, or through the pipeline, from any number of threads.

*Concurrency.* Messages of a key are published in the order of the calls of a thread. *Cancellation.* An interrupted
`publish` may have published. *Failure.* `flush` and `close` raise the failures of `enqueue` whose futures were not
looked at.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, Final, Generic, Literal, overload

from typing_extensions import TypeVar

from broker.errors import BrokerError, PublishError
from broker.outbound import OutboundMessage, OutboundPayload
from broker.publishing import topic as asynchronous
from broker.receipts import Receipt
from broker.threads.portal import Portal

__all__ = ["ReceiptFuture", "Topic"]

T = TypeVar("T", default=bytes)

_KEPT_FAILURES: Final = 1000


class ReceiptFuture(Future[Receipt]):
    """The future receipt of a queued message. Retrieving the outcome, or adding a callback, counts as looking at it."""

    looked_at = False

    def result(self, timeout: float | None = None) -> Receipt:
        """Return the receipt, or raise the failure.

        :raises TimeoutError: there is no outcome after `timeout` seconds.
        """
        self.looked_at = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The failure, or None.

        :raises TimeoutError: there is no outcome after `timeout` seconds.
        """
        self.looked_at = True
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Receipt]], object]) -> None:
        """Call `fn` with this future when there is an outcome, on the loop of the bus. It must return at once."""
        self.looked_at = True
        super().add_done_callback(fn)


class Topic(Generic[T]):
    """A topic to publish to; created by `bus.topic`."""

    name: str

    def __init__(
        self, topic: asynchronous.TopicFacade[T], portal: Portal, on_close: Callable[[Topic[Any]], object]
    ) -> None:
        self._topic = topic
        self._portal = portal
        self._on_close = on_close
        self._failed: deque[tuple[ReceiptFuture, BrokerError]] = deque(maxlen=_KEPT_FAILURES)
        self.name = topic.name

    @property
    def closed(self) -> bool:
        """Whether the topic has closed; `bus.topic` then returns a new one."""
        return self._topic.closed

    def publish(
        self,
        payload: T | OutboundMessage | OutboundPayload[T],
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Publish one message; return when the broker has stored it. An interrupted call may have published.

        :param payload: what the codec of the topic encodes, an `OutboundPayload` of it, or an `OutboundMessage`.
        :param key: the key of a payload, like the other fields; an outbound payload or message has its own.
        :raises InvalidMessage, MessageTooLarge, Unsupported: the broker cannot carry the message; nothing was sent.
        :raises TopicNotFound: the topic does not exist.
        :raises OperationTimeout: no answer in time; the message may be on the broker.
        :raises BrokerError: the message was not published.
        :raises Closed: the topic was closed before the call.
        """
        return self._portal.call(
            self._topic.publish,
            payload,
            key=key,
            attributes=attributes,
            id=id,
            deliver_at=deliver_at,
            ttl=ttl,
            partition=partition,
        )

    @overload
    def publish_batch(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: Literal[True] = True
    ) -> list[Receipt]: ...
    @overload
    def publish_batch(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: Literal[False]
    ) -> None: ...
    @overload
    def publish_batch(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: bool
    ) -> list[Receipt] | None: ...
    def publish_batch(
        self, payloads: Sequence[T | OutboundMessage | OutboundPayload[T]], *, receipts: bool = True
    ) -> list[Receipt] | None:
        """Publish many messages, in order per key; return their receipts in the order of the payloads.

        :param receipts: False returns None, which is faster on some brokers.
        :raises PublishError: some messages failed, the others are on the broker; `outcomes` has the result of each.
        :raises InvalidMessage: `payloads` is not a list of messages; nothing was sent.
        :raises BrokerError: nothing was sent, for instance because the topic does not exist.
        :raises Closed: the topic was closed before the call.
        """
        return self._portal.call(self._topic.publish_batch, payloads, receipts=receipts)

    def enqueue(
        self,
        payload: T | OutboundMessage | OutboundPayload[T],
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
    ) -> ReceiptFuture:
        """Queue one message for publishing; return a future of its receipt. Waits while the queue is full.

        :raises InvalidMessage, MessageTooLarge, Unsupported: the broker cannot carry the message; nothing was queued.
        :raises Closed: the topic was closed before the message was queued.
        """
        return self._portal.call(
            self._enqueue,
            payload,
            key=key,
            attributes=attributes,
            id=id,
            deliver_at=deliver_at,
            ttl=ttl,
            partition=partition,
        )

    async def _enqueue(self, payload: T | OutboundMessage | OutboundPayload[T], **fields: Any) -> ReceiptFuture:
        inner = await self._topic.enqueue(payload, **fields)
        outer = ReceiptFuture()

        def settle(inner: asyncio.Future[Receipt]) -> None:
            error = inner.exception()
            if isinstance(error, BrokerError):
                self._failed.append((outer, error))
            if not outer.set_running_or_notify_cancel():
                return
            if error is None:
                outer.set_result(inner.result())
            else:
                outer.set_exception(error)

        inner.add_done_callback(settle)
        return outer

    def flush(self) -> None:
        """Wait until all queued messages are on the broker.

        :raises PublishError: some messages failed, and their futures were not looked at.
        """
        if not self._portal.closed:
            self._portal.call(self._topic.flush)
        self.raise_failures()

    def close(self, timeout: float = 30.0) -> None:
        """Flush, wait for running calls, and close. May be called twice.

        :param timeout: seconds for the flush and the calls; unsent messages then fail.
        :raises PublishError: some messages failed, and their futures were not looked at.
        """
        if not self._portal.ended:
            self._portal.call(self._topic.close, timeout)
        self._on_close(self)
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise the failures that were not looked at, once; `flush` and `close` call this.

        :raises PublishError: there are such failures.
        """
        unseen: list[BrokerError] = []
        while self._failed:
            future, error = self._failed.popleft()
            if not future.looked_at:
                unseen.append(error)
        if unseen:
            raise PublishError(unseen)
