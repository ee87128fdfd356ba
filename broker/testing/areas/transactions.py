"""Conformance tests of transactions: all or nothing, for messages, positions and acks."""

from __future__ import annotations

import asyncio

import pytest

from broker.driver.contract import TopicPartition
from broker.errors import OffsetOutOfRange, TransactionFatal, Unsupported
from broker.messages import SettleState
from broker.outbound import OutboundMessage
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, nothing_more, numbered, once, read, take

__all__ = ["Transactions"]


class Transactions(ConformanceCase):
    """All or nothing, for messages, positions and acks."""

    @requires("publish.transactions", "records.read_committed")
    @promise(
        "transactions.commit-shows-all",
        "All messages of a committed transaction are visible, in every topic that it wrote to.",
    )
    async def test_commit_shows_all(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic(), await harness.topic()]
        async with bus.transactional_publisher(unique("tx")) as publisher, publisher.transaction() as tx:
            await tx.publish(topics[0], b"single", key="k", attributes={"a": "b"})
            await tx.publish_batch(topics[1], numbered(10))
        async with bus.records(topics, group="readers") as log:
            records = await read(log, 11, harness.patience)
            assert bodies(records) == once([b"single", *numbered(10)])
            (single,) = [record for record in records if record.data == b"single"]
            assert (single.key, dict(single.attributes)) == (b"k", {"a": "b"})

    @requires("publish.transactions", "records.read_committed")
    @promise(
        "transactions.open-is-invisible",
        "Readers of committed data see no message of an open transaction, without an error.",
    )
    async def test_open_is_invisible(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        async with (
            bus.transactional_publisher(unique("tx")) as publisher,
            bus.records(topic, group="committed") as committed,
            bus.records(topic, group="uncommitted", isolation="read_uncommitted") as uncommitted,
        ):
            async with publisher.transaction() as tx:
                await tx.publish_batch(topic, numbered(2))
                assert len(await read(uncommitted, 2, harness.patience)) == 2
                assert await committed.next_record(timeout=2 * harness.quiet) is None
            assert bodies(await read(committed, 2, harness.patience)) == once(numbered(2))

    @requires("publish.transactions", "records.read_committed")
    @promise(
        "transactions.abort-hides-all", "Messages of an aborted transaction are never visible; later messages are."
    )
    async def test_abort_hides_all(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        async with bus.transactional_publisher(unique("tx")) as publisher:
            with pytest.raises(ZeroDivisionError):
                async with publisher.transaction() as tx:
                    await tx.publish_batch(topic, numbered(5, "aborted"))
                    raise ZeroDivisionError
            async with publisher.transaction() as tx:
                await tx.publish_batch(topic, numbered(5, "committed"))
        async with bus.records(topic, group="readers") as log:
            assert bodies(await read(log, 5, harness.patience)) == once(numbered(5, "committed"))
            assert await log.next_record(timeout=harness.quiet) is None

    @requires("publish.transactions", "records.read_committed")
    @promise("transactions.cancelled-is-aborted", "A transaction whose block is cancelled publishes nothing.")
    async def test_cancelled_is_aborted(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        written = asyncio.Event()
        async with bus.transactional_publisher(unique("tx")) as publisher:

            async def work() -> None:
                async with publisher.transaction() as tx:
                    await tx.publish(topic, b"cancelled")
                    written.set()
                    await asyncio.Event().wait()

            task = asyncio.ensure_future(work())
            await written.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with publisher.transaction() as tx:
                await tx.publish(topic, b"next")
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 1, harness.patience)] == [b"next"]
            assert await log.next_record(timeout=harness.quiet) is None

    @requires("publish.transactions")
    @promise("transactions.empty-commits", "An empty transaction commits without an error.")
    async def test_empty_commits(self, harness: Harness) -> None:
        bus = await harness.bus()
        async with bus.transactional_publisher(unique("tx")) as publisher:
            for _ in range(3):
                async with publisher.transaction():
                    pass

    @requires("publish.transactions", "records.read_committed")
    @promise(
        "transactions.positions-are-atomic",
        "Consume, process, produce: the positions of the read records are committed with the published messages.",
    )
    async def test_positions_are_atomic(self, harness: Harness) -> None:
        bus, source, sink = await harness.bus(), await harness.topic(partitions=1), await harness.topic(partitions=1)
        await bus.topic(source).publish_batch(numbered(20))
        async with (
            bus.transactional_publisher(unique("tx")) as publisher,
            bus.records(source, group="copier") as log,
        ):
            done = 0
            while done < 20:
                async with publisher.transaction(log) as tx:
                    batch = await log.next_batch(5, timeout=harness.patience)
                    await tx.publish_batch(sink, [OutboundMessage.from_message(record) for record in batch])
                    done += len(batch)
        async with bus.records(source, group="copier") as log:
            assert await log.next_record(timeout=2 * harness.quiet) is None
        async with bus.records(sink, group="readers") as log:
            assert [record.data for record in await read(log, 20, harness.patience)] == numbered(20)

    @requires("publish.transactions", "records.read_committed")
    @promise(
        "transactions.own-positions-are-atomic",
        "`positions=` commits these positions with the published messages, and not all that was delivered.",
    )
    async def test_own_positions_are_atomic(self, harness: Harness) -> None:
        bus, source, sink = await harness.bus(), await harness.topic(partitions=1), await harness.topic(partitions=1)
        await bus.topic(source).publish_batch(numbered(10))
        at = TopicPartition(source, 0)
        done: dict[TopicPartition, int] = {}
        async with (
            bus.transactional_publisher(unique("tx")) as publisher,
            bus.records(source, group="copier") as log,
        ):
            records = await read(log, 10, harness.patience)
            async with publisher.transaction(log, positions=done) as tx:
                await tx.publish_batch(sink, [OutboundMessage.from_message(record) for record in records[:3]])
                done[at] = records[2].offset + 1
            assert (await log.committed([at]))[at] == records[2].offset + 1
            with pytest.raises(OffsetOutOfRange, match="below"):
                async with publisher.transaction(log, positions={at: records[0].offset}) as tx:
                    await tx.publish(sink, b"never")
            assert [record.data for record in await read(log, 7, harness.patience)] == numbered(10)[3:]
        async with bus.records(source, group="copier") as log:
            assert [record.data for record in await read(log, 7, harness.patience)] == numbered(10)[3:]
        async with bus.records(sink, group="readers") as log:
            assert [record.data for record in await read(log, 3, harness.patience)] == numbered(10)[:3]
            assert await log.next_record(timeout=harness.quiet) is None

    @requires("publish.transactions", "records.read_committed")
    @promise(
        "transactions.abort-rewinds",
        "An abort rewinds the consumer to its committed positions; repeating the work takes effect exactly once.",
    )
    async def test_abort_rewinds(self, harness: Harness) -> None:
        bus, source, sink = await harness.bus(), await harness.topic(partitions=1), await harness.topic(partitions=1)
        await bus.topic(source).publish_batch(numbered(10))
        async with (
            bus.transactional_publisher(unique("tx")) as publisher,
            bus.records(source, group="copier") as log,
        ):
            for attempt in range(2):
                try:
                    async with publisher.transaction(log) as tx:
                        records = await read(log, 10, harness.patience)
                        assert [record.data for record in records] == numbered(10)
                        await tx.publish_batch(sink, [OutboundMessage.from_message(record) for record in records])
                        if attempt == 0:
                            raise ZeroDivisionError
                except ZeroDivisionError:
                    at = TopicPartition(source, 0)
                    assert (await log.committed([at]))[at] is None
        async with bus.records(sink, group="readers") as log:
            assert [record.data for record in await read(log, 10, harness.patience)] == numbered(10)
            assert await log.next_record(timeout=harness.quiet) is None

    @requires("messages.acks_in_transactions", "publish.transactions", "records.read_committed")
    @promise(
        "transactions.acks-are-atomic",
        "Acks of a transaction take effect with its commit; after an abort the messages are held as before.",
    )
    async def test_acks_are_atomic(self, harness: Harness) -> None:
        bus, source, sink = await harness.bus(), await harness.topic(), await harness.topic(partitions=1)
        async with (
            bus.transactional_publisher(unique("tx")) as publisher,
            bus.messages(source, subscription="copier") as inbox,
        ):
            await bus.topic(source).publish_batch(numbered(3))
            messages = await take(inbox, 3, harness.patience)
            for attempt in range(2):
                try:
                    async with publisher.transaction() as tx:
                        await tx.publish_batch(sink, [OutboundMessage.from_message(message) for message in messages])
                        await tx.ack(messages[0])
                        await tx.ack_batch(messages[1:])
                        if attempt == 0:
                            raise ZeroDivisionError
                except ZeroDivisionError:
                    assert {message.state for message in messages} == {SettleState.OPEN}
            assert {message.state for message in messages} == {SettleState.SETTLED}
        async with bus.messages(source, subscription="copier") as inbox:
            await nothing_more(inbox, 2 * harness.quiet)
        async with bus.records(sink, group="readers") as log:
            assert bodies(await read(log, 3, harness.patience)) == once(numbered(3))
            assert await log.next_record(timeout=harness.quiet) is None

    @requires("publish.transactions")
    @promise(
        "transactions.newer-publisher-fences-older",
        "A second publisher with the same id fences the first, whose next commit raises TransactionFatal.",
    )
    async def test_newer_publisher_fences_older(self, harness: Harness) -> None:
        bus, topic, name = await harness.bus(), await harness.topic(partitions=1), unique("tx")
        async with bus.transactional_publisher(name) as older:
            with pytest.raises(TransactionFatal):
                async with older.transaction() as tx:
                    await tx.publish(topic, b"older")
                    async with bus.transactional_publisher(name) as newer, newer.transaction() as other:
                        await other.publish(topic, b"newer")
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 1, harness.patience)] == [b"newer"]
            assert await log.next_record(timeout=harness.quiet) is None

    @promise(
        "transactions.unsupported-are-refused",
        "If the broker has no transactions, requesting a transactional publisher raises Unsupported.",
    )
    async def test_unsupported_are_refused(self, harness: Harness) -> None:
        bus = await harness.bus()
        if bus.capabilities.publish.transactions:
            async with bus.transactional_publisher(unique("tx")):
                return
        with pytest.raises(Unsupported):
            async with bus.transactional_publisher(unique("tx")):
                pass
