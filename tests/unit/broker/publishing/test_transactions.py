"""Transactions: atomic commits, refusals, and consume-process-produce on the in-memory broker."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import broker
from broker.errors import (
    Closed,
    ConfigurationError,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    OffsetOutOfRange,
    TransactionAborted,
    Unsupported,
)
from broker.hooks import Hooks, PublishCall, Published
from broker.outbound import OutboundMessage
from broker.protocols import TransactionalPublisher
from broker.publishing.transactions import TransactionalPublisherFacade, open_transactional_publisher
from broker.receipts import Receipt
from tests.unit.broker.publishing.transaction_bench import P0, P1, FakeProducer, bench
from tests.unit.broker.reading.record_fakes import FakeBackend


async def test_messages_and_positions_are_committed_together() -> None:
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
            for batch in (b"abc", "abc", None):
                with pytest.raises(InvalidMessage, match="It takes a list of messages"):
                    await tx.publish_batch("out.topic", batch)  # type: ignore[arg-type]
            assert b.source.stored == {}
        assert b.producer.calls == ["begin", "publish", "publish", "add_offsets", "commit"]
        assert [m.data for m in b.producer.committed] == [b"one", b"two", b"three"]
        assert b.producer.committed[0].key == b"k"
        assert b.source.stored == {P0: 3, P1: 10}
        assert b.source.commits == [], "never beside the transaction"
        await b.consumer.commit()
        assert b.source.commits == [], "what rode in a transaction is not committed again"


async def test_many_are_published_without_receipts() -> None:
    async with bench() as b:
        async with b.publisher.transaction() as tx:
            await tx.publish_batch("out.topic", [b"one", OutboundMessage(b"two")], receipts=False)
            await tx.publish_batch("out.topic", [], receipts=False)
            with pytest.raises(InvalidMessage, match="It takes a list of messages"):
                await tx.publish_batch("out.topic", b"abc", receipts=False)  # type: ignore[arg-type]
        assert b.producer.calls == ["begin", "publish", "commit"]
        assert [m.data for m in b.producer.committed] == [b"one", b"two"]
        with pytest.raises(Closed):
            await tx.publish_batch("out.topic", [b"late"], receipts=False)


async def test_without_a_consumer_only_messages_are_committed() -> None:
    async with bench() as b:
        async with b.publisher.transaction() as tx:
            await tx.publish("out.topic", b"")
        assert b.producer.calls == ["begin", "publish", "commit"]


async def test_positions_committed_before_are_not_added_again() -> None:
    async with bench() as b:
        b.source.append(1, 2)
        for expected in ({P0: 2}, {P0: 3}):
            async with b.publisher.transaction(b.consumer):
                await b.take(1)
            assert b.producer.offsets[-1] == expected
        async with b.publisher.transaction(b.consumer):
            pass
        assert b.producer.calls[-2:] == ["begin", "commit"]


async def test_a_message_refused_before_sending_does_not_abort_the_transaction() -> None:
    async with bench() as b:
        async with b.publisher.transaction() as tx:
            with pytest.raises(MessageTooLarge):
                await tx.publish("out.topic", b"x" * 1001)
            with pytest.raises(MessageTooLarge):
                await tx.publish_batch("out.topic", [b"ok", b"x" * 1001])
            with pytest.raises(InvalidMessage):
                await tx.publish("out.topic", OutboundMessage(b"x"), key="k")
        assert b.producer.calls == ["begin", "commit"]


async def test_transactions_neither_nest_nor_overlap() -> None:
    async with bench() as b:
        other = TransactionalPublisherFacade("tx-2", FakeProducer(), b.backend.capabilities, b.hooks)
        async with b.publisher.transaction(b.consumer):
            with pytest.raises(Unsupported, match="neither nest nor overlap"):
                async with b.publisher.transaction():
                    pass
            with pytest.raises(Unsupported, match="commits its positions"):
                async with other.transaction(b.consumer):
                    pass
            with pytest.raises(Unsupported, match="commits its positions"):
                await b.consumer.commit()
        async with other.transaction(b.consumer):
            pass
        async with b.publisher.transaction():
            pass


async def test_a_consumer_of_another_kind_is_refused() -> None:
    async with bench() as b:
        no_consumer: Any = object()
        with pytest.raises(ConfigurationError, match=r"bus\.records"):
            b.publisher.transaction(no_consumer)


async def test_an_ended_transaction_publishes_nothing() -> None:
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


async def test_a_failed_begin_releases_the_consumer() -> None:
    async with bench() as b:
        b.producer.errors["begin"] = ConnectionFailed("cut")
        with pytest.raises(ConnectionFailed):
            async with b.publisher.transaction(b.consumer):
                pass
        async with b.publisher.transaction(b.consumer):
            pass


async def test_hooks_see_and_change_the_published_messages() -> None:
    async with bench() as b:
        events: list[Any] = []
        b.hooks.listen(events.append)
        outcomes: list[Any] = []

        @contextmanager
        def traced(call: PublishCall) -> Generator[None]:
            call.messages = [OutboundMessage(message.data, b"traced") for message in call.messages]
            yield
            outcomes.extend(call.outcomes)

        @contextmanager
        def broken(call: PublishCall) -> Generator[None]:
            raise ZeroDivisionError
            yield

        b.hooks.around_publishing(traced)
        b.hooks.around_publishing(broken)
        async with b.publisher.transaction() as tx:
            await tx.publish("out.topic", b"x")
        assert b.producer.committed[0].key == b"traced"
        assert [type(outcome) for outcome in outcomes] == [Receipt]
        assert [type(event) for event in events if isinstance(event, Published)] == [Published]


async def test_the_next_transaction_waits_for_the_end_of_a_cancelled_one() -> None:
    async with bench() as b:
        b.producer.gates["abort"] = asyncio.Event()

        async def block() -> None:
            async with b.publisher.transaction(b.consumer) as tx:
                await tx.publish("out.topic", b"undone")
                await asyncio.Event().wait()

        cancelled = asyncio.ensure_future(block())
        await b.producer.begun["publish"].wait()
        # Once in the block, and once more during the abort.
        cancelled.cancel()
        await b.producer.begun["abort"].wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled

        async def following() -> None:
            async with b.publisher.transaction(b.consumer) as tx:
                await tx.publish("out.topic", b"done")

        entering = asyncio.ensure_future(following())
        await asyncio.sleep(0)
        b.producer.gates["abort"].set()
        await entering
        assert [m.data for m in b.producer.committed] == [b"done"]


async def test_a_backend_without_transactions_says_so_at_open() -> None:
    backend: Any = FakeBackend()
    capabilities = replace(backend.capabilities, publish=replace(backend.capabilities.publish, transactions=False))
    with pytest.raises(Unsupported):
        async with open_transactional_publisher("tx-1", backend, capabilities, Hooks(), lambda: None):
            pass


# -- on the in-memory broker ---------------------------------------------------------------------------------


async def test_a_consumer_of_another_broker_is_refused_in_memory() -> None:
    async with broker.connect("inmem://here") as bus, broker.connect("inmem://there") as other:
        await other.admin.ensure_topic("elsewhere")
        async with other.records("elsewhere", group="work") as source, bus.transactional_publisher("one") as publisher:
            with pytest.raises(ConfigurationError, match=r"another broker.*on one bus"):
                async with publisher.transaction(source):
                    pytest.fail("the transaction cannot commit its positions")
            async with publisher.transaction():
                pass
            await source.commit()


async def test_own_positions_are_committed_instead_of_all_that_was_handed_over() -> None:
    async with bench() as b:
        b.source.append(*range(10))
        done: dict[tuple[str, int], int] = {}
        async with b.publisher.transaction(b.consumer, positions=done) as tx:
            await b.take(10)
            await tx.publish("out.topic", b"one")
            done[P0] = 3
        assert b.source.stored == {P0: 3}
        async with b.publisher.transaction(b.consumer, positions=lambda: {P0: 5}) as tx:
            await tx.publish("out.topic", b"two")
        assert b.source.stored == {P0: 5}
        async with b.publisher.transaction(b.consumer, positions={}) as tx:
            await tx.publish("out.topic", b"three")
        assert b.producer.offsets == [{P0: 3}, {P0: 5}]
        async with b.publisher.transaction(b.consumer):
            pass
        assert b.source.stored == {P0: 10}


async def test_own_positions_that_change_nothing_fence_the_transaction_too() -> None:
    async with bench() as b:
        b.source.append(*range(3))
        await b.take(3)
        await b.consumer.commit()
        async with b.publisher.transaction(b.consumer, positions={P0: 3}) as tx:
            await tx.publish("out.topic", b"a timer's")
        # The group's generation goes with the positions, so a member that lost its partitions is refused.
        assert b.producer.offsets == [{P0: 3}]


@pytest.mark.parametrize(
    ("positions", "error"),
    [
        ({P0: 11}, OffsetOutOfRange),
        (lambda: {P0: 2}, OffsetOutOfRange),
        (lambda: 5, ConfigurationError),
        (lambda: 1 // 0, ZeroDivisionError),
    ],
)
async def test_refused_positions_abort_the_transaction_and_are_raised(positions: Any, error: type[Exception]) -> None:
    async with bench() as b:
        b.source.append(*range(10))
        await b.take(3)
        await b.consumer.commit()
        with pytest.raises(error):
            async with b.publisher.transaction(b.consumer, positions=positions) as tx:
                await tx.publish("out.topic", b"one")
        assert b.producer.calls == ["begin", "publish", "abort"]
        assert b.producer.committed == []
        assert b.source.stored == {P0: 3}
        await b.take(7)
        async with b.publisher.transaction(b.consumer, positions={P0: 4}):
            pass
        assert b.source.stored == {P0: 4}


async def test_positions_of_a_lost_partition_abort_the_transaction() -> None:
    async with bench() as b:
        b.source.append(1)
        text = r"Partition 1 of topic 'orders' is not assigned .* group 'audit', which has 'orders'\[0\]"
        with pytest.raises(TransactionAborted, match=text):
            async with b.publisher.transaction(b.consumer, positions={P0: 2, P1: 1}):
                await b.take(1)
                b.source.lose(1)
        assert b.producer.calls == ["begin", "abort"]
        assert b.source.stored == {}


async def test_positions_without_a_consumer_or_of_another_type_are_refused() -> None:
    async with bench() as b:
        with pytest.raises(ConfigurationError, match="has no consumer"):
            b.publisher.transaction(positions={})
        with pytest.raises(ConfigurationError, match="positions"):
            b.publisher.transaction(b.consumer, positions=5)  # type: ignore[arg-type]
