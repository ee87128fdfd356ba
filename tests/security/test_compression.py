"""Batches of a foreign producer that expand a thousandfold: what bounds them, on a real broker."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka import KafkaError, Producer

import broker
from broker.errors import BackendError
from tests.servers.kafka import shared_server

EXPANDED = 8 << 20
"""Bytes of a record that takes some kilobytes in its batch."""


def publish(topic: str, codec: str) -> KafkaError | None:
    """As a foreign producer, which has no limit of its own; returns the broker's refusal."""
    producer = Producer(
        {
            "bootstrap.servers": shared_server().bootstrap,
            "message.max.bytes": 2 * EXPANDED,
            "compression.type": codec,
        }
    )
    refusals: list[KafkaError | None] = []
    producer.produce(topic, bytes(EXPANDED), callback=lambda error, _: refusals.append(error))
    assert producer.flush(60) == 0
    return refusals[0]


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])
async def test_a_broker_counts_the_bytes_of_a_topic_that_it_stores_uncompressed(codec: str) -> None:
    name = f"bomb-{uuid.uuid4().hex[:12]}"
    async with broker.connect(f"kafka://{shared_server().bootstrap}") as bus:
        await bus.admin.ensure_topic(name)
        assert publish(name, codec) is None
        await bus.admin.ensure_topic(name, compression_type="uncompressed")
        refusal = publish(name, codec)
        assert refusal is not None
        assert refusal.code() == KafkaError.MSG_SIZE_TOO_LARGE
        await bus.admin.delete_topic(name)


async def test_a_batch_that_expands_too_far_is_an_error_that_says_what_to_do() -> None:
    name = f"bomb-{uuid.uuid4().hex[:12]}"
    limits = "fetch_max_bytes=1000000&max_partition_fetch_bytes=1000000"
    url = f"kafka://{shared_server().bootstrap}?{limits}&receive.message.max.bytes="
    async with broker.connect(f"{url}{EXPANDED // 2}") as bus:
        await bus.admin.ensure_topic(name)
        assert publish(name, "zstd") is None
        async with bus.records(name, group="audit", start="earliest") as records:
            with pytest.raises(BackendError, match=r"receive\.message\.max\.bytes"):
                await records.next_record(timeout=60)
    async with broker.connect(f"{url}{2 * EXPANDED}") as bus:
        async with bus.records(name, group="audit", start="earliest") as records:
            record = await records.next_record(timeout=60)
            assert record is not None
            assert len(record.data or b"") == EXPANDED
        await bus.admin.delete_topic(name)
