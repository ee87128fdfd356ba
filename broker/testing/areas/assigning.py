"""Conformance tests of what an application is asked when its partitions change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from broker.driver.contract import TopicPartition
from broker.outbound import OutboundMessage
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import eventually, numbered, read

__all__ = ["Assigning"]


class Assigning(ConformanceCase):
    """The callbacks `on_assigned`, `on_revoking` and `on_lost`."""

    @requires("records.seek")
    @promise(
        "assigning.waits-for-on-assigned",
        "No record of a partition is delivered before `on_assigned` returned; reading begins where it sought to.",
    )
    async def test_waits_for_on_assigned(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=2)
        messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(40))]
        receipts = await bus.topic(topic).publish_batch(messages)
        offsets = {number: [r.offset or 0 for r in receipts if r.partition == number] for number in (0, 1)}
        asked: set[TopicPartition] = set()
        ready = asyncio.Event()

        async def load(partitions: Sequence[TopicPartition]) -> None:
            asked.update(partitions)
            await ready.wait()
            await log.seek({partition: offsets[partition.partition][3] for partition in partitions})

        async with bus.records(topic, group="readers", on_assigned=load) as log:
            await eventually(lambda: len(asked) == 2, 3 * harness.patience, "the call of on_assigned")
            assert await log.next_record(timeout=2 * harness.quiet) is None
            ready.set()
            wanted = {(number, offset) for number in (0, 1) for offset in offsets[number][3:]}
            records = await read(log, len(wanted), harness.patience)
            assert {(record.partition, record.offset) for record in records} == wanted
            assert await log.next_record(timeout=harness.quiet) is None

    @requires("records.rebalance", "harness.isolate")
    @promise(
        "assigning.lost-differs-from-revoking",
        "`on_revoking` is awaited before a release, `on_lost` after a loss; a later `on_assigned` follows either.",
        seconds=180,
    )
    async def test_lost_differs_from_revoking(self, harness: Harness) -> None:
        first, second = await harness.connect(short_lease=True), await harness.connect(short_lease=True)
        topic = await harness.topic(partitions=2)
        await first.topic(topic).publish_batch(numbered(40))
        calls: list[tuple[str, TopicPartition]] = []

        async def on_assigned(partitions: Sequence[TopicPartition]) -> None:
            calls.extend(("assigned", partition) for partition in partitions)

        async def on_revoking(partitions: Sequence[TopicPartition]) -> None:
            calls.extend(("revoking", partition) for partition in partitions)

        async def on_lost(partitions: Sequence[TopicPartition]) -> None:
            calls.extend(("lost", partition) for partition in partitions)

        def of(kind: str) -> list[TopicPartition]:
            return [partition for what, partition in calls if what == kind]

        callbacks: dict[str, Any] = {"on_assigned": on_assigned, "on_revoking": on_revoking, "on_lost": on_lost}
        async with first.records(topic, group="readers", **callbacks) as one:
            await eventually(lambda: len(one.assignment()) == 2, 3 * harness.patience, "the first assignment")
            await eventually(lambda: len(of("assigned")) == 2, harness.patience, "the call of on_assigned")
            async with second.records(topic, group="readers") as two:
                await eventually(lambda: len(two.assignment()) == 1, 3 * harness.patience, "a share for the second")
                (moved,) = two.assignment()
                assert of("revoking") == [moved]
                assert of("lost") == []
            await eventually(lambda: len(of("assigned")) == 3, 3 * harness.patience, "the return of the partition")
            await read(one, 1, harness.patience)
            await harness.isolate(first)
            async with second.records(topic, group="readers") as two:
                await eventually(lambda: len(two.assignment()) == 2, 6 * harness.patience, "the take-over")
                await harness.heal(first)
                await eventually(lambda: len(of("lost")) == 2, 3 * harness.patience, "the calls of on_lost")
            await eventually(lambda: len(one.assignment()) == 2, 6 * harness.patience, "the second return")
            await eventually(lambda: len(of("assigned")) >= 5, harness.patience, "the call of on_assigned")
        for partition in (TopicPartition(topic, 0), TopicPartition(topic, 1)):
            kinds = [kind for kind, each in calls if each == partition]
            assert kinds[0] == "assigned"
            assert ("assigned", "assigned") not in set(pairwise(kinds)), "A release or a loss was not reported"
