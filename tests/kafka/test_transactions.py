"""Transactions on a real broker: isolation, fencing, timeouts, and where reading resumes."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.driver.contract import RecordSubscription, TopicPartition
from broker.errors import (
    BackendError,
    BrokerError,
    ConfigurationError,
    InvalidSetting,
    LeaseLost,
    PublishError,
    TopicNotFound,
    TransactionAborted,
    TransactionFatal,
)
from broker.hooks import Hooks
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker_kafka.backend import KafkaBackend
from broker_kafka.settings import KafkaSettings
from broker_kafka.transactions import KafkaTransaction
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, read_all

OPTIONS = "session_timeout_ms=6000&heartbeat_interval_ms=300"
PATIENCE = 60.0


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with broker.connect(f"{kafka.url}?{OPTIONS}") as bus:
        yield bus


@pytest.fixture
def name(topic: str) -> str:
    """A new transactional id."""
    return f"tx-{topic}"


def numbered(count: int, first: int = 0) -> list[OutboundMessage]:
    return [OutboundMessage(b"%d" % number, b"%d" % number) for number in range(first, first + count)]


def bodies(kafka: KafkaServer, topic: str, isolation: str = "read_committed") -> list[bytes | None]:
    """All of the topic; no transaction is open."""
    if isolation == "read_committed":
        RawAdmin(kafka.bootstrap).wait_for_markers(topic)
    return [message.value() for message in read_all(kafka.bootstrap, topic, isolation=isolation)]


async def transaction_of(kafka: KafkaServer, name: str, **values: Any) -> tuple[KafkaBackend, KafkaTransaction]:
    backend = KafkaBackend(KafkaSettings(servers=(kafka.bootstrap,), **values), Hooks())
    await backend.open()
    spi = await backend.transaction(name)
    assert isinstance(spi, KafkaTransaction)
    return backend, spi


class Listener:
    """Holds on to nothing when partitions go."""

    def assigned(self, partitions: Any) -> None: ...
    async def revoking(self, partitions: Any, deadline: float) -> None: ...
    def lost(self, partitions: Any) -> None: ...
    def event(self, event: Any) -> None: ...


# -- what is seen ------------------------------------------------------------------------------------------


async def test_aborted_records_are_written_but_not_read(bus: Bus, kafka: KafkaServer, topic: str, name: str) -> None:
    async with bus.transactional_publisher(name) as publisher:
        for number in range(6):
            with suppress(ZeroDivisionError):
                async with publisher.transaction() as tx:
                    receipts = await tx.publish_batch(topic, numbered(100, number * 100))
                    assert all(receipt.offset is not None for receipt in receipts)
                    if number % 2 == 0:
                        raise ZeroDivisionError
    wanted = [message.data for number in (1, 3, 5) for message in numbered(100, number * 100)]
    assert bodies(kafka, topic) == wanted
    assert len(bodies(kafka, topic, "read_uncommitted")) == 600


async def test_a_transaction_without_receipts_is_atomic(bus: Bus, kafka: KafkaServer, topic: str, name: str) -> None:
    async with bus.transactional_publisher(name) as publisher:
        for number in range(3):
            with suppress(ZeroDivisionError):
                async with publisher.transaction() as tx:
                    await tx.publish_batch(topic, numbered(1200, number * 1200), receipts=False)
                    if number == 1:
                        raise ZeroDivisionError
        with pytest.raises(TransactionAborted):
            async with publisher.transaction() as tx:
                await tx.publish_batch(topic, [b"with it"], receipts=False)
                with pytest.raises(PublishError) as failed:
                    await tx.publish_batch("no-such-topic", numbered(3), receipts=False)
                assert [type(outcome) for outcome in failed.value.outcomes] == [TopicNotFound] * 3
    assert bodies(kafka, topic) == [message.data for first in (0, 2400) for message in numbered(1200, first)]


@pytest.mark.deep
async def test_a_transaction_over_several_topics_is_atomic(
    bus: Bus, kafka: KafkaServer, make_topic: MakeTopic, name: str
) -> None:
    first, second = make_topic(), make_topic()
    async with bus.transactional_publisher(name) as publisher:
        with pytest.raises(TransactionAborted):
            async with publisher.transaction() as tx:
                await tx.publish(first, b"1")
                with suppress(TopicNotFound):
                    await tx.publish("no-such-topic", b"1")
                await tx.publish(second, b"1")
        async with publisher.transaction() as tx:
            await asyncio.gather(tx.publish(first, b"2"), tx.publish(second, b"2"))
    assert (bodies(kafka, first), bodies(kafka, second)) == ([b"2"], [b"2"])


# -- consume, process, produce -----------------------------------------------------------------------------


@pytest.mark.deep
async def test_reading_resumes_at_the_right_offset_after_aborts(
    bus: Bus, kafka: KafkaServer, make_topic: MakeTopic, name: str
) -> None:
    source, sink = make_topic(partitions=2), make_topic()
    await bus.topic(source).publish_batch(numbered(400))
    seen = 0
    attempts = 0
    async with bus.transactional_publisher(name) as publisher, bus.records(source, group=name) as log:
        while seen < 400:
            attempts += 1
            with suppress(ZeroDivisionError):
                async with publisher.transaction(log) as tx:
                    batch = await log.next_batch(50, timeout=PATIENCE)
                    assert batch
                    await tx.publish_batch(sink, [OutboundMessage(record.data) for record in batch])
                    if attempts % 3 == 0:
                        raise ZeroDivisionError
                    seen += len(batch)
    assert sorted(int(body or b"") for body in bodies(kafka, sink)) == list(range(400))
    assert len(bodies(kafka, sink, "read_uncommitted")) > 400
    admin = RawAdmin(kafka.bootstrap)
    ends = [admin.bounds(source, partition)[1] for partition in range(2)]
    assert [admin.committed(name, source, partition).offset for partition in range(2)] == ends


async def test_a_revoked_partition_aborts_the_transaction(kafka: KafkaServer, make_topic: MakeTopic, name: str) -> None:
    source, sink = make_topic(), make_topic()
    backend, transaction = await transaction_of(kafka, name)
    try:
        await backend.publish_target(source).publish(numbered(3))
        member = await backend.join(RecordSubscription(topics=[source], group=f"g-{source}"), Listener())
        while not await member.fetch(10, 1 << 20, 1.0):
            pass
        await transaction.begin()
        assert all(isinstance(outcome, Receipt) for outcome in await transaction.publish(sink, numbered(3)))
        with pytest.raises(LeaseLost):
            await transaction.add_offsets(member, {TopicPartition(source, 7): 3})
        await transaction.abort()
        # Positions that were undone do not ride in the next transaction.
        await transaction.begin()
        await transaction.add_offsets(member, {TopicPartition(source, 0): 2})
        await transaction.abort()
        await transaction.begin()
        await transaction.publish(sink, numbered(1, 8))
        await transaction.commit()
        assert await member.committed([TopicPartition(source, 0)]) == {TopicPartition(source, 0): None}
        await transaction.begin()
        await transaction.publish(sink, numbered(1, 9))
        await transaction.add_offsets(member, {TopicPartition(source, 0): 3})
        await transaction.commit()
        assert await member.committed([TopicPartition(source, 0)]) == {TopicPartition(source, 0): 3}
    finally:
        await backend.close()
    assert bodies(kafka, sink) == [b"8", b"9"]


# -- fencing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["begin", "publish", "commit", "abort"])
async def test_a_zombie_is_fenced(kafka: KafkaServer, topic: str, name: str, step: str) -> None:
    backend, zombie = await transaction_of(kafka, name)
    try:
        await zombie.begin()
        await zombie.publish(topic, numbered(3))
        if step == "begin":
            await zombie.commit()
        newer = await backend.transaction(name)
        with pytest.raises(TransactionFatal, match=name):
            if step == "begin":
                await zombie.begin()
            if step in {"begin", "publish"}:
                outcomes = await zombie.publish(topic, numbered(300))
                assert all(isinstance(outcome, TransactionFatal) for outcome in outcomes)
                await zombie.commit()
            await (zombie.abort() if step == "abort" else zombie.commit())
        for call in (zombie.begin, zombie.commit, zombie.abort):
            with pytest.raises(TransactionFatal):
                await call()
        await newer.begin()
        await newer.publish(topic, [OutboundMessage(b"newer")])
        await newer.commit()
    finally:
        await backend.close()
    assert bodies(kafka, topic) == [*([b"0", b"1", b"2"] if step == "begin" else []), b"newer"]


async def test_closing_aborts_an_open_transaction(kafka: KafkaServer, topic: str, name: str) -> None:
    backend, transaction = await transaction_of(kafka, name)
    await transaction.begin()
    await transaction.publish(topic, numbered(3))
    await transaction.close()
    await transaction.close()
    await backend.publish_target(topic).publish([OutboundMessage(b"after")])
    await backend.close()
    # A reader of committed data would stand before the three for a minute.
    assert bodies(kafka, topic) == [b"after"]


# -- time --------------------------------------------------------------------------------------------------


OWN = pytest.mark.xdist_group("kafka-transactions")


@pytest.fixture(scope="module")
def impatient() -> Iterator[KafkaServer]:
    """A broker that looks for transactions that take too long ten times in a second."""
    options = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "100"}
    with KafkaServer(options) as server:
        yield server


@pytest.mark.deep
@OWN
async def test_a_consumer_must_be_on_the_same_cluster(
    kafka: KafkaServer, impatient: KafkaServer, bus: Bus, topic: str, name: str
) -> None:
    elsewhere = RawAdmin(impatient.bootstrap).make_topic()
    await bus.topic(topic).publish(b"x")
    async with (
        broker.connect(kafka.url) as same,
        broker.connect(impatient.url) as other,
        other.records(elsewhere, group="copier") as foreign,
        same.records(topic, group=name) as log,
        bus.transactional_publisher(name) as publisher,
    ):
        with pytest.raises(ConfigurationError, match=r"another cluster.*on one bus"):
            async with publisher.transaction(foreign):
                pytest.fail("its positions cannot ride in it")
        async with publisher.transaction(log):
            assert await log.next_record(timeout=PATIENCE)
    assert RawAdmin(kafka.bootstrap).committed(name, topic, 0).offset == 1


@pytest.mark.deep
@OWN
@pytest.mark.parametrize("step", ["publish", "commit", "abort"])
async def test_a_timed_out_transaction_ends_its_publisher(impatient: KafkaServer, step: str) -> None:
    """The broker does not tell whether another publisher has the id now, so it is not taken back."""
    topic = RawAdmin(impatient.bootstrap).make_topic()
    backend, transaction = await transaction_of(impatient, f"slow-{topic}", transaction_timeout_ms=1000)
    try:
        await transaction.begin()
        await transaction.publish(topic, [OutboundMessage(b"slow")])
        await until_aborted(impatient, topic)
        if step == "publish":
            outcomes = await transaction.publish(topic, [OutboundMessage(b"late")])
            assert isinstance(outcomes[0], TransactionFatal)
        else:
            with pytest.raises(TransactionFatal, match="more than 1 s"):
                await (transaction.abort() if step == "abort" else transaction.commit())
        with pytest.raises(TransactionFatal, match="another publisher opened this id"):
            await transaction.begin()
    finally:
        await backend.close()
    assert bodies(impatient, topic) == [b"other"]


async def until_aborted(server: KafkaServer, topic: str) -> None:
    """Wait until the broker has aborted an open transaction of a topic, which holds back what was published later."""
    async with broker.connect(server.url) as bus, bus.records(topic, group=f"g-{topic}") as log:
        await bus.topic(topic).publish(b"other", key="other")
        record = await log.next_record(timeout=PATIENCE)
        assert record is not None
        assert record.data == b"other"


@pytest.mark.deep
@OWN
async def test_who_was_away_for_too_long_does_not_write_after_a_newer_writer(impatient: KafkaServer) -> None:
    async with broker.connect(f"{impatient.url}?transaction_timeout_ms=1000") as bus:
        topic = f"table-{uuid.uuid4().hex[:8]}"
        await bus.admin.ensure_topic(topic, compacted=True)
        async with bus.transactional_publisher(f"anybroker-table.{topic}.0") as old:
            with pytest.raises(TransactionFatal):
                async with old.transaction() as tx:
                    await tx.publish(topic, OutboundMessage(b"old", "key", partition=0))
                    await until_aborted(impatient, topic)
                    async with bus.table_writer(topic, 0) as newer:
                        await newer.write([OutboundMessage(b"new", "key")], checkpoint=b"1")
                        with pytest.raises(TransactionFatal):
                            await tx.publish(topic, OutboundMessage(b"old", "key", partition=0))
                        await newer.write([OutboundMessage(b"newer", "key")], checkpoint=b"2")
            with pytest.raises(TransactionFatal):
                async with old.transaction():
                    pytest.fail("the id is that of the newer writer")
        found = [record.data async for batch in bus.log.read(topic, 0) for record in batch]
        assert found == [b"other", b"new", b"1", b"newer", b"2"]


@pytest.mark.deep
@OWN
async def test_a_new_publisher_continues_after_a_timeout(impatient: KafkaServer) -> None:
    topic = RawAdmin(impatient.bootstrap).make_topic()
    async with broker.connect(f"{impatient.url}?transaction_timeout_ms=1000") as bus:
        async with bus.transactional_publisher(f"slow-{topic}") as publisher:
            with pytest.raises(TransactionFatal):
                async with publisher.transaction() as tx:
                    await tx.publish(topic, b"slow")
                    await until_aborted(impatient, topic)
        async with bus.transactional_publisher(f"slow-{topic}") as publisher, publisher.transaction() as tx:
            await tx.publish(topic, b"again")
    assert bodies(impatient, topic) == [b"other", b"again"]


async def test_a_timeout_above_the_brokers_maximum(kafka: KafkaServer, name: str) -> None:
    with pytest.raises(InvalidSetting, match="Set transaction_timeout_ms to the brokers'"):
        await transaction_of(kafka, name, transaction_timeout_ms=2_000_000_000)


@OWN
@pytest.mark.deep
async def test_broker_killed_in_a_transaction(impatient: KafkaServer) -> None:
    """It is committed when the broker is back, or undone; never half."""
    topic = RawAdmin(impatient.bootstrap).make_topic()
    done: list[int] = []
    async with broker.connect(impatient.url) as bus, bus.transactional_publisher("killed") as publisher:
        for number in range(12):
            restart = None
            try:
                async with publisher.transaction() as tx:
                    await tx.publish_batch(topic, numbered(20, number * 20))
                    if number == 6:
                        await asyncio.to_thread(impatient.kill)
                        restart = asyncio.create_task(asyncio.to_thread(impatient.start))
                    await tx.publish_batch(topic, numbered(20, 10_000 + number * 20))
            except (TransactionAborted, PublishError):
                pass
            else:
                done.append(number)
            if restart is not None:
                await restart
    assert len(done) >= 11
    found = bodies(impatient, topic)
    wanted = [m.data for n in done for m in (*numbered(20, n * 20), *numbered(20, 10_000 + n * 20))]
    assert found == wanted


async def test_a_cancelled_open_leaves_no_thread(bus: Bus, name: str) -> None:
    def threads(number: int) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if f"{name}-{number}'" in thread.name]

    for number in range(5):
        opening = asyncio.ensure_future(bus.transactional_publisher(f"{name}-{number}").__aenter__())
        while not threads(number):
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        async with asyncio.timeout(PATIENCE):
            while threads(number):
                await asyncio.sleep(0.02)


async def test_calls_out_of_order_are_rejected(kafka: KafkaServer, topic: str, name: str) -> None:
    backend, transaction = await transaction_of(kafka, name)
    try:
        for call in (transaction.commit(), transaction.publish(topic, numbered(1))):
            with pytest.raises(BackendError, match="Begin one first"):
                await call
        await transaction.abort()
        await transaction.begin()
        with pytest.raises(BackendError, match="already open"):
            await transaction.begin()
        await transaction.commit()
    finally:
        await backend.close()
    with pytest.raises(BrokerError):
        await transaction.begin()
