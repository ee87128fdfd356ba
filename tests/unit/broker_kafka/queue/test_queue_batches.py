"""STARTs of several messages, and the same one by one: what is open, due, renewed and committed does not differ."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from broker_kafka.queue.markers.lease import Lease, LeaseBatch
from broker_kafka.queue.markers.start_writer import StartWriter, read_each
from broker_kafka.queue.markers.wire import (
    Kind,
    Marker,
    MessageId,
    pack_markers,
    read_content,
    read_markers,
    write_marker,
)
from broker_kafka.queue.tracker.partition_state import PartitionOptions, PartitionState

OPTIONS = PartitionOptions(renew_distance=3, stall_ms=10**9)
some = st.lists(st.integers(0, 11), min_size=1, max_size=12)


def message(offset: int) -> MessageId:
    return MessageId("orders", 0, offset, "q")


def together(offsets: list[int], *, payload: int) -> bytes:
    """The record with one START of all, which may name one twice."""
    writer = StartWriter("orders", 0, "q", lease_ms=1000, holder="me")
    return writer.together(offsets, (), [b"x" * payload] * len(offsets), [1] * len(offsets), ())


def singly(record: bytes) -> bytes:
    """The same as STARTs of one message each, in one record."""
    ((marker, data),) = read_markers(record)
    assert marker is not None
    return pack_markers([part for _, part in read_each(marker, data, set(range(100)))])


def comparable(leases: Iterable[Lease]) -> list[Lease]:
    """All that is known of each message, except its place among the deadlines, which changes late."""
    return [replace(lease, queued=-1) for lease in leases]


def comparable_open(partition: PartitionState) -> list[Lease]:
    """The same of each open message."""
    # To look at leases that are kept together takes them apart.
    return sorted(comparable(deepcopy(partition.markers)), key=by_id)


def by_id(lease: Lease) -> MessageId:
    return lease.id


class Twins(RuleBasedStateMachine):
    """Two trackers of two logs with the same markers."""

    @initialize()
    def begin(self) -> None:
        self.logs: list[list[bytes]] = [[], []]
        self.now = 1_000_000
        self.times: list[int] = []
        self.committed = 0
        self.restart()

    def restart(self) -> None:
        end = len(self.times)
        self.trackers = [PartitionState(self.committed, end, self.now, OPTIONS) for _ in self.logs]
        self.read()

    def read(self) -> None:
        for tracker, log in zip(self.trackers, self.logs, strict=True):
            for offset in range(tracker.position, len(log)):
                tracker.read(offset, self.times[offset], log[offset], self.now)
            tracker.log_end_known(len(log), self.now)

    def write(self, data: bytes, other: bytes | None = None) -> None:
        for log, each in zip(self.logs, (data, data if other is None else other), strict=True):
            log.append(each)
        self.times.append(self.now)

    @rule(offsets=st.lists(st.integers(0, 11), min_size=2, max_size=12), payload=st.sampled_from([10, 900]))
    def start(self, offsets: list[int], payload: int) -> None:
        record = together(offsets, payload=payload)
        self.write(record, singly(record))
        self.read()

    @rule(offsets=some)
    def end(self, offsets: list[int]) -> None:
        first, *more = offsets
        self.write(write_marker(Marker(kind=Kind.END, id=message(first), more=tuple(more))))
        self.read()

    @rule(offsets=some, delay=st.sampled_from([0, 400, 3000]), released=st.booleans())
    def keep(self, offsets: list[int], delay: int, released: bool) -> None:
        first, *more = offsets
        marker = Marker(
            kind=Kind.KEEPALIVE,
            id=message(first),
            after_ms=delay,
            more=tuple(more),
            released=released,
            attempt=1 if released else None,
        )
        self.write(write_marker(marker))
        self.read()

    @rule(milliseconds=st.sampled_from([1, 500, 1001, 5000]))
    def time_goes_on(self, milliseconds: int) -> None:
        self.now += milliseconds
        self.read()

    @rule(fails=st.booleans())
    def send_again(self, fails: bool) -> None:
        due, other = [tracker.due(100) for tracker in self.trackers]
        assert sorted(comparable(due), key=by_id) == sorted(comparable(other), key=by_id)
        for tracker, leases in zip(self.trackers, (due, other), strict=True):
            for lease in leases:
                if fails:
                    tracker.failed(lease, 100)
        for lease in () if fails else sorted(due, key=by_id):
            self.write(write_marker(Marker(kind=Kind.END, id=lease.id)))

    @rule(limit=st.integers(1, 20), arrives=st.booleans(), late=st.booleans())
    def renew(self, limit: int, arrives: bool, late: bool) -> None:
        renewed, other = [tracker.to_renew(limit) for tracker in self.trackers]
        assert comparable(renewed) == comparable(other)
        if not arrives:
            for tracker, leases in zip(self.trackers, (renewed, other), strict=True):
                for lease in leases:
                    tracker.markers.renewal_failed(lease)
            return
        for lease in renewed:
            self.write(write_marker(self.trackers[0].renewal(lease), read_content(lease.data)))
        if not late:
            self.read()
        for tracker in self.trackers:
            assert tracker.markers.to_end() == self.trackers[0].markers.to_end()
        for ended in self.trackers[0].markers.to_end():
            self.write(write_marker(Marker(kind=Kind.END, id=ended)))

    @rule()
    def commit(self) -> None:
        offset, other = [tracker.to_commit() for tracker in self.trackers]
        assert offset == other
        if offset is not None:
            self.committed = offset
            for tracker in self.trackers:
                tracker.committed(offset)

    @rule()
    def tracker_dies(self) -> None:
        self.restart()

    @invariant()
    def they_agree(self) -> None:
        one, other = self.trackers
        assert comparable_open(one) == comparable_open(other)
        assert len(one.markers) == len(other.markers)
        assert one.markers.pin == other.markers.pin
        assert one.markers.next_deadline() == other.markers.next_deadline()

    @invariant()
    def nothing_is_kept_that_has_ended(self) -> None:
        for tracker in self.trackers:
            entries = {id(entry): entry for entry in tracker.markers.entries()}.values()
            assert tracker.markers.bytes == sum(len(entry.data) for entry in entries)
            for entry in entries:
                if isinstance(entry, LeaseBatch) and entry.marker is not None:
                    assert len(entry.data) <= 768 * entry.count or entry.count == 1 + len(entry.marker.more)


TestTwins = Twins.TestCase
TestTwins.settings = settings(stateful_step_count=40, deadline=None)
