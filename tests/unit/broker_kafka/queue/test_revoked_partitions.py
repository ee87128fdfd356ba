"""Partitions that a queue client gives up."""

from __future__ import annotations

import asyncio
from typing import Any

from broker.driver.contract import TopicPartition
from broker.hooks import Event
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.consumer.unknown_commits import UnknownCommits

HERE = TopicPartition("orders", 0)


class Listener:
    """Who hears of partitions."""

    def event(self, event: Event) -> None: ...


async def test_a_partition_revoked_during_a_slow_claim_is_forgotten() -> None:
    unused: Any = None
    listener: Any = Listener()
    client = QueueClient(
        listener,
        connection=unused,
        member=lambda _: unused,
        producer=unused,
        start_builder=unused,
        transactions=None,
        unknown_commits=UnknownCommits(),
        leases=unused,
        failure=lambda: None,
        session_seconds=10.0,
        on_close=unused,
    )
    loop = asyncio.get_running_loop()
    client.assigned([HERE])
    with client._claims.claim():
        giving = loop.create_task(client.revoking([HERE], loop.time() + 60))
        await asyncio.sleep(0)
        assert client._assignments
        giving.cancel()
        await asyncio.wait({giving})
    assert not client._assignments
