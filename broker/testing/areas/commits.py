"""Conformance tests of commits: explicit, persistent, and for all lower offsets of the partition."""

from __future__ import annotations

import pytest

from broker.driver.contract import TopicPartition
from broker.errors import LeaseLost, OffsetOutOfRange
from broker.outbound import OutboundMessage
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, numbered, once, read

__all__ = ["Commits"]


class Commits(ConformanceCase):
    """Positions of one member."""

    @requires("records")
    @promise(
        "records.no-automatic-commits",
        "Reading and closing commit nothing: the next member reads the same records again.",
    )
    async def test_no_automatic_commits(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in numbered(20)])
        for _ in range(2):
            async with bus.records(topic, group="readers") as log:
                assert [record.data for record in await read(log, 20, harness.patience)] == numbered(20)
                assert set((await log.committed()).values()) == {None}

    @requires("records")
    @promise(
        "records.commit-is-the-next-position",
        "Committing a record stores its offset + 1 at once; the next member continues there.",
    )
    async def test_commit_is_the_next_position(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(5))
        async with bus.records(topic, group="readers") as log:
            for record in (await read(log, 5, harness.patience))[:3]:
                await record.commit()
                at = TopicPartition(topic, record.partition)
                assert (await log.committed([at]))[at] == record.offset + 1
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 2, harness.patience)] == numbered(5)[3:]

    @requires("records")
    @promise(
        "records.commit-settles-lower-offsets",
        "Committing a record settles all lower offsets of its partition, and of no other partition.",
    )
    async def test_commit_settles_lower_offsets(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=2)
        messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(40))]
        await bus.topic(topic).publish_batch(messages)
        async with bus.records(topic, group="readers") as log:
            records = await read(log, 40, harness.patience)
            one = [record for record in records if record.partition == 0]
            await one[-1].commit()
        rest = [record.data or b"" for record in records if record.partition != 0]
        async with bus.records(topic, group="readers") as log:
            assert bodies(await read(log, len(rest), harness.patience)) == once(rest)

    @requires("records")
    @promise(
        "records.batch-commit-covers-all-partitions",
        "`batch.commit()` commits every partition and topic of the batch.",
    )
    async def test_batch_commit_covers_all_partitions(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic(partitions=2) for _ in range(2)]
        for topic in topics:
            messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(40, topic))]
            await bus.topic(topic).publish_batch(messages)
        seen = 0
        async with bus.records(topics, group="readers") as log:
            while seen < 80:
                batch = await log.next_batch(30, timeout=harness.patience)
                assert 1 <= len(batch) <= 30
                seen += len(batch)
                await batch.commit()
        async with bus.records(topics, group="readers") as log:
            assert await log.next_record(timeout=2 * harness.quiet) is None

    @requires("records")
    @promise(
        "records.uncommitted-batch-is-read-again",
        "An uncommitted batch is read again in full; a committed one is not.",
    )
    async def test_uncommitted_batch_is_read_again(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(30))
        async with bus.records(topic, group="readers") as log:
            first = await log.next_batch(10, timeout=harness.patience)
            await first.commit()
            second = await log.next_batch(10, timeout=harness.patience)
        async with bus.records(topic, group="readers") as log:
            again = await read(log, len(second), harness.patience)
            assert [record.data for record in again] == [record.data for record in second]

    @requires("records")
    @promise(
        "records.commit-never-rewinds",
        "Committing an older record after a newer one keeps the newer position.",
    )
    async def test_commit_never_rewinds(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(5))
        async with bus.records(topic, group="readers") as log:
            records = await read(log, 5, harness.patience)
            await records[3].commit()
            await records[1].commit()
            at = TopicPartition(topic, records[0].partition)
            assert (await log.committed([at]))[at] == records[3].offset + 1
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 1, harness.patience)] == numbered(5)[4:]

    @requires("records")
    @promise(
        "records.consumer-commit-covers-delivered-records",
        "`log.commit()` commits all delivered records, and no buffered ones.",
    )
    async def test_consumer_commit_covers_delivered_records(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.records(topic, group="readers") as log:
            await read(log, 7, harness.patience)
            await log.commit()
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 13, harness.patience)] == numbered(20)[7:]

    @requires("records.seek")
    @promise(
        "records.own-positions-are-committed",
        "`commit_positions` stores the given positions, not all that was delivered; the next member continues there.",
    )
    async def test_own_positions_are_committed(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        for body in numbered(20):
            # One by one: a broker may know positions inside a batch of a publisher less well.
            await bus.topic(topic).publish(body)
        at = TopicPartition(topic, 0)
        async with bus.records(topic, group="readers") as log:
            records = await read(log, 15, harness.patience)
            for record in (records[2], records[7]):
                await log.commit_positions({at: record.offset + 1})
                assert (await log.committed([at]))[at] == record.offset + 1
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 12, harness.patience)] == numbered(20)[8:]
            await log.seek({at: records[4].offset})
            await log.commit_positions({at: records[4].offset})
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 16, harness.patience)] == numbered(20)[4:]
            await log.seek({at: records[14].offset})
            await log.commit_positions({at: records[14].offset})
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 6, harness.patience)] == numbered(20)[14:]

    @requires("records.seek")
    @promise(
        "records.own-positions-are-bounded",
        "Positions beyond what was delivered, below the committed one, or of other partitions are refused.",
    )
    async def test_own_positions_are_bounded(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        for body in numbered(20):
            # One by one: a broker may know positions inside a batch of a publisher less well.
            await bus.topic(topic).publish(body)
        at = TopicPartition(topic, 0)
        async with bus.records(topic, group="readers") as log:
            records = await read(log, 10, harness.patience)
            with pytest.raises(OffsetOutOfRange, match="beyond"):
                await log.commit_positions({at: records[9].offset + 2})
            await log.commit_positions({at: records[4].offset + 1})
        async with bus.records(topic, group="readers") as log:
            await read(log, 2, harness.patience)
            with pytest.raises(OffsetOutOfRange, match="below"):
                await log.commit_positions({at: records[3].offset + 1})
            with pytest.raises(OffsetOutOfRange, match="beyond"):
                await log.commit_positions({at: records[7].offset + 1})
            with pytest.raises(LeaseLost, match="not assigned"):
                await log.commit_positions({TopicPartition(topic, 7): 1})
            # A broker may round a stored position up to the next record.
            assert records[4].offset < ((await log.committed([at]))[at] or 0) <= records[5].offset
        async with bus.records(topic, group="readers") as log:
            assert [record.data for record in await read(log, 15, harness.patience)] == numbered(20)[5:]
