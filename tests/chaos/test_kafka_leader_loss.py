"""The broker that leads what is written is killed: publishers and transactions go on with the next leader."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

import broker
from broker.bus import Bus
from broker.errors import PublishError, TransactionAborted
from broker.outbound import OutboundMessage
from tests.servers.kafka_client import read_all
from tests.servers.kafka_cluster import KafkaCluster

# Of the same group as the other tests of clusters: six brokers at once are more than a small machine holds.
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.xdist_group("kafka-chaos-cluster"),
]

PARTITIONS = 2
ROUNDS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster(3) as cluster:
        yield cluster


def written(cluster: KafkaCluster, topic: str) -> list[list[bytes]]:
    return [
        [message.value() or b"" for message in read_all(cluster.bootstrap, topic, partition)]
        for partition in range(PARTITIONS)
    ]


async def lose_leaders(cluster: KafkaCluster, topic: str, done: list[bytes]) -> None:
    """Kill the leader of partition 0 in the middle of the work, and start it again, some times over."""
    for _ in range(ROUNDS):
        for kill in (True, False):
            wanted = len(done) + 1000
            while len(done) < wanted:
                await asyncio.sleep(0.02)
            if kill:
                leader = await asyncio.to_thread(cluster.leader, topic)
                assert leader >= 0
                await asyncio.to_thread(cluster[leader].kill)
        await asyncio.to_thread(cluster.start)


async def test_publishing_goes_on_with_the_next_leader(cluster: KafkaCluster) -> None:
    topic = cluster.admin.make_topic(partitions=PARTITIONS, copies=3, config={"min.insync.replicas": "2"})
    confirmed: list[bytes] = []
    failed: list[PublishError] = []
    stopped = asyncio.Event()

    async def publish(bus: Bus, writer: int) -> None:
        number = 0
        while not stopped.is_set():
            batch = [OutboundMessage(b"%d %d" % (writer, number + n), b"%d" % writer) for n in range(20)]
            number += 20
            try:
                await bus.topic(topic).publish_batch(batch)
            except PublishError as error:
                failed.append(error)
                return
            confirmed.extend(message.data or b"" for message in batch)

    async with broker.connect(cluster.url) as bus:
        writers = [asyncio.create_task(publish(bus, writer)) for writer in range(6)]
        await lose_leaders(cluster, topic, confirmed)
        stopped.set()
        await asyncio.gather(*writers)
    assert failed == []
    partitions = written(cluster, topic)
    assert Counter(body for bodies in partitions for body in bodies) == Counter(confirmed)
    for writer in range(6):
        for bodies in partitions:
            numbers = [int(body.split()[1]) for body in bodies if body.startswith(b"%d " % writer)]
            assert numbers == sorted(numbers)


async def test_transactions_go_on_with_the_next_leader(cluster: KafkaCluster) -> None:
    topic = cluster.admin.make_topic(partitions=PARTITIONS, copies=3, config={"min.insync.replicas": "2"})
    committed: list[bytes] = []
    stopped = asyncio.Event()

    async def work(bus: Bus) -> None:
        number = 0
        async with bus.transactional_publisher("leaderless") as publisher:
            while not stopped.is_set():
                batch = [OutboundMessage(b"%d" % n, b"%d" % n) for n in range(number, number + 20)]
                number += 20
                with suppress(TransactionAborted, PublishError):
                    async with publisher.transaction() as transaction:
                        await transaction.publish_batch(topic, batch)
                    committed.extend(message.data or b"" for message in batch)

    async with broker.connect(cluster.url) as bus:
        worker = asyncio.create_task(work(bus))
        losing = asyncio.create_task(lose_leaders(cluster, topic, committed))
        await asyncio.wait((worker, losing), return_when=asyncio.FIRST_COMPLETED)
        stopped.set()
        await worker
        await losing
    assert Counter(body for bodies in written(cluster, topic) for body in bodies) == Counter(committed)
