"""Messages of a queue with markers that are acked in a transaction: their END and its output count together or not."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import broker
from broker import blocking
from broker.bus import Bus, connect
from broker.driver.fetching import lease_time
from broker.errors import LeaseLost, TransactionAborted, TransactionFatal, Unsupported
from broker.messages import Message, SettleState
from broker.testing.waiting import bodies, eventually, let_pass, nothing_more, numbered, once, take
from broker_kafka.queue.markers.marker_topic import marker_topic_name
from broker_kafka.queue.markers.wire import Kind, read_markers
from broker_kafka.transactions import KafkaTransaction
from tests.kafka import queue_ack_process
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, read_all

PATIENCE = 60.0
LEASE = 1.0
LASTING = 2.5 * LEASE
"""Seconds until a lease that is not renewed has ended and its message is redelivered."""
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300"
OPTIONS = f"{QUICK}&queue=markers&lease_seconds={LEASE:g}"


@asynccontextmanager
async def opened(
    kafka: KafkaServer, topic: str, group: str, **how: Any
) -> AsyncGenerator[tuple[Bus, broker.MessageConsumer[bytes], Any]]:
    """A bus, and on it a consumer and a transactional publisher."""
    options = how.pop("options", OPTIONS)
    async with (
        connect(f"{kafka.url}?{options}") as bus,
        bus.messages(topic, subscription=group, **how) as inbox,
        bus.transactional_publisher(f"{group}-tx") as publisher,
    ):
        yield bus, inbox, publisher


def written(kafka: KafkaServer, topic: str) -> list[bytes | None]:
    """What readers of committed data see, all transactions being over."""
    RawAdmin(kafka.bootstrap).wait_for_markers(topic)
    return [record.value() for record in read_all(kafka.bootstrap, topic)]


def ended(kafka: KafkaServer, group: str) -> set[int]:
    """The offsets of messages of which there is an END that counts."""
    records = read_all(kafka.bootstrap, marker_topic_name(group))
    found = [marker for record in records for marker, _ in read_markers(record.value())]
    return {each.offset for marker in found if marker and marker.kind is Kind.END for each in marker.ids()}


async def nothing_left(bus: Bus, topic: str, group: str) -> None:
    async def is_done() -> bool:
        lag = await bus.admin.lag(topic, group)
        return (lag.waiting, lag.unsettled) == (0, 0)

    await eventually(is_done, PATIENCE, "nothing waits and nothing is open")


@pytest.mark.parametrize("settings", ["", "&marker_format=v2-single", "&marker_format=v1", "&queue_transactions=true"])
async def test_output_and_end_appear_with_the_commit(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, settings: str
) -> None:
    topic, sink = make_topic(), make_topic()
    async with opened(kafka, topic, group, options=f"{QUICK}&queue=markers{settings}") as (bus, inbox, publisher):
        await bus.topic(topic).publish_batch(numbered(5))
        messages = await take(inbox, 5, PATIENCE)
        async with publisher.transaction() as tx:
            await tx.publish_batch(sink, [message.data or b"" for message in messages])
            await tx.ack_batch(messages[:4])
            await tx.ack(messages[4])
            assert (await bus.admin.lag(topic, group)).unsettled == 5
            assert await asyncio.to_thread(read_all, kafka.bootstrap, sink) == []
        assert {message.state for message in messages} == {SettleState.SETTLED}
        assert once(numbered(5)) == dict.fromkeys(await asyncio.to_thread(written, kafka, sink), 1)
        await nothing_left(bus, topic, group)
    assert await asyncio.to_thread(ended, kafka, group) >= {message.lease.id.offset for message in messages}


@pytest.mark.deep
async def test_leases_are_renewed_until_the_transaction_ends(
    kafka: KafkaServer, make_topic: MakeTopic, group: str
) -> None:
    topic, sink = make_topic(), make_topic()
    async with opened(kafka, topic, group) as (bus, inbox, publisher):
        await bus.topic(topic).publish_batch(numbered(5))
        messages = await take(inbox, 5, PATIENCE)
        async with publisher.transaction() as tx:
            await tx.publish_batch(sink, [message.data or b"" for message in messages])
            await tx.ack_batch(messages)
            await let_pass(LASTING)
            assert not any(message.lease_lost for message in messages)
            assert (await bus.admin.lag(topic, group)).unsettled == 5
        await nothing_left(bus, topic, group)
        await nothing_more(inbox, LASTING)


@pytest.mark.deep
async def test_an_aborted_transaction_has_no_effect_and_keeps_its_leases(
    kafka: KafkaServer, make_topic: MakeTopic, group: str
) -> None:
    topic, sink = make_topic(), make_topic()
    async with opened(kafka, topic, group) as (bus, inbox, publisher):
        await bus.topic(topic).publish_batch(numbered(2))
        first, second = await take(inbox, 2, PATIENCE)
        with pytest.raises(ZeroDivisionError):
            async with publisher.transaction() as tx:
                await tx.publish(sink, b"x")
                await tx.ack_batch([first, second])
                raise ZeroDivisionError
        await nothing_more(inbox, LASTING)
        assert (await bus.admin.lag(topic, group)).unsettled == 2
        await first.ack()
        await second.nack(delay=0)
        (again,) = await take(inbox, 1, PATIENCE)
        assert (again.data, again.delivery_attempt) == (second.data, 2)
        async with publisher.transaction() as tx:
            await tx.publish(sink, b"y")
            await tx.ack(again)
        await nothing_left(bus, topic, group)
    assert await asyncio.to_thread(written, kafka, sink) == [b"y"]


@pytest.mark.deep
@pytest.mark.parametrize("commits", [True, False])
async def test_no_lease_is_due_while_the_commit_is_pending(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    commit, waiting, go = KafkaTransaction.commit, asyncio.Event(), asyncio.Event()

    async def slowly(self: KafkaTransaction) -> None:
        waiting.set()
        await go.wait()
        if not commits:
            await self.abort()
            raise TransactionAborted("as the test wants it")
        await commit(self)

    monkeypatch.setattr(KafkaTransaction, "commit", slowly)
    topic, sink = make_topic(), make_topic()
    async with opened(kafka, topic, group) as (bus, inbox, publisher):
        await bus.topic(topic).publish_batch(numbered(2))
        mine, other = await take(inbox, 2, PATIENCE)

        async def transact() -> None:
            async with publisher.transaction() as tx:
                await tx.publish(sink, b"x")
                await tx.ack(mine)

        transacting = asyncio.create_task(transact())
        await waiting.wait()
        # The END hides the KEEPALIVEs of the other message too, for longer than a lease.
        await nothing_more(inbox, 2 * LASTING)
        go.set()
        if commits:
            await transacting
        else:
            with pytest.raises(TransactionAborted):
                await transacting
            # Nobody has renewed it since its END was written, and so it is lost.
            (again,) = await take(inbox, 1, PATIENCE)
            assert (again.data, again.delivery_attempt) == (mine.data, 2)
            with pytest.raises(LeaseLost):
                await mine.ack()
            await again.ack()
        await nothing_more(inbox, LASTING)
        assert not other.lease_lost
        await other.ack()
        await nothing_left(bus, topic, group)
    assert await asyncio.to_thread(written, kafka, sink) == ([b"x"] if commits else [])


@pytest.mark.deep
async def test_an_abort_after_the_end_was_written_leaves_the_message_held(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: KafkaTransaction) -> None:
        await self.abort()
        raise TransactionAborted("as the test wants it")

    topic, sink = make_topic(), make_topic()
    async with opened(kafka, topic, group) as (bus, inbox, publisher):
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, PATIENCE)
        with monkeypatch.context() as patched:
            patched.setattr(KafkaTransaction, "commit", refused)
            with pytest.raises(TransactionAborted):
                async with publisher.transaction() as tx:
                    await tx.publish(sink, b"1")
                    await tx.ack(message)
        await nothing_more(inbox, LASTING)
        assert not message.lease_lost
        async with publisher.transaction() as tx:
            await tx.publish(sink, b"2")
            await tx.ack(message)
        await nothing_left(bus, topic, group)
    assert await asyncio.to_thread(written, kafka, sink) == [b"2"]


@pytest.mark.deep
@pytest.mark.parametrize("how", ["max_lease", "stood still"])
async def test_a_lease_lost_inside_aborts_the_transaction(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, how: str
) -> None:
    topic, sink = make_topic(), make_topic()
    longest = 1.0 if how == "max_lease" else 60.0
    async with opened(kafka, topic, group, max_lease=longest) as (bus, inbox, publisher):
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, PATIENCE)
        with pytest.raises(TransactionAborted):
            async with publisher.transaction() as tx:
                await tx.publish(sink, b"1")
                await tx.ack(message)
                if how == "max_lease":
                    await eventually(lambda: message.lease_lost, PATIENCE, "max_lease has passed")
                else:
                    # As after a suspension: the lease has ended, and this process has not noticed yet.
                    message.lease.until = lease_time()
        assert message.lease_lost
        (again,) = await take(inbox, 1, PATIENCE)
        assert (again.data, again.delivery_attempt) == (b"x", 2)
        async with publisher.transaction() as tx:
            await tx.publish(sink, b"2")
            await tx.ack(again)
        await nothing_left(bus, topic, group)
    assert await asyncio.to_thread(written, kafka, sink) == [b"2"]


async def test_a_publisher_that_is_fenced_acks_nothing(kafka: KafkaServer, make_topic: MakeTopic, group: str) -> None:
    topic, sink = make_topic(), make_topic()
    async with opened(kafka, topic, group) as (bus, inbox, older):
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, PATIENCE)
        with pytest.raises(TransactionFatal):
            async with older.transaction() as tx:
                await tx.publish(sink, b"older")
                await tx.ack(message)
                async with bus.transactional_publisher(f"{group}-tx") as newer, newer.transaction() as other:
                    await other.publish(sink, b"newer")
        if message.state is SettleState.UNKNOWN:
            # Only the commit reported the fence: its outcome is unknown here.
            (message,) = await take(inbox, 1, PATIENCE)
            assert message.delivery_attempt == 2
        await message.ack()
        await nothing_left(bus, topic, group)
    assert await asyncio.to_thread(written, kafka, sink) == [b"newer"]


@pytest.mark.deep
@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_process_killed_within_the_transaction_has_no_effect(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, where: str
) -> None:
    topic, sink = make_topic(), make_topic()
    url = f"{kafka.url}?{OPTIONS}&transaction_timeout_ms=2000"
    async with connect(url) as bus:
        await bus.admin.ensure_subscription(topic, group)
        await bus.topic(topic).publish_batch(numbered(3))
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", queue_ack_process.__name__, url, topic, group, sink, where, stdout=PIPE
        )
        try:
            assert worker.stdout is not None
            async with asyncio.timeout(PATIENCE):
                assert await worker.stdout.readline() == b"stopped\n"
        finally:
            worker.kill()
            await worker.wait()
        async with (
            bus.messages(topic, subscription=group) as inbox,
            bus.transactional_publisher(f"{group}-tx") as publisher,
        ):
            messages = await take(inbox, 3, PATIENCE)
            assert bodies(messages) == once(numbered(3))
            async with publisher.transaction() as tx:
                await tx.publish_batch(sink, [message.data or b"" for message in messages])
                await tx.ack_batch(messages)
            await nothing_left(bus, topic, group)
            await nothing_more(inbox, 0.3)
    assert dict.fromkeys(await asyncio.to_thread(written, kafka, sink), 1) == once(numbered(3))


@pytest.mark.deep
async def test_only_messages_with_markers_of_the_same_bus_are_acked(kafka: KafkaServer, topic: str, group: str) -> None:
    async with opened(kafka, topic, group) as (bus, _, publisher), publisher.transaction() as tx:
        await bus.topic(topic).publish(b"x")
        for engine, url, said in (
            ("offsets", f"{kafka.url}?{QUICK}", "queue=offsets are acked by committing group offsets"),
            ("share", f"{kafka.url}?queue=share", "does not support acks of share groups in a transaction"),
            ("markers", f"{kafka.url}?{OPTIONS}", "on another bus"),
        ):
            async with connect(url) as other, other.messages(topic, subscription=f"{group}-{engine}") as inbox:
                await other.topic(topic).publish(b"y")
                message = await inbox.next_message(timeout=PATIENCE)
                assert message is not None
                with pytest.raises(Unsupported, match=said):
                    await tx.ack(message)
                await message.ack()
                assert other.capabilities.messages is not None
                assert other.capabilities.messages.acks_in_transactions == (engine == "markers")
        async with connect(f"inmem://{group}") as memory:
            await memory.admin.ensure_topic(topic)
            await memory.topic(topic).publish(b"x")
            async with memory.messages(topic, subscription="readers") as inbox:
                (message,) = await take(inbox, 1, PATIENCE)
                with pytest.raises(Unsupported, match="from another broker"):
                    await tx.ack(message)
                async with memory.transactional_publisher("local") as local, local.transaction() as inner:
                    with pytest.raises(Unsupported, match="backend 'inmem' ack no messages"):
                        await inner.ack(message)


def test_blocking_transactions_ack_too(kafka: KafkaServer, make_topic: MakeTopic, group: str) -> None:
    topic, sink = make_topic(), make_topic()
    with (
        blocking.connect(f"{kafka.url}?{OPTIONS}") as bus,
        bus.messages(topic, subscription=group) as inbox,
        bus.transactional_publisher(f"{group}-tx") as publisher,
    ):
        bus.topic(topic).publish_batch(numbered(3))
        seen: list[Any] = []
        while len(seen) < 3:
            batch = inbox.next_batch(2, timeout=PATIENCE)
            with publisher.transaction() as tx:
                tx.publish_batch(sink, [message.data or b"" for message in batch])
                tx.ack(batch[0])
                tx.ack_batch(list(batch)[1:])
                with pytest.raises(broker.AlreadySettled):
                    batch[0].nack()
                with pytest.raises(broker.ConfigurationError, match="cannot ack an object of type Message"):
                    tx.ack(Message(topic, b"", None, None))  # type: ignore[arg-type]
            seen += batch
        assert {message.state for message in seen} == {SettleState.SETTLED}
        assert (lag := bus.admin.lag(topic, group)).waiting == 0, lag
    assert dict.fromkeys(written(kafka, sink), 1) == once(numbered(3))
