"""A consumer of a queue that closes while it starts messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from broker.bus import connect
from broker.errors import BrokerError
from broker.testing.waiting import take
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.markers.marker_producer import MarkerProducer, PlacedMarker
from broker_kafka.queue.markers.wire import Kind, read_markers
from broker_kafka.records import KafkaRecordSource
from tests.kafka.test_queue_failures import kinds_of
from tests.servers.kafka import KafkaServer

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers"


async def test_a_close_waits_for_starts_in_flight(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, close, leave = MarkerProducer.write, QueueClient.close, KafkaRecordSource.close
    starting, closing = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def slow(self: MarkerProducer, markers: Sequence[PlacedMarker], **how: float) -> list[BrokerError | None]:
        ((marker, _),) = read_markers(markers[0].data)
        if marker is None or marker.kind is not Kind.START or starting.is_set():
            return await write(self, markers, **how)
        starting.set()
        await closing.wait()
        outcomes = await write(self, markers, **how)
        order.append("started")
        return outcomes

    async def closes(self: QueueClient) -> None:
        closing.set()
        await close(self)

    async def leaves(self: KafkaRecordSource) -> None:
        order.append("left")
        await leave(self)

    monkeypatch.setattr(MarkerProducer, "write", slow)
    monkeypatch.setattr(QueueClient, "close", closes)
    monkeypatch.setattr(KafkaRecordSource, "close", leaves)
    async with connect(f"{kafka.url}?{QUICK}") as bus:
        await bus.admin.ensure_subscription(topic, group)
        await bus.topic(topic).publish(b"once")
        async with bus.messages(topic, subscription=group):
            await asyncio.wait_for(starting.wait(), PATIENCE)
        assert order == ["started", "left"]
        async with bus.messages(topic, subscription=group, confirm_acks=True) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            assert message.delivery_attempt == 1
            await message.ack()
        assert (await bus.admin.lag(topic, group)).unsettled == 0
    assert kinds_of(kafka, group) == [Kind.START, Kind.START, Kind.END]
