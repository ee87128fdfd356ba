"""Conformance tests of table writers: rows and a checkpoint together, by one writer of a partition at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from broker.bus import Bus
from broker.driver.tables import CHECKPOINT_KEY
from broker.errors import BrokerError, InvalidMessage, NotFound, TransactionFatal, Unsupported
from broker.outbound import OutboundMessage
from broker.records import Record
from broker.testing.areas.compaction import table_records, values_of
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import eventually

__all__ = ["Tables"]

ROWS = 20


class Tables(ConformanceCase):
    """Writing a partition of a table."""

    @requires("publish.tables")
    @promise(
        "tables.rows-and-checkpoint",
        "A write stores its rows and then its checkpoint in the partition of the writer; a tombstone deletes a row.",
    )
    async def test_rows_and_checkpoint(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=2)
        async with bus.table_writer(topic, 1) as table:
            for number in range(5):
                rows = [OutboundMessage(b"%d" % number, f"key-{n}", attributes={"n": str(n)}) for n in range(3)]
                await table.write(rows, checkpoint=b"%d" % number)
            await table.write([], checkpoint=b"empty")
            await table.write(
                [
                    OutboundMessage(None, "key-0"),
                    OutboundMessage(b"first", "key-1"),
                    OutboundMessage(b"second", b"key-1", partition=1),
                ],
                checkpoint=b"last",
            )
        records = await _read(harness, topic, b"last", partition=1)
        assert {record.partition for record in records} == {1}
        assert values_of(records) == {b"key-1": b"second", b"key-2": b"4", CHECKPOINT_KEY: b"last"}
        assert records[-1].key == CHECKPOINT_KEY
        (kept,) = [record for record in records if record.key == b"key-2" and record.data == b"4"]
        assert dict(kept.attributes) == {"n": "2"}
        _check_order([record for record in records if (record.data or b"").isdigit()])

    @requires("publish.tables")
    @promise(
        "tables.old-writer-is-fenced",
        "Opening a writer leaves the table as it is; every later write of an earlier writer of the partition is "
        "refused, and stores nothing. Writers of other partitions go on.",
    )
    async def test_old_writer_is_fenced(self, harness: Harness) -> None:
        bus, other, topic = await harness.bus(), await harness.connect(), await harness.compacted_topic(partitions=2)
        async with bus.table_writer(topic, 0) as old, bus.table_writer(topic, 1) as neighbour:
            await old.write(_rows(1), checkpoint=b"1")
            async with other.table_writer(topic, 0) as new:
                # Without a wait: what the old writer has written is visible to a reader that comes after the new one.
                assert values_of(await table_records(bus, topic)) == _table(1)
                for _ in range(2):
                    with pytest.raises(TransactionFatal):
                        await old.write(_rows(2), checkpoint=b"2")
                assert values_of(await table_records(bus, topic)) == _table(1)
                await new.write(_rows(3), checkpoint=b"3")
                with pytest.raises(TransactionFatal):
                    await old.write(_rows(4), checkpoint=b"4")
                assert values_of(await _read(harness, topic, b"3")) == _table(3)
                await neighbour.write([OutboundMessage(b"1", "beside")], checkpoint=b"1")
        async with bus.table_writer(topic, 0) as table:
            await table.write(_rows(5), checkpoint=b"5")
        assert values_of(await _read(harness, topic, b"5")) == _table(5)

    @requires("publish.tables")
    @promise(
        "tables.bad-writes-are-refused",
        "A row without a key, with a key that is too long, of another partition, with an id or under the key of the "
        "checkpoint, and too many rows, are refused, and store nothing; so is a topic that is not compacted or does "
        "not exist.",
    )
    async def test_bad_writes_are_refused(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=2)
        most, longest = bus.capabilities.publish.table_rows, bus.capabilities.publish.limits.key
        good = OutboundMessage(b"x", "key")
        bad_writes = [
            [good, OutboundMessage(b"x")],
            [good, OutboundMessage(b"x", "key", partition=1)],
            [good, OutboundMessage(b"x", "key", id="id")],
            [good, OutboundMessage(b"x", CHECKPOINT_KEY)],
        ]
        if most is not None:
            bad_writes.append([good] * (most + 1))
        if longest is not None:
            bad_writes.append([good, OutboundMessage(b"x", b"k" * (longest + 1))])
        async with bus.table_writer(topic, 0) as table:
            await table.write(_rows(1), checkpoint=b"1")
            for bad in bad_writes:
                with pytest.raises(InvalidMessage):
                    await table.write(bad, checkpoint=b"bad")
            assert values_of(await _read(harness, topic, b"1")) == _table(1)
            many = 1000 if most is None else most
            await table.write([OutboundMessage(b"%d" % n, f"key-{n}") for n in range(many)], checkpoint=b"2")
        assert len(values_of(await _read(harness, topic, b"2"))) == max(many, ROWS) + 1
        for name, partition, error in (
            (await harness.topic(), 0, Unsupported),
            (topic, 2, NotFound),
            (unique("missing"), 0, NotFound),
        ):
            with pytest.raises(error):
                async with bus.table_writer(name, partition):
                    pass

    @requires("publish.tables")
    @promise("tables.cancelled-write-is-whole", "A write whose caller is cancelled is carried out, or not, as a whole.")
    async def test_cancelled_write_is_whole(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=1)
        async with bus.table_writer(topic, 0) as table:
            for number in range(8):
                writing = asyncio.create_task(table.write(_rows(number), checkpoint=b"%d" % number))
                for _ in range(number):
                    await asyncio.sleep(0)
                writing.cancel()
                await asyncio.wait((writing,))
            await table.write([], checkpoint=b"last")
        values = values_of(await _read(harness, topic, b"last"))
        del values[CHECKPOINT_KEY]
        assert len(set(values.values())) <= 1
        assert len(values) in (0, ROWS)

    @requires("publish.atomic_tables", "harness.isolate")
    @promise(
        "tables.no-half-write-and-no-zombie",
        "A writer that is cut off in the middle of its writes leaves whole writes behind, at least all that were "
        "confirmed; what it still sends when it is back is refused.",
        seconds=240.0,
    )
    async def test_no_half_write_and_no_zombie(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.compacted_topic(partitions=1)
        confirmed = 0

        async def write(zombie: Bus) -> None:
            nonlocal confirmed
            async with zombie.table_writer(topic, 0) as table:
                number = confirmed + 1
                while True:
                    try:
                        await table.write(_rows(number), checkpoint=b"%d" % number)
                    except TransactionFatal:
                        return
                    except BrokerError as error:
                        if not error.retriable:
                            raise
                        await asyncio.sleep(0.02)
                    else:
                        confirmed, number = number, number + 1

        for _ in range(3):
            before = confirmed
            zombie = await harness.connect(short_lease=True)
            writing = asyncio.create_task(write(zombie))
            await eventually(lambda: confirmed > before + 2, harness.patience, "three writes")  # noqa: B023
            await asyncio.sleep(random.uniform(0, 0.02))
            await harness.isolate(zombie)
            async with bus.table_writer(topic, 0) as table:
                values = values_of(await table_records(bus, topic))
                number = int(values[CHECKPOINT_KEY])
                assert values == _table(number)
                assert number >= confirmed
                await table.write(_rows(number + 100), checkpoint=b"%d" % (number + 100))
                await harness.heal(zombie)
                async with asyncio.timeout(harness.patience):
                    await writing
                assert values_of(await _read(harness, topic, b"%d" % (number + 100))) == _table(number + 100)
                confirmed = number + 100


async def _read(harness: Harness, topic: str, checkpoint: bytes, partition: int = 0) -> list[Record[bytes]]:
    """The records of a partition, once it has this checkpoint: a commit may become visible a moment later."""
    bus = await harness.bus()

    async def found() -> list[Record[bytes]]:
        records = [record for record in await table_records(bus, topic) if record.partition == partition]
        return records if values_of(records).get(CHECKPOINT_KEY) == checkpoint else []

    return await eventually(found, harness.patience, f"checkpoint {checkpoint!r}")


def _rows(number: int) -> list[OutboundMessage]:
    return [OutboundMessage(b"%d" % number, f"key-{n}") for n in range(ROWS)]


def _table(number: int) -> dict[bytes | None, bytes]:
    """What the table holds after `_rows(number)` with the checkpoint of this number."""
    table: dict[bytes | None, bytes] = {b"key-%d" % n: b"%d" % number for n in range(ROWS)}
    table[CHECKPOINT_KEY] = b"%d" % number
    return table


def _check_order(records: Sequence[Record[bytes]]) -> None:
    """The rows before a checkpoint, and after the one before, belong to its write."""
    rows: list[bytes | None] = []
    for record in records:
        if record.key != CHECKPOINT_KEY:
            rows.append(record.data)
            continue
        assert set(rows) <= {record.data}, f"{rows} came before checkpoint {record.data!r}"
        rows.clear()
