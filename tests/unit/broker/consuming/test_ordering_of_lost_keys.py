"""Order per key when a released message is not redelivered: how long its key waits."""

from __future__ import annotations

import pytest

from broker.consuming.ordering import Lanes
from broker.messages import Message, SettleState
from tests.unit.broker.consuming.scripted_source import NONE, VIEW, Raw


def make(id: str, key: bytes | None) -> Message:
    return Message("orders", b"", Raw(id, key, 1, NONE), VIEW)


def test_lanes_of_messages_that_moved_to_another_consumer_are_dropped() -> None:
    now = 0.0
    lanes = Lanes(1, lambda: now)
    for number in range(50_000):
        # Two messages of each key arrive; one is released and not redelivered.
        key = b"%d" % number
        assert len(lanes.put_all([make(f"{number}-{copy}", key) for copy in range(2)])) == 1
        message = lanes.take()
        assert message is not None
        lanes.done(message)
        now += 0.1
    assert lanes.kept <= 700


def test_a_lane_with_a_running_handler_or_a_pending_release_is_kept() -> None:
    now = 0.0
    lanes = Lanes(1, lambda: now)
    lanes.put_all([make("1", b"worked on"), make("2", b"worked on"), make("3", b"seen"), make("4", b"seen")])
    worked_on, seen = lanes.take(), lanes.take()
    assert worked_on is not None
    assert seen is not None
    lanes.done(seen)
    now = 59.0
    assert lanes.put_all([make("5", b"seen")])
    now = 70.0
    lanes.put_all([make("6", None)])
    assert lanes.kept == 2
    lanes.done(worked_on)
    now = 200.0
    lanes.put_all([make("7", None)])
    assert lanes.kept == 0


def test_a_key_does_not_wait_for_a_copy_of_a_settled_message() -> None:
    lanes = Lanes(2, lambda: 0.0)
    lanes.put_all([make("1", b"k"), make("2", b"k")])
    first = lanes.take()
    assert first is not None
    # The lease of 1 ran out unnoticed: a second copy is delivered, and released.
    assert len(lanes.put_all([make("1", b"k")])) == 1
    lanes.done(first)
    assert lanes.put_all([make("3", b"k")]) == []
    # Nor does it wait for a copy that was in flight when 2 was settled.
    second = lanes.take()
    assert second is not None
    lanes.done(second)
    assert lanes.put_all([make("4", b"k")]) == []
    assert len(lanes.put_all([make("2", b"k"), make("5", b"k")])) == 2
    for wanted in ("3", "4"):
        message = lanes.take()
        assert message is not None
        assert message.id == wanted
        lanes.done(message)
    assert lanes.put_all([make("5", b"k"), make("6", b"k")]) == []


@pytest.mark.parametrize(("lease", "waits"), [(None, 60.0), (30.0, 60.0), (300.0, 310.0)])
def test_a_key_waits_for_a_message_until_its_lease_ends(lease: float | None, waits: float) -> None:
    now = 0.0
    lanes = Lanes(4, lambda: now, lease)
    lanes.put_all([make("1", b"k"), make("2", b"k")])
    head = lanes.take()
    assert head is not None
    # The connection broke: the broker keeps the lease of 1, and delivers 2 at once.
    assert [message.id for message in lanes.abandon(head)] == ["2"]
    now = waits - 0.1
    assert len(lanes.put_all([make("2", b"k")])) == 1
    now = waits
    # 1 was acked after all, or moved to another consumer.
    assert lanes.put_all([make("2", b"k")]) == []


@pytest.mark.parametrize(
    ("in_order", "state", "waits"),
    [
        (True, SettleState.UNKNOWN, False),
        (True, SettleState.SETTLING, False),
        (True, SettleState.LOST, True),
        (False, SettleState.UNKNOWN, True),
    ],
)
def test_with_ordered_delivery_a_follower_proves_an_unanswered_ack(
    in_order: bool, state: SettleState, waits: bool
) -> None:
    lanes = Lanes(None, lambda: 0.0)
    lanes.in_order = in_order
    lanes.put_all([make(str(number), b"k") for number in range(1, 4)])
    head = lanes.take()
    assert head is not None
    head.state = state
    assert [message.id for message in lanes.abandon(head)] == ["2", "3"]
    # Only the message right behind it proves anything.
    assert len(lanes.put_all([make("3", b"k")])) == 1
    assert bool(lanes.put_all([make("2", b"k")])) == waits
    assert bool(lanes.put_all([make("3", b"k")])) == waits


def test_a_new_message_proves_the_unanswered_ack_of_the_last() -> None:
    lanes = Lanes(None, lambda: 0.0)
    lanes.in_order = True
    lanes.put_all([make("1", b"k")])
    head = lanes.take()
    assert head is not None
    head.state = SettleState.UNKNOWN
    assert lanes.abandon(head) == []
    assert lanes.put_all([make("2", b"k")]) == []


def test_followers_of_a_missing_message_are_released_less_and_less_often() -> None:
    now = 0.0
    lanes = Lanes(100, lambda: now)
    lanes.put_all([make("1", b"k"), make("2", b"k")])
    first = lanes.take()
    assert first is not None
    first.state = SettleState.UNKNOWN
    assert [message.id for message in lanes.abandon(first)] == ["2"]
    rounds = 0
    while given_back := lanes.put_all([make("2", b"k")]):
        ((_, delay),) = given_back
        now += delay
        rounds += 1
    assert 60.0 <= now < 66.0
    assert rounds < 35
