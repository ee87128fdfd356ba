"""`FencedWriter` at its close."""

from __future__ import annotations

import asyncio

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from broker_kafka.fenced_writer import FencedWriter, OutcomeUnknown, OutgoingRecord
from tests.kafka.queue_markers import connected
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, read_all, wait_for


async def test_a_closed_writer_leaves_no_open_transaction(
    kafka: KafkaServer, admin: RawAdmin, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(self: FencedWriter, producer: Producer) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))

    monkeypatch.setattr(FencedWriter, "_commit", unanswered)
    async with connected(kafka) as connection:
        writer = FencedWriter(connection, f"{topic}-writer")
        await writer.start()
        writing = asyncio.ensure_future(writer.write([OutgoingRecord(topic, None, b"x")]))
        await asyncio.to_thread(wait_for, lambda: admin.bounds(topic)[1] > 0)
        assert await writer.stop(3.0)
        with pytest.raises(OutcomeUnknown):
            await writing
    # Else it would stay open for a minute, and readers of committed records stand before it.
    await asyncio.to_thread(admin.wait_for_markers, topic)
    assert await asyncio.to_thread(read_all, kafka.bootstrap, topic) == []
