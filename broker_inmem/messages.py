"""One consumer of one subscription of an in-memory server.

`fetch` sleeps without polling: it is woken by what is published or comes back, by the server's clock when a
lease or a delay ends, and by its own `wait`. Settling never suspends. When the connection breaks, the consumer
learns at once which of its messages come again, the running or next fetch raises, and the one after works again
as soon as the server is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from broker.errors import BrokerError, Closed, ConnectionFailed, NotFound, SubscriptionNotFound, TopicNotFound
from broker.hooks import Connected, Disconnected
from broker.messages import Message
from broker.names import Ephemeral
from broker.spi import MessageSubscription, Settlement, SourceListener
from broker_inmem.connections import Connection
from broker_inmem.server import Broker
from broker_inmem.waiting import Waker

__all__ = ["InmemMessageSource"]


class InmemMessageSource:
    """Implements `broker.spi.MessageSource`."""

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
        self._broker = broker
        self._connection = connection
        self._listener = listener
        self._on_close = on_close
        self._waker = Waker()
        self._held: dict[int, Message[Any]] = {}
        self._fetching = False
        self._interrupted = False
        self._closed = False
        self._broken: BrokerError | None = None
        self._lost = False
        self._disconnected = False
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
        broker, queue, waker, clock = self._broker, self._queue, self._waker, self._broker.clock
        self._fetching, self._interrupted = True, False
        until = waker.loop.time() + wait
        slow = broker.faults.fetch_delay
        try:
            if slow > 0:
                await self._pause(clock.time() + slow)
            while True:
                with broker.lock:
                    self._check("fetch")
                    now = clock.time()
                    broker.topic(queue.topic, now)
                    messages = queue.take(self._member, max_messages, max_bytes, now)
                    if messages:
                        for message in messages:
                            self._held[message.lease.tag] = message
                        return messages
                    if self._interrupted or waker.loop.time() >= until:
                        return messages
                    waker.prepare()
                    queue.waiters.append(waker)
                    due = broker.next_due((queue.topic,), queue.next_due())
                try:
                    await waker.wait(clock, due, until)
                finally:
                    with broker.lock:
                        queue.stop_waiting(waker)
        except Closed:
            if self._interrupted:
                return []
            raise
        finally:
            self._fetching = False

    def interrupt(self) -> None:
        if self._fetching:
            self._interrupted = True
            self._waker.wake()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        broker, queue, held = self._broker, self._queue, self._held
        for settlement in settlements:
            held.pop(settlement.message.lease.tag, None)
        with broker.lock:
            self._check_open()
            now = broker.clock.time()
            if queue.deleted:
                return [self._gone() for _ in settlements]
            if broker.faults.armed:
                return self._settle_faultily(settlements, now)
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
        self._held.clear()
        self._interrupted = True
        self._waker.wake()
        self._on_close(self)

    def broken(self, *, lost: bool) -> None:
        """The connection broke; called by the server, under its lock."""
        self._broken = ConnectionFailed(f"The connection to the in-memory broker {self._broker.name!r} broke")
        self._lost = self._lost or lost
        self._waker.call(self._report_break)

    def _report_break(self) -> None:
        self._waker.wake()
        if self._closed:
            return
        if not self._disconnected:
            self._disconnected = True
            self._listener.event(Disconnected(server=self._broker.url, error=self._broken))
        if self._lost and self._held:
            lost, self._held = list(self._held.values()), {}
            self._listener.lost(lost)
        self._lost = False

    def _check(self, operation: Any) -> None:
        """Pass if a fetch can reach the server; report that it can again."""
        if self._closed:
            raise Closed(f"The consumer of subscription {self._queue.name!r} was closed")
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken if self._connection.usable else self._connection.error()
        self._connection.check()
        if self._disconnected:
            self._disconnected = False
            self._waker.call(self._listener.event, Connected(server=self._broker.url, again=True))
        if self._broker.faults.armed:
            self._broker.faults.check(operation, self._queue.topic)
            self._queue.duplicate = self._broker.faults.after_take
        else:
            self._queue.duplicate = None
        if self._queue.deleted:
            raise self._gone()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The consumer of subscription {self._queue.name!r} was closed")
        self._connection.check()

    def _settle_faultily(self, settlements: Sequence[Settlement], now: float) -> list[BrokerError | None]:
        faults = self._broker.faults
        faults.check("settle", self._queue.topic)
        fates = faults.draw("settle", self._queue.topic, len(settlements))
        arrived = [s for s, fate in zip(settlements, fates, strict=True) if fate is None or fate.applied]
        results = iter(self._queue.settle(self._member, arrived, now))
        told: list[BrokerError | None] = []
        for fate in fates:
            result = next(results) if fate is None or fate.applied else None
            told.append(result if fate is None else fate.error)
        return told

    async def _pause(self, due: float) -> None:
        while not self._interrupted and not self._closed and self._broker.clock.time() < due:
            self._waker.prepare()
            await self._waker.wait(self._broker.clock, due, self._waker.loop.time() + 3600.0)

    def _gone(self) -> NotFound:
        if self._topic.deleted:
            return TopicNotFound(f"Topic {self._topic.name!r} was deleted")
        return SubscriptionNotFound(f"Subscription {self._queue.name!r} of topic {self._queue.topic!r} was deleted")
