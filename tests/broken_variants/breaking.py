"""Base classes of the variants: thin wrappers of the in-memory backend that change one thing each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from broker.bus import Bus
from broker.driver.contract import Backend, MessageSubscription, RecordSubscription, Settlement, TopicPartition
from broker.driver.settings import BackendSettings
from broker.errors import BrokerError
from broker.hooks import Event, Hooks
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.registry import create_backend
from broker.testing.faults import Wrapped
from broker.threads.messages import BlockingMessage
from broker.threads.portal import Portal
from tests.conformance.inmem_harness import InmemHarness


class BrokenBackend(Wrapped):
    """A working backend; variants override what they break, or set the class of a source or target."""

    target_class: type[BrokenTarget]
    source_class: type[BrokenSource]
    records_class: type[BrokenRecords]
    transaction_class: type[Wrapped] = Wrapped
    admin_class: type[Wrapped] = Wrapped

    def topic_name(self, topic: str) -> str:
        return topic

    def admin(self) -> Any:
        return self.admin_class(self.inner.admin())

    def publish_target(self, topic: str) -> Any:
        return self.target_class(self.inner.publish_target(self.topic_name(topic)), self, topic)

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        wanted = replace(subscription, topic=self.topic_name(subscription.topic))
        return self.source_class(await self.inner.subscribe(wanted, listener), self, subscription)

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        return self.records_class(await self.inner.join(subscription, listener), self, subscription)

    async def transaction(self, transactional_id: str) -> Any:
        return self.transaction_class(await self.inner.transaction(transactional_id))


class BrokenTarget(Wrapped):
    """Publishes the result of `change` for each message."""

    def __init__(self, inner: Any, backend: BrokenBackend, topic: str) -> None:
        super().__init__(inner)
        self.backend = backend
        self.topic = topic

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return message

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        return await self.inner.publish([self.change(message) for message in messages], receipts=receipts)


class BrokenSource(Wrapped):
    """Settles with the result of `change` for each settlement."""

    def __init__(self, inner: Any, backend: BrokenBackend, subscription: MessageSubscription) -> None:
        super().__init__(inner)
        self.backend = backend
        self.subscription = subscription

    def change(self, settlement: Settlement) -> Settlement:
        return settlement

    def show(self, message: Message[Any]) -> Message[Any]:
        return message

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        return [self.show(message) for message in await self.inner.fetch(max_messages, max_bytes, wait)]

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        return await self.inner.settle([self.change(settlement) for settlement in settlements])


class BrokenRecords(Wrapped):
    """Commits the result of `change` for each position."""

    def __init__(self, inner: Any, backend: BrokenBackend, subscription: RecordSubscription) -> None:
        super().__init__(inner)
        self.backend = backend
        self.subscription = subscription

    def change(self, partition: TopicPartition, position: int) -> int:
        return position

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        return await self.inner.commit({at: self.change(at, position) for at, position in positions.items()})


BrokenBackend.target_class = BrokenTarget
BrokenBackend.source_class = BrokenSource
BrokenBackend.records_class = BrokenRecords


class BrokenAdmin(Wrapped):
    """Administration; variants override what they break."""


class BrokenView(Wrapped):
    """A view that shows one thing wrongly; variants override it."""


class LossyConsumer(Wrapped):
    """A consumer that suspends once more between taking a message and delivering it."""

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.inner.__aexit__(*error)

    async def next_message(self, timeout: float | None = None) -> Any:
        message = await self.inner.next_message(timeout)
        await asyncio.sleep(0)
        return message


class CancellableOwner(Wrapped):
    """Settles a message in the caller's task, which may be cancelled first."""

    async def settle(self, message: Message[Any], outcome: Outcome, delay: float | None, reason: str) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        await self.inner.settle(message, outcome, delay, reason)


class CarelessConsumer(LossyConsumer):
    """A consumer whose settlements run in the caller's task."""

    async def next_message(self, timeout: float | None = None) -> Any:
        message = await self.inner.next_message(timeout)
        if message is not None:
            message.owner = CancellableOwner(message.owner)
        return message


class StandingConsumer(LossyConsumer):
    """A consumer that calls plain handlers on the event loop."""

    async def receive(self, handler: Callable[[Any], Any], *, concurrency: int = 1) -> None:
        portal = Portal.to_running_loop()

        async def call(message: Message[Any]) -> None:
            handler(BlockingMessage(message, portal, Hooks()))

        await self.inner.receive(call, concurrency=concurrency)


class BrokenBus(Bus):
    """A bus whose message consumers are wrapped."""

    consumer_class: type[LossyConsumer] = LossyConsumer

    def messages(self, *args: Any, **options: Any) -> Any:
        return self.consumer_class(super().messages(*args, **options))


class CarelessBus(BrokenBus):
    consumer_class = CarelessConsumer


class StandingBus(BrokenBus):
    consumer_class = StandingConsumer


class BrokenHarness(InmemHarness):
    """Wraps every connection in the variant. Its patience is short, because a lost message never arrives."""

    patience = 1.0
    backend_class: type[BrokenBackend] = BrokenBackend
    bus_class: type[Bus] = Bus
    slips: ClassVar[list[BaseException]] = []
    """Errors in the code of the variants themselves: such a variant proves nothing."""

    def open_bus(self, url: str | BackendSettings, wrap: Callable[[Backend], Backend] | None) -> Bus:
        hooks = Hooks()
        hooks.listen(self._note_slip)
        backend: Any = self.backend_class(create_backend(url, hooks))
        return self.bus_class(backend if wrap is None else wrap(backend), hooks)

    async def crash(self, bus: Bus) -> None:
        self.broker.faults.kill(_whole(bus))

    async def isolate(self, bus: Bus) -> None:
        self.broker.faults.isolate(_whole(bus))

    async def heal(self, bus: Bus) -> None:
        self.broker.faults.heal(_whole(bus))

    def _note_slip(self, event: Event) -> None:
        native = getattr(getattr(event, "error", None), "native", None)
        if isinstance(native, (AttributeError, NameError, TypeError)):
            self.slips.append(native)


def _whole(bus: Bus) -> Any:
    """The backend below all wrappers."""
    inner: Any = bus.backend
    while isinstance(inner, Wrapped):
        inner = inner.inner
    return inner
