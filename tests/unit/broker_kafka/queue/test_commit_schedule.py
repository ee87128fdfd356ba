"""Commits come after so many markers, or after a time, and never for nothing."""

from __future__ import annotations

from broker_kafka.queue.markers.wire import Kind, Marker, MessageId, write_marker
from broker_kafka.queue.tracker.offset_committer import CommitSchedule
from broker_kafka.queue.tracker.partition_state import PartitionState


def test_nothing_read_is_nothing_to_commit() -> None:
    schedule = CommitSchedule(markers=2, after_ms=100)
    schedule.read(0, at=0)
    assert not schedule.is_due(at=10_000)


def test_a_count_makes_it_due() -> None:
    schedule = CommitSchedule(markers=3, after_ms=100)
    schedule.read(2, at=0)
    assert not schedule.is_due(at=0)
    schedule.read(1, at=0)
    assert schedule.is_due(at=0)
    schedule.committed()
    assert not schedule.is_due(at=0)


def test_time_since_the_first_makes_it_due() -> None:
    schedule = CommitSchedule(markers=100, after_ms=100)
    schedule.read(1, at=50)
    schedule.read(1, at=140)
    assert not schedule.is_due(at=149)
    assert schedule.is_due(at=150)


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


def test_what_was_read_before_is_passed_over() -> None:
    partition = PartitionState(0, 0, at=0)
    start = write_marker(Marker(kind=Kind.START, id=MessageId("t", 0, 0), after_ms=10))
    assert partition.read(0, 1_000, start, at=1) == 1
    assert partition.read(0, 1_000, start, at=1) == 0
    assert partition.position == 1
