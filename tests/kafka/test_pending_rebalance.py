"""Commits and transactions of a member whose client has a rebalance callback pending: the callback runs first.

A release waits for the commits and the transaction in flight, and these must see the rebalance before they run.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import confluent_kafka
import pytest

from broker.bus import Bus, connect
from broker.reading.record_consumer import RecordConsumer
from broker.testing.waiting import eventually, read
from broker_kafka.client.rebootstrap import _handle_of
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce

PATIENCE = 60.0
PROTOCOLS = {
    "eager": "partition_assignment_strategy=range&heartbeat_interval_ms=200",
    "cooperative": "partition_assignment_strategy=cooperative-sticky&heartbeat_interval_ms=200",
    "consumer": "group_protocol=consumer",
}
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


def source_of(consumer: RecordConsumer) -> Any:
    return vars(vars(consumer)["_member"])["_source"]


async def read_all(consumer: RecordConsumer) -> None:
    """Read both partitions until the client has reported their ends, after which it has no more records."""
    reported: set[object] = set()
    log_ends = source_of(consumer).log_ends
    ended = log_ends.ended

    def report(partition: object, end: int) -> Any:
        reported.add(partition)
        return ended(partition, end)

    log_ends.ended = report
    await read(consumer, 10, PATIENCE)
    await eventually(lambda: len(reported) == 2, PATIENCE, "the ends of both partitions")


def block_until_event(consumer: RecordConsumer) -> None:
    """Block the member's thread until its client has an event, which is the next to be polled."""
    source = source_of(consumer)
    library: Any = ctypes.CDLL(confluent_kafka.cimpl.__file__)
    library.rd_kafka_queue_get_consumer.restype = ctypes.c_void_p
    library.rd_kafka_queue_length.argtypes = library.rd_kafka_queue_destroy.argtypes = [ctypes.c_void_p]
    library.rd_kafka_queue_length.restype = ctypes.c_size_t

    def wait(client: Any) -> None:
        queue = library.rd_kafka_queue_get_consumer(_handle_of(client))
        until = time.monotonic() + PATIENCE
        while not library.rd_kafka_queue_length(queue) and time.monotonic() < until:
            time.sleep(0.01)
        library.rd_kafka_queue_destroy(queue)

    source.thread.submit(wait)


@asynccontextmanager
async def members(kafka: KafkaServer, protocol: str) -> AsyncGenerator[tuple[Bus, Bus]]:
    url = f"{kafka.url}?{PROTOCOLS[protocol]}"
    async with connect(url) as first, connect(url) as second:
        yield first, second


async def both_have_one(one: RecordConsumer, two: RecordConsumer) -> None:
    await eventually(lambda: len(one.assignment()) == len(two.assignment()) == 1, PATIENCE, "a partition for each")


@every_protocol
async def test_a_pending_commit_runs_before_its_partition_is_released(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
) -> None:
    topic = make_topic(partitions=2)
    for partition in range(2):
        produce(kafka.bootstrap, topic, [b"m"] * 5, partition=partition)
    async with members(kafka, protocol) as (first, second), first.records(topic, group=group) as one:
        await read_all(one)
        block_until_event(one)
        commit = asyncio.ensure_future(one.commit())
        async with second.records(topic, group=group) as two:
            await commit
            await both_have_one(one, two)
            assert await two.committed() == dict.fromkeys(two.assignment(), 5)


@pytest.mark.deep
@every_protocol
async def test_a_transaction_ends_before_its_partition_is_released(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
) -> None:
    topic, sink = make_topic(partitions=2), make_topic()
    for partition in range(2):
        produce(kafka.bootstrap, topic, [b"m"] * 5, partition=partition)
    async with (
        members(kafka, protocol) as (first, second),
        first.transactional_publisher(f"tx-{group}") as publisher,
        first.records(topic, group=group) as one,
        AsyncExitStack() as stack,
    ):
        async with asyncio.timeout(PATIENCE), publisher.transaction(one) as tx:
            await read_all(one)
            await tx.publish(sink, b"done")
            block_until_event(one)
            two = await stack.enter_async_context(second.records(topic, group=group))
        await both_have_one(one, two)
        assert await two.committed() == dict.fromkeys(two.assignment(), 5)
