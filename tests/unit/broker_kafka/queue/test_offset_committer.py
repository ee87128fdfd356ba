"""The tracker commits after so many markers or so long, and per partition the offset from which it must read again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, TopicPartition
from broker.testing.waiting import eventually
from broker_kafka.queue.markers.wire import Kind, Marker, MessageId, write_marker
from broker_kafka.queue.tracker.offset_committer import OffsetCommitter
from broker_kafka.queue.tracker.partition_state import PartitionState
from broker_kafka.queue.tracker.tracker_state import TrackerCounts, TrackerOptions

PLACE = TopicPartition("q.markers", 0)
LONG = 3600.0


class Client:
    """Notes the commits, and fails the first `failures` of them."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.commits: list[int] = []

    async def commit(self, offsets: Sequence[NativePartition]) -> dict[TopicPartition, BrokerError | None]:
        self.commits.append(offsets[0].offset)
        if len(self.commits) <= self.failures:
            raise BrokerError("no answer", retriable=True)
        return {PLACE: None}


@asynccontextmanager
async def committing(client: Client, options: TrackerOptions) -> AsyncGenerator[Callable[[int], None]]:
    """A running committer of one partition; the call reads so many ENDs."""
    tracked: Any = SimpleNamespace(place=PLACE, state=PartitionState(0, 0, at=0))
    thread: Any = client
    committer = OffsetCommitter(thread, lambda: [tracked], options, TrackerCounts())
    running = asyncio.ensure_future(committer.run())

    def read(count: int) -> None:
        for _ in range(count):
            end = write_marker(Marker(kind=Kind.END, id=MessageId("t", 0, 0)))
            committer.read(tracked.state.read(tracked.state.position, 1_000, end, at=1))

    yield read
    running.cancel()


async def committed(client: Client, *offsets: int) -> None:
    await eventually(lambda: client.commits == list(offsets), 10, "the commits")


async def test_it_commits_after_so_many_markers() -> None:
    client = Client()
    async with committing(client, TrackerOptions(commit_markers=3, commit_after=LONG)) as read:
        read(3)
        await committed(client, 3)
        read(2)
        await asyncio.sleep(0)
        assert client.commits == [3]
        read(1)
        await committed(client, 3, 6)


async def test_it_commits_so_long_after_the_first_marker() -> None:
    client = Client()
    async with committing(client, TrackerOptions(commit_markers=100, commit_after=0.01)) as read:
        read(1)
        await committed(client, 1)


async def test_a_failed_commit_is_retried() -> None:
    client = Client(failures=1)
    async with committing(client, TrackerOptions(commit_markers=100, commit_after=0.01)) as read:
        read(1)
        await committed(client, 1, 1)


def test_a_partition_offers_its_lowest_open_start_and_each_offset_once() -> None:
    partition = PartitionState(10, 10, at=0)
    assert partition.to_commit() is None
    for offset, message in ((10, 0), (11, 1)):
        start = Marker(kind=Kind.START, id=MessageId("t", 0, message), after_ms=10)
        partition.read(offset, 1_000, write_marker(start), at=1)
    assert partition.to_commit() is None
    partition.read(12, 1_001, write_marker(Marker(kind=Kind.END, id=MessageId("t", 0, 0))), at=1)
    assert partition.to_commit() == 11
    partition.committed(11)
    assert partition.to_commit() is None
    partition.read(13, 1_001, write_marker(Marker(kind=Kind.END, id=MessageId("t", 0, 1))), at=1)
    assert partition.to_commit() == 14


def test_a_record_that_was_read_before_is_skipped() -> None:
    partition = PartitionState(0, 0, at=0)
    start = write_marker(Marker(kind=Kind.START, id=MessageId("t", 0, 0), after_ms=10))
    assert partition.read(0, 1_000, start, at=1) == 1
    assert partition.read(0, 1_000, start, at=1) == 0
    assert partition.position == 1
