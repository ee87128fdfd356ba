"""The log reader: chunks fetched ahead, and answers of a replica that is behind the leader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.driver.contract import Bounds
from broker.errors import OffsetOutOfRange, OperationTimeout
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.codec import SEQUENCE, NativeMessage, server_header
from broker_jetstream.log_reader import JetStreamLogReader
from tests.jetstream.conftest import Open
from tests.jetstream.support import make_topic, publish


class CountingReader(JetStreamLogReader):
    """Counts the answers to direct gets."""

    def __init__(self, backend: JetStreamBackend) -> None:
        reader = backend.log_reader()
        assert isinstance(reader, JetStreamLogReader)
        super().__init__(reader._connection, reader._layouts)
        self.answers = 0

    async def _get(self, layout: Any, request: dict[str, Any]) -> list[NativeMessage]:
        found = await super()._get(layout, request)
        self.answers += 1
        return found

    async def until(self, answers: int) -> None:
        async with asyncio.timeout(60):
            while self.answers < answers:
                await asyncio.sleep(0.005)


class LaggingReplicaDouble(CountingReader):
    """A double of a lagging replica: the first `requests` answers lack the records above `has`."""

    def __init__(self, backend: JetStreamBackend, has: int, requests: int) -> None:
        super().__init__(backend)
        self.has = has
        self.requests = requests

    async def _get(self, layout: Any, request: dict[str, Any]) -> list[NativeMessage]:
        found = await super()._get(layout, request)
        self.requests -= 1
        if self.requests < 0:
            return found
        return [raw for raw in found if int(server_header(raw.block, SEQUENCE) or 0) <= self.has]


async def read(reader: JetStreamLogReader, topic: str, partition: int, start: int, stop: int) -> list[int]:
    return [record.offset async for batch in reader.read(topic, partition, start, stop, 100) for record in batch]


async def test_one_chunk_is_fetched_ahead(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *(OutboundMessage(b"x") for _ in range(50)))
    reader = CountingReader(backend)
    chunks = aiter(reader.read(topic, 0, 1, 51, 10))
    assert [record.offset for record in await anext(chunks)] == list(range(1, 11))
    # The second chunk, which the caller has not read yet.
    await reader.until(2)
    assert [record.offset async for batch in chunks for record in batch] == list(range(11, 51))
    assert reader.answers == 5


async def test_a_read_closed_early_leaves_no_task(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *(OutboundMessage(b"x") for _ in range(50)))
    reader = CountingReader(backend)
    before = asyncio.all_tasks()
    for turns in range(40):
        # Before, during and after the answers to the second chunk.
        chunks, seen = reader.read(topic, 0, 1, 51, 10), reader.answers
        await anext(chunks)
        for _ in range(turns):
            await asyncio.sleep(0)
        if not turns:
            await reader.until(seen + 2)
        await chunks.aclose()
    assert await read(reader, topic, 0, 1, 51) == list(range(1, 51))
    async with asyncio.timeout(60):
        while asyncio.all_tasks() != before:
            await asyncio.sleep(0.005)


async def test_retention_that_removes_records_fetched_ahead_raises(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, *(OutboundMessage(b"x") for _ in range(50)))
    reader = CountingReader(backend)
    chunks = aiter(reader.read(topic, 0, 1, 51, 10))
    await anext(chunks)
    await backend.admin().purge(topic)
    with pytest.raises(OffsetOutOfRange, match="retention removed the records from position 11 on"):
        await anext(chunks)


@pytest.mark.parametrize("has", [0, 4])
async def test_a_lagging_replica_does_not_end_a_read(backend: JetStreamBackend, topic: str, has: int) -> None:
    await make_topic(backend, topic, partitions=2)
    await publish(backend, topic, *(OutboundMessage(b"x", partition=n % 2) for n in range(10)))
    assert await read(LaggingReplicaDouble(backend, has, 3), topic, 0, 1, 11) == [1, 3, 5, 7, 9]
    assert await read(LaggingReplicaDouble(backend, has, 3), topic, 0, 1, 3) == [1]


async def test_bounds_come_from_the_leader(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic, partitions=3)
    await publish(backend, topic, *(OutboundMessage(b"x", partition=n % 2) for n in range(10)))
    reader = LaggingReplicaDouble(backend, 4, 1000)
    assert await reader.bounds(topic) == {0: Bounds(1, 10), 1: Bounds(2, 11), 2: Bounds(11, 11)}


async def test_a_replica_that_stays_behind_raises(open_backend: Open, topic: str) -> None:
    writer, backend = await open_backend(), await open_backend(request_timeout=3.0)
    await make_topic(writer, topic)
    await publish(writer, topic, *(OutboundMessage(b"x") for _ in range(3)))
    with pytest.raises(OperationTimeout, match="stays behind its leader"):
        await read(LaggingReplicaDouble(backend, 2, 1000), topic, 0, 1, 4)
