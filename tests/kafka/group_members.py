"""Helpers that open group consumers, each on its own bus, with each group protocol."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.bus import connect
from broker.driver import TaskSet
from broker.driver.contract import TopicPartition
from broker.records import Record
from broker_kafka.group import GroupConsumer
from broker_kafka.group.commits import CommitAttempts, LogEnds, RecordCommits
from broker_kafka.offsets.protocol import FetchResults, GroupMember, StoredOffset
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import SECONDS, produce

__all__ = [
    "bare",
    "both_protocols",
    "eventually",
    "every_protocol",
    "fill",
    "new_group",
    "opened",
    "options_of",
    "record_commits",
    "take",
    "values_of",
]

_deep = pytest.mark.deep
every_protocol = pytest.mark.parametrize(
    "protocol",
    ["cooperative-sticky", *(pytest.param(name, marks=_deep) for name in ("range", "roundrobin", "consumer"))],
)
"""Three strategies of the classic protocol, and KIP-848."""
both_protocols = pytest.mark.parametrize("protocol", ["cooperative-sticky", pytest.param("consumer", marks=_deep)])


def options_of(protocol: str) -> dict[str, Any]:
    """The options of a consumer in this protocol, which finds out quickly that a member is gone."""
    if protocol == "consumer":
        return {"group_protocol": "consumer"}
    return {
        "group_protocol": "classic",
        "partition_assignment_strategy": (protocol,),
        "session_timeout_ms": 6000,
        "heartbeat_interval_ms": 200,
    }


def new_group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


@asynccontextmanager
async def opened(server: KafkaServer, topics: Any, group: str, **options: Any) -> AsyncGenerator[GroupConsumer]:
    """A group consumer on a bus of its own."""
    async with connect(server.url) as bus, GroupConsumer(bus, topics, group=group, **options) as consumer:
        yield consumer


def bare(found: FetchResults) -> dict[TopicPartition, Any]:
    """Positions without the ids of their topics."""
    return {
        place: each._replace(topic_id="") if isinstance(each, StoredOffset) else each for place, each in found.items()
    }


async def take(consumer: GroupConsumer, count: int) -> list[Record[bytes]]:
    """The next records, at least so many."""
    taken: list[Record[bytes]] = []
    async with asyncio.timeout(60):
        async for batch in consumer.batches():
            taken += batch
            if len(taken) >= count:
                break
    return taken


async def eventually(look: Callable[[], Any], seconds: float = 4 * SECONDS) -> Any:
    """What `look` finds, once that is true."""
    until = asyncio.get_running_loop().time() + seconds
    while not (found := look()):
        assert asyncio.get_running_loop().time() < until, "it did not become true in time"
        await asyncio.sleep(0.02)
    return found


def values_of(partition: int, count: int, begin: int = 0) -> list[bytes]:
    return [b"%d/%d" % (partition, number) for number in range(begin, begin + count)]


async def fill(server: KafkaServer, topic: str, partitions: int, count: int, begin: int = 0) -> None:
    """Write `count` records into each partition: its number, a slash and the record's."""

    def write() -> None:
        for partition in range(partitions):
            produce(server.bootstrap, topic, values_of(partition, count, begin), partition=partition)

    await asyncio.to_thread(write)


def record_commits(
    store: Any, thread: Any, assignments: Mapping[TopicPartition, object], *, timeout: float = 5.0
) -> RecordCommits:
    """The commits of a member that has reached the end of no partition."""
    return RecordCommits(
        CommitAttempts(store, lambda: GroupMember("readers", 1), group="readers", timeout=timeout),
        thread,
        assignments,
        group="readers",
        log_ends=LogEnds(),
        tasks=TaskSet("test", lambda error: None),
        emit=lambda event: None,
    )
