"""Many leases that end at once: their messages are redelivered in batches, in order, at a limited rate."""

from __future__ import annotations

import asyncio

import pytest

from broker_kafka.queue.markers.wire import Content, Kind, Marker, MessageId
from tests.kafka.queue_markers import Queue, connected, tracking
from tests.servers.kafka import KafkaServer


async def expired(queue: Queue, count: int, size: int = 10) -> list[MessageId]:
    """So many messages that were released and are due, one after the other."""
    ids = await asyncio.to_thread(queue.send, count)
    starts = [
        (
            Marker(kind=Kind.START, id=each, after_ms=1 + 5 * number, attempt=1, released=True),
            Content(value=(b"%d " % number).ljust(size, b".")),
        )
        for number, each in enumerate(ids)
    ]
    await asyncio.to_thread(queue.write, *starts)
    await asyncio.to_thread(queue.commit, ids)
    return ids


def numbers_of(again: list[bytes | None]) -> list[int]:
    return [int((value or b"").split()[0]) for value in again]


@pytest.mark.deep
async def test_redeliveries_keep_the_rate_over_all_partitions(kafka: KafkaServer) -> None:
    async with connected(kafka, queue="markers", redelivery_rate=40) as connection:
        queue = await asyncio.to_thread(Queue, kafka, 2)
        await queue.prepare(connection)
        await expired(queue, 160)
        async with tracking(connection, queue) as tracker:
            again = await asyncio.to_thread(queue.wait_for_again, 160, 160)
            assert tracker.counts.redelivered == 160
    times = sorted(each.timestamp()[1] for each in again)
    # 40 are sent at once, and the other 120 take 3 s.
    assert times[-1] - times[0] >= 2_800


async def test_messages_beyond_one_transaction_keep_their_order(kafka: KafkaServer) -> None:
    async with connected(kafka) as connection:
        queue = await asyncio.to_thread(Queue, kafka)
        await queue.prepare(connection)
        await expired(queue, 24, size=10_000)
        async with tracking(connection, queue, batch=6, batch_bytes=30_000):
            again = await asyncio.to_thread(queue.wait_for_again, 24, 24)
    assert numbers_of([each.value() for each in again]) == list(range(24))
