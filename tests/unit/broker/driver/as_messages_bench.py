"""Records served as messages over a scripted source, driven without a message consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from broker.driver.as_messages.source import RecordsAsMessages
from broker.driver.contract import RecordSubscription, Settlement, TopicPartition
from broker.hooks import Event, Hooks
from broker.messages import Message, Outcome
from tests.unit.broker.reading.record_fakes import FakeBackend, FakeSource

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)
ACK, NACK, REJECT, RELEASE = Outcome.ACK, Outcome.NACK, Outcome.REJECT, Outcome.RELEASE
PLENTY = 1 << 30


class Listener:
    """The listener of the source, in place of a message consumer."""

    def __init__(self) -> None:
        self.gone: list[Message[Any]] = []
        self.events: list[Event] = []

    def lost(self, messages: Sequence[Message[Any]]) -> None:
        self.gone.extend(messages)

    def expired(self, messages: Sequence[Message[Any]]) -> None: ...

    def event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if type(event) is kind]


class Bench:
    def __init__(self, messages: RecordsAsMessages, records: FakeSource, listener: Listener) -> None:
        self.messages = messages
        self.records = records
        self.listener = listener

    async def fetch(self, count: int = 1000, wait: float = 5) -> list[Message[Any]]:
        return list(await self.messages.fetch(count, PLENTY, wait))

    async def hand_over(self) -> list[Message[Any]]:
        """Fetch, and mark the messages as delivered, as a consumer does."""
        messages = await self.fetch()
        for message in messages:
            message.lease_ends = 1e9
        return messages

    async def settle(self, outcome: Outcome, *messages: Message[Any], delay: float | None = None) -> list[Any]:
        return list(await self.messages.settle([Settlement(message, outcome, delay) for message in messages]))

    async def stored(self, position: int, partition: TopicPartition = P0) -> None:
        async with asyncio.timeout(60):
            while self.records.stored.get(partition) != position:
                await asyncio.sleep(0)


async def bench(*partitions: int, **options: Any) -> Bench:
    records = FakeSource(partitions or (0,))
    backend: Any = FakeBackend(records)
    listener = Listener()
    options = {"commit_every": 1, **options}
    messages = RecordsAsMessages(listener, hooks=Hooks(), **options)
    await messages.join(backend, RecordSubscription(topics=["orders"], group="billing"))
    return Bench(messages, records, listener)


def offsets(messages: Sequence[Message[Any]]) -> list[int]:
    return [int(message.data or b"") for message in messages]


async def turns(count: int = 20) -> None:
    """Let other tasks run for `count` turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)
