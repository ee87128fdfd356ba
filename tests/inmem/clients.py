"""Clients for tests of the in-memory broker: the driver contract without the facade."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Self, TypeVar

from broker.driver.contract import (
    MessageSource,
    MessageSubscription,
    RecordSource,
    RecordSubscription,
    Settlement,
    TopicPartition,
)
from broker.errors import BrokerError
from broker.hooks import Event, Hooks
from broker.messages import Message, Outcome
from broker.names import Ephemeral
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.records import Record
from broker_inmem import Broker, InmemSettings
from broker_inmem.backend import InmemBackend

MANY = 1 << 40

T = TypeVar("T")


class Listener:
    """Records the events of sources; `let_go` decides how long `revoking` takes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lost_messages: list[Message[Any]] = []
        self.assigned_partitions: list[TopicPartition] = []
        self.revoked: list[TopicPartition] = []
        self.lost_partitions: list[TopicPartition] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


class MessageListener(Listener):
    def lost(self, messages: Sequence[Message[Any]]) -> None:
        self.lost_messages += messages

    def expired(self, messages: Sequence[Message[Any]]) -> None: ...


class PartitionListener(Listener):
    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.assigned_partitions += partitions

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        self.revoked += partitions

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.lost_partitions += partitions


class Client:
    """One connection."""

    def __init__(self, broker: Broker, **settings: Any) -> None:
        self.backend = InmemBackend(InmemSettings(broker=broker, **settings), Hooks())

    async def __aenter__(self) -> Self:
        await self.backend.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.backend.close()

    async def topic(self, name: str = "orders", partitions: int | None = None, **options: Any) -> str:
        retention = options.pop("retention", None)
        await self.backend.admin().ensure_topic(name, partitions=partitions, retention=retention, options=options)
        return name

    async def publish(
        self, messages: Iterable[OutboundMessage | bytes | str], topic: str = "orders"
    ) -> Sequence[Receipt | BrokerError | None]:
        """Publish; a str is body and key."""
        return await self.backend.publish_target(topic).publish([_message(message) for message in messages])

    async def subscribe(
        self,
        topic: str = "orders",
        subscription: str | Ephemeral = "billing",
        listener: MessageListener | None = None,
        **options: Any,
    ) -> MessageSource:
        wanted = MessageSubscription(topic=topic, subscription=subscription, **options)
        return await self.backend.subscribe(wanted, listener or MessageListener())

    async def join(
        self,
        topics: Sequence[str] = ("orders",),
        group: str | Ephemeral = "audit",
        listener: PartitionListener | None = None,
        **options: Any,
    ) -> RecordSource:
        wanted = RecordSubscription(topics=topics, group=group, **options)
        return await self.backend.join(wanted, listener or PartitionListener())


async def published(
    client: Client, messages: Iterable[OutboundMessage | bytes | str], topic: str = "orders"
) -> list[Receipt]:
    """Publish; return the receipts, which must all be there."""
    receipts: list[Receipt] = []
    for outcome in await client.publish(messages, topic):
        assert isinstance(outcome, Receipt), outcome
        receipts.append(outcome)
    return receipts


def _message(message: OutboundMessage | bytes | str) -> OutboundMessage:
    if isinstance(message, OutboundMessage):
        return message
    return OutboundMessage(message.encode(), message) if isinstance(message, str) else OutboundMessage(message)


async def take(source: MessageSource, count: int = 1000, wait: float = 0.0) -> list[Message[Any]]:
    """The result of one fetch."""
    return list(await source.fetch(count, MANY, wait))


async def read(source: RecordSource, count: int = 1000, wait: float = 0.0) -> list[Record[Any]]:
    return list(await source.fetch(count, MANY, wait))


async def soon(call: Awaitable[T]) -> T:
    """The result of a sleeping call that must be woken, not time out."""
    async with asyncio.timeout(20):
        return await call


async def settle(
    source: MessageSource, messages: Iterable[Message[Any]], outcome: Outcome = Outcome.ACK, delay: float | None = None
) -> list[BrokerError | None]:
    return list(await source.settle([Settlement(message, outcome, delay) for message in messages]))


def bodies(envelopes: Iterable[Message[Any] | Record[Any]]) -> list[bytes]:
    """The bodies, without tombstones."""
    return [envelope.data for envelope in envelopes if envelope.data is not None]
