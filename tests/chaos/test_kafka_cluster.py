"""A cluster of three brokers loses leaders and coordinators during publishing, reading and administration."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import ElectionType, TopicPartition

import broker
from broker.bus import Bus
from broker.errors import PublishError, TransactionAborted
from broker.outbound import OutboundMessage
from tests.chaos.kafka_accounts import Account
from tests.chaos.kafka_copying import copy_while_losing
from tests.chaos.test_kafka_coordinator import answered, ask, asking, found
from tests.chaos.test_kafka_server import OPTIONS, over, reached, read_messages, read_records, still
from tests.servers.kafka_client import SECONDS, read_all, wait_for
from tests.servers.kafka_cluster import KafkaCluster

# One cluster for all tests: three brokers are a lot for a small machine.
pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-cluster")]

OFFSETS = "__consumer_offsets"
PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster(3) as cluster:
        yield cluster


async def read_followed(bus: Bus, account: Account, group: str, name: str) -> None:
    """A follower of the log, which is in no group."""
    async with bus.log.follow(account.topic) as log:
        async for batch in log.batches(200):
            for record in batch:
                account.book(name, record)


@pytest.mark.deep
async def test_leaders_fail_one_after_the_other(cluster: KafkaCluster, capsys: pytest.CaptureFixture[str]) -> None:
    topic = cluster.admin.make_topic(partitions=PARTITIONS)
    account = Account(topic, PARTITIONS)
    stopped = asyncio.Event()
    async with broker.connect(f"{cluster.url}?{OPTIONS}") as bus:
        readers = {"records": read_records, "messages": read_messages, "followed": read_followed}
        reading = [asyncio.create_task(read(bus, account, f"{topic}-{name}", name)) for name, read in readers.items()]
        publishing = asyncio.create_task(account.publish_until(bus, stopped, 10, 0.1, writers=3))
        # Opening is different: it raises while the leader is away.
        await reached(lambda: over(*reading) or all(account.read.get(name) for name in readers))
        for partition in range(2):
            before = len(account.receipts)
            await reached(lambda before=before: len(account.receipts) > before + 150)
            await asyncio.to_thread(cluster.wait_until_whole, topic)
            leader = await asyncio.to_thread(cluster.leader, topic, partition)
            await asyncio.to_thread(cluster[leader].kill)
            await asyncio.to_thread(cluster.wait_for_new_leader, topic, leader, partition)
            before = len(account.receipts)
            await reached(lambda before=before: len(account.receipts) > before + 150)
            await asyncio.to_thread(cluster[leader].start)
        stopped.set()
        await publishing
        written = await asyncio.to_thread(account.written, cluster.bootstrap)
        try:
            await reached(lambda: over(*reading) or all(account.seen_all(name, written) for name in readers))
        finally:
            account.say(capsys, "two leaders lost", written)
        for task in reading:
            await still(task)
    for name in readers:
        account.check(name, written)
    assert len(account.read["followed"]) == len(written), "a follower repeats nothing"
    # Other brokers lead, so no publish had to fail.
    assert not account.failed
    assert written.keys() == account.receipts.keys()


async def test_messages_in_flight_to_a_frozen_leader_go_to_the_next_one(cluster: KafkaCluster) -> None:
    """The connection does not break, so only the request timeout shows the failure."""
    topic = cluster.admin.make_topic(copies=3, config={"min.insync.replicas": "2"})
    await asyncio.to_thread(cluster.wait_until_whole, topic)
    bodies = [b"%d" % number for number in range(200)]
    async with broker.connect(cluster.url) as bus:
        target = bus.topic(topic)
        await target.publish(b"before")
        leader = cluster[await asyncio.to_thread(cluster.leader, topic)]
        leader.pause()
        try:
            receipts = await target.publish_batch(bodies)
        finally:
            leader.resume()
    await asyncio.to_thread(cluster.wait_until_whole, topic)
    assert len(receipts) == len(bodies)
    assert [message.value() for message in read_all(cluster.bootstrap, topic)] == [b"before", *bodies]


@pytest.mark.deep
async def test_transactions_continue_with_the_next_leader(cluster: KafkaCluster) -> None:
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
                await asyncio.sleep(0.02)

    def more(records: int) -> Callable[[], bool]:
        wanted = len(committed) + records
        return lambda: len(committed) > wanted

    async def lose_leaders() -> None:
        """Kill the leader of partition 0 during the work, and stop the next one."""
        for how in ("kill", "stop"):
            await reached(more(200))
            await asyncio.to_thread(cluster.wait_until_whole, topic)
            leader = await asyncio.to_thread(cluster.leader, topic)
            await asyncio.to_thread(getattr(cluster[leader], how))
            await reached(more(200))
            await asyncio.to_thread(cluster.start)

    async with broker.connect(cluster.url) as bus:
        worker = asyncio.create_task(work(bus))
        losing = asyncio.create_task(lose_leaders())
        await asyncio.wait((worker, losing), return_when=asyncio.FIRST_COMPLETED)
        stopped.set()
        await worker
        await losing
    bodies = [
        message.value() for partition in range(PARTITIONS) for message in read_all(cluster.bootstrap, topic, partition)
    ]
    assert Counter(bodies) == Counter(committed)


async def test_a_copy_job_is_exactly_once_when_coordinators_are_killed(
    cluster: KafkaCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinators = iter(["__transaction_state", OFFSETS])

    def lose(source: str) -> None:
        """Kill the coordinator of transactions, and the next time that of groups."""
        topic = next(coordinators)
        cluster.wait_until_whole(source)
        cluster.wait_until_whole(topic)
        leader = cluster.leader(topic)
        cluster[leader].kill()
        cluster.wait_for_new_leader(topic, leader)
        cluster[leader].start()

    await copy_while_losing(cluster.url, cluster.admin, lose, copies=3, directory=tmp_path, capsys=capsys)


def have_the_preferred_lead(cluster: KafkaCluster) -> int:
    """Move leadership to the preferred broker; return the index of the coordinator of groups."""
    admin = cluster.admin.client
    preferred = admin.list_topics(OFFSETS, timeout=SECONDS).topics[OFFSETS].partitions[0].replicas[0] - 1
    cluster.wait_until_whole(OFFSETS)
    if cluster.leader(OFFSETS) != preferred:
        admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition(OFFSETS, 0)]).result(SECONDS)
        wait_for(lambda: cluster.leader(OFFSETS) == preferred)
    return preferred


async def test_a_moved_coordinator_is_found(cluster: KafkaCluster) -> None:
    group = f"asked-{uuid4().hex[:8]}"
    topic = cluster.admin.make_topic()
    await asyncio.to_thread(found, cluster.admin, group, topic)
    first = await asyncio.to_thread(have_the_preferred_lead, cluster)
    async with asking(cluster.url, group) as process:
        await asyncio.to_thread(cluster[first].stop)
        await asyncio.to_thread(cluster.wait_for_new_leader, OFFSETS, first)
        await answered(process)
        # It knows the second as the coordinator, which runs but no longer coordinates.
        await asyncio.to_thread(cluster[first].start)
        assert await asyncio.to_thread(have_the_preferred_lead, cluster) == first
        assert await ask(process) == "read"
