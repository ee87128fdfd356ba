"""A batch above the limit of its topic: only messages that are too large by themselves fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

import broker
from broker.bus import Bus
from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    MessageTooLarge,
    OperationTimeout,
    PublishError,
    TransactionAborted,
)
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import read_all

LIMIT = 20_000
# The messages of a rejected batch wait for each other's round trips.
PATIENT = "message_timeout_ms=240000"
BIG = os.urandom(50_000)


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with broker.connect(f"{kafka.url}?{PATIENT}") as bus:
        yield bus


@pytest.fixture
def small_topic(make_topic: MakeTopic) -> str:
    """A topic with one partition that takes batches of 20,000 bytes."""
    return make_topic(config={"max.message.bytes": str(LIMIT)})


def values_in(kafka: KafkaServer, topic: str, partition: int = 0) -> list[bytes | None]:
    return [message.value() for message in read_all(kafka.bootstrap, topic, partition)]


async def outcomes_of(bus: Bus, topic: str, messages: Sequence[OutboundMessage | bytes]) -> Sequence[Any]:
    try:
        return await bus.topic(topic).publish_batch(messages)
    except PublishError as error:
        return error.outcomes


async def test_messages_batched_with_an_oversized_one_are_published(bus: Bus, kafka: KafkaServer, small_topic: str):
    outcomes = await outcomes_of(bus, small_topic, [b"a", BIG, b"c"])
    assert [type(outcome) for outcome in outcomes] == [Receipt, MessageTooLarge, Receipt]
    assert not outcomes[1].retriable
    found = values_in(kafka, small_topic)
    assert [found[outcomes[0].offset], found[outcomes[2].offset]] == [b"a", b"c"]
    assert len(found) == 2


async def test_an_oversized_message_fails_only_its_own_call(bus: Bus, kafka: KafkaServer, small_topic: str):
    topic = bus.topic(small_topic)
    for _ in range(5):
        small = [topic.publish(b"small") for _ in range(5)]
        results = await asyncio.gather(
            *small, topic.publish(BIG), *[topic.publish(b"x") for _ in range(5)], return_exceptions=True
        )
        assert isinstance(results.pop(5), MessageTooLarge)
        assert all(isinstance(result, Receipt) for result in results)
    assert len(values_in(kafka, small_topic)) == 50


async def test_an_oversized_enqueued_message_fails_alone(bus: Bus, kafka: KafkaServer, small_topic: str):
    topic = bus.topic(small_topic)
    futures = [await topic.enqueue(BIG if number == 100 else b"%d" % number) for number in range(200)]
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(results.pop(100), MessageTooLarge)
    assert all(isinstance(result, Receipt) for result in results)
    assert sorted(int(value or b"") for value in values_in(kafka, small_topic)) == [n for n in range(200) if n != 100]


# A busy machine may fill two batches, and the refusal of the first then fails messages of the key (see the docs).
@pytest.mark.deep
@pytest.mark.parametrize("receipts", [True, False])
async def test_a_batch_above_the_limit_is_split_in_order(
    bus: Bus, kafka: KafkaServer, small_topic: str, receipts: bool
):
    # Each fits, and the client puts a million bytes of them into a batch.
    messages = [OutboundMessage(b"%d " % number + bytes(1000), b"key") for number in range(500)]
    topic = bus.topic(small_topic)
    if receipts:
        assert [receipt.offset for receipt in await topic.publish_batch(messages)] == list(range(500))
    else:
        await topic.publish_batch(messages, receipts=False)
    assert values_in(kafka, small_topic) == [message.data for message in messages]


async def test_failures_without_receipts_belong_to_the_right_messages(bus: Bus, kafka: KafkaServer, small_topic: str):
    messages = [BIG if number % 10 == 5 else b"%d" % number for number in range(50)]
    with pytest.raises(PublishError) as raised:
        await bus.topic(small_topic).publish_batch(messages, receipts=False)
    failed = {index for index, outcome in enumerate(raised.value.outcomes) if isinstance(outcome, BrokerError)}
    assert failed == set(range(5, 50, 10))
    assert all(isinstance(raised.value.outcomes[index], MessageTooLarge) for index in failed)
    # A busy machine may fill two batches, and messages without a key have no order.
    assert sorted(value or b"" for value in values_in(kafka, small_topic)) == sorted(set(messages) - {BIG})


@pytest.mark.parametrize("known", [False, True], ids=["first-refusal", "later"])
async def test_rejections_keep_the_order_of_a_key(bus: Bus, kafka: KafkaServer, make_topic: MakeTopic, known: bool):
    topic = make_topic(partitions=3, config={"max.message.bytes": str(LIMIT)})
    if known:
        # A single message is refused however many batches the client fills.
        with pytest.raises(MessageTooLarge):
            await bus.topic(topic).publish(BIG)
    published: set[int] = set()
    too_large: set[int] = set()
    overtaken: set[int] = set()

    async def publish(first: int) -> None:
        batch = [
            OutboundMessage(BIG if n % 100 == 50 else b"%d" % n, b"%d" % (n % 7), {"n": str(n)})
            for n in range(first, first + 40)
        ]
        for n, outcome in enumerate(await outcomes_of(bus, topic, batch), first):
            if isinstance(outcome, Receipt):
                published.add(n)
            elif isinstance(outcome, MessageTooLarge):
                too_large.add(n)
            else:
                assert type(outcome) is BackendError
                assert outcome.retriable
                overtaken.add(n)

    await asyncio.gather(*[publish(first) for first in range(0, 4000, 40)])
    every_big = set(range(50, 4000, 100))
    assert too_large <= every_big
    if known:
        assert too_large == every_big
        assert not overtaken
    found: dict[int, list[int]] = {key: [] for key in range(7)}
    for partition in range(3):
        for message in read_all(kafka.bootstrap, topic, partition):
            if message.key() is not None:
                found[int(message.key() or b"")].append(int(message.value() or b""))
    for numbers in found.values():
        assert numbers == sorted(set(numbers))
    assert {n for numbers in found.values() for n in numbers} == published


async def test_other_topics_are_not_split(bus: Bus, kafka: KafkaServer, small_topic: str, topic: str):
    results = await asyncio.gather(
        outcomes_of(bus, small_topic, [BIG, *[bytes(1000)] * 300]),
        outcomes_of(bus, topic, [BIG, *[b"%d" % number for number in range(300)]]),
    )
    assert [index for index, outcome in enumerate(results[0]) if isinstance(outcome, BrokerError)] == [0]
    assert not [outcome for outcome in results[1] if isinstance(outcome, BrokerError)]
    assert len(values_in(kafka, topic)) == 301


async def test_each_message_has_an_outcome_when_the_bus_closes(kafka: KafkaServer, small_topic: str):
    async with broker.connect(kafka.url) as bus:
        tasks = [asyncio.create_task(outcomes_of(bus, small_topic, [BIG, *[bytes(1000)] * 50])) for _ in range(20)]
        await asyncio.sleep(0)
    published = unknown = 0
    for outcomes in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcomes, BaseException):
            assert isinstance(outcomes, Closed)
            continue
        assert len(outcomes) == 51
        published += sum(isinstance(outcome, Receipt) for outcome in outcomes)
        unknown += sum(isinstance(outcome, OperationTimeout) for outcome in outcomes)
    # What was in flight when the time of the close ended may be stored.
    assert published <= len(values_in(kafka, small_topic)) <= published + unknown


async def test_an_oversized_message_aborts_its_transaction(kafka: KafkaServer, small_topic: str):
    async with broker.connect(kafka.url) as bus, bus.transactional_publisher(f"tx-{small_topic}") as publisher:
        with pytest.raises(TransactionAborted):
            async with publisher.transaction() as tx:
                with pytest.raises(PublishError) as raised:
                    await tx.publish_batch(small_topic, [b"a", BIG, b"c"])
                assert {type(outcome) for outcome in raised.value.outcomes} == {BackendError}
                assert "batch_size" in str(raised.value.outcomes[0])
        with pytest.raises(TransactionAborted):
            async with publisher.transaction() as tx:
                with pytest.raises(MessageTooLarge):
                    await tx.publish(small_topic, BIG)
        async with publisher.transaction() as tx:
            await tx.publish(small_topic, b"last")
    assert [message.value() for message in read_all(kafka.bootstrap, small_topic, isolation="read_committed")] == [
        b"last"
    ]


async def test_with_batch_size_below_the_limit_only_oversized_messages_fail(kafka: KafkaServer, small_topic: str):
    async with broker.connect(f"{kafka.url}?batch_size={LIMIT}") as bus:
        async with bus.transactional_publisher(f"tx-{small_topic}") as publisher, publisher.transaction() as tx:
            await tx.publish_batch(small_topic, [bytes(1000)] * 300)
        outcomes = await outcomes_of(bus, small_topic, [*[bytes(1000)] * 100, BIG, *[bytes(1000)] * 100])
    assert [index for index, outcome in enumerate(outcomes) if isinstance(outcome, BrokerError)] == [100]
    assert isinstance(outcomes[100], MessageTooLarge)


@pytest.mark.parametrize("attributes", [{}, {"a": "b"}], ids=["bare", "with-attributes"])
@pytest.mark.parametrize("receipts", [True, False])
async def test_a_message_above_the_queue_size_fails_alone(
    kafka: KafkaServer, topic: str, receipts: bool, attributes: dict[str, str]
):
    fits, more = (OutboundMessage(bytes(500 * 1024 + more), attributes=attributes) for more in (0, 1))
    async with broker.connect(f"{kafka.url}?queue_buffering_max_kbytes=500") as bus, asyncio.timeout(60):
        messages = [OutboundMessage(b"a", attributes=attributes), more, fits, more, OutboundMessage(b"b")]
        refused, _ = await asyncio.gather(
            bus.topic(topic).publish_batch(messages, receipts=receipts),
            bus.topic(topic).publish(b"behind"),
            return_exceptions=True,
        )
    assert isinstance(refused, PublishError)
    failed = {index: each for index, each in enumerate(refused.outcomes) if isinstance(each, BrokerError)}
    assert {index: type(each) for index, each in failed.items()} == {1: MessageTooLarge, 3: MessageTooLarge}
    assert "queue_buffering_max_kbytes to 501" in failed[1].advice
    assert values_in(kafka, topic) == [b"a", fits.data, b"b", b"behind"]


async def test_every_message_above_the_queue_size_fails(kafka: KafkaServer, topic: str):
    async with broker.connect(f"{kafka.url}?queue_buffering_max_kbytes=1") as bus, asyncio.timeout(60):
        outcomes = await outcomes_of(bus, topic, [bytes(100_000)] * 20)
        assert [type(outcome) for outcome in outcomes] == [MessageTooLarge] * 20
        await bus.topic(topic).publish(b"behind")


async def test_a_message_above_the_queue_size_aborts_its_transaction(kafka: KafkaServer, topic: str):
    async with (
        broker.connect(f"{kafka.url}?queue_buffering_max_kbytes=500") as bus,
        bus.transactional_publisher(f"tx-{topic}") as publisher,
        asyncio.timeout(60),
    ):
        with pytest.raises(TransactionAborted, match="the queue of the producer holds less"):
            async with publisher.transaction() as tx:
                await tx.publish(topic, b"undone")
                with pytest.raises(MessageTooLarge, match="queue_buffering_max_kbytes"):
                    await tx.publish(topic, bytes(600_000))
        async with publisher.transaction() as tx:
            await tx.publish(topic, b"last")
    found = read_all(kafka.bootstrap, topic, isolation="read_committed")
    assert [message.value() for message in found] == [b"last"]
