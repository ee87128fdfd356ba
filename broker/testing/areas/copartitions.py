"""Conformance tests of copartitioned groups: partition n of all topics belongs to one member."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from broker.bus import Bus
from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, ConfigurationError, LeaseLost, NotFound, OffsetOutOfRange, TopicNotFound
from broker.outbound import OutboundMessage
from broker.testing.areas.assigning import check_lost_when_free_again
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import eventually, numbered, read

__all__ = ["Copartitions"]

NUMBERS = 4


class _Owners:
    """Who owns each partition, as the members say in their callbacks.

    A member that was frozen for longer than its session learns of its losses later: until then it counts as an owner,
    although it can read and commit nothing. Any other overlap is a fault.
    """

    def __init__(self) -> None:
        self.of: dict[TopicPartition, str] = {}
        self.faults: list[str] = []
        self._overtaken: dict[str, set[TopicPartition]] = {}
        self._releasing: set[TopicPartition] = set()
        """Those whose `on_revoking` runs."""

    def callbacks(self, name: str) -> dict[str, Any]:
        async def on_assigned(partitions: Sequence[TopicPartition]) -> None:
            numbers = {partition.partition for partition in partitions}
            for partition, owner in self.of.items():
                if partition.partition in numbers and owner != name:
                    if partition in self._releasing:
                        self.faults.append(f"{name} was assigned {partition} while {owner} released it")
                    self._overtaken.setdefault(owner, set()).add(partition)
            self.of.update(dict.fromkeys(partitions, name))

        async def on_revoking(partitions: Sequence[TopicPartition]) -> None:
            # A release that does not wait for this call overlaps with the next owner, even if the process stands still
            # for a while: in between the loop runs many times.
            self._releasing.update(partitions)
            for _ in range(20):
                await asyncio.sleep(0.005)
            self._releasing.difference_update(partitions)
            for partition in self._overtaken.get(name, set()).intersection(partitions):
                self.faults.append(f"{partition} was released by {name} after {self.of.get(partition)} had it")
            self.drop(name, partitions)

        async def on_lost(partitions: Sequence[TopicPartition]) -> None:
            self.drop(name, partitions)

        return {"on_assigned": on_assigned, "on_revoking": on_revoking, "on_lost": on_lost}

    def drop(self, name: str, partitions: Sequence[TopicPartition] | None = None) -> None:
        """A member gave these up; by default all."""
        for partition in [*self.of, *self._overtaken.get(name, ())] if partitions is None else partitions:
            self._overtaken.get(name, set()).discard(partition)
            if self.of.get(partition) == name:
                del self.of[partition]

    def check(self) -> None:
        """Check that no number had two owners."""
        unreported = {name: partitions for name, partitions in self._overtaken.items() if partitions}
        assert (self.faults, unreported) == ([], {})

    def shared_by(self, topics: Sequence[str], numbers: int, members: int) -> bool:
        """Whether every number is owned, each by one member, and each member has a fair share."""
        wanted = {TopicPartition(topic, number) for topic in topics for number in range(numbers)}
        share = Counter(self.of[partition] for partition in self.of if partition.topic == topics[0])
        return (
            self.of.keys() == wanted
            and all(len({self.of[TopicPartition(topic, n)] for topic in topics}) == 1 for n in range(numbers))
            and len(share) == members
            and max(share.values()) - min(share.values()) <= 1
        )


class Copartitions(ConformanceCase):
    """Several topics whose partitions of a number belong to one member."""

    @requires("records.copartitioned", "records.rebalance")
    @promise(
        "copartitions.one-owner-per-number",
        "While members join and leave, no number has two owners, every number gets one, and no record is lost.",
        seconds=240,
    )
    async def test_one_owner_per_number(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic(partitions=NUMBERS) for _ in range(2)]
        for topic in topics:
            messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(200, topic))]
            await bus.topic(topic).publish_batch(messages)
        owners = _Owners()
        seen: set[bytes | None] = set()
        members: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}

        async def member(name: str, bus: Bus, stop: asyncio.Event) -> None:
            async with bus.records(topics, group="joins", copartitioned=True, **owners.callbacks(name)) as log:
                while not stop.is_set():
                    batch = await log.next_batch(10, timeout=harness.quiet)
                    seen.update(record.data for record in batch)
                    try:
                        await batch.commit()
                    except LeaseLost:
                        continue
                # From the close on, others may own what this member had.
                owners.drop(name)

        async def join(name: str) -> None:
            stop = asyncio.Event()
            members[name] = stop, asyncio.create_task(member(name, await harness.connect(), stop))

        async def leave(name: str) -> None:
            stop, task = members.pop(name)
            stop.set()
            await task

        async def settled() -> None:
            share = f"a share for each of {len(members)} members"
            await eventually(lambda: owners.shared_by(topics, NUMBERS, len(members)), 6 * harness.patience, share)

        await join("a")
        await settled()
        await asyncio.gather(join("b"), join("c"))
        await settled()
        await leave("a")
        await settled()
        await asyncio.gather(leave("b"), join("d"))
        await settled()
        await eventually(lambda: len(seen) == 400, 4 * harness.patience, "all 400 records")
        for name in tuple(members):
            await leave(name)
        owners.check()

    @requires("records.copartitioned", "records.rebalance", "harness.crash")
    @promise(
        "copartitions.crash-moves-whole-numbers",
        "After a member crashed, the others own its numbers whole, and read on at its commits.",
        seconds=240,
    )
    async def test_crash_moves_whole_numbers(self, harness: Harness) -> None:
        doomed, bus = await harness.connect(short_lease=True), await harness.connect(short_lease=True)
        topics = [await harness.topic(partitions=NUMBERS) for _ in range(2)]
        owners = _Owners()
        async with AsyncExitStack() as stack:
            options: dict[str, Any] = {"group": "crashes", "copartitioned": True}
            first = doomed.records(topics, **options, **owners.callbacks("first"))
            await first.__aenter__()
            second = await stack.enter_async_context(bus.records(topics, **options, **owners.callbacks("second")))
            await eventually(lambda: owners.shared_by(topics, NUMBERS, 2), 6 * harness.patience, "a share for both")
            await harness.crash(doomed)
            owners.drop("first")
            await eventually(lambda: owners.shared_by(topics, NUMBERS, 1), 12 * harness.patience, "the take-over")
            assert len(second.assignment()) == 2 * NUMBERS
            for topic in topics:
                messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(20, topic))]
                await bus.topic(topic).publish_batch(messages)
            seen: set[bytes | None] = set()
            while len(seen) < 40:
                record = await second.next_record(timeout=harness.patience)
                assert record is not None, f"Only {len(seen)} of 40 records were read"
                seen.add(record.data)
        owners.check()

    @requires("records.copartitioned", "records.rebalance", "harness.isolate")
    @promise(
        "copartitions.lost-when-free-again",
        "A copartitioned member that was cut off hears of its loss also if its numbers are free again.",
        seconds=240,
    )
    async def test_numbers_lost_when_free_again(self, harness: Harness) -> None:
        await check_lost_when_free_again(harness, copartitioned=True)

    @requires("records.copartitioned")
    @promise(
        "copartitions.topics-may-grow",
        "When the topics grow one after the other, the new numbers are owned and read.",
        seconds=240,
    )
    async def test_topics_may_grow(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic(partitions=1) for _ in range(2)]
        owners = _Owners()
        async with bus.records(topics, group="grows", copartitioned=True, **owners.callbacks("only")) as log:
            await eventually(lambda: owners.shared_by(topics, 1, 1), 3 * harness.patience, "the first assignment")
            for topic in topics:
                await bus.admin.ensure_topic(topic, partitions=2)
            await eventually(lambda: owners.shared_by(topics, 2, 1), 12 * harness.patience, "the new numbers")
            wanted: set[bytes | None] = set()
            for topic in topics:
                bodies = numbered(20, topic)
                wanted.update(bodies)
                messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(bodies)]
                await bus.topic(topic).publish_batch(messages)
            seen: set[bytes | None] = set()
            while seen != wanted:
                record = await log.next_record(timeout=harness.patience)
                assert record is not None, f"Only {len(seen)} of {len(wanted)} records were read"
                seen.add(record.data)
        owners.check()

    @requires("records.copartitioned")
    @promise(
        "copartitions.recreated-topic-loses-nothing",
        "When a topic is deleted and recreated, its consumer reads it from the start, or ends with an error that names "
        "it, and so does the next one; no record is lost.",
        seconds=240,
    )
    async def test_recreated_topic_loses_nothing(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic(partitions=1) for _ in range(2)]
        wanted = {body for topic in topics for body in numbered(20, f"{topic}-new")}
        seen: set[bytes | None] = set()
        errors: list[BrokerError] = []

        async def publish(topic: str, age: str) -> None:
            await bus.topic(topic).publish_batch(numbered(20, f"{topic}-{age}"))

        async def read_rest() -> None:
            async with bus.records(topics, group="readers", copartitioned=True) as log:
                if not errors and not seen:
                    await read(log, 40, 3 * harness.patience)
                    await log.commit()
                    await bus.admin.delete_topic(topics[1])
                    await bus.admin.ensure_topic(topics[1], partitions=1)
                    for topic in topics:
                        await publish(topic, "new")
                while not seen >= wanted:
                    record = await log.next_record(timeout=6 * harness.patience)
                    assert record is not None, f"{len(wanted - seen)} records are missing; before: {errors}"
                    seen.add(record.data)
                    try:
                        await record.commit()
                    except LeaseLost:
                        # The number comes back, with the new topic or the error.
                        continue

        for topic in topics:
            await publish(topic, "old")
        while not seen >= wanted:
            try:
                await read_rest()
            except (NotFound, OffsetOutOfRange) as error:
                errors.append(error)
            assert all(topics[1] in str(error) for error in errors), errors
            # The topic is there again: an advice to create it would mislead.
            assert all(type(error) is not TopicNotFound for error in errors), errors
            assert len(errors) < 4, errors

    @requires("records.copartitioned")
    @promise(
        "copartitions.different-counts-are-refused",
        "Opening a copartitioned consumer of topics with different numbers of partitions raises an error with these.",
    )
    async def test_different_counts_are_refused(self, harness: Harness) -> None:
        bus, one, two = await harness.bus(), await harness.topic(partitions=1), await harness.topic(partitions=2)
        with pytest.raises(ConfigurationError, match=f"({one}' has 1.*{two}' has 2|{two}' has 2.*{one}' has 1)"):
            async with bus.records([one, two], group="readers", copartitioned=True):
                pass
