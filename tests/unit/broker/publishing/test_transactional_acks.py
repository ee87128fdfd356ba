"""Messages acked in a transaction: their state until the commit, and after an abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from broker.capabilities import Capabilities, PublishCapabilities
from broker.driver.contract import MessageSource
from broker.errors import (
    AlreadySettled,
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    LeaseLost,
    TransactionAborted,
    TransactionFatal,
    Unsupported,
)
from broker.hooks import Event, Hooks, LeaseExpired, SettleFailed
from broker.messages import Message, MessageBatch, Outcome, SettleState
from broker.publishing.transactions import TransactionalPublisherFacade
from tests.unit.broker.consuming.scripted_source import VIEW, Raw, ScriptedSource, consuming, received, until
from tests.unit.broker.publishing.transaction_bench import FakeProducer


class AckingProducer(FakeProducer):
    """Also takes acks; refuses those of messages in `lost`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun["acks"] = asyncio.Event()
        self.acked: list[str] = []
        self.held_again: list[str] = []
        self.lost: set[str] = set()
        self.refuses: Unsupported | None = None

    def check_source(self, source: MessageSource) -> None:
        if self.refuses is not None:
            raise self.refuses

    async def add_acks(self, source: MessageSource, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        await self._do("acks")
        self.acked += [message.id for message in messages]
        return [LeaseLost(f"{message.id} is lost") if message.id in self.lost else None for message in messages]

    def acks_aborted(self, source: MessageSource, messages: Sequence[Message[Any]]) -> None:
        self.held_again += [message.id for message in messages]


def publisher_over(producer: FakeProducer) -> TransactionalPublisherFacade:
    capabilities = Capabilities(backend="scripted", publish=PublishCapabilities(transactions=True))
    return TransactionalPublisherFacade("tx-1", producer, capabilities, Hooks())


@pytest.fixture
async def producer() -> AckingProducer:
    return AckingProducer()


@pytest.fixture
async def publisher(producer: AckingProducer) -> AsyncIterator[TransactionalPublisherFacade]:
    made = publisher_over(producer)
    yield made
    await made.close()


def source_of(*ids: str) -> ScriptedSource:
    source = ScriptedSource(redelivers=False)
    source.add(*ids)
    return source


async def test_the_commit_acks_and_acks_are_written_last(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    source = source_of("1", "2", "3")
    async with consuming(source, max_outstanding=3) as consumer:
        async with publisher.transaction() as tx:
            await tx.ack(first := await received(consumer))
            await tx.ack_batch(rest := await consumer.next_batch(2, timeout=5))
            await tx.publish("out", b"x")
            assert "acks" not in producer.calls
            assert first.state is SettleState.SETTLING
        assert producer.calls == ["begin", "publish", "acks", "commit"]
        assert producer.acked == ["1", "2", "3"]
        assert {message.state for message in (first, *rest)} == {SettleState.SETTLED}
        source.add("4")
        assert (await received(consumer)).id == "4", "what was acked makes room"
    assert source.outcomes(Outcome.ACK) == []
    assert source.outcomes(Outcome.RELEASE) == ["4"]


async def test_an_abort_keeps_messages_open(producer: AckingProducer, publisher: TransactionalPublisherFacade) -> None:
    source = source_of("1", "2")
    async with consuming(source) as consumer:
        messages = [await received(consumer), await received(consumer)]
        with pytest.raises(ZeroDivisionError):
            async with publisher.transaction() as tx:
                await tx.ack_batch(messages)
                raise ZeroDivisionError
        assert {message.state for message in messages} == {SettleState.OPEN}
        await messages[0].nack(0)
        async with publisher.transaction() as tx:
            await tx.ack(messages[1])
    assert producer.calls == ["begin", "abort", "begin", "acks", "commit"]
    assert (source.outcomes(Outcome.NACK), producer.acked) == (["1"], ["2"])


async def test_a_message_in_a_transaction_cannot_be_settled_otherwise(publisher: TransactionalPublisherFacade) -> None:
    source = source_of("1", "2", "3")
    async with consuming(source) as consumer:
        messages = [await received(consumer) for _ in range(3)]
        await messages[1].ack()
        await messages[2].nack(0)
        async with publisher.transaction() as tx:
            for settled, said in ((messages[1], "was acked before"), (messages[2], "settled with nack before ack")):
                with pytest.raises(AlreadySettled, match=said):
                    await tx.ack(settled)
                with pytest.raises(AlreadySettled, match=said):
                    await tx.ack_batch([messages[0], settled])
                assert messages[0].state is SettleState.OPEN, "all of them or none"
            await tx.ack(messages[0])
            for settle in (
                messages[0].ack(),
                messages[0].nack(),
                messages[0].reject(),
                tx.ack(messages[0]),
                tx.ack_batch(MessageBatch([messages[0]])),
            ):
                with pytest.raises(AlreadySettled, match="acked in an open transaction"):
                    await settle
        assert messages[0].state is SettleState.SETTLED
        await messages[0].ack()
        with pytest.raises(Closed):
            await tx.ack(messages[0])
    assert source.outcomes(Outcome.ACK) == ["2"]


async def test_an_impossible_ack_raises_at_the_call(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    no_message: Any = object()
    source = source_of("1")
    plain = publisher_over(FakeProducer())
    async with consuming(source) as consumer, publisher.transaction() as tx, plain.transaction() as other:
        message = await received(consumer)
        with pytest.raises(ConfigurationError, match="cannot ack an object of type object"):
            await tx.ack(no_message)
        with pytest.raises(ConfigurationError, match="ack_batch takes many"):
            await tx.ack_batch(message)  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match="does not come from a consumer"):
            await tx.ack(Message("orders", b"", Raw("9", None, 1, {}), VIEW))
        with pytest.raises(Unsupported, match="transactions of backend 'scripted' ack no messages"):
            await other.ack(message)
        producer.refuses = Unsupported("of another bus")
        with pytest.raises(Unsupported, match="of another bus"):
            await tx.ack(message)
        await message.ack()
    assert producer.calls == ["begin", "commit"]
    assert source.outcomes(Outcome.ACK) == ["1"]


async def test_leases_are_renewed_until_the_commit(publisher: TransactionalPublisherFacade) -> None:
    source = source_of("1")
    async with consuming(source, lease_seconds=0.03) as consumer, publisher.transaction() as tx:
        await tx.ack(await received(consumer))
        before = len(source.extended)
        await until(lambda: len(source.extended) > before + 2)
    assert set(source.extended) == {"1"}


async def test_a_message_lost_before_the_commit_aborts_its_transaction(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    events: list[Event] = []
    source = source_of("1", "2")
    async with consuming(source, events=events) as consumer:
        kept, lost = await received(consumer), await received(consumer)
        with pytest.raises(TransactionAborted, match="message '2' of topic 'orders' was lost before the commit"):
            async with publisher.transaction() as tx:
                await tx.ack_batch([kept, lost])
                assert source.listener is not None
                source.listener.lost([lost])
        assert producer.calls == ["begin", "abort"]
        assert (kept.state, lost.state) == (SettleState.OPEN, SettleState.LOST)
        assert [event.message for event in events if isinstance(event, LeaseExpired)] == [lost]
        async with publisher.transaction() as tx:
            with pytest.raises(LeaseLost):
                await tx.ack(lost)


async def test_max_lease_applies_to_messages_that_wait_for_a_commit(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    source = source_of("1")
    async with consuming(source, max_lease=0.05) as consumer:
        message = await received(consumer)
        with pytest.raises(TransactionAborted):
            async with publisher.transaction() as tx:
                await tx.ack(message)
                await until(lambda: source.outcomes(Outcome.NACK))
        assert message.lease_lost
    assert producer.acked == []


async def test_a_late_ack_aborts_the_transaction_and_loses_only_its_message(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    events: list[Event] = []
    source = source_of("1", "2")
    producer.lost = {"2"}
    async with consuming(source, events=events) as consumer:
        kept, lost = await received(consumer), await received(consumer)
        with pytest.raises(TransactionAborted, match="2 is lost"):
            async with publisher.transaction() as tx:
                await tx.ack_batch([kept, lost])
        assert producer.calls == ["begin", "acks", "abort"]
        assert (kept.state, lost.state) == (SettleState.OPEN, SettleState.LOST)
        assert producer.held_again == ["1"]
        assert [event.message for event in events if isinstance(event, SettleFailed)] == [lost]


@pytest.mark.parametrize(
    ("where", "error", "then", "state"),
    [
        ("acks", ConnectionFailed("gone"), TransactionAborted, SettleState.OPEN),
        ("acks", TransactionFatal("fenced"), TransactionFatal, SettleState.OPEN),
        ("commit", TransactionAborted("timed out"), TransactionAborted, SettleState.OPEN),
        ("commit", BackendError("refused"), TransactionAborted, SettleState.OPEN),
        ("commit", TransactionFatal("fenced"), TransactionFatal, SettleState.UNKNOWN),
    ],
)
async def test_the_state_of_a_message_follows_its_transaction(
    producer: AckingProducer,
    publisher: TransactionalPublisherFacade,
    where: str,
    error: BrokerError,
    then: type[BrokerError],
    state: SettleState,
) -> None:
    producer.errors[where] = error
    async with consuming(source_of("1")) as consumer:
        message = await received(consumer)
        with pytest.raises(then):
            async with publisher.transaction() as tx:
                await tx.ack(message)
        assert message.state is state
        assert producer.held_again == (["1"] if state is SettleState.OPEN else [])


async def test_a_commit_of_unknown_outcome_leaves_the_message_unknown(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    producer.errors |= {"commit": ConnectionFailed("gone"), "abort": ConnectionFailed("still gone")}
    async with consuming(source_of("1")) as consumer:
        message = await received(consumer)
        with pytest.raises(TransactionFatal, match="neither committed nor aborted"):
            async with publisher.transaction() as tx:
                await tx.ack(message)
        assert message.state is SettleState.UNKNOWN


async def test_a_message_lost_during_the_commit_is_acked(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    source = source_of("1")
    producer.gates["commit"] = asyncio.Event()
    async with consuming(source) as consumer:
        message = await received(consumer)

        async def commit() -> None:
            async with publisher.transaction() as tx:
                await tx.ack(message)

        committing = asyncio.create_task(commit())
        await producer.begun["commit"].wait()
        assert source.listener is not None
        source.listener.lost([message])
        producer.gates["commit"].set()
        await committing
        assert message.state is SettleState.SETTLED


async def test_a_handler_acks_in_a_transaction_and_fails_with_it(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    source = source_of("1")
    source.redelivers = True
    tries: list[int | None] = []
    async with consuming(source) as consumer:

        async def handle(message: Message) -> None:
            tries.append(message.delivery_attempt)
            async with publisher.transaction() as tx:
                await tx.ack(message)
                if len(tries) == 1:
                    raise ZeroDivisionError
            consumer.stop()

        await consumer.receive(handle)
    assert tries == [1, 2]
    assert (source.outcomes(Outcome.NACK), source.outcomes(Outcome.ACK)) == (["1"], [])
    assert producer.acked == ["1"]


async def test_after_an_abort_the_policy_settles_messages_whose_handler_returned(
    publisher: TransactionalPublisherFacade,
) -> None:
    source = source_of("1")
    async with consuming(source) as consumer:
        with pytest.raises(ZeroDivisionError):
            async with publisher.transaction() as tx:

                async def handle(message: Message) -> None:
                    await tx.ack(message)
                    consumer.stop()

                await consumer.receive(handle)
                assert not source.settled
                raise ZeroDivisionError
        await until(lambda: source.outcomes(Outcome.NACK) == ["1"])


async def test_a_close_releases_messages_of_uncommitted_transactions(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    source = source_of("1")
    with pytest.raises(TransactionAborted):
        async with publisher.transaction() as tx:
            async with consuming(source) as consumer:
                await tx.ack(message := await received(consumer))
            assert message.lease_lost
    assert source.outcomes(Outcome.RELEASE) == ["1"]
    assert producer.calls == ["begin", "abort", "close"][:2]


async def test_a_cancelled_block_releases_the_message_of_its_handler(
    producer: AckingProducer, publisher: TransactionalPublisherFacade
) -> None:
    source = source_of("1")
    inside = asyncio.Event()
    async with consuming(source) as consumer:

        async def handle(message: Message) -> None:
            async with publisher.transaction() as tx:
                await tx.ack(message)
                inside.set()
                await asyncio.Event().wait()

        receiving = asyncio.create_task(consumer.receive(handle))
        await inside.wait()
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await until(lambda: source.outcomes(Outcome.RELEASE) == ["1"])
    assert producer.calls == ["begin", "abort"]


async def test_the_next_of_a_key_follows_the_commit(publisher: TransactionalPublisherFacade) -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2", key=b"k")
    async with consuming(source, ordered_by_key=True) as consumer:
        async with publisher.transaction() as tx:
            await tx.ack(await received(consumer))
            assert await consumer.next_message(timeout=0.05) is None
        assert (await received(consumer)).id == "2"
