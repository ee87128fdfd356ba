"""Publishing to a real broker: receipts, the error of each failure, and the close."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.errors import (
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    OperationTimeout,
    PublishError,
    TopicNotFound,
)
from broker.hooks import Warned
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker_kafka.client import producer
from broker_kafka.client.producer import ProducerThread
from broker_kafka.codec.headers import RECORD_VIEW
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce, read_all


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with broker.connect(kafka.url) as bus:
        yield bus


def settings_of(kafka: KafkaServer, **values: Any) -> KafkaSettings:
    return KafkaSettings(servers=(kafka.bootstrap,), **values)


def numbered(count: int, **more: Any) -> list[OutboundMessage]:
    return [OutboundMessage(b"%d" % number, **more) for number in range(count)]


def failures(raised: PublishError) -> dict[int, BrokerError]:
    return {index: each for index, each in enumerate(raised.outcomes) if isinstance(each, BrokerError)}


# -- receipts ----------------------------------------------------------------------------------------------


async def test_receipt_has_partition_offset_and_time(bus: Bus, kafka: KafkaServer, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=3)
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    receipts = await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % n, b"%d" % n) for n in range(2500)])
    after = datetime.now(UTC)
    for partition in range(3):
        written = {message.offset(): message for message in read_all(kafka.bootstrap, topic, partition)}
        mine = [(n, receipt) for n, receipt in enumerate(receipts) if receipt.partition == partition]
        assert len(written) == len(mine)
        for number, receipt in mine:
            assert receipt.time is not None
            assert before <= receipt.time <= after
            message = written[receipt.offset]
            assert message.value() == b"%d" % number
            assert message.timestamp()[1] == receipt.timestamp


async def test_a_message_without_a_key_on_a_compacted_topic_fails(bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(config={"cleanup.policy": "compact"})
    with pytest.raises(InvalidMessage) as single:
        await bus.topic(topic).publish(b"x")
    with pytest.raises(broker.PublishError) as several:
        await bus.topic(topic).publish_batch([OutboundMessage(b"1", key=b"a"), OutboundMessage(b"2")])
    for error in (single.value, several.value.outcomes[1]):
        assert isinstance(error, InvalidMessage)
        assert "Give each message of a compacted topic a key" in error.advice
    assert (await bus.log.bounds(topic))[0].next == 0


async def test_receipt_has_the_stored_time(bus: Bus, make_topic: MakeTopic) -> None:
    long_ago = datetime.now(UTC).replace(microsecond=5000) - timedelta(hours=1)
    mine, theirs = make_topic(), make_topic(config={"message.timestamp.type": "LogAppendTime"})
    assert (await bus.topic(mine).publish(OutboundMessage(b"", publish_time=long_ago))).time == long_ago
    appended = (await bus.topic(theirs).publish(OutboundMessage(b"", publish_time=long_ago))).time
    assert appended is not None
    assert appended > long_ago + timedelta(minutes=59)


async def test_all_parts_of_a_message_are_written(bus: Bus, kafka: KafkaServer, topic: str) -> None:
    moment = datetime(2026, 11, 21, 12, 0, 0, 123000, tzinfo=UTC)
    await bus.topic(topic).publish_batch(
        [
            OutboundMessage(b"body", b"key", {"a": "ä"}, publish_time=moment),
            OutboundMessage(None, b"key"),
            OutboundMessage(b"", b""),
            OutboundMessage(b"x", id="mine"),
        ]
    )
    full, tombstone, empty, named = read_all(kafka.bootstrap, topic)
    assert (full.value(), full.key(), full.headers()) == (b"body", b"key", [("a", "ä".encode())])
    assert full.timestamp()[1] == int(moment.timestamp() * 1000)
    assert (tombstone.value(), tombstone.key(), tombstone.headers()) == (None, b"key", None)
    assert (empty.value(), empty.key()) == (b"", b"")
    assert named.headers() == [("anybroker-id", b"mine")]


async def test_without_receipts_all_messages_are_written(bus: Bus, kafka: KafkaServer, topic: str) -> None:
    plain, rich = numbered(2200), numbered(1200, attributes={"a": "b"})
    await bus.topic(topic).publish_batch([*plain, *rich, *plain[:10]], receipts=False)
    written = [message.value() for message in read_all(kafka.bootstrap, topic)]
    assert written == [message.data for message in (*plain, *rich, *plain[:10])]


async def test_calls_of_one_key_keep_their_order(bus: Bus, kafka: KafkaServer, topic: str) -> None:
    calls = [
        bus.topic(topic).publish_batch([OutboundMessage(b"%d" % (n * 7 + m)) for m in range(7)], receipts=False)
        for n in range(100)
    ]
    await asyncio.gather(*calls)
    assert [int(message.value() or b"") for message in read_all(kafka.bootstrap, topic)] == list(range(700))


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("receipts", [True, False])
@pytest.mark.parametrize("attributes", [None, {"a": "b"}])
async def test_each_message_has_its_own_outcome(
    bus: Bus, kafka: KafkaServer, make_topic: MakeTopic, receipts: bool, attributes: dict[str, str] | None
) -> None:
    # A compacted topic refuses messages without a key; those of one partition fail together, the others do not.
    topic = make_topic(partitions=2, config={"cleanup.policy": "compact"})
    messages = [
        OutboundMessage(b"%d" % (n % 40), None if n % 3 == 0 else b"abc", attributes, partition=n % 3 % 2)
        if attributes
        else OutboundMessage(b"%d" % (n % 40), None if n % 3 == 0 else b"abc")
        for n in range(300)
    ]
    with pytest.raises(PublishError) as raised:
        await bus.topic(topic).publish_batch(messages, receipts=receipts)
    failed = failures(raised.value)
    for index, error in failed.items():
        if messages[index].key is None:
            assert (type(error), error.retriable) == (InvalidMessage, False)
        else:
            assert error.retriable  # it was only in bad company
    assert {index for index, message in enumerate(messages) if message.key is None} <= failed.keys()
    there = Counter(
        (message.key(), message.value()) for number in range(2) for message in read_all(kafka.bootstrap, topic, number)
    )
    expected = Counter((message.key, message.data) for index, message in enumerate(messages) if index not in failed)
    assert there == expected
    rest = [outcome for index, outcome in enumerate(raised.value.outcomes) if index not in failed]
    assert all(isinstance(outcome, Receipt) if receipts else outcome is None for outcome in rest)


async def test_a_message_above_the_topics_limit_is_too_large(bus: Bus, make_topic: MakeTopic) -> None:
    topic = make_topic(config={"max.message.bytes": "2000"})
    with pytest.raises(MessageTooLarge, match=topic) as raised:
        await bus.topic(topic).publish(b"x" * 3000)
    assert not raised.value.retriable
    await bus.topic(topic).publish(b"x" * 1000)


async def test_a_message_above_the_clients_limit_is_too_large(kafka: KafkaServer, topic: str) -> None:
    config = settings_of(kafka, message_max_bytes=9000).client_config("producer")
    thread = ProducerThread(config)
    await thread.start()
    sizes = [10, 10_000, 10, 10_000, 10_000, 10]
    for attributes in (None, {"a": "b"}):
        for receipts in (True, False):
            outcomes = await thread.publish(
                topic, [OutboundMessage(b"x" * size, None, attributes) for size in sizes], receipts=receipts
            )
            assert [isinstance(outcome, MessageTooLarge) for outcome in outcomes] == [size > 10 for size in sizes]
    await thread.stop(5)
    assert len(read_all(kafka.bootstrap, topic)) == 4 * 3


async def test_a_missing_topic_fails_soon_and_may_be_created_later(bus: Bus, admin: RawAdmin) -> None:
    name = f"late-{time.time_ns()}"
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(TopicNotFound, match=name):
            await bus.topic(name).publish_batch(numbered(3))
        assert time.monotonic() - begun < 20, "the client's own default is 30 seconds"
    admin.make_topic(name)
    assert len(await bus.topic(name).publish_batch(numbered(3))) == 3


async def test_deleted_topic_is_not_found(bus: Bus, admin: RawAdmin, topic: str) -> None:
    await bus.topic(topic).publish(b"x")
    admin.delete_topic(topic)
    with pytest.raises(TopicNotFound):
        for _ in range(100):
            await bus.topic(topic).publish(b"x")
            await asyncio.sleep(0.02)
    admin.make_topic(topic)
    receipt = await bus.topic(topic).publish(b"x")
    assert receipt.offset == 0


async def test_missing_partition(bus: Bus, admin: RawAdmin, topic: str) -> None:
    with pytest.raises(PublishError) as raised:
        await bus.topic(topic).publish_batch([OutboundMessage(b"0", partition=n) for n in (0, 1, 0)])
    assert [type(outcome) for outcome in raised.value.outcomes] == [Receipt, InvalidMessage, Receipt]
    assert "partition is 1, which the topic does not have. Give one of" in str(raised.value.outcomes[1])
    admin.add_partitions(topic, 2)
    admin.wait_for_leaders(topic, 2)
    assert (await bus.topic(topic).publish(OutboundMessage(b"1", partition=1))).partition == 1


@pytest.mark.parametrize("partition", [2**31, 2**70])
async def test_impossible_partition(bus: Bus, topic: str, partition: int) -> None:
    with pytest.raises(PublishError) as raised:
        await bus.topic(topic).publish_batch([b"0", OutboundMessage(b"1", partition=partition), b"2"])
    assert [type(outcome) for outcome in raised.value.outcomes] == [Receipt, InvalidMessage, Receipt]
    assert f"partition is {partition}" in str(raised.value.outcomes[1])


async def test_times_before_the_epoch_come_back(bus: Bus, kafka: KafkaServer, make_topic: MakeTopic) -> None:
    topic = make_topic(config={"retention.ms": "-1"})
    times = [datetime(1960, 2, 3, 4, 5, 6, 789, UTC), datetime(1970, 1, 1, tzinfo=UTC)]
    await bus.topic(topic).publish_batch([OutboundMessage(b"x", publish_time=time) for time in times])
    assert [RECORD_VIEW.publish_time(message) for message in read_all(kafka.bootstrap, topic)] == times


@pytest.mark.parametrize("transactional", [False, True])
async def test_publish_times_older_than_the_retention_cause_a_warning(
    kafka: KafkaServer, make_topic: MakeTopic, transactional: bool
) -> None:
    topics = [make_topic(config={"retention.ms": "86400000"}), make_topic(config={"retention.ms": "-1"})]
    topics += [make_topic(config={"message.timestamp.type": "LogAppendTime"}), make_topic()]
    now = datetime.now(UTC)
    old = [OutboundMessage(b"x", publish_time=now - timedelta(hours=hours)) for hours in (1, 23, 25, 26)]
    warned: list[str] = []
    async with broker.connect(kafka.url) as bus:
        bus.hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
        if transactional:
            async with bus.transactional_publisher(f"tx-{topics[0]}") as publisher, publisher.transaction() as tx:
                for topic in topics:
                    await tx.publish_batch(topic, old)
        else:
            for topic in topics:
                await bus.topic(topic).publish_batch(old)
    (text,) = warned
    assert f"2 messages were published to {topics[0]!r} with a publish time older than its retention of 1 day" in text


async def test_a_redrive_of_old_letters_gives_them_the_present_time(
    kafka: KafkaServer, bus: Bus, make_topic: MakeTopic
) -> None:
    topic, dead = make_topic(), make_topic(config={"retention.ms": "-1"})
    produce(kafka.bootstrap, dead, [b"x"], headers={"dead-letter-topic": topic}, timestamp=1_577_836_800_000)
    assert (await bus.admin.redrive(dead, to=[topic])).moved == 1
    (record,) = read_all(kafka.bootstrap, topic)
    assert record.timestamp()[1] > 1000 * (time.time() - 3600)
    assert RECORD_VIEW.publish_time(record) == datetime(2020, 1, 1, tzinfo=UTC)


async def test_producer_with_a_fatal_error_is_replaced(kafka: KafkaServer, make_topic: MakeTopic) -> None:
    compacted, other = make_topic(config={"cleanup.policy": "compact"}), make_topic()
    settings = settings_of(kafka, properties={"enable.gapless.guarantee": "true"})
    async with broker.connect(settings) as bus:
        for _ in range(3):
            # With that property, a message that the broker refuses leaves a gap, which is fatal to the client.
            with pytest.raises(InvalidMessage):
                await bus.topic(compacted).publish(b"no key")
            outcomes = await asyncio.gather(
                *(bus.topic(other).publish_batch(numbered(300)) for _ in range(4)), return_exceptions=True
            )
            assert all(isinstance(outcome, list) or outcome.retriable for outcome in outcomes)  # type: ignore[union-attr]
            assert len(await bus.topic(other).publish_batch(numbered(300))) == 300


# -- flow --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"queue_buffering_max_messages": 100}, {"publish_window": 100}])
async def test_a_small_queue_makes_callers_wait(kafka: KafkaServer, topic: str, bound: dict[str, int]) -> None:
    async with broker.connect(settings_of(kafka, **bound)) as bus:
        calls = [
            bus.topic(topic).publish_batch(numbered(1500)),
            bus.topic(topic).publish_batch(numbered(1500), receipts=False),
        ]
        calls += [bus.topic(topic).publish_batch(numbered(700, attributes={"a": "b"}))]
        await asyncio.gather(*calls)
    written = [int(message.value() or b"") for message in read_all(kafka.bootstrap, topic)]
    assert written == [*range(1500), *range(1500), *range(700)]


async def publish_timed(bus: Bus, topic: str) -> float:
    begun = time.perf_counter()
    await bus.topic(topic).publish(b"x")
    return time.perf_counter() - begun


async def test_single_messages_do_not_linger(bus: Bus, kafka: KafkaServer, topic: str) -> None:
    lingering = 0.001 * KafkaSettings.model_fields["linger_ms"].default
    async with asyncio.timeout(60):
        # On a busy machine most take longer for other reasons; if they lingered, none took less.
        while await publish_timed(bus, topic) >= 0.9 * lingering:
            pass
    async with broker.connect(settings_of(kafka, linger_ms=40)) as patient:
        assert min([await publish_timed(patient, topic) for _ in range(20)]) > 0.03


async def test_idle_producer_sleeps(kafka: KafkaServer, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = 0
    poll = ProducerThread._poll

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal polls
        polls += 1
        poll(*args, **kwargs)

    monkeypatch.setattr(producer, "_IDLE_SECONDS", 60.0)
    async with broker.connect(kafka.url) as bus:
        await bus.topic(topic).publish(b"x")
        monkeypatch.setattr(ProducerThread, "_poll", counted)
        await asyncio.sleep(0.2)
        assert polls <= 2


# -- a broker that does not answer; tests/chaos kills it -------------------------------------------------------


@pytest.fixture(scope="module")
def own() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


@pytest.fixture
def own_topic(own: KafkaServer) -> str:
    return RawAdmin(own.bootstrap).make_topic(partitions=2)


@pytest.mark.deep
@pytest.mark.xdist_group("kafka-publishing")
async def test_broker_that_does_not_answer(own: KafkaServer, own_topic: str) -> None:
    """Memory is bounded, failures come in time, and close has its deadline."""
    settings = settings_of(own, message_timeout_ms=1500, publish_window=1000)
    async with broker.connect(settings) as bus:
        await bus.topic(own_topic).publish(b"before")
        own.pause()
        try:
            begun = time.monotonic()
            calls = [bus.topic(own_topic).publish_batch(numbered(800, attributes={"n": str(n)})) for n in range(3)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            took = time.monotonic() - begun
        finally:
            own.resume()
        assert 1 < took < 8
        late: list[str] = []
        for outcome in outcomes:
            assert isinstance(outcome, PublishError)
            assert all(error.retriable for error in failures(outcome).values())
            kinds = {type(error) for error in failures(outcome).values()}
            assert kinds <= {OperationTimeout, ConnectionFailed}
            late += [str(error) for error in failures(outcome).values() if isinstance(error, OperationTimeout)]
        assert late
        for said in late:
            assert f"Publishing to '{own_topic}': no answer in time" in said
            assert "may be on the broker" in said
            assert "message_timeout_ms" in said
        assert (await bus.topic(own_topic).publish(b"after")).offset is not None


@pytest.mark.deep
@pytest.mark.xdist_group("kafka-publishing")
async def test_close_has_a_deadline(own: KafkaServer, own_topic: str) -> None:
    thread = ProducerThread(settings_of(own).client_config("producer"))
    await thread.start()
    await thread.publish(own_topic, numbered(1))
    own.pause()
    try:
        calls = [asyncio.create_task(thread.publish(own_topic, numbered(30, attributes={"a": "b"}))) for _ in range(3)]
        await asyncio.sleep(0)
        begun = time.monotonic()
        assert await thread.stop(2.0)
        assert time.monotonic() - begun < 10
        for call in calls:
            outcomes = await call
            assert all(isinstance(outcome, OperationTimeout | ConnectionFailed) for outcome in outcomes)
    finally:
        own.resume()
    with pytest.raises(Closed):
        await thread.publish(own_topic, numbered(1))


@pytest.mark.deep
@pytest.mark.xdist_group("kafka-publishing")
async def test_close_delivers_pending_messages(own: KafkaServer, own_topic: str) -> None:
    thread = ProducerThread(settings_of(own).client_config("producer"))
    await thread.start()
    await thread.publish(own_topic, numbered(1))
    os.kill(own.process_id, signal.SIGSTOP)
    calls = [asyncio.create_task(thread.publish(own_topic, numbered(30))) for _ in range(3)]
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(thread.stop(20.0))
    await asyncio.sleep(0.2)
    os.kill(own.process_id, signal.SIGCONT)
    assert await stopping
    outcomes = [outcome for call in calls for outcome in await call]
    assert len(outcomes) == 90
    assert all(isinstance(outcome, Receipt) for outcome in outcomes)


async def test_a_setting_that_the_client_rejects(kafka: KafkaServer) -> None:
    thread = ProducerThread({**settings_of(kafka).client_config("producer"), "batch.size": "soon"})
    with pytest.raises(BrokerError, match=r"batch\.size"):
        await thread.start()
    assert isinstance(thread.failure, BrokerError)
