"""`enqueue` to a real broker, with and without futures that are awaited: order, receipts and failures."""

from __future__ import annotations

import pytest

import broker
from broker.errors import MessageTooLarge, PublishError
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import read_all

KEYS = 20


@pytest.mark.parametrize("kept", [False, True])
async def test_enqueued_messages_arrive_once_and_in_order_per_key(
    kafka: KafkaServer, make_topic: MakeTopic, kept: bool
) -> None:
    name = make_topic(partitions=3)
    futures: list[object] = []
    async with broker.connect(kafka.url) as bus:
        topic = bus.topic(name)
        for number in range(30_000):
            future = await topic.enqueue(b"%d" % number, key=b"key-%d" % (number % KEYS))
            if kept and number % 1500 == 7:
                futures.append(future)
            del future
        await topic.flush()
    written = [int(message.value() or b"") for part in range(3) for message in read_all(kafka.bootstrap, name, part)]
    assert len(written) == 30_000
    for key in range(KEYS):
        assert [number for number in written if number % KEYS == key] == list(range(key, 30_000, KEYS))
    assert len(futures) == (20 if kept else 0)


async def test_a_receipt_has_the_offset_of_its_message(kafka: KafkaServer, make_topic: MakeTopic) -> None:
    name = make_topic(partitions=3)
    async with broker.connect(kafka.url) as bus:
        topic = bus.topic(name)
        futures = [await topic.enqueue(b"%d" % number, key=b"%d" % number) for number in range(2500)]
        receipts = [await future for future in futures]
    written = {
        (part, message.offset()): message.value()
        for part in range(3)
        for message in read_all(kafka.bootstrap, name, part)
    }
    for number, receipt in enumerate(receipts):
        assert written[receipt.partition or 0, receipt.offset] == b"%d" % number
        assert receipt.id == f"{name}:{receipt.partition}:{receipt.offset}"


async def test_flush_raises_what_the_broker_rejected(kafka: KafkaServer, make_topic: MakeTopic) -> None:
    name = make_topic(config={"max.message.bytes": "2000"})
    async with broker.connect(kafka.url) as bus:
        topic = bus.topic(name)
        for number in range(200):
            await topic.enqueue(b"x" * 3000 if number in (50, 150) else b"%d" % number)
        with pytest.raises(PublishError, match="2 of 2") as raised:
            await topic.flush()
        assert all(isinstance(outcome, MessageTooLarge) for outcome in raised.value.outcomes)
    written = [int(message.value() or b"") for message in read_all(kafka.bootstrap, name, 0)]
    assert sorted(written) == [number for number in range(200) if number not in (50, 150)]
