"""Reads that retention overtakes: records removed before a read raise an error, and are never skipped silently."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

import broker
from broker.bus import Bus
from broker.errors import OffsetOutOfRange
from broker.testing.waiting import eventually
from broker_pulsar.message_ids import PER_ENTRY
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")

MANY = 3000
"""Messages in one ledger, more than a reader prefetches."""
PATIENCE = 60.0


@pytest.fixture
async def bus(pulsar_server: PulsarServer) -> AsyncIterator[Bus]:
    """Without batches, of which a reader may prefetch a hundred."""
    async with broker.connect(f"{pulsar_server.url}&batching=off") as bus:
        yield bus


async def fill(bus: Bus, topic: str, number: int) -> None:
    await bus.topic(topic).publish_batch([b"%d" % each for each in range(number)])


async def unload(bus: Bus, topic: str) -> None:
    """Make the broker close the open ledger, and drop its cache."""
    connection = bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
    await connection.http.request("PUT", f"{connection.topic(topic).partition(0).path}/unload", "")


async def in_two_ledgers(bus: Bus, topic: str) -> None:
    """The topic, with a closed and an open ledger."""
    await fill(bus, topic, MANY)
    await unload(bus, topic)
    await fill(bus, topic, MANY)


async def shorten(bus: Bus, topic: str) -> None:
    """Make the broker remove the closed ledgers, and wait until it has."""
    connection = bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
    place = f"{connection.topic(topic).path}/retention"
    before = (await bus.log.bounds(topic))[0].first
    await connection.http.request("POST", place, "", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})

    async def is_gone() -> bool:
        return (await bus.log.bounds(topic))[0].first > before

    await eventually(is_gone, PATIENCE, "the removal of a ledger")


@pytest.mark.parametrize("later", [0, 10])
async def test_records_purged_ahead_of_a_read_are_reported(bus: Bus, topic: str, later: int) -> None:
    await in_two_ledgers(bus, topic)
    bounds = (await bus.log.bounds(topic))[0]
    batches = bus.log.read(topic, 0, bounds.first, bounds.next, max_records=100)
    await anext(batches)
    await bus.admin.purge(topic)
    await fill(bus, topic, later)
    with pytest.raises(OffsetOutOfRange, match="before they were read"):
        async with asyncio.timeout(PATIENCE):
            async for _ in batches:
                pass


@pytest.mark.deep
async def test_records_removed_behind_a_read_do_not_matter(bus: Bus, topic: str) -> None:
    await in_two_ledgers(bus, topic)
    bounds = (await bus.log.bounds(topic))[0]
    seen = 0
    async for batch in bus.log.read(topic, 0, bounds.first, bounds.next, max_records=500):
        seen += len(batch)
        if seen == MANY + 500:
            await shorten(bus, topic)
    assert seen == 2 * MANY


@pytest.mark.deep
async def test_retention_keeps_uncommitted_records_of_a_group(bus: Bus, topic: str) -> None:
    async with bus.records(topic, group="audit") as log:
        await in_two_ledgers(bus, topic)
        record = await log.next_record(timeout=60)
        assert record is not None
        await record.commit()
        connection = bus.backend.connection  # pyright: ignore[reportAttributeAccessIssue]
        place = f"{connection.topic(topic).path}/retention"
        nothing = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
        await connection.http.request("POST", place, "", nothing)
        # The broker removes ledgers every second.
        await asyncio.sleep(3)
        seen = 1
        while seen < 2 * MANY:
            assert await log.next_record(timeout=60) is not None
            seen += 1


@pytest.mark.parametrize("year", [1, 1969])
async def test_the_position_of_an_early_time_is_the_first(bus: Bus, topic: str, year: int) -> None:
    await fill(bus, topic, 3)
    first = (await bus.log.bounds(topic))[0].first
    assert await bus.log.position_at(topic, datetime(year, 1, 1, tzinfo=UTC)) == {0: first}


@pytest.mark.deep
@pytest.mark.parametrize("compression", ["none", "lz4"])
async def test_a_chunked_message_belongs_to_the_range_of_its_offset(
    pulsar_server: PulsarServer, topic: str, compression: str
) -> None:
    url = f"{pulsar_server.url}&batching=off&chunking=true&max_message_bytes=30000000&compression={compression}"
    large = [os.urandom(12_000_000), os.urandom(6_000_000)]
    async with broker.connect(url) as bus:
        for body in (large[0], b"a", b"b", large[1], large[0], b"c"):
            await bus.topic(topic).publish(body)
        bounds = (await bus.log.bounds(topic))[0]
        whole = [record async for batch in bus.log.read(topic, 0, bounds.first, bounds.next) for record in batch]
        assert [len(record.data or b"") for record in whole] == [12_000_000, 1, 1, 6_000_000, 12_000_000, 1]
        for record in whole:
            read = bus.log.read(topic, 0, record.offset, bounds.next)
            assert [each.offset async for batch in read for each in batch] == [
                each.offset for each in whole if each.offset >= record.offset
            ]
        found: list[int] = []
        for start in range(bounds.first, bounds.next, PER_ENTRY):
            read = bus.log.read(topic, 0, start, min(start + PER_ENTRY, bounds.next))
            found += [record.offset async for batch in read for record in batch]
        assert found == [record.offset for record in whole]


@pytest.mark.deep
async def test_a_group_can_seek_to_a_chunked_message(pulsar_server: PulsarServer, topic: str) -> None:
    url = f"{pulsar_server.url}&batching=off&chunking=true&max_message_bytes=30000000"
    async with broker.connect(url) as bus:
        for body in (b"a", b"x" * 12_000_000, b"b"):
            await bus.topic(topic).publish(body)
        async with bus.records(topic, group="audit") as log:
            offsets = [record.offset for _ in range(3) if (record := await log.next_record(timeout=60)) is not None]
            for start in (offsets[1], offsets[1] - PER_ENTRY, offsets[2]):
                await log.seek({(topic, 0): start})
                expected = [offset for offset in offsets if offset >= start]
                for offset in expected:
                    record = await log.next_record(timeout=60)
                    assert record is not None
                    assert record.offset == offset
