"""The two priority queues against sorted lists, and that what has ended does not stay."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker_kafka.queue.markers.lease import Lease, LeaseState
from broker_kafka.queue.markers.wire import MessageId
from broker_kafka.queue.tracker.markers_queue import DeadlinesQueue, OffsetsQueue


def lease(number: int, *, deadline: int = 0) -> Lease:
    return Lease(MessageId("t", 0, number), number, 0, 10, deadline, 1, b"", False, number, 0)


def drained(queue: DeadlinesQueue) -> list[Lease]:
    found: list[Lease] = []
    while (head := queue.head()) is not None:
        assert isinstance(head, Lease)
        queue.pop(head)
        head.state = LeaseState.SENDING
        found.append(head)
    return found


@given(st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 50), st.booleans()), max_size=40))
def test_deadlines_come_in_order_after_moves_and_ends(histories: list[tuple[int, int | None, bool]]) -> None:
    queue = DeadlinesQueue()
    leases = [lease(number, deadline=deadline) for number, (deadline, _, _) in enumerate(histories)]
    for each in leases:
        queue.add(each)
    for each, (_, moved, ended) in zip(leases, histories, strict=True):
        if moved is not None:
            each.deadline = moved
            queue.add(each)
        if ended:
            each.state = LeaseState.CLOSED
    found = drained(queue)
    left = [each for each, (_, _, ended) in zip(leases, histories, strict=True) if not ended]
    assert [each.deadline for each in found] == sorted(each.deadline for each in left)
    assert {each.id for each in found} == {each.id for each in left}
    assert len(found) == len(left)


def test_equal_deadlines_come_in_the_order_of_their_starts() -> None:
    queue = DeadlinesQueue()
    leases = [lease(number, deadline=5) for number in range(20)]
    for each in leases:
        queue.add(each)
    assert drained(queue) == leases


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_the_lowest_pin_is_that_of_an_open_lease(histories: list[tuple[bool, bool]]) -> None:
    queue = OffsetsQueue()
    leases = [lease(number) for number in range(len(histories))]
    for each in leases:
        queue.add(each)
    for each, (moved, ended) in zip(leases, histories, strict=True):
        if moved:
            each.pin += len(leases)
            queue.add(each)
        if ended:
            each.state = LeaseState.CLOSED
    left = sorted(each.pin for each in leases if each.state == LeaseState.OPEN)
    assert [each.pin for each in queue] == left
    head = queue.head()
    assert (None if head is None else head.pin) == (left[0] if left else None)


def test_empty_queues_have_no_head() -> None:
    assert OffsetsQueue().head() is None
    assert DeadlinesQueue().head() is None


def test_ended_leases_behind_an_open_one_are_swept() -> None:
    offsets, deadlines = OffsetsQueue(), DeadlinesQueue()
    for number in range(20_000):
        each = lease(number, deadline=number)
        offsets.add(each)
        deadlines.add(each)
        if number:
            each.state = LeaseState.CLOSED
    assert len(offsets._leases) < 3_000
    assert len(deadlines._entries) < 3_000
    first = offsets.head()
    assert first is not None
    assert first.pin == 0
    assert drained(deadlines) == [first]


def test_ended_leases_at_the_head_are_visited_once() -> None:
    class Counted:
        """As much of a lease as the queue of offsets looks at."""

        looked = 0

        def __init__(self, pin: int) -> None:
            self.pin = pin

        def is_pinned(self, pin: int) -> bool:
            Counted.looked += 1
            return False

    queue: Any = OffsetsQueue()
    for number in range(500):
        queue.add(Counted(number))
    for _ in range(10):
        assert list(queue) == []
    assert Counted.looked == 500
