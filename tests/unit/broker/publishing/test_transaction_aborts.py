"""Transactions that fail, are cancelled or lose their partitions: abort, rewind and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from broker.driver.contract import TopicPartition
from broker.errors import (
    BackendError,
    ConnectionFailed,
    LeaseLost,
    NotAuthorized,
    OperationTimeout,
    PublishError,
    TransactionAborted,
    TransactionFatal,
)
from broker.receipts import Receipt
from tests.unit.broker.publishing.transaction_bench import P0, P1, Bench, bench


async def one_record_and(b: Bench, step: str, error: Exception) -> None:
    """A transaction with one record, a step of which fails."""
    b.source.append(1)
    b.producer.errors[step] = error
    async with b.publisher.transaction(b.consumer):
        await b.take(1)


async def test_an_exception_aborts_rewinds_and_is_raised_again() -> None:
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


@pytest.mark.parametrize("step", ["commit", "add_offsets", "publish"])
async def test_without_rewind_the_consumer_stays_where_it_is_and_the_same_work_is_written_again(step: str) -> None:
    async with bench() as b:
        b.source.append(1, 2, 3)
        assert await b.take(2) == [1, 2]
        b.producer.errors[step] = TransactionAborted("rebalanced")
        for _ in range(2):
            with suppress(TransactionAborted, PublishError):
                async with b.publisher.transaction(b.consumer, positions={P0: 3}, rewind=False) as tx:
                    await tx.publish("out.topic", b"x")
        assert b.source.seeks == []
        assert b.source.stored == {P0: 3}
        assert await b.take(1) == [3]


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


async def test_a_fenced_publisher_cannot_be_used() -> None:
    async with bench() as b:
        with pytest.raises(TransactionFatal, match="fenced"):
            await one_record_and(b, "commit", TransactionFatal("fenced"))
        assert "abort" not in b.producer.calls
        assert b.source.seeks, "its consumer is rewound all the same"
        with pytest.raises(TransactionFatal, match="ended: fenced"):
            async with b.publisher.transaction(b.consumer):
                pass
        assert await b.take(1) == [1]
        await b.consumer.commit()


async def test_a_failed_publish_aborts_even_if_it_was_caught() -> None:
    async with bench() as b:
        b.producer.refuse.append(NotAuthorized("no"))
        with pytest.raises(TransactionAborted, match="no"):
            async with b.publisher.transaction(b.consumer) as tx:
                with pytest.raises(PublishError) as caught:
                    await tx.publish_batch("out.topic", [b"1", b"2"])
                assert [type(outcome) for outcome in caught.value.outcomes] == [NotAuthorized, Receipt]
        assert b.producer.calls[-1] == "abort"


async def test_errors_of_one_message_are_raised_unchanged() -> None:
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


async def test_lost_partitions_abort_the_transaction() -> None:
    async with bench() as b:
        b.source.append(1)
        b.source.append(1, partition=1)
        with pytest.raises(TransactionAborted, match="undone: Partition 0 of topic 'orders' was revoked before"):
            async with b.publisher.transaction(b.consumer):
                await b.take(2)
                b.source.lose(0)
        assert "commit" not in b.producer.calls
        assert b.source.seeks == [{P1: None}]
        assert await b.take(1) == [1]


async def test_a_refused_position_aborts_the_transaction() -> None:
    async with bench() as b:
        with pytest.raises(TransactionAborted, match="undone: not yours"):
            await one_record_and(b, "add_offsets", LeaseLost("not yours"))
        assert b.producer.calls[-1] == "abort"


async def test_a_revocation_waits_for_the_transaction_of_its_records() -> None:
    async with bench() as b:
        b.source.append(1)
        async with b.publisher.transaction(b.consumer):
            await b.take(1)
            idle = asyncio.create_task(b.source.revoke(1))
            revoking = asyncio.create_task(b.source.revoke(0))
            await asyncio.wait_for(idle, 60)
            assert not revoking.done(), "the other partition has nothing in the transaction"
        await asyncio.wait_for(revoking, 60)
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
        await asyncio.wait_for(revoking[0], 60)
        assert b.source.stored == {}


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
        await asyncio.wait_for(inside.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert b.producer.calls == ["begin", "abort"]
        assert await b.take(1) == [1]


@pytest.mark.parametrize("step", ["begin", "publish", "commit"])
async def test_a_cancelled_step_is_completed_before_the_abort(step: str) -> None:
    async with bench() as b:
        gate = b.producer.gates[step] = asyncio.Event()

        async def work() -> None:
            async with b.publisher.transaction(b.consumer) as tx:
                await tx.publish("out.topic", b"x")

        task = asyncio.create_task(work())
        await asyncio.wait_for(b.producer.begun[step].wait(), 60)
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


async def test_a_rewind_is_repeated_while_the_broker_is_away_and_nothing_is_read_meanwhile() -> None:
    async with bench() as b:
        b.source.append(1, 2, 3)
        seek, failures = b.source.seek, 2

        async def fail_twice(positions: Mapping[TopicPartition, int | None]) -> None:
            nonlocal failures
            b.source.append(4)
            if failures:
                failures -= 1
                raise ConnectionFailed("away")
            await seek(positions)

        b.source.seek = fail_twice
        b.producer.errors["commit"] = TransactionAborted("rebalanced")
        with pytest.raises(TransactionAborted):
            async with b.publisher.transaction(b.consumer):
                await b.take(2)
        assert not failures
        assert (await b.take(3))[:3] == [1, 2, 3]


async def test_own_positions_that_are_committed_already_are_sent_too() -> None:
    """The broker fences a member by the positions that it sends."""
    async with bench() as b:
        b.source.append(1)
        await b.take(1)
        for _ in range(2):
            async with b.publisher.transaction(b.consumer, positions={P0: 2}):
                pass
        assert b.producer.offsets == [{P0: 2}, {P0: 2}]
