"""Conformance tests of records: an ordered log per partition, read by independent groups."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest

from broker.codecs import Json
from broker.driver.contract import TopicPartition
from broker.errors import Closed, DecodeError, LeaseLost, OffsetOutOfRange, TopicNotFound
from broker.names import ephemeral
from broker.outbound import OutboundMessage
from broker.records import Record
from broker.testing.case import ConformanceCase
from broker.testing.faults import RecordProbe
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, log_time, numbered, once, read, take
from broker.topic_patterns import TopicPattern

_FOUND_WITHIN: Final = 10.0
"""Seconds after which a new topic is found."""

__all__ = ["Records"]


class Records(ConformanceCase):
    """Reading as the only member of a group."""

    @requires("records")
    @promise(
        "records.arrive-unchanged",
        "Records arrive with the published key, body, attributes and id, and with growing offsets.",
    )
    async def test_records_arrive_unchanged(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        sent = [
            OutboundMessage(body, key=b"k\x00" + body, attributes={"n": body.decode()}, id=f"id-{n}")
            for n, body in enumerate(numbered(50))
        ]
        receipts = await bus.topic(topic).publish_batch(sent)
        async with bus.records(topic, group="readers") as log:
            records = await read(log, 50, harness.patience)
        by_id = {record.id: record for record in records}
        for message, receipt in zip(sent, receipts, strict=True):
            record = by_id[message.id or ""]
            assert (record.topic, record.key, record.data) == (topic, message.key, message.data)
            assert dict(record.attributes) == dict(message.attributes)
            assert (record.partition, record.offset) == (receipt.partition, receipt.offset)
            assert record.native is not None

    @requires("records")
    @promise(
        "records.in-order-within-a-partition",
        "Records of a partition arrive in the order of their offsets, each once.",
    )
    async def test_in_order_within_a_partition(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=3)
        messages = [OutboundMessage(body, key=f"key-{n % 17}") for n, body in enumerate(numbered(600))]
        await bus.topic(topic).publish_batch(messages)
        by_partition: defaultdict[int, list[int]] = defaultdict(list)
        by_key: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)
        async with bus.records(topic, group="readers") as log:
            for record in await read(log, 600, harness.patience):
                by_partition[record.partition].append(record.offset)
                by_key[record.key].append(record.data)
        assert all(offsets == sorted(set(offsets)) for offsets in by_partition.values())
        assert all(seen == sorted(seen, key=lambda body: body or b"") for seen in by_key.values())

    @requires("records")
    @promise(
        "records.columns-equal-the-records",
        "`batch.rows(...)` returns the attributes of the records; times in milliseconds are those times, rounded down.",
    )
    async def test_columns_equal_the_records(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=2)
        written = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
        sent = [
            OutboundMessage(
                body, key=f"key-{n}", attributes={"n": str(n)}, id=f"id-{n}", publish_time=written if n % 2 else None
            )
            for n, body in enumerate(numbered(40))
        ]
        await bus.topic(topic).publish_batch(sent)
        names = ["topic", "partition", "offset", "id", "key", "data", "attributes", "publish_time", "broker_time"]
        seen = 0
        async with bus.records(topic, group="readers") as log:
            while seen < len(sent):
                batch = await log.next_batch(timeout=harness.patience)
                # Before the records are made, where a backend makes them on access.
                times = list(batch.rows("publish_time_ms", "broker_time_ms"))
                rows = list(batch.rows(*names))
                assert rows == [tuple(getattr(record, name) for name in names) for record in batch]
                assert times == [(_milliseconds(r.publish_time), _milliseconds(r.broker_time)) for r in batch]
                seen += len(batch)
                assert len(batch), f"{seen} of {len(sent)} records arrived"

    @requires("records")
    @promise(
        "records.by-partition-parts-a-batch",
        "`batch.by_partition()` has each record once, in order, under its partition; committing a part commits that "
        "partition only.",
    )
    async def test_by_partition_parts_a_batch(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic(partitions=2) for _ in range(2)]
        for topic in topics:
            messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(40, topic))]
            await bus.topic(topic).publish_batch(messages)
        one = TopicPartition(topics[0], 0)
        seen, wanted = 0, -1
        async with bus.records(topics, group="readers") as log:
            while seen < 80:
                batch = await log.next_batch(timeout=harness.patience)
                parts = batch.by_partition()
                for place, part in parts.items():
                    mine = [record for record in batch if (record.topic, record.partition) == place]
                    assert [record.offset for record in part] == [record.offset for record in mine]
                    assert [record.data for record in part] == [record.data for record in mine]
                assert sum(map(len, parts.values())) == len(batch)
                if (part := parts.get(one)) is not None:
                    wanted = part[-1].offset + 1
                    await part.commit()
                seen += len(batch)
                assert len(batch), f"{seen} of 80 records arrived"
            committed = await log.committed()
        assert {place for place, position in committed.items() if position is not None} == {one}
        assert committed[one] == wanted

    @requires("records")
    @promise("records.each-group-gets-all", "Each of two groups reads all records, and commits its own positions.")
    async def test_each_group_gets_all(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(50))
        for group in ("first", "second"):
            async with bus.records(topic, group=group) as log:
                assert bodies(await read(log, 50, harness.patience)) == once(numbered(50))
                await log.commit()

    @requires("records")
    @promise(
        "records.latest-skips-history",
        'A new group with `start="latest"` reads only records that are appended after it joined.',
    )
    async def test_group_latest_skips_history(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(10, "old"))
        async with bus.records(topic, group="readers", start="latest") as log:
            assert await log.next_record(timeout=harness.quiet) is None
            await bus.topic(topic).publish_batch(numbered(5, "new"))
            assert bodies(await read(log, 5, harness.patience)) == once(numbered(5, "new"))

    @requires("records.start_time")
    @promise(
        "records.start-at-a-time",
        "A new group with a start time reads the records that the broker stored from then on.",
    )
    async def test_group_starts_at_a_time(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(5, "old"))
        await bus.topic(topic).publish_batch(numbered(5, "new"))
        async with bus.records(topic, group="clock") as log:
            records = await read(log, 10, harness.patience)
        boundary = log_time(records[5])
        wanted = [record.data or b"" for record in records if log_time(record) >= boundary]
        async with bus.records(topic, group="readers", start=boundary) as log:
            assert bodies(await read(log, len(wanted), harness.patience)) == once(wanted)
            assert await log.next_record(timeout=harness.quiet) is None

    @requires("records.seek")
    @promise(
        "records.seek-moves-both-ways",
        "`seek` continues at a given or the committed position, and raises for one that is not in the log.",
    )
    async def test_seek_moves_both_ways(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.records(topic, group="readers") as log:
            records = await read(log, 10, harness.patience)
            at = TopicPartition(topic, records[0].partition)
            await records[4].commit()
            await log.seek({at: records[2].offset})
            assert [record.data for record in await read(log, 5, harness.patience)] == numbered(20)[2:7]
            await log.seek({at: None})
            assert [record.data for record in await read(log, 5, harness.patience)] == numbered(20)[5:10]
            await log.seek({at: records[9].offset + 1})
            assert [record.data for record in await read(log, 10, harness.patience)] == numbered(20)[10:]
            with pytest.raises(OffsetOutOfRange):
                await log.seek({at: records[0].offset + 1_000_000})

    @requires("records")
    @promise(
        "records.pause-stops-delivery",
        "A paused partition delivers nothing, loses nothing, and continues when it is resumed.",
    )
    async def test_pause_stops_delivery(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=2)
        async with bus.records(topic, group="readers") as log:
            messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(40))]
            receipts = await bus.topic(topic).publish_batch(messages)
            open_ones = sum(receipt.partition == 1 for receipt in receipts)
            (first,) = await read(log, 1, harness.patience)
            await eventually(lambda: len(log.assignment()) == 2, 3 * harness.patience, "the assignment")
            log.pause([TopicPartition(topic, 0)])
            seen = [first, *await read(log, open_ones - (first.partition == 1), harness.patience)]
            assert {record.partition for record in seen[1:]} == {1}
            assert await log.next_record(timeout=2 * harness.quiet) is None
            log.resume([TopicPartition(topic, 0)])
            seen += await read(log, 40 - len(seen), harness.patience)
            assert bodies(seen) == once(numbered(40))

    @requires("records.topic_patterns")
    @promise(
        "records.pattern-follows-topics",
        "A group with a pattern reads the topics that match it, new ones from their first record on, and no other.",
    )
    async def test_record_pattern_follows_topics(self, harness: Harness) -> None:
        bus, prefix = await harness.bus(), unique("pattern")
        pattern = TopicPattern(re.escape(prefix) + r"\..*", exclude=r".*\.dead")
        for end in (".eu", ".us", ".dead", "-us"):
            name = await harness.create_topic(prefix + end, partitions=2)
            await bus.topic(name).publish(name.encode())
        async with bus.records(pattern, group="readers") as log:
            records = await read(log, 2, 3 * harness.patience)
            new = await harness.create_topic(f"{prefix}.new", partitions=2)
            await bus.topic(new).publish_batch([OutboundMessage(new.encode(), key=str(n)) for n in range(10)])
            records += await read(log, 10, harness.patience + _FOUND_WITHIN)
            assert await log.next_record(timeout=harness.quiet) is None
            await log.commit()
        assert bodies(records) == {f"{prefix}.eu".encode(): 1, f"{prefix}.us".encode(): 1, new.encode(): 10}
        assert all(record.data == record.topic.encode() for record in records)
        async with bus.records(pattern, group="readers") as log:
            assert await log.next_record(timeout=2 * harness.quiet) is None

    @requires("records.topic_patterns")
    @promise(
        "records.pattern-survives-a-deletion",
        "A group with a pattern goes on when one of its topics is deleted, and reads a new topic of that name.",
    )
    async def test_record_pattern_survives_a_deletion(self, harness: Harness) -> None:
        bus, prefix = await harness.bus(), unique("pattern")
        stays, goes = [await harness.create_topic(f"{prefix}.{end}", partitions=2) for end in ("stays", "goes")]
        async with bus.records(TopicPattern(re.escape(prefix) + ".*"), group="readers") as log:
            for name in (stays, goes):
                await bus.topic(name).publish(name.encode())
            assert bodies(await read(log, 2, 3 * harness.patience)) == once([stays.encode(), goes.encode()])
            await bus.admin.delete_topic(goes)
            await bus.topic(stays).publish(b"at once")
            (record,) = await read(log, 1, harness.patience)
            assert record.data == b"at once"
            with suppress(LeaseLost):
                await log.commit()
            assert await log.next_record(timeout=1.2 * _FOUND_WITHIN) is None
            await harness.create_topic(goes, partitions=2)
            await bus.topic(goes).publish(b"again")
            (record,) = await read(log, 1, harness.patience + _FOUND_WITHIN)
            assert record.data == b"again"

    @requires("records")
    @promise(
        "records.batch-waits-to-fill",
        "With `max_wait` a batch is handed over when it is full, or when its first record has waited so long.",
    )
    async def test_record_batch_waits_to_fill(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.records(topic, group="readers") as log:
            full = asyncio.ensure_future(log.next_batch(5, max_wait=10 * harness.patience))
            for half in (numbered(5)[:3], numbered(5)[3:]):
                await asyncio.wait((full,), timeout=2 * harness.quiet)
                assert not full.done()
                await bus.topic(topic).publish_batch(half)
            async with asyncio.timeout(3 * harness.patience):
                assert bodies(await full) == once(numbered(5))
            await bus.topic(topic).publish_batch(numbered(3, "old"))
            seen: list[Record[bytes]] = []
            while len(seen) < 3:
                batch = await log.next_batch(5, timeout=harness.patience, max_wait=harness.quiet)
                assert batch, f"Only {len(seen)} of 3 records arrived"
                seen += batch
            assert bodies(seen) == once(numbered(3, "old"))

    @requires("records")
    @promise(
        "records.unassigned-partitions-are-refused",
        "Pausing or resuming an unassigned partition raises LeaseLost, which names it, and changes nothing.",
    )
    async def test_unassigned_partitions_are_refused(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(10))
        async with bus.records(topic, group="readers") as log:
            (first,) = await read(log, 1, harness.patience)
            mine = TopicPartition(topic, first.partition)
            for call in (log.pause, log.resume):
                with pytest.raises(LeaseLost, match=f"Partition 77 of topic '{topic}'"):
                    call([mine, TopicPartition(topic, 77)])
            seen = [first, *await read(log, 9, harness.patience)]
            assert bodies(seen) == once(numbered(10))

    @requires("records")
    @promise(
        "records.idle-closed-and-cancelled-differ",
        "Idle returns None or an empty batch, a close raises Closed, a cancellation is one; no record is lost.",
    )
    async def test_idle_closed_and_cancelled_differ(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.records(topic, group="readers") as log:
            assert await log.next_record(timeout=harness.quiet) is None
            assert len(await log.next_batch(timeout=0)) == 0
            waiting = asyncio.ensure_future(log.next_record())
            await asyncio.wait({waiting}, timeout=harness.quiet)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await bus.topic(topic).publish_batch(numbered(10))
            assert bodies(await read(log, 10, harness.patience)) == once(numbered(10))
            blocked = asyncio.ensure_future(log.next_record())
            await asyncio.wait({blocked}, timeout=harness.quiet)
            await log.close()
            with pytest.raises(Closed):
                await blocked
            with pytest.raises(Closed):
                await log.next_batch(timeout=0)
            assert [record async for record in log] == []

    @requires("records")
    @promise(
        "records.cancelled-reads-lose-nothing",
        "Cancelling reads repeatedly while records arrive loses no record.",
    )
    async def test_cancelled_reads_lose_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        seen: list[bytes | None] = []
        async with bus.records(topic, group="readers") as log:
            publishing = asyncio.ensure_future(bus.topic(topic).publish_batch(numbered(100)))
            for turns in range(100):
                call = asyncio.ensure_future(log.next_record())
                for _ in range(turns % 4):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait({call})
                if not call.cancelled() and (record := call.result()) is not None:
                    seen.append(record.data)
            await publishing
            seen += [record.data for record in await read(log, 100 - len(seen), harness.patience)]
        assert seen == numbered(100)

    @requires("records")
    @promise(
        "records.shapes-agree",
        "`next_record`, `next_batch`, `async for` and `batches()` continue one another; `break` loses nothing.",
    )
    async def test_shapes_agree(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(100))
        seen: list[bytes | None] = []
        async with asyncio.timeout(2 * harness.patience):
            async with bus.records(topic, group="readers", stop_when_idle=2 * harness.quiet) as log:
                seen += [record.data for record in await read(log, 10, harness.patience)]
                seen += [record.data for record in await log.next_batch(10, timeout=harness.patience)]
                async for record in log:
                    seen.append(record.data)
                    if len(seen) >= 40:
                        break
                async for batch in log.batches(15):
                    rows = list(batch.rows("offset", "key", "data", "attributes", "publish_time"))
                    seen += [data for _, _, data, _, _ in rows]
                    assert rows == [(r.offset, r.key, r.data, r.attributes, r.publish_time) for r in batch]
                    break
                async for record in log:
                    seen.append(record.data)
        assert seen == numbered(100)

    @requires("records")
    @promise(
        "records.decode-error-is-raised-in-place",
        "An undecodable record raises DecodeError in its place; the records around it are read.",
    )
    async def test_decode_error_is_raised_in_place(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch([b"1", b"2", b"{broken", b"4"])
        seen: list[int] = []
        errors = 0
        async with bus.records(topic, group="readers", codec=Json(int)) as log:
            while len(seen) + errors < 4:
                try:
                    record = await log.next_record(timeout=harness.patience)
                except DecodeError:
                    errors += 1
                    assert seen == [1, 2]
                else:
                    assert record is not None
                    seen.append(record.payload)
        assert (seen, errors) == ([1, 2, 4], 1)

    @requires("records")
    @promise(
        "records.decode-error-to-dead-letters",
        "With a dead-letter topic, an undecodable record is dead-lettered with its reason, and reading continues.",
    )
    async def test_decode_error_to_dead_letters(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(partitions=1), await harness.topic()
        await bus.topic(topic).publish_batch([OutboundMessage(b, key="k") for b in (b"1", b"{broken", b"3")])
        async with bus.records(topic, group="readers", codec=Json(int), on_decode_error=dead) as log:
            seen: list[int] = []
            while len(seen) < 2:
                record = await log.next_record(timeout=harness.patience)
                assert record is not None
                seen.append(record.payload)
            assert seen == [1, 3]
        async with bus.messages(dead, subscription="readers", start="earliest") as letters:
            (letter,) = await take(letters, 1, harness.patience)
            assert (letter.data, letter.key) == (b"{broken", b"k")
            assert letter.attributes["dead-letter-topic"] == topic

    @requires("records")
    @promise(
        "records.buffer-is-bounded",
        "A source returns at most the requested records, and exceeds the requested bytes by at most one record.",
    )
    async def test_buffer_is_bounded(self, harness: Harness) -> None:
        topic, sent = await harness.topic(), [body + bytes(1000) for body in numbered(50)]
        await (await harness.bus()).topic(topic).publish_batch(sent)
        for group, probe, max_buffered in (("count", RecordProbe(), 5), ("bytes", RecordProbe(max_bytes=5000), 1000)):
            bus = await harness.connect(wrap=probe)
            async with bus.records(topic, group=group, max_buffered=max_buffered) as log:
                assert bodies(await read(log, 50, harness.patience)) == once(sent)
            assert probe.excess == []

    @requires("records")
    @promise(
        "records.close-ends-the-wait",
        "Closing a record consumer ends its waiting fetch at once.",
    )
    async def test_close_ends_the_wait(self, harness: Harness) -> None:
        topic, probe = await harness.topic(), RecordProbe(wait=600.0)
        bus = await harness.connect(wrap=probe)
        async with asyncio.timeout(3 * harness.patience):
            async with bus.records(topic, group="readers", close_timeout=600.0) as log:
                await eventually(lambda: log.assignment() and probe.waiting, harness.patience, "a fetch that waits")
            await eventually(lambda: not probe.waiting, harness.patience, "the end of the fetch")

    @requires("records")
    @promise("records.missing-topic-raises", "Joining a group on a missing topic raises TopicNotFound.")
    async def test_joining_a_missing_topic_raises(self, harness: Harness) -> None:
        bus = await harness.bus()
        with pytest.raises(TopicNotFound):
            async with bus.records(unique("missing"), group="readers"):
                pass

    @requires("records", "messages.ephemeral")
    @promise("records.ephemeral-group-is-exclusive", "By default, every ephemeral group reads all records.")
    async def test_ephemeral_group_is_exclusive(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(10))
        async with (
            bus.records(topic, group=ephemeral()) as first,
            bus.records(topic, group=ephemeral(), start="earliest") as second,
        ):
            for log in (first, second):
                assert bodies(await read(log, 10, harness.patience)) == once(numbered(10))

    @requires("records")
    @promise(
        "records.share-a-topic-with-messages",
        "A message subscription and a record group can read the same topic independently.",
    )
    async def test_share_a_topic_with_messages(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="queue") as inbox, bus.records(topic, group="log") as log:
            await bus.topic(topic).publish_batch(numbered(20))
            assert bodies(await read(log, 20, harness.patience)) == once(numbered(20))
            await log.commit()
            messages = await take(inbox, 20, harness.patience)
            assert bodies(messages) == once(numbered(20))
            for message in messages:
                await message.ack()


def _milliseconds(time: datetime | None) -> int | None:
    return None if time is None else (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
