"""Transactional publishing over a scripted producer and a scripted record source, and over the in-memory broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import broker
from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    InvalidMessage,
    LeaseLost,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    PublishError,
    TransactionAborted,
    TransactionFatal,
    Unsupported,
)
from broker.hooks import Hooks, Published
from broker.outbound import OutboundMessage
from broker.protocols import TransactionalPublisher
from broker.publishing.transactions import TransactionalPublisherFacade, open_transactional_publisher
from broker.reading.record_consumer import RecordConsumer
from broker.receipts import Receipt
from broker.spi import RecordSource, RecordSubscription, TopicPartition
from tests.unit.record_fakes import FakeBackend, FakeSource

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)


class FakeProducer:
    """Does what it is told to, in order, and fails where it is told to."""

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

    async def publish(self, topic: str, messages: Sequence[OutboundMessage]) -> Sequence[Receipt | BrokerError]:
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


async def test_what_is_published_and_the_positions_are_committed_together() -> None:
    async with bench() as b:
        _typed: TransactionalPublisher = b.publisher
        b.source.append(1, 2)
        b.source.append(9, partition=1)
        async with b.publisher.transaction(b.consumer) as tx:
            await b.take(3)
            receipt = await tx.publish("out.topic", b"one", key="k", attributes={"a": "b"})
            assert isinstance(receipt, Receipt)
            assert len(await tx.publish_batch("out.topic", [b"two", OutboundMessage(b"three")])) == 2
            assert await tx.publish_batch("out.topic", []) == []
            assert b.source.stored == {}
        assert b.producer.calls == ["begin", "publish", "publish", "add_offsets", "commit"]
        assert [m.data for m in b.producer.committed] == [b"one", b"two", b"three"]
        assert b.producer.committed[0].key == b"k"
        assert b.source.stored == {P0: 3, P1: 10}
        assert b.source.commits == [], "never beside the transaction"
        await b.consumer.commit()
        assert b.source.commits == [], "what rode in a transaction is not committed again"


async def test_without_a_consumer_only_messages_are_committed() -> None:
    async with bench() as b:
        async with b.publisher.transaction() as tx:
            await tx.publish("out.topic", b"")
        assert b.producer.calls == ["begin", "publish", "commit"]


async def test_positions_committed_before_do_not_ride_again() -> None:
    async with bench() as b:
        b.source.append(1, 2)
        for expected in ({P0: 2}, {P0: 3}):
            async with b.publisher.transaction(b.consumer):
                await b.take(1)
            assert b.producer.offsets[-1] == expected
        async with b.publisher.transaction(b.consumer):
            pass
        assert b.producer.calls[-2:] == ["begin", "commit"]


async def test_an_exception_aborts_rewinds_and_is_raised_further() -> None:
    async with bench() as b:
        b.source.append(1, 2, 3)
        b.source.append(9, partition=1)
        await b.take(1)
        await b.consumer.commit()
        with pytest.raises(ZeroDivisionError):
            async with b.publisher.transaction(b.consumer) as tx:
                await b.take(2)
                await tx.publish("out.topic", b"x")
                raise ZeroDivisionError
        assert b.producer.calls == ["begin", "publish", "abort"]
        assert b.producer.committed == []
        assert b.source.seeks == [{P0: None, P1: None}]
        assert sorted(await b.take(3)) == [2, 3, 9]
        async with b.publisher.transaction(b.consumer):
            pass
        assert b.source.stored == {P0: 4, P1: 10}


async def test_an_aborted_commit_rewinds_and_can_be_done_again() -> None:
    async with bench() as b:
        b.source.append(1, 2)
        b.producer.errors["commit"] = TransactionAborted("rebalanced")
        for _ in range(2):
            try:
                async with b.publisher.transaction(b.consumer) as tx:
                    assert await b.take(2) == [1, 2]
                    await tx.publish("out.topic", b"x")
            except TransactionAborted:
                b.producer.pending = []
                b.producer.offsets.clear()
        assert b.producer.calls == 2 * ["begin", "publish", "add_offsets", "commit"], "undone is not aborted again"
        assert len(b.producer.committed) == 1
        assert b.source.stored == {P0: 3}


async def test_a_failed_commit_that_can_be_aborted_is_an_aborted_transaction() -> None:
    async with bench() as b:
        b.producer.errors["commit"] = ConnectionFailed("cut")
        with pytest.raises(TransactionAborted, match="cut") as caught:
            async with b.publisher.transaction(b.consumer):
                pass
        assert isinstance(caught.value.native, ConnectionFailed)
        assert b.producer.calls == ["begin", "commit", "abort"]
        assert b.source.seeks


async def test_a_commit_of_unknown_outcome_is_fatal() -> None:
    async with bench() as b:
        b.producer.errors["commit"] = OperationTimeout("no answer")
        b.producer.errors["abort"] = ConnectionFailed("cut")
        with pytest.raises(TransactionFatal, match="neither committed nor aborted"):
            async with b.publisher.transaction(b.consumer):
                pass
        with pytest.raises(TransactionFatal):
            async with b.publisher.transaction():
                pass


async def test_a_fenced_publisher_is_dead() -> None:
    async with bench() as b:
        b.source.append(1)
        b.producer.errors["commit"] = TransactionFatal("fenced")
        with pytest.raises(TransactionFatal, match="fenced"):
            async with b.publisher.transaction(b.consumer):
                await b.take(1)
        assert "abort" not in b.producer.calls
        assert b.source.seeks, "its consumer is rewound all the same"
        with pytest.raises(TransactionFatal, match="ended: fenced"):
            async with b.publisher.transaction(b.consumer):
                pass
        assert await b.take(1) == [1]
        await b.consumer.commit()


async def test_what_could_not_be_published_aborts_even_if_it_was_caught() -> None:
    async with bench() as b:
        b.producer.refuse.append(NotAuthorized("no"))
        with pytest.raises(TransactionAborted, match="no"):
            async with b.publisher.transaction(b.consumer) as tx:
                with pytest.raises(PublishError) as caught:
                    await tx.publish_batch("out.topic", [b"1", b"2"])
                assert [type(outcome) for outcome in caught.value.outcomes] == [NotAuthorized, Receipt]
        assert b.producer.calls[-1] == "abort"


async def test_errors_of_one_message_are_raised_as_they_are() -> None:
    async with bench() as b:
        b.producer.refuse.append(NotAuthorized("no"))
        with pytest.raises(NotAuthorized):
            async with b.publisher.transaction() as tx:
                await tx.publish("out.topic", b"1")
        b.producer.errors["publish"] = ConnectionFailed("cut")
        with pytest.raises(ConnectionFailed):
            async with b.publisher.transaction() as tx:
                await tx.publish("out.topic", b"1")
        b.producer.errors["publish"] = ZeroDivisionError("oops")
        with pytest.raises(BackendError):
            async with b.publisher.transaction() as tx:
                await tx.publish("out.topic", b"1")


async def test_a_message_that_is_refused_before_it_is_sent_does_not_spoil_the_transaction() -> None:
    async with bench() as b:
        async with b.publisher.transaction() as tx:
            with pytest.raises(MessageTooLarge):
                await tx.publish("out.topic", b"x" * 1001)
            with pytest.raises(MessageTooLarge):
                await tx.publish_batch("out.topic", [b"ok", b"x" * 1001])
            with pytest.raises(InvalidMessage):
                await tx.publish("out.topic", OutboundMessage(b"x"), key="k")
        assert b.producer.calls == ["begin", "commit"]


async def test_partitions_that_moved_abort_the_transaction() -> None:
    async with bench() as b:
        b.source.append(1)
        b.source.append(1, partition=1)
        with pytest.raises(TransactionAborted, match="moved"):
            async with b.publisher.transaction(b.consumer):
                await b.take(2)
                b.source.lose(0)
        assert "commit" not in b.producer.calls
        assert b.source.seeks == [{P1: None}]
        assert await b.take(1) == [1]


async def test_a_refused_position_aborts_the_transaction() -> None:
    async with bench() as b:
        b.source.append(1)
        b.producer.errors["add_offsets"] = LeaseLost("not yours")
        with pytest.raises(TransactionAborted, match="moved"):
            async with b.publisher.transaction(b.consumer):
                await b.take(1)
        assert b.producer.calls[-1] == "abort"


async def test_a_revocation_waits_for_the_transaction_that_its_records_ride_in() -> None:
    async with bench() as b:
        b.source.append(1)
        async with b.publisher.transaction(b.consumer):
            await b.take(1)
            idle = asyncio.create_task(b.source.revoke(1))
            revoking = asyncio.create_task(b.source.revoke(0))
            await asyncio.wait_for(idle, 5)
            assert not revoking.done(), "the other partition has nothing in the transaction"
        await asyncio.wait_for(revoking, 5)
        assert b.source.stored == {P0: 2}


async def test_an_abort_does_not_wait_for_a_revocation_that_waits_for_it() -> None:
    async with bench() as b:
        b.source.append(1)
        revoking: list[asyncio.Task[None]] = []
        with pytest.raises(ZeroDivisionError):
            async with b.publisher.transaction(b.consumer):
                await b.take(1)
                revoking.append(asyncio.create_task(b.source.revoke(0, within=60)))
                await asyncio.sleep(0)
                raise ZeroDivisionError
        await asyncio.wait_for(revoking[0], 5)
        assert b.source.stored == {}


async def test_transactions_neither_nest_nor_overlap() -> None:
    async with bench() as b:
        other = TransactionalPublisherFacade("tx-2", FakeProducer(), b.backend.capabilities, b.hooks)
        async with b.publisher.transaction(b.consumer):
            with pytest.raises(Unsupported, match="do not nest"):
                async with b.publisher.transaction():
                    pass
            with pytest.raises(Unsupported, match="positions ride in it"):
                async with other.transaction(b.consumer):
                    pass
            with pytest.raises(Unsupported, match="positions ride in it"):
                await b.consumer.commit()
        async with other.transaction(b.consumer):
            pass
        async with b.publisher.transaction():
            pass


async def test_a_consumer_of_another_kind_is_refused() -> None:
    async with bench() as b:
        stranger: Any = object()
        with pytest.raises(ConfigurationError, match=r"bus\.records"):
            b.publisher.transaction(stranger)


async def test_a_transaction_that_is_over_publishes_nothing() -> None:
    async with bench() as b:
        async with b.publisher.transaction() as tx:
            pass
        with pytest.raises(Closed):
            await tx.publish("out.topic", b"late")
        await b.publisher.close()
        await b.publisher.close()
        assert b.producer.calls.count("close") == 1
        with pytest.raises(Closed):
            async with b.publisher.transaction():
                pass


async def test_a_failed_begin_leaves_the_consumer_free() -> None:
    async with bench() as b:
        b.producer.errors["begin"] = ConnectionFailed("cut")
        with pytest.raises(ConnectionFailed):
            async with b.publisher.transaction(b.consumer):
                pass
        async with b.publisher.transaction(b.consumer):
            pass


async def test_cancellation_inside_the_block_aborts() -> None:
    async with bench() as b:
        b.source.append(1)
        inside = asyncio.Event()

        async def work() -> None:
            async with b.publisher.transaction(b.consumer):
                await b.take(1)
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.wait_for(inside.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert b.producer.calls == ["begin", "abort"]
        assert await b.take(1) == [1]


@pytest.mark.parametrize("step", ["begin", "publish", "commit"])
async def test_a_cancelled_step_is_carried_out_and_then_ended(step: str) -> None:
    async with bench() as b:
        gate = b.producer.gates[step] = asyncio.Event()

        async def work() -> None:
            async with b.publisher.transaction(b.consumer) as tx:
                await tx.publish("out.topic", b"x")

        task = asyncio.create_task(work())
        await asyncio.wait_for(b.producer.begun[step].wait(), 5)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await b.publisher.close()
        ends = {"begin": "abort", "publish": "abort", "commit": "commit"}
        assert b.producer.calls[-2:] == [ends[step], "close"]
        await b.consumer.commit()


async def test_a_consumer_that_cannot_be_rewound_ends() -> None:
    async with bench() as b:
        b.source.append(1, 2)

        async def refuse(positions: Any) -> None:
            raise NotAuthorized("no seek")

        with pytest.raises(ZeroDivisionError):
            async with b.publisher.transaction(b.consumer):
                await b.take(1)
                b.source.seek = refuse
                raise ZeroDivisionError
        with pytest.raises(NotAuthorized):
            await b.consumer.next_batch()


async def test_hooks_see_and_change_what_is_published() -> None:
    async with bench() as b:
        events: list[Any] = []
        b.hooks.listen(events.append)
        b.hooks.on_publish(lambda topic, messages: [OutboundMessage(m.data, b"traced") for m in messages])

        def broken(topic: str, messages: Sequence[OutboundMessage]) -> Sequence[OutboundMessage]:
            raise ZeroDivisionError

        b.hooks.on_publish(broken)
        async with b.publisher.transaction() as tx:
            await tx.publish("out.topic", b"x")
        assert b.producer.committed[0].key == b"traced"
        assert [type(event) for event in events if isinstance(event, Published)] == [Published]


async def test_a_backend_without_transactions_says_so_at_open() -> None:
    backend: Any = FakeBackend()
    capabilities = replace(backend.capabilities, publish=replace(backend.capabilities.publish, transactions=False))
    with pytest.raises(Unsupported):
        async with open_transactional_publisher("tx-1", backend, capabilities, Hooks(), lambda: None):
            pass


# -- on the in-memory broker ---------------------------------------------------------------------------------


async def test_consume_process_produce_in_memory() -> None:
    async with broker.connect("inmem:") as bus:
        await bus.admin.ensure_topic("tx.in", partitions=2)
        await bus.admin.ensure_topic("tx.out", partitions=1)
        await bus.topic("tx.in").publish_batch([OutboundMessage(b"%d" % n, key=b"%d" % n) for n in range(20)])
        failures = 2
        async with (
            bus.records("tx.in", group="work") as source,
            bus.transactional_publisher("doubler") as publisher,
        ):
            seen = 0
            while seen < 20:
                batch_size = 0
                try:
                    async with publisher.transaction(source) as tx:
                        batch = await source.next_batch(7, timeout=5)
                        batch_size = len(batch)
                        await tx.publish_batch("tx.out", [b"%d" % (2 * int(r.data or b"")) for r in batch])
                        if failures:
                            failures -= 1
                            raise ZeroDivisionError
                except ZeroDivisionError:
                    continue
                seen += batch_size
        async with bus.records("tx.out", group="check", stop_when_idle=0.1) as check:
            values = sorted([int(r.data or b"") async for r in check])
        assert values == [2 * n for n in range(20)], "each once, in spite of the aborts"
        async with bus.records("tx.in", group="work", stop_when_idle=0.05) as rest:
            assert [r async for r in rest] == []


async def test_a_second_publisher_of_the_id_fences_the_first_in_memory() -> None:
    async with broker.connect("inmem:") as bus:
        await bus.admin.ensure_topic("fenced.out")
        async with bus.transactional_publisher("one") as first:
            with pytest.raises(TransactionFatal):
                async with first.transaction() as tx:
                    await tx.publish("fenced.out", b"lost")
                    async with bus.transactional_publisher("one") as second, second.transaction() as other:
                        await other.publish("fenced.out", b"kept")
        async with bus.records("fenced.out", group="check", stop_when_idle=0.1) as check:
            assert [r.data async for r in check] == [b"kept"]
