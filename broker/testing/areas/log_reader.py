"""Conformance tests of the log reader: bounded reads without a group, which never wait and never skip."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from broker.errors import NotFound, OffsetOutOfRange, TopicNotFound
from broker.outbound import OutboundMessage
from broker.protocols import LogReader
from broker.records import Record
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, log_time, numbered, once, read

__all__ = ["LogReading"]


class LogReading(ConformanceCase):
    """Reading without a group."""

    @requires("records.log_reader")
    @promise(
        "log.bounds-cover-all",
        "Reading every partition between its bounds returns each complete record once, in order.",
    )
    async def test_bounds_cover_all(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=3)
        sent = [OutboundMessage(b, key=f"k-{n}", attributes={"n": str(n)}) for n, b in enumerate(numbered(100))]
        await bus.topic(topic).publish_batch(sent)
        assert list(await bus.log.partitions(topic)) == [0, 1, 2]
        records = await _read_all(bus.log, topic)
        assert bodies(records) == once(numbered(100))
        assert {(r.data, r.key, tuple(r.attributes.items())) for r in records} == {
            (m.data, m.key, tuple(m.attributes.items())) for m in sent
        }
        for partition in range(3):
            offsets = [record.offset for record in records if record.partition == partition]
            assert offsets == sorted(offsets)

    @requires("records.log_reader")
    @promise(
        "log.range-is-half-open",
        "`read(start, stop)` returns start <= offset < stop, in batches of at most the requested size.",
    )
    async def test_range_is_half_open(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(30))
        offsets = [record.offset for record in await _read_all(bus.log, topic)]
        batches = [batch async for batch in bus.log.read(topic, 0, offsets[5], offsets[20], max_records=4)]
        assert [record.offset for batch in batches for record in batch] == offsets[5:20]
        assert all(1 <= len(batch) <= 4 for batch in batches)
        assert [batch async for batch in bus.log.read(topic, 0, offsets[5], offsets[5])] == []

    @requires("records.log_reader")
    @promise(
        "log.never-waits",
        "A read ends at the end that the log had at its start, also for an empty log; it does not wait for more.",
    )
    async def test_never_waits(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        async with asyncio.timeout(harness.patience):
            assert [batch async for batch in bus.log.read(topic, 0)] == []
            bounds = (await bus.log.bounds(topic))[0]
            assert bounds.first == bounds.next
            await bus.topic(topic).publish_batch(numbered(3))
            assert len(await _read_all(bus.log, topic)) == 3

    @requires("records.log_reader")
    @promise(
        "log.beyond-the-end-raises",
        "A stop beyond the end of the log raises OffsetOutOfRange.",
    )
    async def test_beyond_the_end_raises(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(3))
        bounds = (await bus.log.bounds(topic))[0]
        with pytest.raises(OffsetOutOfRange):
            async for _ in bus.log.read(topic, 0, bounds.first, bounds.next + 1):
                pass

    @requires("records.log_reader")
    @promise(
        "log.removed-start-raises",
        "A start that was removed from the log raises OffsetOutOfRange; no record is skipped silently.",
    )
    async def test_removed_start_raises(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(5))
        before = (await bus.log.bounds(topic))[0]
        await bus.admin.purge(topic)
        await bus.topic(topic).publish_batch(numbered(3, "new"))
        after = (await bus.log.bounds(topic))[0]
        assert after.first > before.first
        with pytest.raises(OffsetOutOfRange):
            async for _ in bus.log.read(topic, 0, before.first, after.next):
                pass
        assert bodies(await _read_all(bus.log, topic)) == once(numbered(3, "new"))

    @requires("records.log_reader")
    @promise(
        "log.reads-are-repeatable",
        "Reading changes nothing: it can be repeated, and creates no group or subscription.",
    )
    async def test_reads_are_repeatable(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(10))
        first, second = await asyncio.gather(_read_all(bus.log, topic), _read_all(bus.log, topic))
        assert [r.data for r in first] == [r.data for r in second] == numbered(10)
        assert await bus.admin.subscriptions(topic) == []
        async with bus.records(topic, group="readers") as log:
            assert len(await read(log, 10, harness.patience)) == 10

    @requires("records.log_reader")
    @promise("log.abandoned-read-is-harmless", "Abandoning a read does not affect later reads.")
    async def test_abandoned_read_is_harmless(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(100))
        async for _ in bus.log.read(topic, 0, max_records=5):
            break
        assert bodies(await _read_all(bus.log, topic)) == once(numbered(100))

    @requires("records.log_reader")
    @promise("log.missing-topic-raises", "Reading a missing topic raises TopicNotFound, a missing partition NotFound.")
    async def test_reading_a_missing_topic_raises(self, harness: Harness) -> None:
        bus, missing = await harness.bus(), unique("missing")
        with pytest.raises(TopicNotFound):
            await bus.log.partitions(missing)
        with pytest.raises(TopicNotFound):
            await bus.log.bounds(missing)
        topic = await harness.topic(partitions=1)
        await bus.topic(topic).publish(b"1")
        first, following = (await bus.log.bounds(topic))[0]
        for bounds in ((), (first, following), (following, following)):
            with pytest.raises(NotFound):
                async for _ in bus.log.read(topic, 1, *bounds):
                    pass

    @requires("records.log_reader", "records.position_at")
    @promise(
        "log.position-at-a-time",
        "`position_at(time)` is the first position that the broker stored at or after that time.",
    )
    async def test_position_at_a_time(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(5, "old"))
        await bus.topic(topic).publish_batch(numbered(5, "new"))
        records = await _read_all(bus.log, topic)
        moment = log_time(records[5])
        wanted = next(record.offset for record in records if log_time(record) >= moment)
        assert await bus.log.position_at(topic, moment) == {0: wanted}
        bounds = (await bus.log.bounds(topic))[0]
        assert await bus.log.position_at(topic, datetime(2000, 1, 1, tzinfo=UTC)) == {0: bounds.first}
        assert await bus.log.position_at(topic, datetime.now(UTC) + timedelta(days=1)) == {0: bounds.next}


async def _read_all(log: LogReader, topic: str) -> list[Record[bytes]]:
    return [
        record
        for partition, bounds in (await log.bounds(topic)).items()
        async for batch in log.read(topic, partition, bounds.first, bounds.next)
        for record in batch
    ]
