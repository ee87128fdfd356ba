"""Conformance tests of what an application is asked when its partitions change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

from broker.driver.contract import TopicPartition
from broker.outbound import OutboundMessage
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import eventually, numbered, read

__all__ = ["Assigning", "check_lost_when_free_again"]


class _Calls:
    """The calls of the callbacks, in order."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, TopicPartition]] = []
        self.callbacks: dict[str, Any] = {
            f"on_{kind}": self._callback(kind) for kind in ("assigned", "revoking", "lost")
        }

    def _callback(self, kind: str) -> Callable[[Sequence[TopicPartition]], Awaitable[None]]:
        async def note(partitions: Sequence[TopicPartition]) -> None:
            self._calls.extend((kind, partition) for partition in partitions)

        return note

    def of(self, kind: str) -> list[TopicPartition]:
        """The partitions of the calls of `on_<kind>`."""
        return [partition for each, partition in self._calls if each == kind]

    def about(self, partition: TopicPartition) -> list[str]:
        """What was called for a partition."""
        return [kind for kind, each in self._calls if each == partition]


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
        calls = _Calls()
        async with first.records(topic, group="readers", **calls.callbacks) as one:
            await eventually(lambda: len(one.assignment()) == 2, 3 * harness.patience, "the first assignment")
            await eventually(lambda: len(calls.of("assigned")) == 2, harness.patience, "the call of on_assigned")
            async with second.records(topic, group="readers") as two:
                await eventually(lambda: len(two.assignment()) == 1, 3 * harness.patience, "a share for the second")
                (moved,) = two.assignment()
                assert calls.of("revoking") == [moved]
                assert calls.of("lost") == []
            await eventually(
                lambda: len(calls.of("assigned")) == 3, 3 * harness.patience, "the return of the partition"
            )
            await read(one, 1, harness.patience)
            await harness.isolate(first)
            async with second.records(topic, group="readers") as two:
                await eventually(lambda: len(two.assignment()) == 2, 6 * harness.patience, "the take-over")
                await harness.heal(first)
                await eventually(lambda: len(calls.of("lost")) == 2, 3 * harness.patience, "the calls of on_lost")
            await eventually(lambda: len(one.assignment()) == 2, 6 * harness.patience, "the second return")
            await eventually(lambda: len(calls.of("assigned")) >= 5, harness.patience, "the call of on_assigned")
        for partition in (TopicPartition(topic, 0), TopicPartition(topic, 1)):
            kinds = calls.about(partition)
            assert kinds[0] == "assigned"
            assert ("assigned", "assigned") not in set(pairwise(kinds)), "A release or a loss was not reported"

    @requires("records.rebalance", "harness.isolate")
    @promise(
        "assigning.lost-when-free-again",
        "`on_lost` comes before `on_assigned` also if the partitions are free again when the member learns of it.",
        seconds=180,
    )
    async def test_lost_when_free_again(self, harness: Harness) -> None:
        await check_lost_when_free_again(harness, copartitioned=False)


async def check_lost_when_free_again(harness: Harness, *, copartitioned: bool) -> None:
    """Cut a member off while another one owns its partitions for a while."""
    first, second = await harness.connect(short_lease=True), await harness.connect(short_lease=True)
    topics = [await harness.topic(partitions=2), await harness.topic(partitions=2)]
    # The other topic stays empty.
    messages = [OutboundMessage(body, key=f"key-{n}") for n, body in enumerate(numbered(40))]
    await first.topic(topics[0]).publish_batch(messages)
    partitions = {TopicPartition(topic, number) for topic in topics for number in (0, 1)}
    calls = _Calls()
    options: dict[str, Any] = {"group": "readers", "copartitioned": copartitioned}
    async with first.records(topics, **options, **calls.callbacks) as one:
        await read(one, 40, 3 * harness.patience)
        await eventually(lambda: set(calls.of("assigned")) == partitions, harness.patience, "the first assignment")
        await harness.isolate(first)
        async with second.records(topics, **options) as two:
            # The first member continues where the second one has committed: the positions do not tell.
            await read(two, 40, 6 * harness.patience)
            await two.commit()
            await eventually(lambda: set(two.assignment()) == partitions, 6 * harness.patience, "the take-over")
        await harness.heal(first)
        await eventually(lambda: len(calls.of("assigned")) >= 8, 6 * harness.patience, "the second assignment")
    for partition in partitions:
        assert calls.about(partition) == ["assigned", "lost", "assigned"]
