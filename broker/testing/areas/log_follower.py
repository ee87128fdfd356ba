"""Conformance tests of followed logs: reads without end and without a group, which never skip."""

from __future__ import annotations

import asyncio

import pytest

import broker.blocking
from broker.errors import BrokerError, Closed, NotFound, OffsetOutOfRange, TopicNotFound, TopicRecreated
from broker.outbound import OutboundMessage
from broker.protocols import FollowedLog
from broker.records import Record
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, numbered, once

__all__ = ["LogFollowing"]


class LogFollowing(ConformanceCase):
    """Following a log."""

    @requires("records.follow", "publish.partitions")
    @promise(
        "follow.begins-at-the-positions",
        "A follower reads the named partitions from their positions on, in order, and no other partition.",
    )
    async def test_begins_at_the_positions(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=3)
        for partition in range(3):
            await _publish(harness, topic, partition, numbered(20, f"p{partition}"))
        offsets = {
            number: [record.offset async for batch in bus.log.read(topic, number) for record in batch]
            for number in range(3)
        }
        async with bus.log.follow(topic, {0: offsets[0][12], 2: offsets[2][5]}) as log:
            records = await _take(log, 23, harness.patience)
            assert not await log.next_batch(timeout=harness.quiet)
        for number, first in ((0, 12), (2, 5)):
            assert [each.offset for each in records if each.partition == number] == offsets[number][first:]
            bodies_of = [each.data for each in records if each.partition == number]
            assert bodies_of == numbered(20, f"p{number}")[first:]

    @requires("records.follow")
    @promise(
        "follow.new-records-arrive",
        "Every follower receives every new record, in order per partition, at most `max_records` at once; no group "
        "is created.",
    )
    async def test_new_records_arrive(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=2)
        await bus.topic(topic).publish_batch([OutboundMessage(b, key=b) for b in numbered(10, "old")])
        async with bus.log.follow(topic) as whole, bus.log.follow(topic, others="latest") as tail:
            assert bodies(await _until_caught_up(whole, harness.patience)) == once(numbered(10, "old"))
            assert await _until_caught_up(tail, harness.patience) == []
            for number in range(3):
                new = numbered(50, f"new{number}")
                await bus.topic(topic).publish_batch([OutboundMessage(body, key=body) for body in new])
                for log in (whole, tail):
                    records: list[Record[bytes]] = []
                    while len(records) < 50:
                        batch = await log.next_batch(7, timeout=harness.patience)
                        assert 1 <= len(batch) <= 7, f"Only {len(records)} of 50 records arrived"
                        records += batch
                    assert bodies(records) == once(new)
                    for partition in range(2):
                        offsets = [record.offset for record in records if record.partition == partition]
                        assert offsets == sorted(offsets)
                    assert not await log.next_batch(timeout=harness.quiet)
        assert await bus.admin.subscriptions(topic) == []

    @requires("records.follow", "publish.partitions")
    @promise(
        "follow.tells-caught-up",
        "`behind` loses a partition when the last record that the log held at the start is handed over, not before; "
        "an empty partition or a position at the end shows at once, with an empty batch.",
    )
    async def test_tells_caught_up(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=3)
        await _publish(harness, topic, 0, numbered(30, "a"))
        await _publish(harness, topic, 1, numbered(30, "b"))
        last = {n: [r.offset async for b in bus.log.read(topic, n) for r in b][-1] for n in (0, 1)}
        async with bus.log.follow(topic) as log:
            assert log.behind == {0, 1, 2}
            seen: set[int] = set()
            async with asyncio.timeout(harness.patience):
                async for batch in log.batches(7):
                    seen |= {record.partition for record in batch if record.offset == last[record.partition]}
                    # The broker tells the end of a partition before or after the records of another.
                    assert {0, 1} - log.behind <= seen
                    if not log.behind:
                        break
            assert seen == {0, 1}
            await _publish(harness, topic, 0, [b"later"])
            assert [each.data for each in await _take(log, 1, harness.patience)] == [b"later"]
            assert not log.behind
        bounds = await bus.log.bounds(topic)
        async with bus.log.follow(topic, {0: bounds[0].next, 2: bounds[2].next}) as log:
            assert len(await log.next_batch(timeout=harness.patience)) == 0
            assert not log.behind

    @requires("records.follow", "publish.transactions")
    @promise(
        "follow.catches-up-behind-transactions",
        "A follower catches up although the log ends with an aborted transaction, whose records it never shows; those "
        "of an open transaction come with its commit.",
    )
    async def test_catches_up_behind_transactions(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish(b"before")
        async with bus.transactional_publisher(unique("tx")) as publisher:
            with pytest.raises(ZeroDivisionError):
                async with publisher.transaction() as tx:
                    await tx.publish(topic, b"aborted")
                    raise ZeroDivisionError
            async with bus.log.follow(topic) as log:
                records = await _until_caught_up(log, harness.patience)
                assert [record.data for record in records] == [b"before"]
                async with publisher.transaction() as tx:
                    await tx.publish(topic, b"committed")
                    assert not await log.next_batch(timeout=harness.quiet)
                assert [each.data for each in await _take(log, 1, harness.patience)] == [b"committed"]

    @requires("records.follow", "harness.cut")
    @promise(
        "follow.survives-reconnects",
        "After a broken connection a follower goes on where it was: each record comes once, in order.",
    )
    async def test_survives_reconnects(self, harness: Harness) -> None:
        topic = await harness.topic(partitions=1)
        writer, reader = await harness.bus(), await harness.connect(short_lease=True)
        sent: list[bytes] = []
        seen: list[bytes | None] = []
        async with reader.log.follow(topic) as log:
            for number in range(3):
                more = numbered(100, f"round{number}")
                sent += more
                await writer.topic(topic).publish_batch(more[:50])
                seen += [each.data for each in await _take(log, 50, harness.patience)]
                await harness.cut(reader)
                await writer.topic(topic).publish_batch(more[50:])
                seen += [each.data for each in await _take(log, 50, harness.patience)]
        assert seen == sent

    @requires("records.follow", "publish.partitions")
    @promise(
        "follow.new-partitions-are-followed",
        "A follower of a whole topic reads partitions that are added later, from their first record on; one of named "
        "partitions does not.",
    )
    async def test_new_partitions_are_followed(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish(b"old")
        async with (
            bus.log.follow(topic) as whole,
            bus.log.follow(topic, others="latest") as tail,
            bus.log.follow(topic, {0: (await bus.log.bounds(topic))[0].first}) as part,
        ):
            await _until_caught_up(whole, harness.patience)
            await _until_caught_up(tail, harness.patience)
            await bus.admin.ensure_topic(topic, partitions=3)
            writer = await harness.connect()
            for partition in range(3):
                await writer.topic(topic).publish(OutboundMessage(b"new-%d" % partition, partition=partition))
            new = [b"new-0", b"new-1", b"new-2"]
            assert bodies(await _take(whole, 3, harness.patience)) == once(new)
            assert bodies(await _take(tail, 3, harness.patience)) == once(new)
            assert whole.behind == tail.behind == set()
            assert [each.data for each in await _take(part, 2, harness.patience)] == [b"old", b"new-0"]
            assert not await part.next_batch(timeout=harness.quiet)

    @requires("records.follow")
    @promise(
        "follow.recreated-topic-raises",
        "A follower of a topic that is deleted and recreated raises TopicRecreated, or another error where the broker "
        "has no identities of topics; it does not read the new topic from the start.",
    )
    async def test_recreated_topic_raises(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(3, "old"))
        named = await bus.admin.topic_identity(topic) is not None
        async with bus.log.follow(topic) as log:
            await _until_caught_up(log, harness.patience)
            await bus.admin.delete_topic(topic)
            await _recreate(harness, topic)
            with pytest.raises(TopicRecreated if named else (TopicNotFound, OffsetOutOfRange)) as caught:
                while True:
                    batch = await log.next_batch(timeout=harness.patience)
                    assert not batch, "A record of the new topic was handed over"
            assert topic in str(caught.value)
            assert log.closed
            with pytest.raises(Closed):
                await log.next_batch()
        async with bus.log.follow(topic) as log:
            await _until_caught_up(log, harness.patience)

    @requires("records.follow")
    @promise(
        "follow.removed-position-raises",
        "Following from a position that was removed from the log, or lies beyond its end, raises OffsetOutOfRange; "
        "a missing topic or partition raises NotFound.",
    )
    async def test_removed_position_raises(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(5))
        before = (await bus.log.bounds(topic))[0]
        await bus.admin.purge(topic)
        await bus.topic(topic).publish_batch(numbered(3, "new"))
        after = (await bus.log.bounds(topic))[0]
        for position in (before.first, after.next + 100):
            with pytest.raises(OffsetOutOfRange):
                async with bus.log.follow(topic, {0: position}) as log:
                    await _take(log, 3, harness.patience)
        async with bus.log.follow(topic) as log:
            assert [each.data for each in await _take(log, 3, harness.patience)] == numbered(3, "new")
        with pytest.raises(NotFound):
            async with bus.log.follow(topic, {7: 0}):
                pass
        with pytest.raises(TopicNotFound):
            async with bus.log.follow(unique("missing")):
                pass

    @requires("records.follow", "harness.isolate")
    @promise(
        "follow.removed-records-are-not-skipped",
        "Records that are removed while a follower is cut off come all the same, or raise OffsetOutOfRange.",
    )
    async def test_removed_records_are_not_skipped(self, harness: Harness) -> None:
        topic = await harness.topic(partitions=1)
        bus, reader = await harness.bus(), await harness.connect(short_lease=True)
        await bus.topic(topic).publish_batch(numbered(3))
        async with reader.log.follow(topic) as log:
            assert len(await _take(log, 3, harness.patience)) == 3
            await harness.isolate(reader)
            await bus.topic(topic).publish_batch(numbered(3, "removed"))
            await bus.admin.purge(topic)
            await bus.topic(topic).publish_batch(numbered(3, "new"))
            await harness.heal(reader)
            seen: list[bytes | None] = []
            try:
                while b"new-000002" not in seen:
                    seen += [record.data for record in await _take(log, 1, 6 * harness.patience)]
            except OffsetOutOfRange:
                return
            # The broker had sent them before.
            assert seen == [*numbered(3, "removed"), *numbered(3, "new")]

    @requires("records.follow")
    @promise(
        "follow.cancelling-and-closing",
        "A cancelled call loses no record; a close ends a waiting call with Closed, and iterations.",
    )
    async def test_cancelling_and_closing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        seen: list[bytes | None] = []
        async with bus.log.follow(topic) as log:
            await _until_caught_up(log, harness.patience)
            publishing = asyncio.ensure_future(bus.topic(topic).publish_batch(numbered(50)))
            async with asyncio.timeout(harness.patience):
                while len(seen) < 50:
                    cut_off = asyncio.ensure_future(log.next_batch(3))
                    await asyncio.sleep(0)
                    cut_off.cancel()
                    await asyncio.wait((cut_off,))
                    if not cut_off.cancelled():
                        seen += [each.data for each in cut_off.result()]
                    seen += [each.data for each in await log.next_batch(3, timeout=harness.quiet)]
            await publishing
            assert seen == numbered(50)
            waiting = asyncio.ensure_future(log.next_batch())
            iterating = asyncio.ensure_future(anext(log.batches(), None))
            await asyncio.sleep(harness.quiet)
            await log.close()
            async with asyncio.timeout(harness.patience):
                assert await iterating is None
                with pytest.raises(Closed):
                    await waiting

    @requires("records.follow")
    @promise("follow.without-await", "`broker.blocking` follows a log with the same results.")
    async def test_without_await(self, harness: Harness) -> None:
        topic = await harness.topic(partitions=2)
        await (await harness.bus()).topic(topic).publish_batch([OutboundMessage(b, key=b) for b in numbered(20)])

        def work() -> None:
            with broker.blocking.connect(harness.url()) as bus, bus.log.follow(topic) as log:
                seen = 0
                for batch in log.batches(6):
                    seen += len(batch)
                    if not log.behind:
                        break
                assert seen == 20
                assert not log.next_batch(timeout=harness.quiet)
                bus.topic(topic).publish(b"new")
                assert [record.data for record in log.next_batch(timeout=harness.patience)] == [b"new"]

        await asyncio.to_thread(work)


async def _publish(harness: Harness, topic: str, partition: int, wanted: list[bytes]) -> None:
    bus = await harness.bus()
    await bus.topic(topic).publish_batch([OutboundMessage(body, partition=partition) for body in wanted])


async def _take(log: FollowedLog, count: int, patience: float) -> list[Record[bytes]]:
    """The next `count` records, ignoring what tells that partitions have caught up."""
    records: list[Record[bytes]] = []
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while len(records) < count:
        left = deadline - loop.time()
        assert left > 0, f"Only {len(records)} of {count} records arrived within {patience} s"
        records += await log.next_batch(count - len(records), timeout=left)
    return records


async def _until_caught_up(log: FollowedLog, patience: float) -> list[Record[bytes]]:
    records: list[Record[bytes]] = []
    async with asyncio.timeout(patience):
        async for batch in log.batches():
            records += batch
            if not log.behind:
                return records
    raise AssertionError("unreachable")


async def _recreate(harness: Harness, topic: str) -> None:
    """Recreate a topic, with fewer records than the old one had; brokers take a moment to delete one."""
    bus = await harness.connect()

    async def created() -> bool:
        try:
            await bus.admin.ensure_topic(topic, partitions=1)
            await bus.topic(topic).publish_batch([b"recreated"])
        except BrokerError:
            return False
        return True

    await eventually(created, 6 * harness.patience, "a recreated topic")
