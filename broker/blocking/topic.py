"""`Topic` without `await`: publishes one message, a batch, or through the pipeline, from any number of threads.

*Concurrency.* Calls of one thread keep their order per key. *Cancellation.* An interrupted `publish` may have
published. *Failure.* As in the asynchronous topic; a failed future of `enqueue` that nobody looked at is raised by
`flush` or `close`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, Generic, Literal, overload

from typing_extensions import TypeVar

from broker.blocking.portal import Portal
from broker.errors import BrokerError, PublishError
from broker.outbound import OutboundMessage
from broker.publishing import topic as asynchronous
from broker.receipts import Receipt

__all__ = ["ReceiptFuture", "Topic"]

T = TypeVar("T", default=bytes)

_KEPT_FAILURES: Final = 1000


class ReceiptFuture(Future[Receipt]):
    """The receipt of an enqueued message. Asking for the result or the exception, or a callback, counts as a look."""

    looked_at = False

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, or the failure raised. :raises TimeoutError: there is neither after `timeout` seconds."""
        self.looked_at = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The failure, or None. :raises TimeoutError: there is no outcome after `timeout` seconds."""
        self.looked_at = True
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Receipt]], object]) -> None:
        """Call it with this future when there is an outcome; on the bus's loop, so it returns at once."""
        self.looked_at = True
        super().add_done_callback(fn)


class Topic(Generic[T]):
    """A place to publish to; made by `bus.topic`, without I/O."""

    name: str

    def __init__(self, topic: asynchronous.TopicFacade[T], portal: Portal) -> None:
        self._topic = topic
        self._portal = portal
        self._failed: deque[tuple[ReceiptFuture, BrokerError]] = deque(maxlen=_KEPT_FAILURES)
        self.name = topic.name

    @property
    def closed(self) -> bool:
        """Whether it has closed; `bus.topic` gives a new one then, and not while it still flushes."""
        return self._topic.closed

    def publish(
        self,
        payload: T | OutboundMessage,
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Publish one message and wait until the broker has it.

        An interrupted call may have published.

        :raises InvalidMessage, MessageTooLarge, Unsupported: the broker cannot carry it; nothing was sent.
        :raises TopicNotFound: there is no such topic.
        :raises BrokerError: it is not on the broker, or nobody knows (OperationTimeout).
        :raises Closed: the topic was closed before the call.
        """
        return self._portal.call(self._topic.publish, payload, key=key, attributes=attributes)

    @overload
    def publish_batch(
        self, payloads: Sequence[T | OutboundMessage], *, receipts: Literal[True] = True
    ) -> list[Receipt]: ...
    @overload
    def publish_batch(self, payloads: Sequence[T | OutboundMessage], *, receipts: Literal[False]) -> None: ...
    @overload
    def publish_batch(self, payloads: Sequence[T | OutboundMessage], *, receipts: bool) -> list[Receipt] | None: ...
    def publish_batch(self, payloads: Sequence[T | OutboundMessage], *, receipts: bool = True) -> list[Receipt] | None:
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
        payload: T | OutboundMessage,
        *,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> ReceiptFuture:
        """Hand one message to the pipeline; the call's waiting is the back-pressure, the future is the receipt.

        :raises InvalidMessage, MessageTooLarge, Unsupported: the broker cannot carry it; nothing was queued.
        :raises Closed: the topic was closed before the message was let in.
        """
        return self._portal.call(self._enqueue, payload, key, attributes)

    async def _enqueue(
        self, payload: T | OutboundMessage, key: bytes | str | None, attributes: Mapping[str, str] | None
    ) -> ReceiptFuture:
        inner = await self._topic.enqueue(payload, key=key, attributes=attributes)
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
        """Wait until everything enqueued by now is on the broker.

        :raises PublishError: something is not, and nobody has looked at its future.
        """
        self._portal.call(self._topic.flush)
        self.raise_failures()

    def close(self, timeout: float = 30.0) -> None:
        """Flush, let running calls end, and release the backend's side. May be called twice.

        :raises PublishError: something enqueued failed, and nobody has looked at its future.
        """
        if self._portal.running:
            self._portal.call(self._topic.close, timeout)
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise what failed and was not looked at, once; `flush` and `close` do it.

        :raises PublishError: there is such a failure.
        """
        unseen: list[BrokerError] = []
        while self._failed:
            future, error = self._failed.popleft()
            if not future.looked_at:
                unseen.append(error)
        if unseen:
            raise PublishError(unseen)
