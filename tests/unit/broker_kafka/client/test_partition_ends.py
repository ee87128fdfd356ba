"""A consumer thread reports the ends of all partitions that it still reads, since the client reports each once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, Message
from confluent_kafka import TopicPartition as NativePartition

from broker.driver.contract import TopicPartition
from broker_kafka.client.consumer import ConsumerThread

Turn = Callable[[ConsumerThread, Any], object]


def end_of(partition: int, offset: int) -> Message:
    return Message(topic="orders", partition=partition, offset=offset, error=KafkaError(KafkaError._PARTITION_EOF))


class Client:
    """Gets an event of its group in the middle of a fetch of the ends of partitions 0 and 1."""

    def __init__(self, thread: ConsumerThread, event: Turn) -> None:
        self.thread = thread
        self.event = event

    def consume(self, count: int, timeout: float) -> list[Message]:
        self.event(self.thread, self)
        return [end_of(0, 7), end_of(1, 9)]

    def assignment(self) -> list[NativePartition]:
        return []

    def incremental_assign(self, partitions: list[NativePartition]) -> None: ...
    def incremental_unassign(self, partitions: list[NativePartition]) -> None: ...
    def resume(self, partitions: list[NativePartition]) -> None: ...


def assign_nothing(thread: ConsumerThread, client: Any) -> None:
    thread._assign(client, [])


def release(thread: ConsumerThread, client: Any) -> None:
    thread._let_go(client, [NativePartition("orders", 1)], [TopicPartition("orders", 1)])


@pytest.mark.parametrize(("event", "expected"), [(assign_nothing, [(0, 7), (1, 9)]), (release, [(0, 7)])])
async def test_a_rebalance_keeps_the_ends_of_retained_partitions(event: Turn, expected: list[tuple[int, int]]) -> None:
    ends: list[tuple[int, int]] = []
    thread = ConsumerThread(
        {"group.id": "readers", "partition.assignment.strategy": "cooperative-sticky"},
        cast("Any", None),
        name="readers",
        warn=lambda text: None,
        ended=lambda partition, end: ends.append((partition.partition, end)),
    )
    thread._turn(cast("Any", Client(thread, event)))
    await asyncio.sleep(0)
    assert ends == expected
