"""One consumer of one subscription of an in-memory server.

Published and redelivered messages wake `fetch`, and so does the server's clock when a lease or a delay ends. Settling
never suspends. When the connection breaks, the consumer learns at once which messages will be redelivered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from broker import BrokerError, Closed, Message, NotFound, SubscriptionNotFound, TopicNotFound
from broker.driver import Ephemeral, MessageSubscription, Settlement, SourceListener
from broker_inmem.connection import Connection
from broker_inmem.fetching import Fetching
from broker_inmem.server import Broker

__all__ = ["InmemMessageSource"]


class InmemMessageSource(Fetching[Message[Any]]):
    """Implements `MessageSource` and `ReportsLeaseLeft`."""

    def __init__(
        self,
        broker: Broker,
        connection: Connection,
        subscription: MessageSubscription,
        listener: SourceListener,
        *,
        lease_seconds: float,
        on_close: Callable[[InmemMessageSource], object],
    ) -> None:
        super().__init__(broker, connection, listener.event)
        self._listener = listener
        self._on_close = on_close
        self._unsettled: dict[int, Message[Any]] = {}
        self._lost = False
        name = subscription.subscription
        with broker.lock:
            connection.check()
            if broker.faults.armed:
                broker.faults.check("open", subscription.topic)
            now = broker.clock.time()
            topic = broker.topic(subscription.topic, now)
            self._topic = topic
            self._number = broker.number()
            if isinstance(name, Ephemeral):
                queue = broker.ensure_queue(topic, f"ephemeral-{self._number}", subscription.start, ephemeral=True)
            elif name not in topic.queues and not subscription.create:
                raise SubscriptionNotFound(f"Topic {topic.name!r} has no subscription {name!r}")
            else:
                broker.check_family(topic.name, name, "messages")
                queue = broker.ensure_queue(topic, name, subscription.start)
            self._queue = queue
            self._member = queue.join(self._number, subscription.ordered_by_key, lease_seconds)
            connection.sources[self._number] = self

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        return await self._fetch(max_messages, max_bytes, wait)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        broker, queue, unsettled = self._broker, self._queue, self._unsettled
        for settlement in settlements:
            unsettled.pop(settlement.message.lease.tag, None)
        with broker.lock:
            self._check_open()
            now = broker.clock.time()
            if queue.deleted:
                return [self._gone() for _ in settlements]
            if broker.faults.armed:
                return self._settle_with_faults(settlements, now)
            return queue.settle(self._member, settlements, now)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        broker = self._broker
        with broker.lock:
            self._check_open()
            if self._queue.deleted:
                return [self._gone() for _ in messages]
            if broker.faults.armed:
                broker.faults.check("extend", self._queue.topic)
            return self._queue.extend(self._member, messages, broker.clock.time())

    def lease_left(self, message: Message[Any]) -> float:
        return message.lease.expires - self._broker.clock.time()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        broker, queue = self._broker, self._queue
        with broker.lock:
            self._connection.sources.pop(self._number, None)
            if self._connection.usable:
                queue.leave(self._member)
            else:
                queue.abandon(self._member)
            if queue.ephemeral:
                self._topic.delete_queue(queue.name)
        self._unsettled.clear()
        self._interrupted = True
        self._waker.wake()
        self._on_close(self)

    def broken(self, *, lost: bool) -> None:
        self._lost = self._lost or lost
        super().broken(lost=lost)

    def _report_break(self) -> None:
        super()._report_break()
        if self._closed:
            return
        if self._lost and self._unsettled:
            unsettled, self._unsettled = list(self._unsettled.values()), {}
            self._listener.lost(unsettled)
        self._lost = False

    def _closed_error(self) -> Closed:
        return Closed(f"The consumer of subscription {self._queue.name!r} was closed")

    def _take(self, most: int, max_bytes: int, now: float) -> Sequence[Message[Any]]:
        broker, queue = self._broker, self._queue
        if broker.faults.armed:
            broker.faults.check("fetch", queue.topic)
            queue.duplicate = broker.faults.after_take
        else:
            queue.duplicate = None
        if queue.deleted:
            raise self._gone()
        broker.topic(queue.topic, now)
        messages = queue.take(self._member, most, max_bytes, now)
        for message in messages:
            self._unsettled[message.lease.tag] = message
        return messages

    def _watch(self) -> float | None:
        self._queue.waiters.append(self._waker)
        return self._broker.next_due((self._queue.topic,), self._queue.next_due())

    def _stop_watching(self) -> None:
        self._queue.stop_waiting(self._waker)

    def _settle_with_faults(self, settlements: Sequence[Settlement], now: float) -> list[BrokerError | None]:
        faults = self._broker.faults
        faults.check("settle", self._queue.topic)
        failures = faults.draw("settle", self._queue.topic, len(settlements))
        arrived = [s for s, failure in zip(settlements, failures, strict=True) if failure is None or failure.applied]
        settled = iter(self._queue.settle(self._member, arrived, now))
        results: list[BrokerError | None] = []
        for failure in failures:
            result = next(settled) if failure is None or failure.applied else None
            results.append(result if failure is None else failure.error)
        return results

    def _gone(self) -> NotFound:
        if self._topic.deleted:
            return TopicNotFound(f"Topic {self._topic.name!r} was deleted")
        return SubscriptionNotFound(f"Subscription {self._queue.name!r} of topic {self._queue.topic!r} was deleted")
