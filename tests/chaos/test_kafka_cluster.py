"""The leader of a partition is lost, in a cluster of three brokers, while others publish and consume."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import broker
from tests.chaos.kafka_accounts import Account
from tests.chaos.test_kafka_server import OPTIONS, over, reached, read_messages, read_records, still
from tests.servers.kafka_cluster import KafkaCluster

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("kafka-chaos-cluster"), pytest.mark.timeout(120)]

PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster(3) as cluster:
        yield cluster


async def test_leaders_are_lost_one_after_the_other(cluster: KafkaCluster, capsys: pytest.CaptureFixture[str]) -> None:
    topic = cluster.admin.make_topic(partitions=PARTITIONS)
    account = Account(topic, PARTITIONS)
    stopped = asyncio.Event()
    async with broker.connect(f"{cluster.url}?{OPTIONS}") as bus:
        readers = {"records": read_records, "messages": read_messages}
        reading = [asyncio.create_task(read(bus, account, f"{topic}-{name}", name)) for name, read in readers.items()]
        publishing = asyncio.create_task(account.publish_until(bus, stopped))
        for partition in range(2):
            before = len(account.receipts)
            await reached(lambda before=before: len(account.receipts) > before + 300)
            await asyncio.to_thread(cluster.wait_until_whole, topic)
            leader = await asyncio.to_thread(cluster.leader, topic, partition)
            await asyncio.to_thread(cluster[leader].kill)
            await asyncio.to_thread(cluster.wait_for_new_leader, topic, leader, partition)
            before = len(account.receipts)
            await reached(lambda before=before: len(account.receipts) > before + 300)
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
    assert written.keys() >= account.receipts.keys()
    # Others lead, so nothing had to be given up.
    assert not account.failed
