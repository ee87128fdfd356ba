"""Paused partitions that are reassigned and come back are read in full, on a real broker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.driver.contract import RecordSubscription, TopicPartition
from broker.hooks import Event, Hooks
from broker.testing.waiting import eventually
from broker_kafka.backend import KafkaBackend
from broker_kafka.client import consumer as consuming
from broker_kafka.records import KafkaRecordSource
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import produce

PATIENCE = 60.0
EACH = 6_000
"""Records of a partition; those of two partitions are more than may be in flight to the source."""

both_protocols = pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.deep)])


class Quiet:
    """A `RecordListener` that has nothing to do."""

    def assigned(self, partitions: Sequence[TopicPartition]) -> None: ...

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None: ...

    def lost(self, partitions: Sequence[TopicPartition]) -> None: ...

    def event(self, event: Event) -> None: ...


@asynccontextmanager
async def member(kafka: KafkaServer, topic: str, group: str, protocol: str) -> AsyncGenerator[KafkaRecordSource]:
    """One that commits nothing."""
    settings: dict[str, Any] = {"servers": (kafka.bootstrap,), "group_protocol": protocol}
    if protocol == "classic":
        settings |= {"session_timeout_ms": 3000, "heartbeat_interval_ms": 300}
    backend = KafkaBackend(KafkaSettings(**settings), Hooks())
    await backend.open()
    try:
        source: Any = await backend.join(RecordSubscription(topics=(topic,), group=group), Quiet())
        yield source
        await source.close()
    finally:
        await backend.close()


async def owns(source: KafkaRecordSource, count: int) -> None:
    await eventually(lambda: len(source.assignment()) == count, PATIENCE, f"{count} partitions")


async def read_all(source: KafkaRecordSource) -> dict[int, set[int]]:
    """The offsets of both partitions, once all were fetched."""
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    while any(len(offsets) < EACH for offsets in seen.values()):
        records = await source.fetch(5_000, 1 << 30, PATIENCE)
        assert records, f"nothing comes any more, after {[len(offsets) for offsets in seen.values()]} records"
        for record in records:
            seen[record.partition].add(record.offset)
    return seen


@pytest.mark.deep
@both_protocols
async def test_a_partition_reassigned_during_a_stall_is_read(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "_LONG_STALL", 0.1)
    topic = make_topic(partitions=2)
    for partition in range(2):
        produce(kafka.bootstrap, topic, [b"x"] * EACH, partition=partition)
    async with member(kafka, topic, group, protocol) as one:
        pausing: Any = vars(one.thread)["_pausing"]
        await owns(one, 2)
        await eventually(lambda: pausing.parked, PATIENCE, "a pause of everything")
        async with member(kafka, topic, group, protocol) as other:
            await owns(one, 1)
            await owns(other, 1)
            while pausing.parked:
                await one.fetch(5_000, 1 << 30, 0.1)
        await owns(one, 2)
        await one.seek(dict.fromkeys(one.assignment(), 0))
        assert await read_all(one) == {0: set(range(EACH)), 1: set(range(EACH))}


@both_protocols
async def test_a_partition_resumed_while_reassigned_is_read(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, protocol: str
) -> None:
    topic = make_topic(partitions=2)
    async with member(kafka, topic, group, protocol) as one:
        await owns(one, 2)
        both = one.assignment()
        one.pause(both)
        for partition in range(2):
            produce(kafka.bootstrap, topic, [b"x"] * EACH, partition=partition)
        async with member(kafka, topic, group, protocol) as other:
            await owns(one, 1)
            await owns(other, 1)
            one.resume(both)
        await owns(one, 2)
        assert await read_all(one) == {0: set(range(EACH)), 1: set(range(EACH))}
