"""A materialized view of a compacted topic, read from bound to bound during writes: every read ends, and the view
equals the content of the topic.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer

import broker
from broker.bus import Bus
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "200",
    "delete.retention.ms": "0",
}


class Table:
    """Writes to a topic, in transactions and without, and knows what it must hold."""

    def __init__(self, kafka: KafkaServer, topic: str, seed: int) -> None:
        self.topic = topic
        self.content: dict[bytes, bytes] = {}
        self.random = random.Random(seed)
        config: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap, "log_level": 3}
        self.plain = Producer({**config, "enable.idempotence": True})
        self.transactional = Producer({**config, "transactional.id": uuid4().hex})
        self.transactional.init_transactions()

    def write(self, number: int) -> None:
        """A few upserts and tombstones, by a random way."""
        changes = [
            (b"%d" % self.random.randrange(5), self.random.choice([None, b"%d" % number]))
            for _ in range(self.random.randint(1, 4))
        ]
        way = self.random.choice(["plain", "commit", "abort", "abort"])
        producer = self.plain if way == "plain" else self.transactional
        if way != "plain":
            producer.begin_transaction()
        for key, value in changes:
            producer.produce(self.topic, value, key=key, partition=0)
        producer.flush()
        if way == "commit":
            producer.commit_transaction()
        elif way == "abort":
            producer.abort_transaction()
            return
        for key, value in changes:
            if value is None:
                self.content.pop(key, None)
            else:
                self.content[key] = value


async def load(
    bus: Bus, topic: str, view: dict[bytes, bytes], start: int | None = None, partition: int = 0, max_records: int = 7
) -> int:
    """Bring a view up to the end of the log; the position to go on from."""
    bounds = (await bus.log.bounds(topic))[partition]
    first = bounds.first if start is None else start
    async with asyncio.timeout(60):
        async for batch in bus.log.read(topic, partition, first, bounds.next, max_records=max_records):
            for record in batch:
                assert record.key is not None
                if record.data is None:
                    view.pop(record.key, None)
                else:
                    view[record.key] = record.data
    return bounds.next


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
async def test_a_view_equals_the_latest_values(kafka: KafkaServer, admin: RawAdmin, make_topic: MakeTopic, seed: int):
    topic = make_topic(config=COMPACTED)
    table = Table(kafka, topic, seed)
    followed: dict[bytes, bytes] = {}
    position: int | None = None
    async with broker.connect(f"kafka://{kafka.bootstrap}") as bus:
        for number in range(25):
            await asyncio.to_thread(table.write, number)
            await asyncio.to_thread(admin.wait_for_markers, topic)
            fresh: dict[bytes, bytes] = {}
            await load(bus, topic, fresh)
            assert fresh == table.content
            position = await load(bus, topic, followed, position)
            assert followed == table.content


async def test_a_view_of_many_partitions_loads_during_writes(kafka: KafkaServer, make_topic: MakeTopic):
    """What compaction takes from under a read has its successor behind the read's end, so that going on finds it."""
    topic = make_topic(partitions=4, config=COMPACTED)
    async with broker.connect(f"kafka://{kafka.bootstrap}") as bus:
        target = bus.topic(topic)
        await target.publish_batch([broker.OutboundMessage(b"first", key=f"{n}") for n in range(200)])
        views: list[dict[bytes, bytes]] = [{} for _ in range(4)]

        async def go_on(stop: asyncio.Event) -> None:
            while not stop.is_set():
                await target.publish_batch([broker.OutboundMessage(b"later", key=f"{n}") for n in range(200)])
            await target.publish_batch([broker.OutboundMessage(b"last", key=f"{n}") for n in range(200)])

        async def load_all(starts: list[int | None]) -> list[int | None]:
            return list(
                await asyncio.gather(
                    *(
                        load(bus, topic, view, start, number, 500)
                        for number, (view, start) in enumerate(zip(views, starts, strict=True))
                    )
                )
            )

        stop = asyncio.Event()
        writer = asyncio.create_task(go_on(stop))
        positions: list[int | None] = [None] * 4
        try:
            for _ in range(5):
                positions = await load_all(positions)
        finally:
            stop.set()
            await writer
        await load_all(positions)
        assert sum(map(len, views)) == 200
        assert set.union(*map(set, views)) == {b"%d" % n for n in range(200)}
        assert {value for view in views for value in view.values()} == {b"last"}
