"""Random histories of a queue: workers and trackers die at every step, writes are lost and doubled, and the log is read
again from any committed offset. The invariants are those of the protocol, by the numbers that
`tests/kafka/test_queue_invariants.py` lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_kafka.queue.markers.wire import Kind, MessageId
from broker_kafka.queue.tracker.partition_state import PartitionState
from tests.unit.broker_kafka.queue.simulation import Held, Record, Simulation, markers_of, naive_open


class QueueMachine(RuleBasedStateMachine):
    @initialize(transactional=st.booleans())
    def begin(self, transactional: bool) -> None:
        self.queue = Simulation(transactional=transactional)
        self.sent = 0
        self.clock = 0
        self.committed = 0
        self.tracker: PartitionState | None = None
        self.attempts: defaultdict[bytes, int] = defaultdict(int)
        self.doubled: set[bytes] = set()

    # -- applications and workers --------------------------------------------------------------------------

    @rule(commits=st.sampled_from([True, True, True, False]), delay=st.sampled_from([None, None, None, 0, 3000]))
    def take(self, commits: bool, delay: int | None) -> None:
        if self.queue.position == len(self.queue.messages):
            self.queue.send(f"m{self.sent}")
            self.sent += 1
        held = self.queue.take(commits=commits, delay=delay)
        if held is not None:
            self.note(held, commits)

    def note(self, held: Held, commits: bool) -> None:
        value = held.sending.value or b""
        # Of a message that was doubled, one copy may be older than the other.
        if not commits or not self.queue.transactional:
            self.doubled.add(value)
        assert value in self.doubled or held.attempt >= self.attempts[value], "I8: attempts were forgotten"
        self.attempts[value] = held.attempt

    @rule(count=st.integers(2, 5), commits=st.sampled_from([True, True, False]))
    def take_together(self, count: int, commits: bool) -> None:
        while self.queue.position + count > len(self.queue.messages):
            self.queue.send(f"m{self.sent}")
            self.sent += 1
        for held in self.queue.take_together(count, commits=commits):
            self.note(held, commits)

    @rule(count=st.integers(2, 3), commits=st.sampled_from([True, True, False]))
    def take_packed(self, count: int, commits: bool) -> None:
        with self.queue.packing():
            for _ in range(count):
                self.take(commits, None)

    @precondition(lambda self: self.queue.held)
    @rule(which=st.integers(0, 9), lost=st.booleans(), twice=st.booleans())
    def ack(self, which: int, lost: bool, twice: bool) -> None:
        self.queue.ack(self.pick(which), lost=lost, twice=twice)

    @precondition(lambda self: self.queue.held)
    @rule(first=st.integers(0, 9), count=st.integers(1, 9))
    def ack_together(self, first: int, count: int) -> None:
        self.queue.ack_together(self.queue.held[first:][:count] or self.queue.held[:])

    @precondition(lambda self: self.queue.held)
    @rule()
    def keep_all(self) -> None:
        self.queue.keep(*self.queue.held)

    @precondition(lambda self: self.queue.held)
    @rule(which=st.integers(0, 9))
    def keep(self, which: int) -> None:
        self.queue.keep(self.pick(which))

    @precondition(lambda self: self.queue.held)
    @rule(which=st.integers(0, 9), delay=st.sampled_from([0, 500, 5000]))
    def try_again(self, which: int, delay: int) -> None:
        held = self.pick(which)
        self.queue.try_again(held, delay)
        self.attempts[held.sending.value or b""] = held.attempt

    @precondition(lambda self: self.queue.held)
    @rule(which=st.integers(0, 9), delay=st.sampled_from([0, 500, 5000]), counts=st.booleans())
    def release(self, which: int, delay: int, counts: bool) -> None:
        self.queue.release(self.pick(which), delay, counts=counts)

    @precondition(lambda self: self.queue.held)
    @rule(which=st.integers(0, 9))
    def crash(self, which: int) -> None:
        self.queue.crash(self.pick(which))

    @rule(milliseconds=st.sampled_from([1, 400, 1001, 8000]))
    def time_goes_on(self, milliseconds: int) -> None:
        self.queue.now += milliseconds

    @rule(data=st.sampled_from([b"", b"garbage", b"\x08\x07\x1a\x02\x10\x05"]))
    def somebody_else_writes(self, data: bytes) -> None:
        self.queue.append(data)

    # -- the tracker ---------------------------------------------------------------------------------------

    @rule(count=st.sampled_from([1, 3, None, None]), milliseconds=st.sampled_from([0, 0, 1001, 4000]))
    def read(self, count: int | None, milliseconds: int) -> None:
        self.queue.now += milliseconds
        self.queue.read(count)

    @rule(limit=st.sampled_from([1, 100]), fails=st.sampled_from([False, False, True]), dies=st.booleans())
    def redeliver(self, limit: int, fails: bool, dies: bool) -> None:
        known = self.queue.log[: self.queue.tracker.position]
        for lease in self.queue.redeliver(limit, fails=fails, dies=dies):
            assert self.queue.now >= earliest(known, lease.id), "redelivered before its time"
            if self.queue.transactional:
                assert self.queue.redelivered.get(lease.id, 0) <= 1, "redelivered twice"

    @rule(more=st.integers(0, 4))
    def renew(self, more: int) -> None:
        for _ in range(more):
            self.somebody_else_writes(b"")
        self.queue.read()
        self.queue.renew()

    @precondition(lambda self: self.queue.renewals)
    @rule(fail=st.sampled_from([False, False, True]))
    def renewals_arrive(self, fail: bool) -> None:
        self.queue.renewals_arrive(fail=fail)

    @rule()
    def commit(self) -> None:
        self.queue.commit()

    @rule()
    def tracker_dies(self) -> None:
        self.queue.restart()

    # -- what always holds ---------------------------------------------------------------------------------

    @invariant()
    def i5_a_replay_from_the_commit_says_the_same(self) -> None:
        queue = self.queue
        replay = PartitionState(queue.committed, len(queue.log), queue.now, queue.options)
        for record in queue.log[queue.committed :]:
            assert not replay.due(100), "due before the gate"
            assert replay.to_commit() is None, "committed before the gate"
            replay.read(record.offset, record.timestamp, record.data, queue.now)
        assert {lease.id: lease.attempt for lease in replay.markers} == naive_open(queue.log)

    @invariant()
    def a_tracker_that_read_all_says_the_same(self) -> None:
        tracker = self.queue.tracker
        if tracker.position == len(self.queue.log):
            # To look at leases that are kept together takes them apart.
            markers = deepcopy(tracker.markers)
            assert {lease.id: lease.attempt for lease in markers} == naive_open(self.queue.log)

    @invariant()
    def i2_commits_only_rise_and_pass_no_open_message(self) -> None:
        queue = self.queue
        assert self.committed <= queue.committed <= len(queue.log)
        self.committed = queue.committed
        starts = [marker for _, marker in markers_of(queue.log[queue.committed :]) if marker.kind == Kind.START]
        assert set(naive_open(queue.log)) <= {message for marker in starts for message in marker.ids()}

    @invariant()
    def i1_no_message_is_taken_without_a_start(self) -> None:
        starts = [marker for _, marker in markers_of(self.queue.log) if marker.kind == Kind.START]
        assert set(range(self.queue.position)) <= {message.offset for marker in starts for message in marker.ids()}

    @invariant()
    def i6_the_clock_does_not_run_backwards(self) -> None:
        tracker = self.queue.tracker
        if tracker is not self.tracker:
            self.tracker, self.clock = tracker, 0
        now = tracker.clock.now
        if now is not None:
            assert self.clock <= now <= self.queue.now
            self.clock = now

    @invariant()
    def what_is_open_takes_what_it_takes(self) -> None:
        markers = self.queue.tracker.markers
        entries = {id(entry): entry for entry in markers.entries()}
        assert markers.bytes == sum(len(entry.data) for entry in entries.values())

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.settle_all()
        done = set(self.queue.acked)
        assert done == {f"m{number}" for number in range(self.sent)}, "I4: lost"
        assert not naive_open(self.queue.log), "I4: a START without END"
        assert len(self.queue.tracker.markers) == 0
        self.queue.commit()
        assert self.queue.committed == len(self.queue.log)

    # -- inside --------------------------------------------------------------------------------------------

    def pick(self, which: int) -> Held:
        return self.queue.held[which % len(self.queue.held)]


def earliest(log: Sequence[Record], id: MessageId) -> int:
    """The time from which a message may be sent again, by what the log says of it."""
    due = 0
    released = False
    for record, marker in markers_of(log):
        if id not in marker.ids() or marker.renews is not None:
            continue
        if marker.kind == Kind.START or (marker.kind == Kind.KEEPALIVE and (marker.released or not released)):
            due, released = record.timestamp + marker.after_ms, marker.released
    return due


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(stateful_step_count=40, deadline=None)
