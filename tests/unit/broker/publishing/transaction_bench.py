"""A transactional publisher over a scripted producer, with a record consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

from broker.driver.contract import RecordSource, RecordSubscription, TopicPartition
from broker.errors import BrokerError
from broker.hooks import Hooks
from broker.outbound import OutboundMessage
from broker.publishing.transactions import TransactionalPublisherFacade
from broker.reading.record_consumer import RecordConsumer
from broker.receipts import Receipt
from tests.unit.broker.reading.record_fakes import FakeBackend, FakeSource

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)


class FakeProducer:
    """A scripted transaction: records its calls in order, and fails where the script says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.offsets: list[Mapping[TopicPartition, int]] = []
        self.committed: list[OutboundMessage] = []
        self.pending: list[OutboundMessage] = []
        self.refuse: list[BrokerError] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.begun = {name: asyncio.Event() for name in ("begin", "publish", "add_offsets", "commit", "abort")}
        self.source: FakeSource | None = None

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        self.begun[name].set()
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.errors:
            raise self.errors.pop(name)

    async def begin(self) -> None:
        await self._do("begin")

    async def publish(
        self, topic: str, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        await self._do("publish")
        outcomes: list[Receipt | BrokerError] = []
        for message in messages:
            if self.refuse:
                outcomes.append(self.refuse.pop(0))
            else:
                self.pending.append(message)
                outcomes.append(Receipt(str(len(self.pending))))
        return outcomes

    async def add_offsets(self, source: RecordSource, positions: Mapping[TopicPartition, int]) -> None:
        await self._do("add_offsets")
        self.offsets.append(dict(positions))

    async def commit(self) -> None:
        await self._do("commit")
        self.committed += self.pending
        self.pending = []
        if self.source is not None:
            for positions in self.offsets:
                self.source.stored.update(positions)

    async def abort(self) -> None:
        await self._do("abort")
        self.pending = []
        self.offsets.clear()

    async def close(self) -> None:
        self.calls.append("close")


class Bench:
    def __init__(self) -> None:
        self.source = FakeSource((0, 1))
        self.backend = FakeBackend(self.source)
        self.hooks = Hooks()
        self.producer = FakeProducer()
        self.producer.source = self.source
        self.publisher = TransactionalPublisherFacade("tx-1", self.producer, self.backend.capabilities, self.hooks)
        self.consumer: RecordConsumer[bytes] = RecordConsumer(
            self.backend,  # pyright: ignore[reportArgumentType]
            RecordSubscription(topics=["orders"], group="audit"),
            hooks=self.hooks,
        )

    async def take(self, count: int) -> list[int]:
        offsets: list[int] = []
        while len(offsets) < count:
            offsets += [r.offset for r in await self.consumer.next_batch(count - len(offsets), timeout=5)]
        return offsets


@asynccontextmanager
async def bench() -> AsyncGenerator[Bench]:
    made = Bench()
    async with made.consumer:
        yield made
