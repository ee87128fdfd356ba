"""Conformance tests of compacted topics: the last value of each key stays, at its position."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta

import pytest

from broker.bus import Bus
from broker.errors import ConfigurationError, InvalidMessage, MessageTooLarge, Unsupported
from broker.outbound import OutboundMessage
from broker.records import Record
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import eventually

__all__ = ["Compaction", "table_records", "values_of"]

KEYS = [b"", b" ", b".", b"*", b">", b"a.b.c", b"\x00", b"\r\n", b"\xff\xfe", "ключ".encode(), b"k" * 200, b"=/+-_"]
"""Keys that a naming scheme may confuse or refuse."""


class Compaction(ConformanceCase):
    """Topics that keep the last value of each key."""

    @requires("records.compacted_topics")
    @promise(
        "compaction.is-chosen-at-creation",
        "`describe_topic` says whether a topic is compacted; `ensure_topic` refuses to change it.",
    )
    async def test_is_chosen_at_creation(self, harness: Harness) -> None:
        bus, table, log = await harness.bus(), await harness.compacted_topic(partitions=2), await harness.topic()
        for topic, compacted in ((table, True), (log, False)):
            assert (await bus.admin.describe_topic(topic)).compacted is compacted
            assert (await bus.admin.ensure_topic(topic, compacted=compacted)).compacted is compacted
            assert (await bus.admin.ensure_topic(topic)).compacted is compacted
            with pytest.raises(Unsupported, match=topic):
                await bus.admin.ensure_topic(topic, compacted=not compacted)
            assert (await bus.admin.describe_topic(topic)).compacted is compacted
        assert (await bus.admin.ensure_topic(table, partitions=3, compacted=True)).partitions == 3
        for flag in (True, None):
            with pytest.raises(ConfigurationError, match="retention"):
                await bus.admin.ensure_topic(table, compacted=flag, retention=timedelta(hours=1))

    @requires("records.compacted_topics")
    @promise(
        "compaction.keys-are-needed",
        "A compacted topic takes keys of any bytes up to the limit of the broker, and refuses a message without a key, "
        "or with a longer one.",
    )
    async def test_keys_are_needed(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=1)
        with pytest.raises(InvalidMessage, match="key"):
            await bus.topic(topic).publish(b"no key")
        most = bus.capabilities.publish.limits.key
        if most is not None:
            with pytest.raises(MessageTooLarge, match=r"[Kk]ey"):
                await bus.topic(topic).publish(b"long key", key=b"k" * (most + 1))
        limit = min(most or 2000, 2000)
        long = [b"l" * limit, b"l" * (limit - 1) + b"m"]
        keys = [*KEYS, *long]
        await bus.topic(topic).publish_batch([OutboundMessage(b"old", key) for key in keys])
        await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % n, key) for n, key in enumerate(keys)])
        assert values_of(await table_records(bus, topic)) == {key: b"%d" % n for n, key in enumerate(keys)}

    @requires("records.compacted_topics", "harness.compact")
    @promise(
        "compaction.last-values-stay",
        "After compaction each key has one record: its last one, complete, in its partition and in order.",
    )
    async def test_last_values_stay(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=2)
        for value in range(4):
            await bus.topic(topic).publish_batch(
                [OutboundMessage(b"%d" % value, f"key-{n}", attributes={"n": str(n)}) for n in range(10)]
            )
        before = await table_records(bus, topic)
        places = {record.key: (record.partition, record.offset) for record in before}
        await harness.compact(topic)
        after = _ours(await table_records(bus, topic))
        assert {(r.key, r.data, r.attributes["n"]) for r in after} == {(b"key-%d" % n, b"3", str(n)) for n in range(10)}
        assert len(after) == 10
        assert {record.key: (record.partition, record.offset) for record in after} == places
        for partition in range(2):
            offsets = [record.offset for record in after if record.partition == partition]
            assert offsets == sorted(offsets)

    @requires("records.compacted_topics", "publish.tombstones", "harness.compact")
    @promise(
        "compaction.deleted-keys-go",
        "A key whose last value is a tombstone is gone after compaction, and the tombstone too in time; "
        "a key that was written again stays.",
    )
    async def test_deleted_keys_go(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=1)
        values = {"kept": b"1", "deleted": b"1", "again": b"1"}
        await bus.topic(topic).publish_batch([OutboundMessage(data, key) for key, data in values.items()])
        await bus.topic(topic).publish_batch([OutboundMessage(None, "deleted"), OutboundMessage(None, "again")])
        assert values_of(await table_records(bus, topic)) == {b"kept": b"1"}
        await bus.topic(topic).publish(b"2", key="again")
        await harness.compact(topic)
        records = _ours(await table_records(bus, topic))
        assert [(record.key, record.data) for record in records] == [(b"kept", b"1"), (b"again", b"2")]

    @requires("records.compacted_topics", "harness.compact")
    @promise(
        "compaction.positions-stay-valid",
        "A read or a group goes on from any earlier position after compaction; new records have higher offsets.",
    )
    async def test_positions_stay_valid(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=1)
        for value in range(5):
            await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % value, key) for key in ("a", "b")])
        offsets = [record.offset for record in await table_records(bus, topic)]
        bounds = (await bus.log.bounds(topic))[0]
        last = max(offsets)
        async with bus.records(topic, group="readers") as log:
            first = await log.next_record(timeout=harness.patience)
            assert first is not None
            await first.commit()
        await harness.compact(topic)
        for start in (bounds.first, first.offset + 1, offsets[-2], last):
            found = _ours(await table_records(bus, topic, start))
            wanted = {b"a": b"4", b"b": b"4"} if start < last else {b"b": b"4"}
            assert values_of(found) == wanted, start
        assert (await bus.log.bounds(topic))[0].next >= bounds.next
        await bus.topic(topic).publish(b"5", key="c")
        (new,) = [record for record in await table_records(bus, topic) if record.key == b"c"]
        assert new.offset > last
        async with bus.records(topic, group="readers") as log:
            seen: dict[bytes | None, bytes | None] = {first.key: first.data}
            while seen.get(b"c") != b"5":
                record = await log.next_record(timeout=harness.patience)
                assert record is not None, f"The group read {seen} and no more"
                seen[record.key] = record.data
        assert {key: seen[key] for key in (b"a", b"b")} == {b"a": b"4", b"b": b"4"}

    @requires("records.compacted_topics", "harness.compact")
    @promise(
        "compaction.readers-miss-nothing",
        "A reader that is behind, or reads while the topic is compacted, gets the last value of every key.",
    )
    async def test_readers_miss_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=2)
        seen: dict[bytes | None, bytes | None] = {}
        wanted = {b"key-%d" % n: b"19" for n in range(10)}

        async def follow() -> None:
            if bus.capabilities.records is None or not bus.capabilities.records.follow:
                return
            copy: dict[bytes | None, bytes | None] = {}
            async with bus.log.follow(topic) as log:

                async def is_complete() -> bool:
                    copy.update((record.key, record.data) for record in await log.next_batch(timeout=harness.quiet))
                    return wanted.items() <= copy.items()

                await eventually(is_complete, 4 * harness.patience, "a complete copy by a followed log")

        async def read_on() -> None:
            async with bus.records(topic, group="followers") as log:
                while any(seen.get(key) != value for key, value in wanted.items()):
                    record = await log.next_record(timeout=harness.patience)
                    assert record is not None, f"The reader saw {seen} and no more"
                    seen[record.key] = record.data

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow())
            tasks.create_task(read_on())
            for value in range(20):
                await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % value, f"key-{n}") for n in range(10)])
                if value == 10:
                    await harness.compact(topic)
        async with bus.records(topic, group="late") as late:
            seen.clear()
            await harness.compact(topic)
            while any(seen.get(key) != value for key, value in wanted.items()):
                record = await late.next_record(timeout=harness.patience)
                assert record is not None, f"The late reader saw {seen} and no more"
                seen[record.key] = record.data
        await follow()


async def table_records(bus: Bus, topic: str, start: int | None = None) -> list[Record[bytes]]:
    """All records of a topic, or those from an offset of its partitions on."""
    return [
        record
        for partition in await bus.log.partitions(topic)
        async for batch in bus.log.read(topic, partition, start)
        for record in batch
    ]


def values_of(records: Iterable[Record[bytes]]) -> dict[bytes | None, bytes]:
    """What a table of these records holds: the last value of each key, without deleted ones."""
    last = {record.key: record.data for record in records}
    return {key: data for key, data in last.items() if data is not None}


def _ours(records: Iterable[Record[bytes]]) -> list[Record[bytes]]:
    """Without the records that a harness publishes to make its broker compact."""
    return [record for record in records if not (record.key or b"").startswith(b"kit-filler")]
