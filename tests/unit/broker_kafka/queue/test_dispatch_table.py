"""Lanes of queues that share a reader: they lose nothing, hold no more than they may, and none stops others."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker_kafka.queue.dispatch.dispatch_table import LEAST_DELAY, LONGEST_DELAY, NOBODYS, DispatchTable, Policy

A, B = b"a", b"b"
MOST, MOST_BYTES, TOTAL_BYTES = 4, 100, 150
LARGEST = 120
NAMES = st.sampled_from([b"a", b"b", b"c"])


def new_table(most: int = MOST) -> DispatchTable[str]:
    return DispatchTable(most=most, most_bytes=MOST_BYTES, total_bytes=TOTAL_BYTES, now=0.0)


def fill(table: DispatchTable[str], queue: bytes, count: int, *, size: int = 1, now: float = 0.0) -> list[float]:
    """Read so many messages of a queue together; the delays that were planned."""
    table.begin()
    delays = [table.plan(queue, size, now) for _ in range(count)]
    for number, delay in enumerate(delays):
        assert delay > 0 or table.offer(queue, f"{number}", size, now)
    return delays


def test_what_has_no_room_is_deferred_and_other_queues_have_theirs() -> None:
    table = new_table()
    table.open(A, NOBODYS, 0.0)
    table.open(B, NOBODYS, 0.0)
    delays = fill(table, A, MOST + 3)
    assert delays[:MOST] == [0.0] * MOST
    assert all(LEAST_DELAY <= delay <= LONGEST_DELAY for delay in delays[MOST:])
    assert fill(table, B, MOST) == [0.0] * MOST


def test_a_delay_is_no_shorter_for_the_rounding_of_times() -> None:
    table, now = new_table(), 9.399118448363282e-11
    table.open(A, NOBODYS, now)
    assert min(fill(table, A, 2, size=MOST_BYTES, now=now)[1:]) >= LEAST_DELAY


def test_reading_goes_on_while_a_lane_is_hungry() -> None:
    table = new_table()
    assert table.room() == 0
    table.open(A, NOBODYS, 0.0)
    assert table.room() == MOST
    fill(table, A, MOST)
    assert table.room() == 0
    assert table.take(A, 1, 1000, 1.0) == ["0"]
    assert table.room() == 0  # a trip to the brokers for each message would be dear
    assert table.take(A, 1, 1000, 1.0) == ["1"]
    assert table.room() == 2
    fill(table, A, 1)
    assert table.room() == 1
    table.open(B, NOBODYS, 0.0)
    assert table.room() == 1 + MOST


def test_a_message_of_any_size_has_room_in_an_empty_lane() -> None:
    table = new_table()
    table.open(A, NOBODYS, 0.0)
    table.open(B, NOBODYS, 0.0)
    assert fill(table, A, 2, size=10 * TOTAL_BYTES)[0] == 0.0
    assert table.room() == MOST  # of the other
    assert [delay > 0 for delay in fill(table, B, 2, size=1)] == [False, True]
    assert table.take(A, 5, 1, 0.0) == ["0"]


def test_a_queue_that_gives_slowly_is_asked_later() -> None:
    table = new_table()
    table.open(A, NOBODYS, 0.0)
    fill(table, A, MOST)
    assert table.take(A, 1, 1000, 2.0) == ["0"]
    fill(table, A, 1, now=2.0)
    first, second, third = fill(table, A, 3, now=2.0)
    # Four wait, of which one was given in two seconds.
    assert (first, second, third) == (10.0, 12.0, 14.0)
    assert not table.is_quiet(A, 10.0)
    assert fill(table, A, 100, now=2.0)[-1] == LONGEST_DELAY
    table.take(A, MOST, 1000, 2.0)
    assert not table.is_quiet(A, 2.0 + LONGEST_DELAY)
    assert table.is_quiet(A, 2.0 + LONGEST_DELAY + 2 * LEAST_DELAY)


def test_one_that_is_stuck_is_asked_ever_more_seldom() -> None:
    table = new_table()
    table.open(A, NOBODYS, 0.0)
    fill(table, A, MOST)
    assert fill(table, A, 1, now=0.1)[0] < 1.0
    assert fill(table, A, 50, now=20.0) == [20.0] * 50
    assert fill(table, A, 1, now=5000.0)[0] == LONGEST_DELAY


def test_what_nobody_consumes_comes_again_the_later_the_longer_nobody_does() -> None:
    table = new_table()
    assert table.plan(A, 1, 0.0) == 1.0
    assert table.plan(A, 1, 8.0) == 2.0
    assert table.forsaken(A, 8.0) == 8.0
    assert table.plan(A, 1, 1e6) == LONGEST_DELAY
    table.open(A, NOBODYS, 1e6)
    assert table.forsaken(A, 2e6) == 0.0
    assert table.close(A, 2e6) == []
    assert table.plan(A, 1, 2e6 + 12) == 3.0


def test_the_last_client_of_a_queue_leaves_what_waits_to_be_given_back() -> None:
    table = new_table()
    table.open(A, Policy(3, "old"), 0.0)
    table.open(A, Policy(5, "dead"), 0.0)
    assert table.policy(A) == Policy(5, "dead")
    assert table.policy(B) == NOBODYS
    table.begin()
    assert [table.plan(A, 1, 0.0) for _ in range(3)] == [0.0] * 3
    assert table.offer(A, "0", 1, 0.0)
    assert table.close(A, 0.0) == []
    assert table.offer(A, "1", 1, 0.0)
    assert table.close(A, 0.0) == ["0", "1"]
    assert not table.offer(A, "2", 1, 0.0)
    assert (len(table), A in table, table.waiting()) == (0, False, [])


def test_what_was_planned_and_never_came_takes_no_room() -> None:
    table = new_table()
    table.open(A, NOBODYS, 0.0)
    table.begin()
    assert [table.plan(A, 1, 0.0) for _ in range(MOST)] == [0.0] * MOST
    assert table.plan(A, 1, 0.0) > 0
    table.begin()
    assert [table.plan(A, 1, 0.0) for _ in range(MOST)] == [0.0] * MOST


@pytest.mark.parametrize(("messages", "size", "found"), [(2, 1000, 2), (9, 25, 2), (9, 5, 1), (0, 1000, 0)])
def test_no_more_is_taken_than_was_asked_for(messages: int, size: int, found: int) -> None:
    table = new_table()
    table.open(A, NOBODYS, 0.0)
    fill(table, A, 3, size=10)
    assert table.take(A, messages, size, 0.0) == [f"{number}" for number in range(found)]


class TableMachine(RuleBasedStateMachine):
    """A reader that reads batches, of which some is never written, and clients that come, take and go."""

    def __init__(self) -> None:
        super().__init__()
        self.table: DispatchTable[str] = new_table()
        self.now = 0.0
        self.count = 0
        self.users: defaultdict[bytes, int] = defaultdict(int)
        self.lanes: defaultdict[bytes, list[tuple[str, int]]] = defaultdict(list)
        """What waits, as it ought to."""

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(queue=NAMES, most=st.integers(1, 5))
    def open(self, queue: bytes, most: int) -> None:
        self.table.open(queue, Policy(most, "dead"), self.now)
        self.users[queue] += 1
        assert self.table.policy(queue) == Policy(most, "dead")

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from(sorted(each for each, users in self.users.items() if users)))
        self.users[queue] -= 1
        left = self.table.close(queue, self.now)
        assert left == ([] if self.users[queue] else [item for item, _ in self.lanes.pop(queue, [])])

    @rule(batch=st.lists(st.tuples(NAMES, st.integers(1, LARGEST)), max_size=8), written=st.booleans())
    def read(self, batch: list[tuple[bytes, int]], written: bool) -> None:
        self.table.begin()
        admitted: list[tuple[bytes, int]] = []
        for queue, size in batch:
            delay = self.table.plan(queue, size, self.now)
            if delay == 0.0:
                assert self.users[queue], "nobody would take it"
                admitted.append((queue, size))
            else:
                assert LEAST_DELAY <= delay <= LONGEST_DELAY
                before = self.lanes[queue] + [("", each) for name, each in admitted if name == queue]
                total = sum(each for lane in self.lanes.values() for _, each in lane)
                full = len(before) >= MOST or sum(each for _, each in before) + size > MOST_BYTES
                spent = total + sum(each for _, each in admitted) + size > TOTAL_BYTES
                assert not self.users[queue] or (before and (full or spent)), "it had room"
        for queue, size in admitted if written else []:
            item = f"m{self.count}"
            self.count += 1
            assert self.table.offer(queue, item, size, self.now)
            self.lanes[queue].append((item, size))

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data(), messages=st.integers(1, 5), size=st.integers(1, 200))
    def take(self, data: st.DataObject, messages: int, size: int) -> None:
        queue = data.draw(st.sampled_from(sorted(each for each, users in self.users.items() if users)))
        found = self.table.take(queue, messages, size, self.now)
        lane = self.lanes[queue]
        assert found == [item for item, _ in lane[: len(found)]]
        assert len(found) <= messages
        assert len(found) == 1 or sum(each for _, each in lane[: len(found)]) <= size
        assert found or not lane
        del lane[: len(found)]

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        waiting = self.table.waiting()
        gone = data.draw(st.lists(st.sampled_from(waiting), unique=True)) if waiting else []
        self.table.discard(gone)
        for queue, lane in self.lanes.items():
            self.lanes[queue] = [each for each in lane if each[0] not in gone]

    @invariant()
    def all_that_was_let_in_waits(self) -> None:
        assert sorted(self.table.waiting()) == sorted(item for lane in self.lanes.values() for item, _ in lane)

    @invariant()
    def bounds_are_kept(self) -> None:
        for lane in self.lanes.values():
            assert len(lane) <= MOST
            assert sum(size for _, size in lane) <= max(MOST_BYTES, lane[0][1] if len(lane) == 1 else 0)
        # Each queue has one message of any size, whatever others have.
        alone = sum(lane[0][1] for lane in self.lanes.values() if lane)
        assert sum(size for lane in self.lanes.values() for _, size in lane) <= TOTAL_BYTES + alone

    @invariant()
    def a_queue_without_messages_is_never_kept_waiting(self) -> None:
        hungry = sum(MOST for queue, users in self.users.items() if users and not self.lanes[queue])
        assert self.table.room() >= hungry
        assert any(self.users.values()) or self.table.room() == 0


TestTable = TableMachine.TestCase
