"""Conformance tests of groups: one owner per partition, and hand-over without loss and in order."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

import pytest

from broker.errors import LeaseLost
from broker.hooks import Event, PartitionsAssigned, PartitionsLost, PartitionsRevoked
from broker.outbound import OutboundMessage
from broker.records import Record
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import eventually, numbered, read

__all__ = ["Groups"]

PARTITIONS = 4


class Groups(ConformanceCase):
    """Several members of a group."""

    @requires("records.rebalance")
    @promise(
        "groups.partitions-are-distributed",
        "Members of a group share the partitions: each partition has one owner, and no member is idle.",
    )
    async def test_partitions_are_distributed(self, harness: Harness) -> None:
        first, second, topic = await harness.bus(), await harness.connect(), await harness.topic(partitions=PARTITIONS)
        async with first.records(topic, group="readers") as one:
            await eventually(lambda: len(one.assignment()) == PARTITIONS, 3 * harness.patience, "the first assignment")
            async with second.records(topic, group="readers") as two:
                await eventually(lambda: _is_shared(one, two), 3 * harness.patience, "a fair share for both members")

    @requires("records.rebalance")
    @promise(
        "groups.leaving-reassigns-partitions",
        "When a member leaves, the others take over its partitions and continue at its commits.",
    )
    async def test_leaving_reassigns_partitions(self, harness: Harness) -> None:
        first, second, topic = await harness.bus(), await harness.connect(), await harness.topic(partitions=PARTITIONS)
        await first.topic(topic).publish_batch(_keyed(200))
        seen: Counter[bytes | None] = Counter()
        async with second.records(topic, group="readers") as two:
            await eventually(lambda: len(two.assignment()) == PARTITIONS, 3 * harness.patience, "the first assignment")
            async with first.records(topic, group="readers") as one:
                await eventually(lambda: _is_shared(one, two), 3 * harness.patience, "a fair share for both members")
                while batch := await one.next_batch(20, timeout=2 * harness.quiet):
                    seen.update(record.data for record in batch)
                    await batch.commit()
            await eventually(lambda: len(two.assignment()) == PARTITIONS, 3 * harness.patience, "the take-over")
            while len(seen) < 200:
                batch = await two.next_batch(100, timeout=harness.patience)
                assert batch, f"Only {len(seen)} of 200 records were read"
                seen.update(record.data for record in batch)
                await batch.commit()
        assert set(seen) == set(numbered(200))

    @requires("records.rebalance")
    @promise(
        "groups.rebalance-with-work-in-flight",
        "While members join and leave, no record is lost, and each key is read in order.",
        seconds=120,
    )
    async def test_rebalance_with_work_in_flight(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=PARTITIONS)
        members = [await harness.connect() for _ in range(3)]
        latest: defaultdict[bytes | None, int] = defaultdict(lambda: -1)
        seen: set[bytes | None] = set()
        gaps: list[str] = []

        async def member(number: int, stop: asyncio.Event) -> None:
            async with members[number].records(topic, group="readers") as log:
                while not stop.is_set():
                    batch = await log.next_batch(10, timeout=harness.quiet)
                    for record in batch:
                        _note(record)
                    try:
                        await batch.commit()
                    except LeaseLost:
                        continue

        def _note(record: Record[bytes]) -> None:
            seen.add(record.data)
            position = int((record.data or b"").rpartition(b"-")[2])
            if position > latest[record.key] + 1:
                gaps.append(f"key {record.key!r}: {position} came after {latest[record.key]}")
            latest[record.key] = max(latest[record.key], position)

        await bus.topic(topic).publish_batch(_keyed(800, keys=8))
        stops = [asyncio.Event() for _ in range(3)]
        work = [asyncio.ensure_future(member(0, stops[0]))]
        await eventually(lambda: len(seen) > 50, 3 * harness.patience, "the first records")
        for number in (1, 2):
            work.append(asyncio.ensure_future(member(number, stops[number])))
            count = len(seen)
            await eventually(
                lambda count=count: len(seen) > count or len(seen) == 800, 3 * harness.patience, "progress"
            )
        stops[0].set()
        await work[0]
        await eventually(lambda: len(seen) == 800, 4 * harness.patience, "all 800 records")
        for stop in stops:
            stop.set()
        await asyncio.gather(*work)
        assert gaps == []

    @requires("records.rebalance")
    @promise(
        "groups.stale-commit-is-refused",
        "Committing a partition that moved to another member raises LeaseLost and changes nothing.",
    )
    async def test_stale_commit_is_refused(self, harness: Harness) -> None:
        first, second, topic = await harness.bus(), await harness.connect(), await harness.topic(partitions=PARTITIONS)
        await first.topic(topic).publish_batch(_keyed(100))
        async with first.records(topic, group="readers") as one:
            records = await read(one, 100, harness.patience)
            async with second.records(topic, group="readers") as two:
                await eventually(lambda: _is_shared(one, two), 3 * harness.patience, "a fair share for both members")
                gone = {partition.partition for partition in two.assignment()}
                stale = next(record for record in reversed(records) if record.partition in gone)
                with pytest.raises(LeaseLost):
                    await stale.commit()
                again = await two.next_record(timeout=harness.patience)
                assert again is not None
                assert again.partition in gone

    @requires("records.rebalance")
    @promise(
        "groups.revocation-event-precedes-release",
        "Revoked partitions are reported by an event before they are released, with the remaining ones.",
    )
    async def test_revocation_event_precedes_release(self, harness: Harness) -> None:
        first, second, topic = await harness.bus(), await harness.connect(), await harness.topic(partitions=PARTITIONS)
        events: list[Event] = []
        first.hooks.listen(events.append)
        second.hooks.listen(events.append)
        async with first.records(topic, group="readers") as one:
            await eventually(lambda: len(one.assignment()) == PARTITIONS, 3 * harness.patience, "the first assignment")
            async with second.records(topic, group="readers") as two:
                await eventually(lambda: _is_shared(one, two), 3 * harness.patience, "a fair share for both members")
                moved = set(two.assignment())
                revoked = [(index, event) for index, event in enumerate(events) if isinstance(event, PartitionsRevoked)]
                assert {tuple(p) for _, event in revoked for p in event.partitions} >= {tuple(p) for p in moved}
                taken = [
                    index
                    for index, event in enumerate(events)
                    if isinstance(event, PartitionsAssigned)
                    and set(map(tuple, event.partitions)) & set(map(tuple, moved))
                ]
                assert revoked[0][0] < taken[-1]
                assert all(not set(event.partitions) & set(event.current) for _, event in revoked)

    @requires("records.rebalance")
    @promise(
        "groups.more-members-than-partitions",
        "Members beyond the number of partitions wait, and take over when one leaves.",
    )
    async def test_more_members_than_partitions(self, harness: Harness) -> None:
        first, second, topic = await harness.bus(), await harness.connect(), await harness.topic(partitions=1)
        await first.topic(topic).publish_batch(numbered(10))
        async with second.records(topic, group="readers") as two:
            await eventually(lambda: len(two.assignment()) == 1, 3 * harness.patience, "the first assignment")
            async with first.records(topic, group="readers") as one:
                assert await one.next_record(timeout=2 * harness.quiet) is None or not two.assignment()
            records = await read(two, 10, 3 * harness.patience)
            assert {record.data for record in records} == set(numbered(10))

    @requires("records.rebalance", "harness.crash")
    @promise(
        "groups.crash-reassigns-partitions",
        "After a member crashed, the others continue at its last commit, in order and without loss.",
        seconds=180,
    )
    async def test_crash_reassigns_partitions(self, harness: Harness) -> None:
        doomed, bus, topic = (
            await harness.connect(short_lease=True),
            await harness.bus(),
            await harness.topic(partitions=2),
        )
        await bus.topic(topic).publish_batch(_keyed(100))
        log = doomed.records(topic, group="readers")
        await log.__aenter__()
        records = await read(log, 100, harness.patience)
        committed = records[:30]
        for record in committed:
            await record.commit()
        await harness.crash(doomed)
        done = {(record.partition, record.offset) for record in committed}
        top = {partition: max((o for p, o in done if p == partition), default=-1) for partition in (0, 1)}
        rest = {record.data for record in records if record.offset > top[record.partition]}
        survivor = await harness.connect(short_lease=True)
        async with survivor.records(topic, group="readers") as other:
            seen: set[bytes | None] = set()
            while not seen >= rest:
                record = await other.next_record(timeout=6 * harness.patience)
                assert record is not None, f"{len(rest - seen)} records did not arrive"
                seen.add(record.data)

    @requires("records.rebalance", "harness.isolate")
    @promise(
        "groups.lost-partitions-are-reported",
        "A member that could not reach the server gets an event when its partitions moved to other members.",
        seconds=180,
    )
    async def test_lost_partitions_are_reported(self, harness: Harness) -> None:
        first, second = await harness.connect(short_lease=True), await harness.connect(short_lease=True)
        topic = await harness.topic(partitions=2)
        await first.topic(topic).publish_batch(_keyed(40))
        events: list[Event] = []
        first.hooks.listen(events.append)
        async with first.records(topic, group="readers") as one:
            await read(one, 40, harness.patience)
            await harness.isolate(first)
            async with second.records(topic, group="readers") as two:
                await read(two, 40, 6 * harness.patience)
                await harness.heal(first)

                def lost() -> set[tuple[str, int]]:
                    losses = [event for event in events if isinstance(event, PartitionsLost)]
                    return {partition for event in losses for partition in event.partitions}

                await eventually(lambda: len(lost()) == 2, 3 * harness.patience, "the news of the loss")

    @requires("records.rebalance", "harness.crash")
    @promise(
        "groups.crash-delays-idle",
        "A consumer that follows a crashed member is idle only after it has read the records of that member.",
        seconds=180,
    )
    async def test_crash_delays_idle(self, harness: Harness) -> None:
        doomed, topic = await harness.connect(short_lease=True), await harness.topic(partitions=2)
        await doomed.topic(topic).publish_batch(_keyed(20))
        log = doomed.records(topic, group="readers")
        await log.__aenter__()
        await read(log, 20, harness.patience)
        await harness.crash(doomed)
        successor = await harness.connect(short_lease=True)
        async with successor.records(topic, group="readers", stop_when_idle=harness.quiet) as other:
            seen = {record.data async for record in other}
        assert seen == set(numbered(20))


def _is_shared(one: Any, two: Any) -> bool:
    first, second = one.assignment(), two.assignment()
    return (
        len(first) + len(second) == PARTITIONS and abs(len(first) - len(second)) <= 1 and not set(first) & set(second)
    )


def _keyed(count: int, keys: int = 16) -> list[OutboundMessage]:
    """Numbered messages whose number within their key grows by one."""
    if keys == 8:  # numbered within their key
        return [
            OutboundMessage(f"m-{key}-{n}".encode(), key=f"key-{key}")
            for n in range(count // keys)
            for key in range(keys)
        ]
    return [OutboundMessage(body, key=f"key-{n % keys}") for n, body in enumerate(numbered(count))]
